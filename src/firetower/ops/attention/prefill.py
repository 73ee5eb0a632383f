"""Prefill through the library's kernel, one sequence at a time, with the op's own rules before and after it.

Before: keys and values that are not finite are set to zero for the library, and their first positions kept. After: the
rows that see one are made NaN. The library alone would answer a NaN query with zeros (PyTorch 2.13 on the CPU), and let
a NaN value reach queries that do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.ops.attention.torch_path import NEVER, first_bad, has_no_norm, sdpa
from firetower.ops.registry import kernel
from firetower.sensors.marks import Mark

__all__ = ["run", "sdpa"]


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Sequence[int],
    bounds_k: Sequence[int],
    scale: float,
    gate: Tensor | None,
    out: Tensor,
    mark: Mark | None,
    *,
    causal: bool,
) -> None:
    """Checked arguments of `firetower.ops.attention.prefill`; ``bounds`` are its ``cu_seqlens``."""
    heads, dim = key.shape[1:]
    library = kernel("attention.prefill", query)
    parts, keys, values, lengths = [], [], [], []
    for i in range(len(bounds_q) - 1):
        q = query[bounds_q[i] : bounds_q[i + 1]]
        k, v = (x[bounds_k[i] : bounds_k[i + 1]] for x in (key, value))
        lengths.append(len(k))
        if len(k) == 0:
            keys.append(torch.full((heads,), NEVER, dtype=torch.int32, device=query.device))
            values.append(torch.full((heads, dim), NEVER, dtype=torch.int32, device=query.device))
            parts.append(torch.empty_like(q))
            continue
        bad_key, bad_value = has_no_norm(k), ~v.isfinite()
        keys.append(first_bad(bad_key))
        values.append(first_bad(bad_value))
        if len(q):
            k, v = k.masked_fill(bad_key[..., None], 0.0), v.masked_fill(bad_value, 0.0)
            parts.append(library(q, k, v, scale, causal=causal))
    pads = query.shape[0] - bounds_q[-1]
    if pads:
        parts.append(torch.empty_like(query[:pads]))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    sequence, last_key = segment_rows(bounds_q, lengths, query, causal=causal)
    kernel("attention.finish", query)(
        attended, query, gate, torch.stack(keys), torch.stack(values), sequence, last_key, out, mark
    )


def segment_rows(bounds: Sequence[int], lengths: Sequence[int], like: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(sequence, last_key) of `firetower.ops.attention.torch_path.finish` for packed queries, made on the device.

    Args:
        bounds: where each sequence's queries begin, and the last ends.
        lengths: keys of each sequence.
        like: [T, ...], for the number of rows and the device.
        causal: whether a query sees only the keys up to its own.

    Returns:
        int32 [T] twice.
    """
    rows = like.shape[0]
    sequence = torch.zeros(rows, dtype=torch.int32, device=like.device)
    last_key = torch.full((rows,), -1, dtype=torch.int32, device=like.device)
    for i, length in enumerate(lengths):
        begin, end = bounds[i], bounds[i + 1]
        sequence[begin:end] = i
        if causal:
            first = length - (end - begin)
            last_key[begin:end] = torch.arange(first, length, dtype=torch.int32, device=like.device)
        else:
            last_key[begin:end] = length - 1
    return sequence, last_key
