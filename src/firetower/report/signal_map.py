"""Layer x signal: which signals of a fire were bad, in which order, where it began, and what is not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum

from firetower.core.records import Fire, Signal, Status

STAGE_ORDER = (
    "input", "ple", "attention", "query", "kv", "conv_state", "recurrent_state", "router", "gate", "up", "swiglu",
    "down", "shared", "hit", "miss", "routed", "output",
)  # fmt: skip
"""Columns in the order in which a layer runs them; other stages follow as they come."""

MAX_ROWS = 80
MAX_COLUMNS = 24
FULL_LIST = 64
"""A watch lists at most so many bad signals; beyond it the map cannot call a signal not bad."""


class Cell(StrEnum):
    """What the map says of one signal."""

    ORIGIN = "origin"
    BAD = "bad"
    CLEAN = "clean"
    NOT_COVERED = "not covered"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalMap:
    """Rows are layers (the last may be ``model``, for signals outside layers), columns stages.

    ``cells`` maps (row, column) to its cell and the place in the order of bad signals, from 1. ``legend`` says what
    the signs of signals that are not bad mean.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], tuple[Cell, int | None]]
    legend: tuple[tuple[Cell, str], ...]
    num_left_out: int = 0

    def cell(self, row: str, column: str) -> tuple[Cell, int | None]:
        """The cell, and its place in the order of bad signals."""
        return self.cells.get((row, column), (Cell.UNKNOWN, None))


def signal_map(fire: Fire) -> SignalMap | None:
    """The map of one fire; None where it lists no signal within layers."""
    cells: dict[tuple[str, str], tuple[Cell, int | None]] = {}
    order = 0
    for s in fire.bad_signals:
        place = (_row(s.signal), s.signal.stage)
        if s.status is Status.BAD:
            order += 1
            cells.setdefault(place, (Cell.BAD, order))
        else:
            # another engine may hand in whole readings
            cells.setdefault(place, (Cell(s.status.value), None))
    origin = (_row(fire.origin), fire.origin.stage)
    cells[origin] = (Cell.ORIGIN, cells.get(origin, (Cell.BAD, 1))[1] or 1)
    layers = sorted({int(row) for row, _ in cells if row != MODEL})
    if not layers:
        return None
    first = max(0, layers[0] - 1)
    span = range(first, layers[-1] + 1)
    rows = [str(n) for n in (span if len(span) <= MAX_ROWS else layers[:MAX_ROWS])]
    if any(row == MODEL for row, _ in cells):
        rows.append(MODEL)
    bad, shown, columns = tuple(cells), set(rows), _columns([stage for _, stage in cells])
    legend = _fill(fire, cells, rows, columns)
    return SignalMap(
        rows=tuple(rows),
        columns=tuple(columns[:MAX_COLUMNS]),
        cells=cells,
        legend=legend,
        num_left_out=sum(row not in shown or stage not in columns[:MAX_COLUMNS] for row, stage in bad),
    )


MODEL = "model"


def _row(signal: Signal) -> str:
    return MODEL if signal.layer is None else str(signal.layer)


def _columns(stages: Sequence[str]) -> list[str]:
    seen = list(dict.fromkeys(stages))
    known = [s for s in STAGE_ORDER if s in seen]
    return known + [s for s in seen if s not in STAGE_ORDER]


def _fill(
    fire: Fire, cells: dict[tuple[str, str], tuple[Cell, int | None]], rows: Sequence[str], columns: Sequence[str]
) -> tuple[tuple[Cell, str], ...]:
    """Say of every signal that is not listed as bad what that means; returns what the signs stand for."""
    given = {c for c, _ in cells.values()}
    cell, meaning = _not_bad(fire)
    listed = [row for row, _ in cells if row != MODEL]
    cut = int(listed[-1]) if len(fire.bad_signals) >= FULL_LIST else None
    for row in rows:
        beyond = cut is not None and (row == MODEL or int(row) >= cut)
        for column in columns:
            cells.setdefault((row, column), (Cell.UNKNOWN if beyond else cell, None))
    legend = [(cell, meaning)]
    if cut is not None and cell is not Cell.UNKNOWN:
        legend.append((Cell.UNKNOWN, f"not listed: the fire keeps its first {len(fire.bad_signals)} bad signals"))
    if Cell.NOT_COVERED in given:
        legend.append((Cell.NOT_COVERED, "not covered"))
    return tuple(legend)


def _not_bad(fire: Fire) -> tuple[Cell, str]:
    ran, declared = fire.coverage
    if not declared:
        return Cell.UNKNOWN, "not reported: the fire does not say which signals were watched"
    if ran == declared:
        return Cell.CLEAN, f"not bad: clean, or not a signal of that layer (all {declared} declared signals ran)"
    missing = declared - ran
    return Cell.UNKNOWN, f"not bad: clean, or one of the {missing} of {declared} declared signals that were not covered"
