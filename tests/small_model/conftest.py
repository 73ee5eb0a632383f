"""A work folder as ``prepare`` leaves it, in small: a text of this file's own, and a tokenizer trained on it."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from small_model.grammar import NOUNS, VERBS, Grammar
from small_model.mixture import Mixture
from small_model.prepare import tokens_of
from small_model.tokens import save_tokenizer, train_tokenizer

SYLLABLES = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]


@pytest.fixture(scope="session")
def words() -> list[str]:
    rng = random.Random(1)
    made = {"".join(rng.choices(SYLLABLES, k=rng.randint(2, 4))) for _ in range(6000)}
    return sorted({w[:10] for w in made} | set(VERBS) | set(NOUNS))


@pytest.fixture(scope="session")
def work(words, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    rng = random.Random(2)
    documents = [(f"d{i}", " ".join(rng.choices(words, k=120)) + ".") for i in range(300)]
    definitions = [("mungo", "A term that stands for a thing nobody has named before in any of the books.")]
    mixture = Mixture(Grammar(words, held_out=False), definitions)
    chats = [mixture.text(rng) for _ in range(1500)]
    tokenizer = train_tokenizer(iter([t for _, t in documents] + chats))
    save_tokenizer(tokenizer, folder)
    (folder / "words.txt").write_text("\n".join(words))
    (folder / "definitions.json").write_text(json.dumps(definitions))
    np.save(folder / "text_train.npy", tokens_of(tokenizer, documents[:250]))
    np.save(folder / "text_held_out.npy", tokens_of(tokenizer, documents[250:]))
    held_out_bytes = sum(len(t) for _, t in documents[250:])
    (folder / "corpus.json").write_text(json.dumps({"held_out_bytes": held_out_bytes}))
    return folder
