"""Times as people and records write them, turned into milliseconds since 1970 (UTC)."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

from firetower.core.errors import ConfigError, RecordError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_time(text: str, name: str = "created_at") -> int:
    """Milliseconds since 1970 of an ISO 8601 date or time; one without an offset is read as UTC.

    Raises:
        RecordError: not ISO 8601, or outside the years 1 to 9999.
    """
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as e:
        raise RecordError(
            f"{name}={text!r}: must be an ISO 8601 time such as 2026-11-30T21:44:15.123Z"
        ) from e


def parse_age(text: str, name: str) -> float:
    """Seconds of an age such as ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``.

    Raises:
        ConfigError: not a whole number followed by one of s, m, h, d, w.
    """
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise ConfigError(
            f"{name}={text!r}: must be a whole number and a unit, such as 90s, 30m, 12h, 7d or 2w"
        )
    return int(match[1]) * _SECONDS[match[2]]


def parse_moment(text: str, name: str, now: float | None = None) -> int:
    """Milliseconds since 1970 of an ISO 8601 time, or of an age before now (``12h``).

    Raises:
        ConfigError: neither of the two.
    """
    if re.fullmatch(r"[0-9]+[a-z]", text):
        return int(((time.time() if now is None else now) - parse_age(text, name)) * 1000)
    try:
        return parse_time(text, name)
    except RecordError as e:
        raise ConfigError(
            f"{name}={text!r}: must be an ISO 8601 time such as 2026-11-30T21:44Z, or an age such as 12h"
        ) from e


def format_ms(milliseconds: int) -> str:
    """ISO 8601 in UTC with milliseconds, as `Fire.created_at` is written."""
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03d}Z"
