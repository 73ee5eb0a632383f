"""What every function of this folder asks of its input."""

from __future__ import annotations

import operator
from typing import Any

from firetower.core.errors import StatsError

MAX_TRIES = 10**9
"""More tries than anybody makes; beyond it the sums of logarithms lose digits."""


def check_count(fires: Any, tries: Any) -> tuple[int, int]:
    """Fires and tries as plain integers.

    Raises:
        StatsError: not whole numbers, fires below 0 or above tries, tries below 1 or above `MAX_TRIES`.
    """
    shown = f"{fires}/{tries}"
    try:
        fires, tries = operator.index(fires), operator.index(tries)
    except TypeError:
        raise StatsError(f"{shown}: fires and tries must be whole numbers") from None
    if tries < 1:
        raise StatsError(f"{shown}: tries must be at least 1")
    if fires < 0:
        raise StatsError(f"{shown}: fires must not be negative")
    if fires > tries:
        raise StatsError(f"{shown}: fires must not exceed tries")
    if tries > MAX_TRIES:
        raise StatsError(f"{shown}: tries must be at most {MAX_TRIES:,}")
    return fires, tries


def check_whole(name: str, value: Any, least: int) -> int:
    """One whole number of at least ``least`` and at most `MAX_TRIES`.

    Raises:
        StatsError: it is not.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise StatsError(f"{name}={value}: must be a whole number") from None
    if not least <= number <= MAX_TRIES:
        raise StatsError(f"{name}={value}: must be between {least} and {MAX_TRIES:,}")
    return number


def check_between(name: str, value: Any, *, zero: bool = False, one: bool = False) -> float:
    """A share between 0 and 1; the ends themselves only where ``zero`` or ``one`` allow them.

    Raises:
        StatsError: it is not, or it is a NaN.
    """
    number = float(value)
    inside = 0 < number < 1 or (zero and number == 0) or (one and number == 1)
    if not inside:
        ends = f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
        raise StatsError(f"{name}={value}: must be {ends}")
    return number
