"""Training rows of conversations: tool calls from the grammar, and a share of terms explained."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from small_model.chat import END_OF_TEXT, segments
from small_model.grammar import SYSTEM_LINES, Conversation, Grammar
from small_model.tokens import encode_conversation, pack_rows

DEFINITION_SHARE = 0.08
_QUESTIONS = ("What is {term}?", "What does {term} mean?", "Explain {term}.", "Define {term}.", "What is a {term}?")


class Mixture:
    """Draws conversations of both kinds.

    Args:
        grammar: where tool calls come from.
        definitions: (term, meaning) pairs, for conversations without tools; may be empty.
    """

    def __init__(self, grammar: Grammar, definitions: Sequence[tuple[str, str]]) -> None:
        self.grammar = grammar
        self.definitions = definitions

    def draw(self, rng: random.Random) -> Conversation:
        """One conversation."""
        if not self.definitions or rng.random() >= DEFINITION_SHARE:
            return self.grammar.conversation(rng)
        term, meaning = rng.choice(self.definitions)
        thinking = rng.random() < 0.5
        messages = [{"role": "system", "content": rng.choice(SYSTEM_LINES)}] if rng.random() < 0.2 else []
        messages.append({"role": "user", "content": rng.choice(_QUESTIONS).format(term=term)})
        thought = f"The user asks about {term}." if thinking else ""
        messages.append({"role": "assistant", "reasoning_content": thought, "content": meaning})
        return Conversation(kind="define", tools=(), messages=tuple(messages), expected=None, thinking=thinking)

    def text(self, rng: random.Random) -> str:
        """One conversation as text."""
        drawn = self.draw(rng)
        return "".join(t for t, _ in segments(drawn.messages, [tool.signature() for tool in drawn.tools]))


def read_mixture(work: Path, *, held_out: bool = False) -> Mixture:
    """The mixture that a work folder of ``prepare`` describes."""

    words = (work / "words.txt").read_text(encoding="utf-8").split()
    definitions = [] if held_out else json.loads((work / "definitions.json").read_text(encoding="utf-8"))
    return Mixture(Grammar(words, held_out=held_out), [(t, m) for t, m in definitions])


def conversation_rows(work: Path, *, seed: int, length: int, num_rows: int, held_out: bool = False) -> np.ndarray:
    """Rows [num_rows, length] of conversations, uint16; the same for the same arguments, on any machine."""
    mixture = read_mixture(work, held_out=held_out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    rng = random.Random(f"{seed} {held_out}")

    def samples() -> Iterator[np.ndarray]:
        while True:
            yield encode_conversation(tokenizer, mixture.draw(rng))

    return pack_rows(samples(), length, num_rows, tokenizer.token_to_id(END_OF_TEXT))
