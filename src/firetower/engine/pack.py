"""From the table of running sequences to the packed inputs of one window: numpy throughout, no loop over rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from firetower.engine.buckets import Shape
from firetower.engine.rows import RowTable

Ints = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]


def fed_tokens(rows: RowTable, seats: Ints, drafts: Mapping[int, list[int]], window: int) -> tuple[Ints, Ints]:
    """What the window runs.

    Args:
        rows: the running sequences.
        seats: int64 [n], those of this step.
        drafts: drafts by place in ``seats``, each at most ``window - 1``.
        window: W.

    Returns:
        (tokens int64 [n, W], 0 where none stands; real tokens of each row, int64 [n]).
    """
    fed = np.zeros((len(seats), window), dtype=np.int64)
    fed[:, 0] = rows.token[seats]
    num_real = np.ones(len(seats), dtype=np.int64)
    for place, tokens in drafts.items():
        fed[place, 1 : 1 + len(tokens)] = tokens
        num_real[place] += len(tokens)
    return fed, num_real


def pack_window(
    into: Arrays, shape: Shape, rows: RowTable, seats: Ints, fed: Ints, num_real: Ints, table: npt.NDArray[np.int32],
    page_size: int,
) -> None:  # fmt: skip
    """Fill the packed inputs of a step.

    Args:
        into: arrays of `firetower.engine.buffers.Packed`.
        shape: B and W, B at least the number of rows.
        rows, seats: who runs. fed, num_real: as `fed_tokens` gives them.
        table: int32 [slots, max_pages], pages by slot.
        page_size: tokens a page.
    """
    n, window = fed.shape
    at = slice(0, n)
    position = rows.position[seats]
    slot = rows.slot[seats]
    offsets = np.arange(window)
    is_real = offsets < num_real[:, None]
    positions = position[:, None] + offsets
    pages = table[slot[:, None], np.where(is_real, positions // page_size, 0)]
    words = np.arange(n * window).reshape(n, window)

    def per_token(name: str, pad: int, values: Any) -> None:
        view = into[name].reshape(shape.num_rows, window)
        view[n:] = pad
        view[at] = np.where(is_real, values, pad)

    def per_row(name: str, pad: int, values: Any) -> None:
        into[name][n:] = pad
        into[name][at] = values

    per_token("token_ids", 0, fed)
    per_token("positions", 0, positions)
    per_token("slot_mapping", -1, pages.astype(np.int64) * page_size + positions % page_size)
    per_token("token_positions", 0, positions + 1)
    per_token("row_ids", -1, words)
    per_row("seq_lens", 0, position + num_real)
    per_row("state_slots", -1, slot)
    per_row("table_rows", 0, slot)
    per_row("num_accepted", 0, rows.accepted[seats])
    per_row("source", -1, rows.source[seats])


def pack_sampling(into: Arrays, shape: Shape, rows: RowTable, seats: Ints) -> dict[str, bool]:
    """Fill the sampler's columns, where some row is not greedy.

    Returns:
        Which parameters are in use: ``is_sampled``, ``top_k``, ``top_p``, ``min_p``.
    """
    n = len(seats)
    temperature = rows.temperature[seats]
    if not temperature.any():
        return {"is_sampled": False, "top_k": False, "top_p": False, "min_p": False}
    top_k, top_p, min_p = rows.top_k[seats], rows.top_p[seats], rows.min_p[seats]

    def per_row(name: str, pad: int, values: npt.NDArray[Any]) -> None:
        view = into[name].reshape(shape.num_rows, shape.window)
        view[:n] = values[:, None]
        view[n:] = pad

    per_row("seeds", 0, rows.seed[seats])
    per_row("temperature", 0, temperature)
    per_row("top_k", 0, top_k)
    per_row("top_p", 1, top_p)
    per_row("min_p", 0, min_p)
    return {
        "is_sampled": True,
        "top_k": bool(top_k.any()),
        "top_p": bool((top_p < 1).any()),
        "min_p": bool(min_p.any()),
    }
