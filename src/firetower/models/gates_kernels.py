# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The gates of Gated DeltaNet in Triton: one launch instead of eight small ones a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

ROWS = 8
"""Tokens a program: a window of one sequence; elements are computed each by itself, so that it changes no bit."""


@triton.jit(do_not_specialize=["rows", "slot", "num_signals", "num_rows", "shape", "neg_inf"])
def gates_fwd_kernel(p_b, p_a, p_rate, p_bias, p_g, p_beta, rows, stride_b, stride_a,
                     p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                     HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """One program ``TILE`` tokens; grid (cdiv(rows, TILE),)."""
    b_row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    b_col = tl.arange(0, BLOCK)[None, :]
    b_in = b_col < HEADS
    b_mask = (b_row < rows) & b_in
    b_wide = b_row.to(tl.int64)
    b_x = tl.load(p_a + b_wide * stride_a + b_col, mask=b_mask, other=0.0).to(tl.float32)
    b_x += tl.load(p_bias + b_col, mask=b_in, other=0.0)
    b_small = tl.exp(-tl.abs(b_x))
    # log1p: where 1 + e rounds to 1 the logarithm is e itself, elsewhere the rounding is divided out
    b_sum = 1.0 + b_small
    b_rounded = b_sum - 1.0
    b_ratio = b_small / tl.where(b_rounded == 0.0, 1.0, b_rounded)
    b_log = tl.where(b_rounded == 0.0, b_small, tl.log(b_sum) * b_ratio)
    # a comparison that NaN fails: max() would drop it
    b_softplus = tl.where(b_x <= 0.0, 0.0, b_x) + b_log
    b_g = b_softplus * tl.load(p_rate + b_col, mask=b_in, other=0.0)
    b_b = tl.load(p_b + b_wide * stride_b + b_col, mask=b_mask, other=0.0).to(tl.float32)
    b_beta = 1.0 / (1.0 + tl.exp(-b_b))
    b_at = b_wide * HEADS + b_col
    tl.store(p_g + b_at, b_g, mask=b_mask)
    tl.store(p_beta + b_at, b_beta, mask=b_mask)
    if p_panel is not None:
        if tl.program_id(0) == 0:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_g, b_row, b_col, b_mask, HEADS, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)


def gates(
    b: Tensor, a: Tensor, decay_rate: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor, mark: Mark | None
) -> None:
    """Fill ``g`` and ``beta``; arguments as `firetower.models.gates.gates_torch`."""
    rows, heads = a.shape
    if rows == 0:
        return
    with torch.cuda.device_of(a):
        gates_fwd_kernel[(triton.cdiv(rows, ROWS),)](
            b, a, decay_rate, dt_bias, g, beta, rows, b.stride(0), a.stride(0),
            *mark_arguments(mark, torch.float32, rows, heads), HEADS=heads, BLOCK=triton.next_power_of_2(heads),
            TILE=ROWS, num_warps=1,
        )  # fmt: skip
