"""Filters of the store as SQL conditions."""

from __future__ import annotations

from typing import Any, TypedDict

from firetower.core.errors import ConfigError
from firetower.fires.rows import plain
from firetower.fires.times import parse_moment


class FireFilter(TypedDict, total=False):
    """Conditions that all must hold; an absent or None one does not restrict.

    ``model`` is any part of the model's name, whatever the case. ``since`` (inclusive) and ``until``
    (exclusive) are ISO 8601 times, or ages before now such as ``12h``. The others must be equal.
    """

    model: str | None
    source: str | None
    stage: str | None
    layer: int | None
    kind: str | None
    phase: str | None
    outcome: str | None
    since: str | None
    until: str | None


_CONDITIONS: dict[str, str] = {
    "model": "instr(lower(model), lower(?)) > 0",
    "source": "source = ?",
    "stage": "stage = ?",
    "layer": "layer = ?",
    "kind": "kind = ?",
    "phase": "phase = ?",
    "outcome": "outcome = ?",
    "since": "created_ms >= ?",
    "until": "created_ms < ?",
}


def where(filters: FireFilter) -> tuple[str, list[Any]]:
    """The SQL condition and its parameters; ``("1", [])`` without filters.

    Raises:
        ConfigError: an unknown filter, or a time that cannot be read.
    """
    conditions, parameters = ["1"], []
    for name, value in filters.items():
        if name not in _CONDITIONS:
            raise ConfigError(f"filter={name!r}: unknown; known: {', '.join(_CONDITIONS)}")
        if value is not None:
            conditions.append(_CONDITIONS[name])
            parameters.append(_parameter(name, value))
    return " AND ".join(conditions), parameters


def _parameter(name: str, value: Any) -> Any:
    if name in ("since", "until"):
        return parse_moment(value, name)
    if name == "layer":
        # no stored layer is beyond 64 bits, and SQLite cannot compare with more
        return max(-(1 << 63), min(value, (1 << 63) - 1))
    return plain(str(value))
