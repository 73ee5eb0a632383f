# ruff: noqa: N803
"""A kernel that does nothing but copy a tile and mark it."""

from __future__ import annotations

import triton
import triton.language as tl

from firetower.sensors.mark_tile import mark_ran, mark_tile


@triton.jit(do_not_specialize=["slot", "num_signals", "num_rows", "shape", "neg_inf"])
def copy_fwd_kernel(p_x, p_y, rows, width, p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """y = x, cast to y's type; [rows, width] each."""
    i_block = tl.program_id(0)
    b_row = i_block * ROWS + tl.arange(0, ROWS)[:, None]
    b_col = tl.arange(0, WIDTH)[None, :]
    b_mask = (b_row < rows) & (b_col < width)
    b_y = tl.load(p_x + b_row * width + b_col, mask=b_mask, other=0.0).to(p_y.dtype.element_ty)
    tl.store(p_y + b_row * width + b_col, b_y, mask=b_mask)
    if p_panel is not None:
        if i_block == 0:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_y, b_row, b_col, b_mask, width, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)
