# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels before the experts: logits, top-k, the plan. Import needs Triton.

Numbers that vary from call to call are not specialised: a graph of 1 row and one of 256 run the same machine code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.moe.planning import Plan
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

LOGITS_TILES = {16: (16, 256, 4, 4), 64: (64, 64, 3, 4)}
"""(BLOCK_N, BLOCK_K, stages, warps) by block_m, for an H200, by reasoning: 17 programs of a window stream 64 KiB each,
so their loads must be few and deep; many rows are a plain product. fp32 halves BLOCK_K."""

WINDOW_TOKENS, PLAN_TOKENS, PLAN_CHUNKS = 16, 256, 32
"""Tokens that one step of the plan reads: few for the smallest windows, whose plan then costs one launch of short
programs; counts of further tokens are summed from this many chunks at once."""

PLAN_WARPS = 4
_MARK = ("slot", "num_signals", "num_rows", "shape", "neg_inf")


@triton.jit(do_not_specialize=["num_tokens", *_MARK])
def moe_logits_fwd_kernel(p_x, p_router, p_gate, p_out, num_tokens, hidden, num_experts, num_columns,
                          p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """One program a tile of BLOCK_M tokens and BLOCK_N experts; the last one across holds the shared gate alone."""
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    b_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_lane = tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    b_col = i_n * BLOCK_N + b_lane
    b_is = b_col < num_experts
    p_w = p_router + i_n.to(tl.int64) * BLOCK_N * hidden
    if p_gate is not None:
        is_gate = i_n == tl.num_programs(1) - 1
        p_w = tl.where(is_gate, p_gate, p_w)
        b_col = tl.where(is_gate, num_experts + b_lane, b_col)
        b_is = tl.where(is_gate, b_lane < 1, b_is)
    b_real = b_row < num_tokens
    p_x_tile = p_x + b_row[:, None].to(tl.int64) * hidden + b_k[None, :]
    p_w_tile = p_w + b_lane[None, :] * hidden + b_k[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, hidden, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x_tile + k, mask=b_real[:, None], other=0.0)
            b_w = tl.load(p_w_tile + k, mask=b_is[None, :], other=0.0)
        else:
            b_in = k + b_k < hidden
            b_x = tl.load(p_x_tile + k, mask=b_real[:, None] & b_in[None, :], other=0.0)
            b_w = tl.load(p_w_tile + k, mask=b_is[None, :] & b_in[:, None], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    b_mask = b_real[:, None] & b_is[None, :]
    tl.store(p_out + b_row[:, None].to(tl.int64) * num_columns + b_col[None, :], b_acc, mask=b_mask)
    if p_panel is not None:
        if (i_m == 0) & (i_n == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_acc, b_row[:, None], b_col[None, :], b_mask, num_columns, p_panel, p_row_ids, slot, num_signals,
                  num_rows, neg_inf)  # fmt: skip


def logits(
    hidden_states: Tensor, router: Tensor, gate: Tensor | None, *, out: Tensor, block_m: int, mark: Mark | None
) -> None:
    """Launch `moe_logits_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.logits`."""
    num_tokens, hidden = hidden_states.shape
    if num_tokens == 0:
        return
    block_m = max(block_m, 16)
    block_n, block_k, stages, warps = LOGITS_TILES[16 if block_m <= 16 else 64]
    block_m = 16 if block_m <= 16 else 64
    if hidden_states.itemsize == 4:
        block_k //= 2
    num_experts = router.shape[0]
    grid = (triton.cdiv(num_tokens, block_m), triton.cdiv(num_experts, block_n) + (gate is not None))
    with torch.cuda.device_of(out):
        moe_logits_fwd_kernel[grid](
            hidden_states,
            router,
            gate,
            out,
            num_tokens,
            hidden,
            num_experts,
            out.shape[1],
            *mark_arguments(mark, out.dtype, num_tokens, out.shape[1]),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN_K=hidden % block_k == 0,
            num_stages=stages,
            num_warps=warps,
        )


@triton.jit
def _exp_shares(b_score, b_is, b_all, b_all_is):
    """exp(score - top) of the chosen and its sum over all; where every score is -Inf, as if all were equal."""
    top = tl.max(tl.where(b_all_is, b_all, float("-inf")), axis=0)
    is_empty = top == float("-inf")
    b_zero = tl.where(is_empty, 0.0, b_score)
    b_all_zero = tl.where(is_empty, 0.0, b_all)
    top = tl.where(is_empty, 0.0, top)
    total = tl.sum(tl.where(b_all_is, tl.exp(b_all_zero - top), 0.0), axis=0)
    return tl.where(b_is, tl.exp(b_zero - top), 0.0), total


@triton.jit(do_not_specialize=["stride", *_MARK])
def moe_route_fwd_kernel(p_logits, p_bias, p_weights, p_ids, stride, num_experts, scale, p_panel, p_row_ids, slot,
                         num_signals, num_rows, shape, neg_inf, K: tl.constexpr, BLOCK_K: tl.constexpr,
                         BLOCK_E: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr):  # fmt: skip
    """One program a token."""
    i_t = tl.program_id(0)
    b_e = tl.arange(0, BLOCK_E)
    b_j = tl.arange(0, BLOCK_K)
    b_is = b_e < num_experts
    # lanes past the last expert are -Inf: 0 would be the row's maximum where all logits are negative
    b_logit = tl.load(p_logits + i_t.to(tl.int64) * stride + b_e, mask=b_is, other=float("-inf")).to(tl.float32)
    b_choice = b_logit
    if p_bias is not None:
        b_choice = 1.0 / (1.0 + tl.exp(-b_logit)) + tl.load(p_bias + b_e, mask=b_is, other=0.0).to(tl.float32)
    b_nan = (b_choice != b_choice) & b_is
    is_nan = tl.max(b_nan.to(tl.int32), axis=0) != 0
    b_choice = tl.where(b_nan, float("-inf"), b_choice)
    b_free = b_is.to(tl.int32)
    b_ids = tl.zeros([BLOCK_K], tl.int32)
    b_chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for j in range(K):
        best = tl.max(tl.where(b_free != 0, b_choice, float("-inf")), axis=0)
        expert = tl.min(tl.where((b_free != 0) & (b_choice == best), b_e, BLOCK_E), axis=0)
        chosen = tl.max(tl.where(b_e == expert, b_logit, float("-inf")), axis=0)
        b_free = tl.where(b_e == expert, 0, b_free)
        b_ids = tl.where(b_j == j, expert, b_ids)
        b_chosen = tl.where(b_j == j, chosen, b_chosen)
    b_is_k = b_j < K
    if RENORMALISE:
        if SIGMOID:
            b_chosen = tl.minimum(b_chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_chosen)))
        b_w, total = _exp_shares(b_chosen, b_is_k, b_chosen, b_is_k)
        b_w = b_w / total
    elif SIGMOID:
        b_w = 1.0 / (1.0 + tl.exp(-b_chosen))
    else:
        b_w, total = _exp_shares(b_chosen, b_is_k, b_logit, b_is)
        b_w = b_w / total
    b_w = tl.where(is_nan, float("nan"), b_w * scale)
    at = i_t.to(tl.int64) * K
    tl.store(p_ids + at + b_j, b_ids, mask=b_is_k)
    tl.store(p_weights + at + b_j, b_w, mask=b_is_k)
    if p_panel is not None:
        if i_t == 0:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_w, i_t, b_j, b_is_k, K, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)


def router(
    router_logits: Tensor,
    selection_bias: Tensor | None,
    *,
    top_k: int,
    is_sigmoid: bool,
    renormalise: bool,
    scale: float,
    weights: Tensor,
    ids: Tensor,
    mark: Mark | None,
) -> None:
    """Launch `moe_route_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.router`."""
    num_tokens, num_experts = router_logits.shape
    if num_tokens == 0:
        return
    with torch.cuda.device_of(weights):
        moe_route_fwd_kernel[(num_tokens,)](
            router_logits,
            selection_bias,
            weights,
            ids,
            router_logits.stride(0),
            num_experts,
            float(scale),
            *mark_arguments(mark, weights.dtype, num_tokens, top_k),
            K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_E=triton.next_power_of_2(num_experts),
            SIGMOID=is_sigmoid,
            RENORMALISE=renormalise,
            num_warps=1 if num_experts <= 512 else 4,
        )


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
