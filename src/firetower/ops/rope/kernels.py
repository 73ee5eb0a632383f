# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RoPE in Triton: queries and keys of all tokens in one launch, in place or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.rope.table import LOW, RopeTable
from firetower.sensors.mark_stored import mark_stored
from firetower.sensors.mark_tile import mark_ran
from firetower.sensors.marks import Mark, mark_arguments

TILE, NUM_WARPS = 2048, 4
"""Elements of a tile of whole heads: 16 a thread, two 16-byte loads of bf16. By reasoning for sm_90, not tuned."""


@triton.jit
def _cos_sin(p_low, p_high, position, b_col, num_positions, HALF: tl.constexpr, LOW: tl.constexpr):
    """Cosine and sine of every column, the sine negative in the first half; NaN beyond the table."""
    b_turns = b_col < 2 * HALF
    b_pair = b_col % HALF
    is_inside = (position >= 0) & (position < num_positions)
    inside = tl.where(is_inside, position, 0)
    p_a = p_low + (inside % LOW) * 2 * HALF + b_pair
    p_b = p_high + (inside // LOW) * 2 * HALF + b_pair
    b_cos_a = tl.load(p_a, mask=b_turns, other=0.0)
    b_sin_a = tl.load(p_a + HALF, mask=b_turns, other=0.0)
    b_cos_b = tl.load(p_b, mask=b_turns, other=0.0)
    b_sin_b = tl.load(p_b + HALF, mask=b_turns, other=0.0)
    b_cos = tl.where(is_inside, b_cos_b * b_cos_a - b_sin_b * b_sin_a, float("nan"))
    b_sin = tl.where(is_inside, b_sin_b * b_cos_a + b_cos_b * b_sin_a, float("nan"))
    return b_cos, tl.where(b_col < HALF, -b_sin, b_sin)


@triton.jit
def _rotate(p_x, p_y, stride_xt, stride_xh, stride_yt, stride_yh, i_token, position, first_head, num_heads,
            b_cos, b_sin, b_col, p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
            HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
            STEP: tl.constexpr):  # fmt: skip
    """A tile of whole heads of one token; the partner of a column is loaded once more, from the cache."""
    b_head = first_head + tl.arange(0, HEADS)[:, None]
    b_mask = (b_head < num_heads) & (b_col < HEAD_DIM)
    b_turns = b_mask & (b_col < 2 * HALF)
    token = i_token.to(tl.int64)
    p_row = p_x + token * stride_xt + b_head * stride_xh
    b_stored = tl.load(p_row + b_col, mask=b_mask, other=0.0)
    b_partner = tl.load(p_row + tl.where(b_col < HALF, b_col + HALF, b_col - HALF), mask=b_turns, other=0.0)
    b_y = b_stored.to(tl.float32) * b_cos + b_partner.to(tl.float32) * b_sin
    b_out = tl.where((b_col < 2 * HALF) & (position >= 0), b_y.to(p_y.dtype.element_ty), b_stored)
    # in place, another thread's partner is this thread's element: all loads come before all stores
    tl.debug_barrier()
    p_out = p_y + token * stride_yt + b_head * stride_yh
    tl.store(p_out + b_col, b_out, mask=b_mask)
    if p_panel is not None:
        if (i_token == 0) & (first_head == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_stored(b_out, b_mask, p_out, i_token * num_heads + b_head, b_head < num_heads, 0, HEAD_DIM, BLOCK, STEP,
                    p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=[
    "num_positions", "slot_q", "num_signals_q", "num_rows_q", "shape_q", "neg_inf_q", "slot_k", "num_signals_k",
    "num_rows_k", "shape_k", "neg_inf_k",
])  # fmt: skip
def rope_fwd_kernel(p_q, p_k, p_q_out, p_k_out, p_positions, p_low, p_high, num_positions,
                    stride_qt, stride_qh, stride_kt, stride_kh, stride_qot, stride_qoh, stride_kot, stride_koh,
                    p_panel_q, p_row_ids_q, slot_q, num_signals_q, num_rows_q, shape_q, neg_inf_q,
                    p_panel_k, p_row_ids_k, slot_k, num_signals_k, num_rows_k, shape_k, neg_inf_k,
                    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                    HEADS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, Q_TILES: tl.constexpr,
                    LOW: tl.constexpr):  # fmt: skip
    """Grid (T, tiles of query heads + tiles of key heads)."""
    i_token = tl.program_id(0)
    i_tile = tl.program_id(1)
    b_col = tl.arange(0, BLOCK)[None, :]
    position = tl.load(p_positions + i_token).to(tl.int64)
    b_cos, b_sin = _cos_sin(p_low, p_high, position, b_col, num_positions, HALF, LOW)
    if i_tile < Q_TILES:
        _rotate(p_q, p_q_out, stride_qt, stride_qh, stride_qot, stride_qoh, i_token, position, i_tile * HEADS,
                NUM_HEADS, b_cos, b_sin, b_col, p_panel_q, p_row_ids_q, slot_q, num_signals_q, num_rows_q, shape_q,
                neg_inf_q, HEAD_DIM, HALF, HEADS, BLOCK, STEP)  # fmt: skip
    else:
        _rotate(p_k, p_k_out, stride_kt, stride_kh, stride_kot, stride_koh, i_token, position,
                (i_tile - Q_TILES) * HEADS, NUM_KV_HEADS, b_cos, b_sin, b_col, p_panel_k, p_row_ids_k, slot_k,
                num_signals_k, num_rows_k, shape_k, neg_inf_k, HEAD_DIM, HALF, HEADS, BLOCK, STEP)  # fmt: skip


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: RopeTable,
    q_out: Tensor,
    k_out: Tensor,
    *,
    mark_q: Mark | None,
    mark_k: Mark | None,
) -> None:
    """Write ``q_out`` and ``k_out``; arguments as `firetower.ops.rope.rope` has them."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    heads = max(1, TILE // block)
    q_tiles = triton.cdiv(num_heads, heads)
    with torch.cuda.device_of(q):
        rope_fwd_kernel[(num_tokens, q_tiles + triton.cdiv(num_kv_heads, heads))](
            q, k, q_out, k_out, positions, table.low, table.high, table.num_positions,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            q_out.stride(0), q_out.stride(1), k_out.stride(0), k_out.stride(1),
            *mark_arguments(mark_q, q.dtype, num_tokens * num_heads, head_dim),
            *mark_arguments(mark_k, k.dtype, num_tokens * num_kv_heads, head_dim),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=table.rotary_dim // 2,
            HEADS=heads, BLOCK=block, STEP=min(block, max(1, 64 * NUM_WARPS // heads)), Q_TILES=q_tiles, LOW=LOW,
            num_warps=NUM_WARPS,
        )  # fmt: skip
