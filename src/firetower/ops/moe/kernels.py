# ruff: noqa: N803, SIM102 - compile-time arguments are upper case, as in Triton's own code; its `and` is no `if`
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of the experts: two grouped products. Import needs Triton.

A program of a grouped product holds one block of one expert's rows and one tile of its columns, and runs over the whole
inner dimension, in the same order for every row: its bits do not depend on which rows share its block. Programs of
blocks beyond the plan's end leave at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.moe.kernels_base import MARK, WINDOW_BLOCK, is_any_bad
from firetower.ops.moe.planning import Plan
from firetower.ops.overlap import overlap_options, wait
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Columns and inner elements of a program's tile, and how Triton is to compile it."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


# For an H200 (132 SMs, 4.3 TB/s, 228 KiB of shared memory). Memory must see about 30 KiB in flight on every SM. A
# window's tiles were timed on one, five others of gate_up and eight of down, for 1, 5, 16 and 64 tokens: 16 KiB of
# weights a step, three steps in flight. Wide blocks, by reasoning: what a matrix instruction of 64 rows reuses, as many
# steps as fit. fp32 has no matrix instruction that keeps its bits: small tiles.
GATE_UP_TILES = {
    (2, 16): Tile(block_n=32, block_k=128, num_stages=4, num_warps=4),
    (2, 64): Tile(block_n=64, block_k=64, num_stages=4, num_warps=4),
    (2, 128): Tile(block_n=128, block_k=64, num_stages=4, num_warps=8),
    (4, 16): Tile(block_n=32, block_k=32, num_stages=3, num_warps=4),
    (4, 64): Tile(block_n=32, block_k=32, num_stages=2, num_warps=4),
    (4, 128): Tile(block_n=32, block_k=32, num_stages=2, num_warps=8),
}
DOWN_TILES = {
    (2, 16): Tile(block_n=64, block_k=128, num_stages=3, num_warps=4),
    (2, 64): Tile(block_n=128, block_k=64, num_stages=4, num_warps=4),
    (2, 128): Tile(block_n=256, block_k=64, num_stages=4, num_warps=8),
    (4, 16): Tile(block_n=32, block_k=32, num_stages=3, num_warps=4),
    (4, 64): Tile(block_n=32, block_k=32, num_stages=2, num_warps=4),
    (4, 128): Tile(block_n=32, block_k=32, num_stages=2, num_warps=8),
}

_MARKS = tuple(f"{name}_{part}" for part in ("g", "u", "a") for name in MARK)


