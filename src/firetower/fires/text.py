"""Text that came from a model, a file or another engine, made safe to print on a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Escape every character that a terminal would obey or hide rather than show.

    Controls, line ends, bidirectional overrides, zero-width and unpaired surrogate characters become
    ``\x1b``, ``\u202e`` and so on; letters of every script, and spaces, stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
