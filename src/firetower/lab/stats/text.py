"""Numbers as the sentences print them."""

from __future__ import annotations

import math


def share(value: float) -> str:
    """A rate or probability: ``.118``, ``.0058``, ``4.6e-06``; never rounded to 0 or 1 when it is neither."""
    if value in (0, 1, -1) or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    sign = "-" if value < 0 else ""
    if size < 1e-4:
        return f"{value:.1e}"
    if 0.9995 <= size < 1:
        return "<-.999" if value < 0 else ">.999"
    digits = 3 if size >= 0.00995 else 4
    return sign + f"{size:.{digits}f}".removeprefix("0")


def percent(value: float) -> str:
    """A confidence: ``95%``, ``99.9%``."""
    return f"{100 * value:.6g}%"


def count(number: int, noun: str) -> str:
    """``1 fire``, ``4 fires``, ``1 try``, ``34 tries``."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def interval(lower: float, upper: float) -> str:
    """``.033-.243``; ends that carry a minus sign are joined by ``to``."""
    joint = " to " if lower < 0 or upper < 0 else "-"
    return f"{share(lower)}{joint}{share(upper)}"
