# ruff: noqa: N803, SIM102 - compile-time arguments are upper case, as in Triton's own code; its `and` is no `if`
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Dense projection in Triton: one tile shape for every number of rows, K split by the weight's shape alone.

Shape legend: T rows, K inputs, N outputs, S splits of K. Each program multiplies 64 rows (fewer are padded with zeros
that cost no memory traffic) with a block of the weight, always by the same instructions in the same order of K.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.overlap import overlap_options, wait
from firetower.sensors.mark_tile import codes, exponent_of, mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

_UNSPECIALIZED = ["num_rows", "split_k", "slot", "num_signals", "num_words", "shape", "neg_inf"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Block sizes of one launch; a function of N, K and the type alone."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


# For an H200 (132 SMs, 227 KB of shared memory a block); the wide tile was searched. 64 rows is the smallest tile that
# wgmma takes, so that 1 and 64 rows run the same instruction; at 64 flops a byte of weight the tensor cores are a
# third busy at full bandwidth. Wide weights take 128 columns: the rows are read from L2 once a column block, and with
# 64 columns that alone would exceed L2's bandwidth at T = 64. Four stages of 48 KB keep 96 KB of weight in flight.
# With 8 warps the marking epilogue fits the registers (ptxas: 184 of 255, no spill; with 4 warps it spills).
_WIDE = Tiles(block_m=64, block_n=128, block_k=128, num_stages=4, num_warps=8)
_NARROW = Tiles(block_m=64, block_n=64, block_k=128, num_stages=4, num_warps=8)
_FLOAT32 = Tiles(block_m=64, block_n=64, block_k=32, num_stages=2, num_warps=8)
_WIDE_FROM = 8192
_ENOUGH_PROGRAMS = 64
_WANTED_PROGRAMS = 128
_MIN_BLOCKS_PER_SPLIT = 2
_REDUCE_BLOCK = 512


def tiles_for(num_outputs: int, dtype: torch.dtype) -> Tiles:
    """Block sizes for a weight of [num_outputs, any]."""
    if dtype is torch.float32:
        return _FLOAT32
    return _WIDE if num_outputs >= _WIDE_FROM else _NARROW


def split_for(num_outputs: int, num_inputs: int, tiles: Tiles) -> int:
    """Parts of K that are summed by programs of their own: enough to fill the device with one block of rows."""
    columns = triton.cdiv(num_outputs, tiles.block_n)
    if columns >= _ENOUGH_PROGRAMS:
        return 1
    blocks = triton.cdiv(num_inputs, tiles.block_k)
    return int(max(1, min(_WANTED_PROGRAMS // columns, blocks // _MIN_BLOCKS_PER_SPLIT)))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def linear_fwd_kernel(p_x, p_w, p_bias, p_y, num_rows, N, K, x_row, w_row, split_k, p_panel, p_row_ids, slot,
                      num_signals, num_words, shape, neg_inf, IS_PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """``y`` is [T, N] as stored, or with IS_PARTIAL float32 [S, T, N]. Row blocks are the fastest axis of the grid, so
    that programs that share a block of the weight run side by side and it is read from memory once. Where there is a
    mark, the last column of the grid says that it ran, so that no other program's end waits for those words."""
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    i_k = tl.program_id(2)
    wait(OVERLAP)
    if p_panel is not None:
        if i_n == tl.num_programs(1) - 1:
            if i_m == 0:
                mark_ran(p_panel, slot, num_signals, num_words, shape)
            return
    b_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_col = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    in_rows = b_row < num_rows
    in_cols = b_col < N
    p_x_rows = p_x + b_row.to(tl.int64)[:, None] * x_row
    p_w_rows = p_w + b_col.to(tl.int64)[:, None] * w_row
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), split_k) * BLOCK_K
    begin = i_k * per_split
    for k in range(begin, tl.minimum(begin + per_split, K), BLOCK_K):
        in_k = (k + b_k)[None, :] < K
        b_x = tl.load(p_x_rows + (k + b_k)[None, :], mask=in_rows[:, None] & in_k, other=0.0)
        b_w = tl.load(p_w_rows + (k + b_k)[None, :], mask=in_cols[:, None] & in_k, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    b_mask = in_rows[:, None] & in_cols[None, :]
    b_offset = b_row.to(tl.int64)[:, None] * N + b_col[None, :]
    if IS_PARTIAL:
        tl.store(p_y + i_k.to(tl.int64) * num_rows * N + b_offset, b_acc, mask=b_mask)
    else:
        if p_bias is not None:
            b_acc += tl.load(p_bias + b_col, mask=in_cols, other=0.0).to(tl.float32)[None, :]
        b_y = b_acc.to(p_y.dtype.element_ty)
        tl.store(p_y + b_offset, b_y, mask=b_mask)
        if p_panel is not None:
            # words of the whole tile would cost the clean path registers: it is read again, 16 rows at a time
            exponent = exponent_of(b_y)
            if tl.max(codes(b_y) & exponent) == exponent:
                tl.debug_barrier()
                for r in range(0, BLOCK_M, 16):
                    b_r = i_m * BLOCK_M + r + tl.arange(0, 16)
                    b_is = (b_r < num_rows)[:, None] & in_cols[None, :]
                    b_again = tl.load(p_y + b_r.to(tl.int64)[:, None] * N + b_col[None, :], mask=b_is, other=0.0)
                    mark_tile(b_again, b_r[:, None], b_col[None, :], b_is, N, p_panel, p_row_ids, slot, num_signals,
                              num_words, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def linear_reduce_fwd_kernel(p_partial, p_bias, p_y, num_rows, N, split_k, p_panel, p_row_ids, slot, num_signals,
                             num_words, shape, neg_inf, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Adds the parts in the order of K: float32 [S, T, N] to [T, N]."""
    wait(OVERLAP)
    i_row = tl.program_id(0)
    i_n = tl.program_id(1)
    if p_panel is not None:
        if i_row == tl.num_programs(0) - 1:
            if i_n == 0:
                mark_ran(p_panel, slot, num_signals, num_words, shape)
            return
    b_col = i_n * BLOCK + tl.arange(0, BLOCK)
    b_mask = b_col < N
    b_offset = i_row.to(tl.int64) * N + b_col
    b_acc = tl.zeros([BLOCK], tl.float32)
    for _ in range(split_k):
        b_acc += tl.load(p_partial + b_offset, mask=b_mask, other=0.0)
        b_offset += num_rows.to(tl.int64) * N
    if p_bias is not None:
        b_acc += tl.load(p_bias + b_col, mask=b_mask, other=0.0).to(tl.float32)
    b_y = b_acc.to(p_y.dtype.element_ty)
    tl.store(p_y + i_row.to(tl.int64) * N + b_col, b_y, mask=b_mask)
    if p_panel is not None:
        mark_tile(b_y, i_row + b_col * 0, b_col, b_mask, N, p_panel, p_row_ids, slot, num_signals, num_words, neg_inf)


def linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    mark: Mark | None,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Launch; shapes as `firetower.ops.linear.torch_path.linear`.

    Args:
        hidden_states: [T, K]. weight: [N, K]. bias: [N]. out: [T, N].
        mark: signal of ``out``.
        workspace: float32 [S, T, N] for the parts, where K is split; made where None.
    """
    (num_rows, num_inputs), num_outputs = hidden_states.shape, weight.shape[0]
    panel = mark_arguments(mark, out.dtype, num_rows, num_outputs)
    if num_rows == 0:
        return
    x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    tiles = tiles_for(num_outputs, x.dtype)
    split_k = split_for(num_outputs, num_inputs, tiles)
    is_marked = mark is not None
    columns = triton.cdiv(num_outputs, tiles.block_n) + (is_marked and split_k == 1)
    off = mark_arguments(None, out.dtype, num_rows, num_outputs)
    if split_k > 1 and workspace is None:
        workspace = torch.empty(split_k, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    options = overlap_options(x)
    with torch.cuda.device_of(x):
        linear_fwd_kernel[(triton.cdiv(num_rows, tiles.block_m), columns, split_k)](
            x, weight, bias, out if split_k == 1 else workspace, num_rows, num_outputs, num_inputs, x.stride(0),
            weight.stride(0), split_k, *(panel if split_k == 1 else off), IS_PARTIAL=split_k > 1,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **options,
        )  # fmt: skip
        if split_k > 1:
            linear_reduce_fwd_kernel[(num_rows + is_marked, triton.cdiv(num_outputs, _REDUCE_BLOCK))](
                workspace, bias, out, num_rows, num_outputs, split_k, *panel, BLOCK=_REDUCE_BLOCK, **options
            )
