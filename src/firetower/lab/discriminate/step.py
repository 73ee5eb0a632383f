"""A discriminating test: what it costs, what it needs, which facts it can establish."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import IntEnum

from firetower.lab.discriminate.look import Look


class Cost(IntEnum):
    """What a step costs. The cheap ones (up to ``RECOMPUTE``) also run after a verdict is reached."""

    READ = 1
    """Reads what is there."""
    RECOMPUTE = 2
    """Computes one op, or one answer, again."""
    RUN = 3
    """Runs the request once or twice more."""
    REPLAY = 4
    """Runs the request many times."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that was established: ``name`` holds or does not, and what was seen, with figures."""

    name: str
    holds: bool
    statement: str


Run = Callable[[Look], Iterator[Fact]]
"""What a step does: it looks, and yields the facts that it could establish."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One discriminating test.

    Attributes:
        name: what evidence and verdicts call it.
        title: the question that it answers.
        cost: see `Cost`.
        needs: parts of the subject without which it cannot run.
        facts: names of the facts that it may establish; one that it does not yield stays unknown.
        command: how a person runs it.
        run: yields the facts.
    """

    name: str
    title: str
    cost: Cost
    needs: tuple[str, ...]
    facts: tuple[str, ...]
    command: str
    run: Run


def fact(name: str, holds: bool, statement: str) -> Fact:
    """Short for `Fact`; takes numpy's bools."""
    return Fact(name=name, holds=bool(holds), statement=statement)
