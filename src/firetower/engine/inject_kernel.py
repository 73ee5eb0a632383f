# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The injector's write on a device, as one small kernel: no host sync, recorded in graphs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["signal", "num_rows", "num_columns", "row_stride"])
def inject_kernel(p_places, p_x, signal, num_rows, num_columns, row_stride):
    """One program a place."""
    p_place = p_places + tl.program_id(0) * 4
    row = tl.load(p_place + 1)
    column = tl.load(p_place + 2)
    bits = tl.load(p_place + 3)
    is_here = (tl.load(p_place) == signal) & (row < num_rows) & (column < num_columns)
    tl.store(p_x + row * row_stride + column, bits.to(p_x.dtype.element_ty), mask=is_here)


def write(places: Tensor, signal: int, rows: Tensor) -> None:
    """Write the armed values of a signal into ``rows`` [R, C], rows contiguous.

    Args:
        places: int64 [P, 4]: signal, row, column, bits.
        signal: index of the signal.
        rows: float, of 1, 2 or 4 bytes an element.
    """
    bits = rows.view(_WIDTHS[rows.element_size()])
    inject_kernel[(places.shape[0],)](places, bits, signal, bits.shape[0], bits.shape[1], bits.stride(0))
