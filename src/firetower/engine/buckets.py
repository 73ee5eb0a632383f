"""Shapes that a step may have: rows from a short list of buckets, windows of 1 to 8 tokens."""

from __future__ import annotations

import bisect
import dataclasses

from firetower.core.errors import ConfigError

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a step; unused ones are pads."""

MAX_WINDOW = 8
"""Tokens of a window: one that is certain and up to 7 drafts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Rows and tokens a row of one step; names its graph."""

    num_rows: int
    window: int


def bucket_of(num_sequences: int, max_batch: int) -> int:
    """The smallest bucket that holds the sequences; the last one is ``max_batch`` itself.

    Raises:
        ConfigError: none does.
    """
    buckets = buckets_up_to(max_batch)
    at = bisect.bisect_left(buckets, num_sequences)
    if num_sequences < 1 or at == len(buckets):
        raise ConfigError(f"num_sequences={num_sequences}: must be from 1 to max_batch={max_batch}")
    return buckets[at]


def buckets_up_to(max_batch: int) -> tuple[int, ...]:
    """Every bucket of an engine of ``max_batch`` rows, smallest first."""
    if not 1 <= max_batch <= BUCKETS[-1]:
        raise ConfigError(f"max_batch={max_batch}: must be from 1 to {BUCKETS[-1]}")
    return (*(b for b in BUCKETS if b < max_batch), max_batch)


def window_limit(num_rows: int, max_window: int, max_window_rows: int) -> int:
    """Longest window for so many rows; rows times window is bounded: drafts of many rows cost more than they bring."""
    return max(1, min(max_window, max_window_rows // max(1, num_rows)))


def capture_order(max_batch: int, max_window: int, max_window_rows: int) -> list[Shape]:
    """Every shape of an engine, those first that a memory budget should go to.

    Windows of one token of every bucket, then the longest windows, then those between; in each group large ones first:
    a graph captured later can use the memory of one captured before it.
    """
    shapes = [
        Shape(num_rows=rows, window=window)
        for rows in buckets_up_to(max_batch)
        for window in range(1, window_limit(rows, max_window, max_window_rows) + 1)
    ]

    def rank(shape: Shape) -> tuple[int, int, int]:
        longest = window_limit(shape.num_rows, max_window, max_window_rows)
        group = 0 if shape.window == 1 else 1 if shape.window == longest else 2
        return group, -shape.num_rows, -shape.window

    return sorted(shapes, key=rank)
