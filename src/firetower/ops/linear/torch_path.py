"""Dense projection in PyTorch: matrix products of one fixed shape, so that the library cannot choose by row count.

MKL picks another kernel for 1, for 2-3 and for 4 and more rows, and their bits differ. A product of `CHUNK` rows always
runs the same kernel, and in it a row's bits depend neither on its place nor on the other rows (tested), but for weights
of fewer than 12 rows and odd lengths, which are padded with zeros. 8 rows is a compromise: one row costs four times a
matrix-vector product, 64 rows 1.5 times one large product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.sensors.marks import Mark, mark_rows

CHUNK = 8
_MULTIPLE = 16


def linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, mark: Mark | None) -> None:
    """Arguments as the Triton launcher: [T, K], [N, K], [N] or None, ``out`` [T, N]."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    w = _padded(weight.to(dtype)).t()
    is_whole = bias is None and w.shape == (hidden_states.shape[1], out.shape[1]) and out.dtype is dtype
    for begin in range(0, hidden_states.shape[0], CHUNK):
        rows = hidden_states[begin : begin + CHUNK]
        # a fresh tensor: the same alignment for every chunk
        chunk = torch.zeros(CHUNK, w.shape[0], dtype=dtype, device=rows.device)
        chunk[: len(rows), : rows.shape[1]] = rows
        y = torch.mm(chunk, w)
        if is_whole:
            out[begin : begin + CHUNK] = y if len(rows) == CHUNK else y[: len(rows)]
            continue
        y = y[: len(rows), : weight.shape[0]]
        if bias is not None:
            y = y + bias.to(dtype)
        out[begin : begin + CHUNK] = y
    mark_rows(out, mark)


def _padded(weight: Tensor) -> Tensor:
    """Zeros appended to lengths that need it; no copy for a real model's weight."""
    n, k = weight.shape
    more_n, more_k = max(0, _MULTIPLE - n), -k % _MULTIPLE
    return torch.nn.functional.pad(weight, (0, more_k, 0, more_n)) if more_n or more_k else weight
