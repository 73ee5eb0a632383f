# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of the plan of any number of tokens; few are routed and planned by one kernel of `kernels_route`.

Numbers that vary from call to call are not specialised: a graph of 1 row and one of 256 run the same machine code.
Import needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.moe.planning import Plan

WINDOW_TOKENS, PLAN_TOKENS, PLAN_CHUNKS = 16, 256, 32
"""Tokens that one step of the plan reads: few for the smallest windows, whose plan then costs one launch of short
programs; counts of further tokens are summed from this many chunks at once."""

PLAN_WARPS = 4


@triton.jit
def _count(p_ids, p_row_ids, first, num_tokens, num_experts, K: tl.constexpr, SLOTS: tl.constexpr,
           BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Rows of every expert among BLOCK_T tokens; the last bin takes what is routed nowhere, and counts 0."""
    b_bin = tl.arange(0, BINS)
    b_pair = tl.arange(0, BLOCK_T * BLOCK_K)
    b_token = first + b_pair // BLOCK_K
    b_j = b_pair % BLOCK_K
    b_is = (b_token < num_tokens) & (b_j < K)
    b_id = tl.load(p_ids + b_token * K + b_j, mask=b_is, other=-1).to(tl.int32)
    if p_row_ids is not None:
        b_is = b_is & (tl.load(p_row_ids + b_token, mask=b_is, other=-1) >= 0)
    b_is = b_is & (b_id >= 0) & (b_id < num_experts)
    b_counts = tl.histogram(tl.where(b_is, b_id, BINS - 1), BINS)
    b_counts = tl.where(b_bin == BINS - 1, 0, b_counts)
    if SLOTS > K:
        b_t = first + tl.arange(0, BLOCK_T)
        b_real = b_t < num_tokens
        if p_row_ids is not None:
            b_real = b_real & (tl.load(p_row_ids + b_t, mask=b_real, other=-1) >= 0)
        b_counts = tl.where(b_bin == num_experts, tl.sum(b_real.to(tl.int32), axis=0), b_counts)
    return b_counts


@triton.jit(do_not_specialize=["num_tokens"])
def moe_count_fwd_kernel(p_ids, p_row_ids, p_counts, num_tokens, num_experts, K: tl.constexpr, SLOTS: tl.constexpr,
                         BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Rows of every expert in each chunk of BLOCK_T tokens; one program a chunk."""
    i_c = tl.program_id(0)
    b_counts = _count(p_ids, p_row_ids, i_c * BLOCK_T, num_tokens, num_experts, K, SLOTS, BLOCK_T, BLOCK_K, BINS)
    tl.store(p_counts + i_c * BINS + tl.arange(0, BINS), b_counts)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_blocks"])
def moe_plan_fwd_kernel(p_ids, p_row_ids, p_counts, p_pair_ids, p_block_experts, p_offsets, p_totals, p_pair_rows,
                        num_tokens, num_chunks, num_blocks, num_experts, K: tl.constexpr, SLOTS: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
                        BINS: tl.constexpr, CHUNKS: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """One program an expert: finds where its blocks begin, then lists its pairs in ascending order.

    Whatever lies beyond the plan's end, and the row ids of all pairs, are shared out among the programs.
    """
    i_e = tl.program_id(0)
    num_lists = tl.num_programs(0)
    b_bin = tl.arange(0, BINS)
    b_fill = tl.arange(0, FILL)
    if p_counts is None:
        b_counts = _count(p_ids, p_row_ids, 0, num_tokens, num_experts, K, SLOTS, BLOCK_T, BLOCK_K, BINS)
    else:
        b_counts = tl.zeros([BINS], tl.int32)
        for c in range(0, num_chunks, CHUNKS):
            b_c = c + tl.arange(0, CHUNKS)
            b_part = tl.load(p_counts + b_c[:, None] * BINS + b_bin[None, :], mask=(b_c < num_chunks)[:, None], other=0)
            b_counts += tl.sum(b_part, axis=0)
    b_blocks = (b_counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(b_bin < i_e, b_blocks, 0), axis=0)
    my_rows = tl.sum(tl.where(b_bin == i_e, b_counts, 0), axis=0)
    my_blocks = (my_rows + BLOCK_M - 1) // BLOCK_M
    total = tl.sum(b_blocks, axis=0)
    first = first_block * BLOCK_M
    capacity = num_blocks * BLOCK_M
    tl.store(p_offsets + i_e, first)
    if i_e == num_lists - 1:
        tl.store(p_offsets + num_lists, total * BLOCK_M)
        tl.store(p_totals, total)
        tl.store(p_totals + 1, total * BLOCK_M)
        tl.store(p_totals + 2, tl.sum(b_counts, axis=0))
    for b in range(0, my_blocks, FILL):
        b_at = first_block + b + b_fill
        tl.store(p_block_experts + b_at, b_fill * 0 + i_e, mask=(b + b_fill < my_blocks) & (b_at < num_blocks))
    b_pad = first + my_rows + tl.arange(0, BLOCK_M)
    b_is_pad = (b_pad < first + my_blocks * BLOCK_M) & (b_pad < capacity)
    tl.store(p_pair_ids + b_pad, b_pad * 0 - 1, mask=b_is_pad)
    for b in range(total + i_e * FILL, num_blocks, num_lists * FILL):
        tl.store(p_block_experts + b + b_fill, b_fill * 0 - 1, mask=b + b_fill < num_blocks)
    for r in range(total * BLOCK_M + i_e * FILL, capacity, num_lists * FILL):
        tl.store(p_pair_ids + r + b_fill, b_fill * 0 - 1, mask=r + b_fill < capacity)
    if p_pair_rows is not None:
        for r in range(i_e * FILL, num_tokens * SLOTS, num_lists * FILL):
            b_is_pair = r + b_fill < num_tokens * SLOTS
            b_id = tl.load(p_row_ids + (r + b_fill) // SLOTS, mask=b_is_pair, other=-1).to(tl.int32)
            tl.store(p_pair_rows + r + b_fill, b_id, mask=b_is_pair)
    b_slot = tl.arange(0, BLOCK_S)
    base = first
    for t in range(0, num_tokens, BLOCK_T):
        b_t = t + tl.arange(0, BLOCK_T)
        b_real = b_t < num_tokens
        if p_row_ids is not None:
            b_real = b_real & (tl.load(p_row_ids + b_t, mask=b_real, other=-1) >= 0)
        b_is = b_real[:, None] & (b_slot < K)[None, :]
        b_id = tl.load(p_ids + b_t[:, None] * K + b_slot[None, :], mask=b_is, other=-1).to(tl.int32)
        b_id = tl.where(b_id < num_experts, b_id, -1)
        if SLOTS > K:
            b_id = tl.where(b_real[:, None] & (b_slot == K)[None, :], num_experts, b_id)
        b_hit = b_id == i_e
        b_one = b_hit.to(tl.int32)
        b_in_token = tl.sum(b_one, axis=1)
        b_before = tl.cumsum(b_in_token, axis=0) - b_in_token
        b_at = base + b_before[:, None] + tl.cumsum(b_one, axis=1) - b_one
        tl.store(p_pair_ids + b_at, b_t[:, None] * SLOTS + b_slot[None, :], mask=b_hit & (b_at < capacity))
        base += tl.sum(b_in_token, axis=0)


def plan(topk_ids: Tensor, row_ids: Tensor | None, *, into: Plan) -> None:
    """Launch `moe_plan_fwd_kernel`, after `moe_count_fwd_kernel` where one chunk does not hold all tokens."""
    num_tokens = into.num_tokens
    block_k = triton.next_power_of_2(into.top_k)
    threads = 32 * PLAN_WARPS
    few = max(WINDOW_TOKENS, threads // block_k)
    block_t = few if num_tokens <= few else PLAN_TOKENS
    num_chunks = triton.cdiv(num_tokens, block_t)
    # a histogram of fewer elements, or into fewer bins, than threads would be computed on copies
    bins = max(threads, triton.next_power_of_2(into.num_experts + 2))
    counts = None
    if num_chunks > 1:
        counts = topk_ids.new_empty((num_chunks, bins), dtype=into.totals.dtype)
        with torch.cuda.device_of(topk_ids):
            moe_count_fwd_kernel[(num_chunks,)](
                topk_ids,
                row_ids,
                counts,
                num_tokens,
                into.num_experts,
                K=into.top_k,
                SLOTS=into.num_slots,
                BLOCK_T=block_t,
                BLOCK_K=block_k,
                BINS=bins,
                num_warps=PLAN_WARPS,
            )
    with torch.cuda.device_of(topk_ids):
        moe_plan_fwd_kernel[(into.num_lists,)](
            topk_ids,
            row_ids,
            counts,
            into.pair_ids,
            into.block_experts,
            into.expert_offsets,
            into.totals,
            into.row_ids,
            num_tokens,
            num_chunks,
            into.num_blocks,
            into.num_experts,
            K=into.top_k,
            SLOTS=into.num_slots,
            BLOCK_M=into.block_m,
            BLOCK_T=block_t,
            BLOCK_K=block_k,
            BLOCK_S=triton.next_power_of_2(into.num_slots),
            BINS=bins,
            CHUNKS=PLAN_CHUNKS,
            FILL=1024,
            num_warps=PLAN_WARPS,
        )
