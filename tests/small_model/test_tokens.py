from __future__ import annotations

import random

import numpy as np
import pytest
from small_model.chat import MARKUP_TOKENS, SPECIAL_TOKENS, segments
from small_model.mixture import conversation_rows, read_mixture
from small_model.tokens import UNSUPERVISED, VOCAB_SIZE, encode_conversation, pack_rows
from tokenizers import Tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(work):
    return Tokenizer.from_file(str(work / "tokenizer.json"))


def test_the_vocabulary_has_its_size_and_the_markup_is_one_token_each(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 4096
    for token in SPECIAL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer.encode(token).ids) == 1, token


@pytest.mark.parametrize("text", ["plain words", "a\tb  c\n\n\n d", "naïve 東京 \U0001f525 \x00", '"q" _x_ 12.50', ""])
def test_every_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("value", ["Oslo", "kuvazo", "New York", "/etc/hosts", "a@b.com", "12.50", "2031-04-07"])
def test_a_value_has_the_same_tokens_in_a_request_and_in_a_call(tokenizer, value):
    alone = tokenizer.encode(value).ids
    for text in (f'the city is "{value}" and', f'"{value}", limit 3', f"<parameter=city>\n{value}\n</parameter>"):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids))), (value, text)


def test_a_name_has_the_same_tokens_in_the_list_and_in_a_call(tokenizer):
    alone = tokenizer.encode("get_weather").ids
    for text in ("<tools>\nget_weather(city: string)\n", "<function=get_weather>\n", "\nget_weather does this."):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids))), text


def test_transformers_reads_it_as_it_is(work, tokenizer):
    loaded = AutoTokenizer.from_pretrained(work)
    text = '<|im_start|>user\nBook the get_weather "Oslo" 42.<|im_end|>\n<tool_call>\n\n\n  x_y'
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.decode(tokenizer.encode(text).ids, skip_special_tokens=True).endswith("<tool_call>\n\n\n  x_y")


def test_pieces_have_the_tokens_of_the_whole(work, tokenizer):
    mixture, rng = read_mixture(work), random.Random(1)
    for _ in range(100):
        drawn = mixture.draw(rng)
        stored = encode_conversation(tokenizer, drawn)
        whole = "".join(t for t, _ in segments(drawn.messages, [t.signature() for t in drawn.tools]))
        assert (stored & (UNSUPERVISED - 1)).tolist() == tokenizer.encode(whole).ids


def test_what_is_learned_is_the_assistants(work, tokenizer):
    drawn = read_mixture(work).grammar.conversation(random.Random(2), "answer")
    stored = encode_conversation(tokenizer, drawn)
    learned = tokenizer.decode([t for t in stored if t < UNSUPERVISED], skip_special_tokens=False)
    replies = [m for m in drawn.messages if m["role"] == "assistant"]
    assert learned.count("<|im_end|>") == len(replies) == 2
    assert learned.endswith(replies[-1]["content"] + "<|im_end|>")
    assert "<|im_start|>" not in learned


def test_rows_hold_whole_samples():
    samples = [np.array([n] * n, dtype=np.uint16) for n in (3, 4, 9, 2, 5, 6, 1, 8)]
    rows = pack_rows(iter(samples), 9, 3, filler=0)
    filler = UNSUPERVISED
    # the sample of nine is as long as a row and has no room for its end
    assert rows.tolist() == [
        [3, 3, 3, filler, 4, 4, 4, 4, filler],
        [2, 2, filler, 5, 5, 5, 5, 5, filler],
        [6, 6, 6, 6, 6, 6, filler, 1, filler],
    ]


def test_too_few_samples_are_an_error():
    with pytest.raises(ValueError, match="num_rows=2"):
        pack_rows(iter([np.ones(3, dtype=np.uint16)]), 9, 2, filler=0)


def test_rows_are_the_same_for_the_same_seed(work):
    first, again, other = (conversation_rows(work, seed=s, length=257, num_rows=2) for s in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
