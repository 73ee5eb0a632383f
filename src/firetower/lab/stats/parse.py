"""Counts, rounds, positions and rates as people type them."""

from __future__ import annotations

import re

from firetower.core.errors import StatsError
from firetower.lab.stats.check import check_between, check_count
from firetower.lab.stats.rounds import Round
from firetower.lab.stats.survival import Position

# digits are bounded: Python refuses to read numbers of thousands of them
_COUNT = re.compile(r"(-?\d{1,18})/(-?\d{1,18})")
_STEP = re.compile(r"(\d{1,18})(\+?)")


def parse_count(text: str) -> tuple[int, int]:
    """``4/34`` to fires and tries.

    Raises:
        StatsError: another form, or counts that cannot be.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise StatsError(f"{text!r}: must be FIRES/TRIES in whole numbers, such as 4/34")
    return check_count(int(match[1]), int(match[2]))


def parse_arm(text: str) -> tuple[str | None, tuple[int, int]]:
    """``after=0/90`` to a name and counts; without ``=`` the name is None.

    Raises:
        StatsError: another form, or counts that cannot be.
    """
    name, equals, counts = text.rpartition("=")
    if equals and not name.strip():
        raise StatsError(f"{text!r}: no name before =; write NAME=FIRES/TRIES or FIRES/TRIES")
    return (name.strip() or None), parse_count(counts)


def parse_rounds(text: str) -> list[Round]:
    """``6,18,1,9,40+``: tries until the fire of each round, ``+`` where it ended without one.

    Raises:
        StatsError: another form, or a round of no try.
    """
    return [Round(tries=n, fired=fired) for n, fired in _steps("rounds", text, "6,18,1,40+")]


def parse_positions(text: str) -> list[Position]:
    """``88443,85965,90000+``: position of each fire, ``+`` where a try ended clean.

    Raises:
        StatsError: another form.
    """
    return [Position(at=n, fired=fired) for n, fired in _steps("positions", text, "88443,85965,90000+")]


def parse_rate(text: str) -> float:
    """``1/18``, ``.05`` or ``5%`` to a share from 0 to 1.

    Raises:
        StatsError: another form, or a share outside 0 to 1.
    """
    share = text.strip().removesuffix("%")
    percent = share != text.strip()
    above, slash, below = share.partition("/")
    try:
        value = float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise StatsError(f"rate={text!r}: must be a share such as 1/18, .05 or 5%") from None
    return check_between("rate", value / 100 if percent else value, zero=True, one=True)


def _steps(name: str, text: str, example: str) -> list[tuple[int, bool]]:
    steps = []
    for part in text.split(","):
        match = _STEP.fullmatch(part.strip())
        if match is None:
            raise StatsError(f"{name}={part.strip()!r}: must be a whole number, + behind it if no fire: {example}")
        steps.append((int(match[1]), not match[2]))
    return steps
