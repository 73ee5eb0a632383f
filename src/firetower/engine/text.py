"""Text beside tokens: what a tokenizer must offer, text that grows token by token, strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The two calls that are needed of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        ...


class TextStream:
    """Text of an answer as its tokens come.

    A character whose bytes are not all there is held back, and so is what may become a stop string.

    Attributes:
        is_stopped: a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        # decoding starts a few tokens back, since a token's text may depend on the one before it
        self._begin = self._read = 0
        self._held = ""
        self._parts: list[str] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text that was handed on."""
        return "".join(self._parts)

    def push(self, tokens: Sequence[int]) -> str:
        """New tokens; returns the text that can be handed on."""
        if self.is_stopped:
            return ""
        self._ids.extend(tokens)
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        whole = self._tokenizer.decode(self._ids[self._begin :])
        if whole.endswith("�") or len(whole) <= len(before):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return self._hand_on(self._held + whole[len(before) :])

    def finish(self) -> str:
        """No more tokens will come: returns what was held back."""
        if self.is_stopped:
            return ""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        rest = self._held + self._tokenizer.decode(self._ids[self._begin :])[len(before) :]
        self._begin = self._read = len(self._ids)
        self._held = ""
        text = self._hand_on(rest)
        # half a stop string is text after all
        held, self._held = self._held, ""
        self._parts.append(held)
        return text + held

    def _hand_on(self, text: str) -> str:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            text, self._held = text[: min(found)], ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if text:
            self._parts.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