@triton.jit
def _mark_stored(b_stored, p_out, p_pairs, b_n, width, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """Mark what a program has just stored.

    Only where something is bad is the tile read again, 16 rows at a time: words of a whole tile of 128 rows would cost
    the clean path registers and thousands of instructions.
    """
    if is_any_bad(b_stored):
        # other threads of this program stored what this one reads
        tl.debug_barrier()
        for r in range(0, BLOCK_M, 16):
            b_pair = tl.load(p_pairs + r + tl.arange(0, 16))
            b_mask = (b_pair >= 0)[:, None] & (b_n < width)[None, :]
            b_y = tl.load(p_out + b_pair[:, None].to(tl.int64) * width + b_n[None, :], mask=b_mask, other=0.0)
            mark_tile(b_y, b_pair[:, None], b_n[None, :], b_mask, width, p_panel, p_row_ids, slot, num_signals,
                      num_rows, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=_MARKS)
def moe_gate_up_fwd_kernel(p_x, p_w, p_shared, p_out, p_pair_ids, p_block_experts, hidden, inner, inner_shared, width,
                           num_experts,
                           p_panel_g, p_row_ids_g, slot_g, num_signals_g, num_rows_g, shape_g, neg_inf_g,
                           p_panel_u, p_row_ids_u, slot_u, num_signals_u, num_rows_u, shape_u, neg_inf_u,
                           p_panel_a, p_row_ids_a, slot_a, num_signals_a, num_rows_a, shape_a, neg_inf_a,
                           SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                           EVEN: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """``silu(x @ gate) * (x @ up)`` of one block's rows in BLOCK_N columns.

    ``p_w`` [E, 2 inner, hidden], ``p_shared`` [2 inner_shared, hidden] or None, ``p_out`` [pairs, width]. ``EVEN``: no
    column and no inner element needs a mask.
    """
    wait(OVERLAP)
    i_program = tl.program_id(0)
    num_tiles = tl.cdiv(width, BLOCK_N)
    i_block = i_program // num_tiles
    i_n = i_program % num_tiles
    # both at once: each is a trip to memory
    expert = tl.load(p_block_experts + i_block)
    b_pair = tl.load(p_pair_ids + i_block * BLOCK_M + tl.arange(0, BLOCK_M))
    if i_program == 0:
        if p_panel_g is not None:
            mark_ran(p_panel_g, slot_g, num_signals_g, num_rows_g, shape_g)
        if p_panel_u is not None:
            mark_ran(p_panel_u, slot_u, num_signals_u, num_rows_u, shape_u)
        if p_panel_a is not None:
            mark_ran(p_panel_a, slot_a, num_signals_a, num_rows_a, shape_a)
    if expert < 0:
        return
    b_real = b_pair >= 0
    b_token = tl.where(b_real, b_pair // SLOTS, 0)
    b_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    p_expert = p_w + expert.to(tl.int64) * (2 * inner * hidden)
    rows = inner
    if p_shared is not None:
        p_expert = tl.where(expert == num_experts, p_shared, p_expert)
        rows = tl.where(expert == num_experts, inner_shared, inner)
    p_x_tile = p_x + b_token[:, None].to(tl.int64) * hidden + b_k[None, :]
    p_gate = p_expert + b_n[None, :] * hidden + b_k[:, None]
    p_up = p_gate + rows * hidden
    b_column = b_n < rows
    b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, hidden, BLOCK_K):
        if EVEN:
            b_g = tl.load(p_gate + k)
            b_u = tl.load(p_up + k)
            b_x = tl.load(p_x_tile + k, mask=b_real[:, None], other=0.0)
        else:
            b_in = k + b_k < hidden
            b_x = tl.load(p_x_tile + k, mask=b_real[:, None] & b_in[None, :], other=0.0)
            b_g = tl.load(p_gate + k, mask=b_in[:, None] & b_column[None, :], other=0.0)
            b_u = tl.load(p_up + k, mask=b_in[:, None] & b_column[None, :], other=0.0)
        b_gate = tl.dot(b_x, b_g, b_gate, input_precision="ieee")
        b_up = tl.dot(b_x, b_u, b_up, input_precision="ieee")
    b_act = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    if not EVEN:
        # columns past a narrower expert's width are zeros for the product that follows
        b_act = tl.where(b_column[None, :], b_act, 0.0)
    b_mask = b_real[:, None] & (b_n < width)[None, :]
    b_stored = b_act.to(p_out.dtype.element_ty)
    tl.store(p_out + b_pair[:, None].to(tl.int64) * width + b_n[None, :], b_stored, mask=b_mask)
    b_own = b_real[:, None] & b_column[None, :]
    if p_panel_g is not None:
        mark_tile(b_gate, b_pair[:, None], b_n[None, :], b_own, width, p_panel_g, p_row_ids_g, slot_g, num_signals_g,
                  num_rows_g, neg_inf_g)  # fmt: skip
    if p_panel_u is not None:
        mark_tile(b_up, b_pair[:, None], b_n[None, :], b_own, width, p_panel_u, p_row_ids_u, slot_u, num_signals_u,
                  num_rows_u, neg_inf_u)  # fmt: skip
    if p_panel_a is not None:
        _mark_stored(b_stored, p_out, p_pair_ids + i_block * BLOCK_M, b_n, width, p_panel_a, p_row_ids_a, slot_a,
                     num_signals_a, num_rows_a, neg_inf_a, BLOCK_M)  # fmt: skip


def gate_up(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    shared: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    gate_mark: Mark | None,
    up_mark: Mark | None,
    mark: Mark | None,
) -> None:
    """Launch `moe_gate_up_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.gate_up`."""
    if plan.num_blocks == 0:
        return
    tile = _tile(GATE_UP_TILES, hidden_states, plan)
    hidden, width, inner = hidden_states.shape[1], out.shape[1], gate_up_proj.shape[1] // 2
    inner_shared = inner if shared is None else shared.shape[0] // 2
    rows = plan.num_pairs
    with torch.cuda.device_of(out):
        moe_gate_up_fwd_kernel[(plan.num_blocks * triton.cdiv(width, tile.block_n),)](
            hidden_states,
            gate_up_proj,
            shared,
            out,
            plan.pair_ids,
            plan.block_experts,
            hidden,
            inner,
            inner_shared,
            width,
            plan.num_experts,
            *mark_arguments(gate_mark, torch.float32, rows, width),
            *mark_arguments(up_mark, torch.float32, rows, width),
            *mark_arguments(mark, out.dtype, rows, width),
            SLOTS=plan.num_slots,
            BLOCK_M=plan.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            EVEN=inner == inner_shared and width % tile.block_n == 0 and hidden % tile.block_k == 0,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
            **overlap_options(hidden_states, is_wanted=plan.block_m == WINDOW_BLOCK),
        )


@triton.jit(do_not_specialize=MARK)
def moe_down_fwd_kernel(p_act, p_w, p_shared, p_out, p_pair_ids, p_block_experts, width, inner, inner_shared, hidden,
                        num_experts, p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
                        CHAINED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """``act @ down`` of one block's rows in BLOCK_N columns.

    ``p_act`` [pairs, width], ``p_w`` [E, hidden, inner], ``p_shared`` [hidden, inner_shared] or None. ``CHAINED``: the
    plan is read while ``p_act`` is not yet there.
    """
    if not CHAINED:
        wait(OVERLAP)
    i_program = tl.program_id(0)
    num_tiles = tl.cdiv(hidden, BLOCK_N)
    i_block = i_program // num_tiles
    i_n = i_program % num_tiles
    # what is read before the wait is read past the L1 cache, which may hold it as it was a step ago
    expert = tl.load(p_block_experts + i_block, cache_modifier=".cg")
    b_pair = tl.load(p_pair_ids + i_block * BLOCK_M + tl.arange(0, BLOCK_M), cache_modifier=".cg")
    if p_panel is not None:
        if i_program == 0:
            if CHAINED:
                wait(OVERLAP)
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
    if expert < 0:
        if CHAINED:
            wait(OVERLAP)
        return
    b_real = b_pair >= 0
    b_row = tl.where(b_real, b_pair, 0)
    b_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    p_expert = p_w + expert.to(tl.int64) * (hidden * inner)
    columns = inner
    if p_shared is not None:
        p_expert = tl.where(expert == num_experts, p_shared, p_expert)
        columns = tl.where(expert == num_experts, inner_shared, inner)
    p_act_tile = p_act + b_row[:, None].to(tl.int64) * width + b_k[None, :]
    b_out = b_n < hidden
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if EVEN:
        p_w_tile = p_expert + b_n[None, :] * inner + b_k[:, None]
    else:
        p_w_tile = p_expert + b_n[None, :] * columns + b_k[:, None]
    if CHAINED:
        wait(OVERLAP)
    for k in range(0, width, BLOCK_K):
        if EVEN:
            b_w = tl.load(p_w_tile + k)
            b_a = tl.load(p_act_tile + k, mask=b_real[:, None], other=0.0)
        else:
            b_w = tl.load(p_w_tile + k, mask=(k + b_k < columns)[:, None] & b_out[None, :], other=0.0)
            b_a = tl.load(p_act_tile + k, mask=b_real[:, None] & (k + b_k < width)[None, :], other=0.0)
        b_acc = tl.dot(b_a, b_w, b_acc, input_precision="ieee")
    b_mask = b_real[:, None] & b_out[None, :]
    b_stored = b_acc.to(p_out.dtype.element_ty)
    tl.store(p_out + b_pair[:, None].to(tl.int64) * hidden + b_n[None, :], b_stored, mask=b_mask)
    if p_panel is not None:
        _mark_stored(b_stored, p_out, p_pair_ids + i_block * BLOCK_M, b_n, hidden, p_panel, p_row_ids, slot,
                     num_signals, num_rows, neg_inf, BLOCK_M)  # fmt: skip


def down(
    act: Tensor,
    down_proj: Tensor,
    shared: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    mark: Mark | None,
    is_chained: bool = False,
) -> None:
    """Launch `moe_down_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.down`."""
    if plan.num_blocks == 0:
        return
    hidden, width, inner = out.shape[1], act.shape[1], down_proj.shape[2]
    inner_shared = inner if shared is None else shared.shape[1]
    tile = _tile(DOWN_TILES, act, plan)
    options = overlap_options(act, is_wanted=plan.block_m == WINDOW_BLOCK)
    with torch.cuda.device_of(out):
        moe_down_fwd_kernel[(plan.num_blocks * triton.cdiv(hidden, tile.block_n),)](
            act,
            down_proj,
            shared,
            out,
            plan.pair_ids,
            plan.block_experts,
            width,
            inner,
            inner_shared,
            hidden,
            plan.num_experts,
            *mark_arguments(mark, out.dtype, plan.num_pairs, hidden),
            BLOCK_M=plan.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            EVEN=inner == inner_shared and hidden % tile.block_n == 0 and width % tile.block_k == 0,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
            CHAINED=is_chained and options["OVERLAP"],
            **options,
        )


def _tile(tiles: dict[tuple[int, int], Tile], x: Tensor, plan: Plan) -> Tile:
    tile = tiles.get((x.itemsize, plan.block_m))
    if tile is None:
        raise ConfigError(f"block_m={plan.block_m}: must be 16, 64 or 128 for a Triton kernel; see block_rows()")
    return tile
