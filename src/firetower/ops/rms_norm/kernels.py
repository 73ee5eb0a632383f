# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norm in Triton: a tile of whole rows is read once and written once.

The check of the input costs nothing while rows are finite: the mean of the squares, which is needed anyway, is finite
exactly when the row is. Only a row whose mean is not takes the second look.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.sensors.mark_stored import mark_again, mark_stored
from firetower.sensors.mark_tile import mark_ran
from firetower.sensors.marks import Mark, mark_arguments

TILE, NUM_PER_THREAD = 2048, 16
"""Elements of a tile (more where a row is longer), elements a thread: on sm_90 two 16-byte loads of bf16 a tensor, and
enough warps in flight at 128 threads a program. By reasoning, not tuned; a row's bits depend on them, so that they may
depend on the width, never on the number of rows."""


@triton.jit
def _row_offset(b_row, num_inner, stride_outer, stride_inner):
    """Where a row of ``[outer, inner, width]`` starts."""
    outer = (b_row // num_inner).to(tl.int64)
    return outer * stride_outer + (b_row % num_inner).to(tl.int64) * stride_inner


@triton.jit(do_not_specialize=[
    "rows", "num_inner", "eps", "slot", "num_signals", "num_rows", "shape", "neg_inf", "slot_in", "num_signals_in",
    "num_rows_in", "shape_in", "neg_inf_in",
])  # fmt: skip
def rms_norm_fwd_kernel(p_x, p_weight, p_residual, p_gate, p_y, p_residual_out, rows, num_inner, outer_x, inner_x,
                        outer_residual, inner_residual, outer_gate, inner_gate, eps,
                        p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                        p_panel_in, p_row_ids_in, slot_in, num_signals_in, num_rows_in, shape_in, neg_inf_in,
                        WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                        STEP: tl.constexpr, ZERO_CENTRED: tl.constexpr):  # fmt: skip
    """One program ``ROWS`` rows; grid (cdiv(rows, ROWS),)."""
    i_tile = tl.program_id(0)
    b_row = i_tile * ROWS + tl.arange(0, ROWS)[:, None]
    b_col = tl.arange(0, BLOCK)[None, :]
    b_in = b_row < rows
    b_mask = b_in & (b_col < WIDTH)
    p_input = p_x + _row_offset(b_row, num_inner, outer_x, inner_x)
    b_stored = tl.load(p_input + b_col, mask=b_mask, other=0.0)
    b_first = b_row.to(tl.int64) * WIDTH
    if p_residual is not None:
        p_r = p_residual + _row_offset(b_row, num_inner, outer_residual, inner_residual) + b_col
        b_sum = b_stored.to(tl.float32) + tl.load(p_r, mask=b_mask, other=0.0).to(tl.float32)
        b_total = b_sum.to(p_residual_out.dtype.element_ty)
        p_input = p_residual_out + b_first
        tl.store(p_input + b_col, b_total, mask=b_mask)
    else:
        b_total = b_stored
    b_x = b_total.to(tl.float32)

    b_mean = tl.sum(b_x * b_x, axis=1) / WIDTH
    b_scale = tl.rsqrt(b_mean + eps)
    b_step = tl.full([ROWS], 1.0, tl.float32)
    b_overflowed = (b_mean <= 3.4028234663852886e38) == 0
    if tl.max(b_overflowed.to(tl.int32), axis=0) != 0:
        # 2^-40 twice, as one product would leave float32 for the smallest rows that come here
        b_small = b_x * 9.094947017729282e-13 * 9.094947017729282e-13
        b_mean_small = tl.sum(b_small * b_small, axis=1) / WIDTH
        b_has = b_mean_small <= 3.4028234663852886e38
        b_rescaled = tl.where(b_has, tl.rsqrt(b_mean_small) * 9.094947017729282e-13, float("nan"))
        b_scale = tl.where(b_overflowed, b_rescaled, b_scale)
        b_step = tl.where(b_overflowed, 9.094947017729282e-13, 1.0)
        if p_panel_in is not None:
            mark_again(p_input, b_row, b_in, 0, WIDTH, BLOCK, STEP, p_panel_in, p_row_ids_in, slot_in, num_signals_in,
                       num_rows_in, neg_inf_in)  # fmt: skip

    b_weight = tl.load(p_weight + b_col, mask=b_col < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        b_weight += 1.0
    b_y = (b_x * b_step[:, None]) * b_scale[:, None] * b_weight
    if p_gate is not None:
        p_g = p_gate + _row_offset(b_row, num_inner, outer_gate, inner_gate) + b_col
        b_gate = tl.load(p_g, mask=b_mask, other=0.0).to(tl.float32)
        b_y *= b_gate / (1.0 + tl.exp(-b_gate))
    b_out = b_y.to(p_y.dtype.element_ty)
    tl.store(p_y + b_first + b_col, b_out, mask=b_mask)

    if i_tile == 0:
        if p_panel_in is not None:
            mark_ran(p_panel_in, slot_in, num_signals_in, num_rows_in, shape_in)
        if p_panel is not None:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
    if p_panel is not None:
        mark_stored(b_out, b_mask, p_y + b_first, b_row, b_in, 0, WIDTH, BLOCK, STEP, p_panel, p_row_ids, slot,
                    num_signals, num_rows, neg_inf)  # fmt: skip


def rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
    *,
    eps: float,
    is_zero_centred: bool,
    mark: Mark | None,
    mark_input: Mark | None,
) -> None:
    """Write ``out``, and ``residual_out`` where there is a residual; arguments as `firetower.ops.rms_norm` has them."""
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return
    view, num_inner, outer, inner = _as_rows(x)
    residual, _, outer_residual, inner_residual = _as_rows(residual)
    gate, _, outer_gate, inner_gate = _as_rows(gate)
    block = triton.next_power_of_2(width)
    tile_rows = max(1, TILE // block)
    num_warps = min(16, max(4, block // (32 * NUM_PER_THREAD)))
    in_dtype = out.dtype if residual_out is None else residual_out.dtype
    with torch.cuda.device_of(out):
        rms_norm_fwd_kernel[(triton.cdiv(rows, tile_rows),)](
            view, weight, residual, gate, out, residual_out, rows, num_inner, outer, inner, outer_residual,
            inner_residual, outer_gate, inner_gate, eps, *mark_arguments(mark, out.dtype, rows, width),
            *mark_arguments(mark_input, in_dtype, rows, width), WIDTH=width, BLOCK=block, ROWS=tile_rows,
            STEP=min(block, max(1, 64 * num_warps // tile_rows)), ZERO_CENTRED=is_zero_centred, num_warps=num_warps,
        )  # fmt: skip


def _as_rows(x: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """(tensor, rows of the inner dimension, stride of the outer, of the inner one); a copy only where a view cannot."""
    if x is None:
        return None, 1, 0, 0
    x = x.reshape(-1, x.shape[-2], x.shape[-1]) if x.ndim > 1 else x.reshape(1, 1, -1)
    return x, x.shape[1], x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)
