# ruff: noqa: N803, SIM102 - compile-time arguments are upper case, as in Triton's own code; its `and` is no `if`
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels before the experts: logits, top-k, and for few tokens top-k and plan in one. Import needs Triton.

Numbers that vary from call to call are not specialised: a graph of 1 row and one of 256 run the same machine code. The
two kernels that route share their arithmetic, and its only sum is one of integers: a row has the same bits in both.
Logits are held as [L, T, C], expert ``c * L + l``: Triton gives L to a warp's lanes and T to the warps, so that a
token's best expert is found inside one warp, and several tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.moe.kernels_base import MARK, WINDOW_BLOCK, ask_into_cache, is_any_bad
from firetower.ops.moe.planning import Plan
from firetower.ops.overlap import overlap_options, wait
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

LOGITS_TILES = {
    (2, 16): (8, 256, 8, 1, 8),
    (2, 64): (64, 64, 1, 3, 4),
    (4, 16): (8, 256, 1, 3, 4),
    (4, 64): (64, 32, 1, 3, 4),
}
"""(BLOCK_N, BLOCK_K, PARTS, stages, warps) by bytes of an element and block_m, for an H200. The 33 programs of a window
load all of their 32 KiB of weights at once, and each warp sums its own part of the inner dimension: a chain of 16
matrix instructions, not of 128. Many rows are a plain product."""

LOGITS_ASKS = True
"""Whether a window's programs ask for their weights before the kernel before them has ended."""

ROUTE_PLAN_WARPS = 8
"""The most warps of a program that routes and plans; it has one a token."""
AHEAD_PROGRAMS, AHEAD_BYTES = 16, 16 << 20
"""Programs that ask for what comes next, 0 for none, and the most of one tensor that is worth it: a quarter of the L2
cache, in the few microseconds in which the memory would be idle."""


