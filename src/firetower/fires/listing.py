"""Fires as rows of a table that fits the terminal without breaking an id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from firetower.core.records import Fire
from firetower.fires.page import value_name
from firetower.fires.text import visible

_GAP = 3  # what output.print_table puts between columns
_EDGES = 2  # and outside of them
_MIN_LAST = 8


def table_rows(fires: Iterable[Fire]) -> list[tuple[str, ...]]:
    """One row a fire: id, where, value, times, phase, outcome, created, model."""
    return [
        (
            fire.id,
            visible(fire.origin.name)
            if fire.origin.op is None
            else visible(f"{fire.origin.name} {fire.origin.op}"),
            value_name(fire.first),
            str(fire.count),
            str(fire.phase),
            str(fire.outcome),
            visible(fire.created_at[:16].replace("T", " ")),
            visible(fire.model),
        )
        for fire in fires
    ]


def fit(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Keep the leading columns that fit ``width`` characters, and shorten what stands in the last one kept.

    The first column, the id, is always whole: it is there to be pasted into the next command.
    """
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(columns)]
    room, kept = width - _EDGES - widths[0], 1
    for w in widths[1:]:
        if room - _GAP < min(w, _MIN_LAST):
            break
        room -= _GAP + w
        kept += 1
    # what the last kept column is too wide by, it loses
    last = widths[kept - 1] + min(room, 0) if kept > 1 else widths[0]
    return columns[:kept], [(*row[: kept - 1], _cut(row[kept - 1], last)) for row in rows]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 1)] + "..."
