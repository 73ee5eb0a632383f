"""The tokenizer: byte-level BPE with pieces that look alike wherever a name or a value stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from small_model.chat import CHAT_TEMPLATE, END_OF_TEXT, IM_END, MARKUP_TOKENS, SPECIAL_TOKENS, segments
from small_model.grammar import Conversation

VOCAB_SIZE = 4096
UNSUPERVISED = 1 << 15
"""Bit of a stored token that is read and not learned: prompts, and what fills a row."""

# a word takes the blank or underscore before it, a quotation mark and a digit stand alone: so "Oslo" in a request and
# Oslo on its own line in a call are the same pieces, and so are get_weather in a list and in a call
_PIECES = r"""[ _]?\p{L}+|\p{N}| ?"| ?[^\s\p{L}\p{N}"]+|\s*[\r\n]+|\s+(?!\S)|\s+"""


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE of ``VOCAB_SIZE`` entries, the chat format's tokens among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        # the alphabet is the 256 bytes: a longer one would be a file's odd characters taken whole
        limit_alphabet=256,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"tokenizer: {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}: the text is too small")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside, as Transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> np.ndarray:
    """Tokens of a conversation, uint16, ``UNSUPERVISED`` set on what the assistant is given."""
    pieces = segments(conversation.messages, [t.signature() for t in conversation.tools])
    parts = []
    for text, supervised in pieces:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
        parts.append(ids if supervised else ids | UNSUPERVISED)
    return np.concatenate(parts)


def pack_rows(samples: Iterator[np.ndarray], length: int, num_rows: int, filler: int) -> np.ndarray:
    """Rows [num_rows, length] of whole samples one behind the other, each sample ended and each row filled by
    ``filler``, unsupervised. A sample longer than a row is left out."""
    rows = np.full((num_rows, length), filler | UNSUPERVISED, dtype=np.uint16)
    row = column = 0
    for sample in samples:
        if len(sample) >= length:
            continue
        if column + len(sample) > length:
            row, column = row + 1, 0
            if row == num_rows:
                return rows
        rows[row, column : column + len(sample)] = sample
        column += len(sample) + 1
    raise ValueError(f"num_rows={num_rows}: the samples end in row {row}; give more of them")


def texts_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of stored tokens, markup kept."""
    return str(tokenizer.decode([t & ~UNSUPERVISED for t in tokens], skip_special_tokens=False))