@triton.jit(do_not_specialize=["num_tokens", *MARK])
def moe_logits_fwd_kernel(p_x, p_router, p_gate, p_out, num_tokens, hidden, num_experts, num_columns, num_tiles,
                          p_ahead, ahead_bytes, p_ahead_2, ahead_bytes_2,
                          p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr,
                          ASKS: tl.constexpr, LANES: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """One program a tile of BLOCK_M tokens and BLOCK_N experts; the last one across holds the shared gate alone.

    Programs beyond the tiles, where there are any, say that the signal ran (the first of them) and ask ``p_ahead`` and
    ``p_ahead_2`` into the cache (all others). ``PARTS`` blocks of BLOCK_K are multiplied side by side and then summed.
    ``ASKS``: a program's own weights are asked into the cache as well, before its turn.
    """
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    if i_n >= num_tiles:
        if i_m == 0:
            i_part = i_n - num_tiles
            if p_panel is not None:
                i_part -= 1
            if p_ahead is not None:
                if i_part >= 0:
                    num_parts = tl.num_programs(1) - (i_n - i_part)
                    ask_into_cache(p_ahead, ahead_bytes, i_part, num_parts, LANES)
                    ask_into_cache(p_ahead_2, ahead_bytes_2, i_part, num_parts, LANES)
        wait(OVERLAP)
        if p_panel is not None:
            if (i_m == 0) & (i_n == num_tiles):
                mark_ran(p_panel, slot, num_signals, num_rows, shape)
        return
    b_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_lane = tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    b_col = i_n * BLOCK_N + b_lane
    b_is = b_col < num_experts
    p_w = p_router + i_n.to(tl.int64) * BLOCK_N * hidden
    num_own = tl.minimum(num_experts - i_n * BLOCK_N, BLOCK_N)
    if p_gate is not None:
        is_gate = i_n == num_tiles - 1
        p_w = tl.where(is_gate, p_gate, p_w)
        b_col = tl.where(is_gate, num_experts + b_lane, b_col)
        b_is = tl.where(is_gate, b_lane < 1, b_is)
        num_own = tl.where(is_gate, 1, num_own)
    if ASKS:
        ask_into_cache(p_w, num_own * hidden * (p_w.dtype.element_ty.primitive_bitwidth // 8), 0, 1, LANES)
    wait(OVERLAP)
    b_real = b_row < num_tokens
    p_x_tile = p_x + b_row[:, None].to(tl.int64) * hidden + b_k[None, :]
    p_w_tile = p_w + b_lane[None, :] * hidden + b_k[:, None]
    if PARTS == 1:
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
    else:
        b_part = tl.arange(0, PARTS)[:, None, None] * BLOCK_K
        b_accs = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, hidden, PARTS * BLOCK_K):
            b_at = k + b_part
            if EVEN_K:
                b_w = tl.load(p_w_tile[None, :, :] + b_at, mask=b_is[None, None, :], other=0.0)
                b_x = tl.load(p_x_tile[None, :, :] + b_at, mask=b_real[None, :, None], other=0.0)
            else:
                b_w_in = b_is[None, None, :] & (b_at + b_k[None, :, None] < hidden)
                b_w = tl.load(p_w_tile[None, :, :] + b_at, mask=b_w_in, other=0.0)
                b_x_in = b_real[None, :, None] & (b_at + b_k[None, None, :] < hidden)
                b_x = tl.load(p_x_tile[None, :, :] + b_at, mask=b_x_in, other=0.0)
            b_accs = tl.dot(b_x, b_w, b_accs, input_precision="ieee")
        b_acc = tl.sum(b_accs, axis=0)
    b_mask = b_real[:, None] & b_is[None, :]
    tl.store(p_out + b_row[:, None].to(tl.int64) * num_columns + b_col[None, :], b_acc, mask=b_mask)
    if p_panel is not None:
        if BLOCK_M == 16:
            mark_tile(b_acc, b_row[:, None], b_col[None, :], b_mask, num_columns, p_panel, p_row_ids, slot,
                      num_signals, num_rows, neg_inf)  # fmt: skip
        else:
            # words of a whole tile would take all registers there are: read it again, 16 rows at a time
            if is_any_bad(b_acc):
                tl.debug_barrier()
                for r in range(0, BLOCK_M, 16):
                    b_r = i_m * BLOCK_M + r + tl.arange(0, 16)
                    b_stored = (b_r < num_tokens)[:, None] & b_is[None, :]
                    p_stored = p_out + b_r[:, None].to(tl.int64) * num_columns + b_col[None, :]
                    b_again = tl.load(p_stored, mask=b_stored, other=0.0)
                    mark_tile(b_again, b_r[:, None], b_col[None, :], b_stored, num_columns, p_panel, p_row_ids, slot,
                              num_signals, num_rows, neg_inf)  # fmt: skip


def logits(
    hidden_states: Tensor,
    router: Tensor,
    gate: Tensor | None,
    *,
    out: Tensor,
    block_m: int,
    mark: Mark | None,
    ahead: Sequence[Tensor] = (),
) -> None:
    """Launch `moe_logits_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.logits`."""
    num_tokens, hidden = hidden_states.shape
    if num_tokens == 0:
        return
    block_m = 16 if block_m <= 16 else 64
    block_n, block_k, parts, stages, warps = LOGITS_TILES[hidden_states.itemsize, block_m]
    num_experts = router.shape[0]
    num_tiles = triton.cdiv(num_experts, block_n) + (gate is not None)
    options = overlap_options(hidden_states, is_wanted=block_m == WINDOW_BLOCK)
    sizes = [_worth_asking(x) for x in ahead]
    is_asked = bool(options["OVERLAP"] and AHEAD_PROGRAMS and len(sizes) == 2 and all(sizes))
    first, second = ahead if is_asked else (None, None)
    further = AHEAD_PROGRAMS * is_asked + (mark is not None)
    with torch.cuda.device_of(out):
        moe_logits_fwd_kernel[(triton.cdiv(num_tokens, block_m), num_tiles + further)](
            hidden_states,
            router,
            gate,
            out,
            num_tokens,
            hidden,
            num_experts,
            out.shape[1],
            num_tiles,
            first,
            sizes[0] if is_asked else 0,
            second,
            sizes[1] if is_asked else 0,
            *mark_arguments(mark, out.dtype, num_tokens, out.shape[1]),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            PARTS=parts,
            EVEN_K=hidden % (parts * block_k) == 0,
            ASKS=bool(LOGITS_ASKS and options["OVERLAP"] and _are_aligned(router, gate)),
            LANES=32 * warps,
            num_stages=stages,
            num_warps=warps,
            **options,
        )


def _are_aligned(*weights: Tensor | None) -> bool:
    """Whether rows of weights lie where the cache may be asked for them."""
    return all(x is None or not (x.data_ptr() % 16 or x.shape[-1] * x.itemsize % 16) for x in weights)


def _worth_asking(x: Tensor) -> int:
    """Bytes of a tensor that the cache is asked for; 0 where its address is not aligned for it."""
    return 0 if x.data_ptr() % 16 else min(x.numel() * x.itemsize, AHEAD_BYTES)


@triton.jit
def _over_all(b_x):
    """The largest of each token's [L, T, C] values: [1, T, 1]."""
    return tl.max(tl.max(b_x, axis=2), axis=0)[None, :, None]


@triton.jit
def _shares(b_score, b_over):
    """exp(score - top) over its sum over the lanes ``b_over``; where all of those are -Inf, as if all were equal.

    The sum is one of integers, 2^-40 each, so that it has no order: shares below 1e-12 of the largest add nothing that
    float32 would keep. A NaN or +Inf among the scores makes the row NaN.
    """
    top = _over_all(tl.where(b_over, b_score, float("-inf")))
    is_empty = top == float("-inf")
    b_share = tl.exp(tl.where(is_empty, 0.0, b_score) - tl.where(is_empty, 0.0, top))
    # a NaN has no integer; its row divides by 0, or is made NaN by the caller
    b_part = tl.where(b_over & (b_share <= 1.0), b_share, 0.0)
    total = tl.sum(tl.sum((b_part * 1099511627776.0).to(tl.int64), axis=2), axis=0)
    return b_share / (total.to(tl.float32) * 9.094947017729282e-13)[None, :, None]


@triton.jit
def _choose(b_logit, b_e, b_is, p_bias, scale, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr):
    """The K best of each token of ``b_logit`` [L, T, C], of equals the lowest index first.

    ``b_e`` [L, 1, C]: experts; ``b_is``: which of them there are, the others' logits being -Inf.

    Returns:
        (int32 [L, T, C] slot of each chosen expert, -1 elsewhere; fp32 [L, T, C] its weight).
    """
    least: tl.constexpr = -2147483648
    b_choice = b_logit
    if p_bias is not None:
        b_choice = 1.0 / (1.0 + tl.exp(-b_logit)) + tl.load(p_bias + b_e, mask=b_is, other=0.0).to(tl.float32)
    b_nan = (b_choice != b_choice) & b_is
    is_nan = _over_all(b_nan.to(tl.int32)) != 0
    # -0.0 becomes 0.0, which it equals
    b_choice = tl.where(b_nan | (b_choice == 0.0), tl.where(b_nan, float("-inf"), 0.0), b_choice)
    b_bits = b_choice.to(tl.int32, bitcast=True)
    # integers in the order of the floats, all above the least one, which is for experts that are taken or not there
    b_order = tl.where(b_is, b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), least)
    b_slot = b_order * 0 - 1
    for j in range(K):
        best = _over_all(b_order)
        index = -_over_all(tl.where(b_order == best, -b_e, least))
        b_taken = b_e == index
        b_slot = tl.where(b_taken, j, b_slot)
        b_order = tl.where(b_taken, least, b_order)
    # a NaN's row is NaN, whatever is computed for it
    b_score = tl.where(b_nan, float("-inf"), b_logit)
    if RENORMALISE:
        if SIGMOID:
            b_score = tl.minimum(b_score, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_score)))
        b_w = _shares(b_score, b_slot >= 0)
    elif SIGMOID:
        b_w = 1.0 / (1.0 + tl.exp(-b_score))
    else:
        b_w = _shares(b_score, b_is)
    return b_slot, tl.where(is_nan, float("nan"), b_w * scale)


