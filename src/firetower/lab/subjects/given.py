"""A subject put together from functions: for an engine, a drill or a test that knows its parts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from firetower.core.errors import SubjectError
from firetower.lab.subject import PARTS

LISTS: tuple[str, ...] = (
    "weights", "states", "valid_rows", "slots", "routed_rows", "events", "quantised", "splits", "recurrences",
    "sampled", "launderers", "collectives", "laws",
)  # fmt: skip
"""The parts that are lists, so that "I looked, there are none" can be said of them."""


class GivenSubject:
    """Has the parts that it is given, and no others.

    Args:
        name: for people.
        none: parts of which there are none: ``LISTS`` for a subject that has looked everywhere.
        **parts: by the names of `lab.subject`: a function as that part's method, or the value that it returns.

    Raises:
        SubjectError: a name that is no part, or ``none`` of something that is no list.
    """

    def __init__(self, name: str = "", *, none: Iterable[str] = (), **parts: Any) -> None:
        self.name = name
        for part in parts:
            if part not in PARTS:
                raise SubjectError(f"{part}: is no part of a subject; known: {', '.join(PARTS)}")
        for part in none:
            if part not in LISTS:
                raise SubjectError(f"none={part!r}: is no list; must be of {', '.join(LISTS)}")
            setattr(self, part, _constant(()))
        for part, given in parts.items():
            is_plain = callable(given) or part in ("fire", "clean_twin_bit_stable")
            setattr(self, part, given if is_plain else _constant(given))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_: value