@triton.jit(do_not_specialize=["stride", *MARK])
def moe_route_fwd_kernel(p_logits, p_bias, p_weights, p_ids, stride, num_experts, scale, p_panel, p_row_ids, slot,
                         num_signals, num_rows, shape, neg_inf, K: tl.constexpr, CHUNKS: tl.constexpr,
                         SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """One program a token."""
    wait(OVERLAP)
    i_t = tl.program_id(0)
    b_e = tl.arange(0, CHUNKS)[None, None, :] * 32 + tl.arange(0, 32)[:, None, None]
    b_is = b_e < num_experts
    # lanes past the last expert are -Inf: 0 would be the row's maximum where all logits are negative
    b_logit = tl.load(p_logits + i_t.to(tl.int64) * stride + b_e, mask=b_is, other=float("-inf")).to(tl.float32)
    b_slot, b_w = _choose(b_logit, b_e, b_is, p_bias, scale, K, SIGMOID, RENORMALISE)
    b_at = i_t.to(tl.int64) * K + b_slot
    tl.store(p_ids + b_at, b_e, mask=b_slot >= 0)
    tl.store(p_weights + b_at, b_w, mask=b_slot >= 0)
    if p_panel is not None:
        mark_tile(b_w, i_t, b_slot, b_slot >= 0, K, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)
        if i_t == 0:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)


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
            CHUNKS=_chunks(num_experts),
            SIGMOID=is_sigmoid,
            RENORMALISE=renormalise,
            num_warps=1 if num_experts <= 512 else 4,
            **overlap_options(weights),
        )


def _chunks(num_experts: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(num_experts, 32)))


@triton.jit
def _num_ones(x):
    """How many bits of an int32 are set: what the compiler knows as one instruction."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _fill(p_x, size, FILL: tl.constexpr):
    """-1 everywhere."""
    b_fill = tl.arange(0, FILL)
    for i in range(0, size, FILL):
        tl.store(p_x + i + b_fill, b_fill * 0 - 1, mask=i + b_fill < size)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "stride"])
def moe_route_plan_fwd_kernel(p_logits, p_bias, p_row_ids, p_weights, p_ids, p_pair_ids, p_block_experts, p_offsets,
                              p_totals, p_pair_rows, num_tokens, num_blocks, stride, num_experts, scale,
                              K: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr,
                              BLOCK_M: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
                              FILL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """`moe_route_fwd_kernel` and `moe_plan_fwd_kernel` of up to BLOCK_M tokens, in one program.

    The experts of a token are distinct, so that no expert has more than one block, whose tokens are bits of a number.
    """
    wait(OVERLAP)
    b_tokens = tl.arange(0, BLOCK_T)
    b_t = b_tokens[None, :, None]
    b_e = tl.arange(0, CHUNKS)[None, None, :] * 32 + tl.arange(0, 32)[:, None, None]
    b_is = b_e < num_experts
    b_in = b_tokens < num_tokens
    b_logit = tl.load(p_logits + b_t.to(tl.int64) * stride + b_e, mask=b_in[None, :, None] & b_is,
                      other=float("-inf")).to(tl.float32)  # fmt: skip
    # while the logits come: pads everywhere, then what is planned over them
    _fill(p_pair_ids, num_blocks * BLOCK_M, FILL)
    _fill(p_block_experts, num_blocks, FILL)
    real = (1 << num_tokens) - 1
    if p_row_ids is not None:
        b_id = tl.load(p_row_ids + b_tokens, mask=b_in, other=-1).to(tl.int32)
        real = tl.sum(tl.where(b_id >= 0, 1, 0) << b_tokens, axis=0)
        for s in tl.static_range(SLOTS):
            tl.store(p_pair_rows + b_tokens * SLOTS + s, b_id, mask=b_in)
    b_slot, b_w = _choose(b_logit, b_e, b_is, p_bias, scale, K, SIGMOID, RENORMALISE)
    b_chosen = (b_slot >= 0) & b_in[None, :, None]
    b_at = b_t * K + b_slot
    tl.store(p_ids + b_at, b_e, mask=b_chosen)
    tl.store(p_weights + b_at, b_w, mask=b_chosen)
    b_hit = b_chosen & (((real >> b_t) & 1) != 0)
    b_takers = tl.sum(b_hit.to(tl.int32) << b_t, axis=1)
    b_has = (b_takers != 0).to(tl.int32)
    # experts that have a block, a bit each, so that those before an expert are counted and not summed up
    b_lane = tl.arange(0, 32)[:, None]
    b_hits = tl.sum(b_has << b_lane, axis=0)
    b_in_chunk = _num_ones(b_hits)
    routed = tl.sum(b_in_chunk, axis=0)
    b_block = (tl.cumsum(b_in_chunk, axis=0) - b_in_chunk)[None, :] + _num_ones(b_hits[None, :] & ((1 << b_lane) - 1))
    b_expert = tl.arange(0, CHUNKS)[None, :] * 32 + b_lane
    tl.store(p_offsets + b_expert, b_block * BLOCK_M, mask=b_expert < num_experts)
    # the fill is another thread's
    tl.debug_barrier()
    tl.store(p_block_experts + b_block, b_expert, mask=b_has != 0)
    b_earlier = (1 << b_t) - 1
    b_rank = _num_ones(b_takers[:, None, :] & b_earlier)
    tl.store(p_pair_ids + b_block[:, None, :] * BLOCK_M + b_rank, b_t * SLOTS + b_slot, mask=b_hit)
    num_real = _num_ones(real)
    blocks = routed
    if SLOTS > K:
        is_any = num_real > 0
        tl.store(p_offsets + num_experts, routed * BLOCK_M)
        tl.store(p_block_experts + routed, num_experts, mask=is_any)
        b_place = routed * BLOCK_M + _num_ones(real & ((1 << b_tokens) - 1))
        tl.store(p_pair_ids + b_place, b_tokens * SLOTS + K, mask=((real >> b_tokens) & 1) != 0)
        blocks += is_any.to(tl.int32)
    tl.store(p_offsets + num_experts + (SLOTS - K), blocks * BLOCK_M)
    tl.store(p_totals, blocks)
    tl.store(p_totals + 1, blocks * BLOCK_M)
    tl.store(p_totals + 2, num_real * SLOTS)


def route_plan(
    router_logits: Tensor,
    selection_bias: Tensor | None,
    row_ids: Tensor | None,
    *,
    top_k: int,
    is_sigmoid: bool,
    renormalise: bool,
    scale: float,
    weights: Tensor,
    ids: Tensor,
    into: Plan,
) -> None:
    """Launch `moe_route_plan_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.route_plan`."""
    num_tokens, num_experts = router_logits.shape
    assert num_tokens <= into.block_m, f"{num_tokens} tokens: an expert could have more than one block"
    if num_tokens == 0:
        into.expert_offsets.zero_()
        into.totals.zero_()
        return
    # of one token alone, logits would be read four at a time, and its best be sought in other lanes
    block_t = max(2, triton.next_power_of_2(num_tokens))
    with torch.cuda.device_of(weights):
        moe_route_plan_fwd_kernel[(1,)](
            router_logits,
            selection_bias,
            row_ids,
            weights,
            ids,
            into.pair_ids,
            into.block_experts,
            into.expert_offsets,
            into.totals,
            into.row_ids,
            num_tokens,
            into.num_blocks,
            router_logits.stride(0),
            num_experts,
            float(scale),
            K=top_k,
            SLOTS=into.num_slots,
            CHUNKS=_chunks(num_experts),
            BLOCK_T=block_t,
            BLOCK_M=into.block_m,
            SIGMOID=is_sigmoid,
            RENORMALISE=renormalise,
            FILL=256,
            num_warps=min(ROUTE_PLAN_WARPS, block_t),
            **overlap_options(weights),
        )
