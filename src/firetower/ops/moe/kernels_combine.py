# ruff: noqa: N803, SIM102 - compile-time arguments are upper case, as in Triton's own code; its `and` is no `if`
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The Triton kernel of the weighted sum over each token's experts, and of the marks that wait for it.

A value that is not finite, in a token's weights or in any element of its activations or of its experts' rows, makes
the sum of that token not finite, in every column that the value reaches: 0 times it is NaN. So the kernels before this
one need no check; here the sum is asked, and only if it says so are the weights, activations and rows read and marked.
Import needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.moe.kernels_base import MARK, WINDOW_BLOCK, is_any_bad, mark_line
from firetower.ops.moe.planning import Plan
from firetower.ops.overlap import overlap_options, wait
from firetower.sensors.mark_tile import mark_ran
from firetower.sensors.marks import Mark, mark_arguments

COMBINE_TILES = {True: (256, 2), False: (1024, 4)}
"""(columns, warps) of a program, of a window and of a prefill: few tokens need many short programs."""


@triton.jit
def _mark_routed_rows(p_x, first, last, width, p_ids, num_experts, K: tl.constexpr, SLOTS: tl.constexpr,
                      BLOCK: tl.constexpr, i_t, p_panel, p_row_ids, slot, num_signals, num_rows,
                      neg_inf):  # fmt: skip
    """Mark columns ``first`` to ``last`` of those rows [T * SLOTS, width] of a token that its experts wrote."""
    at = i_t.to(tl.int64)
    for s in range(SLOTS):
        expert = tl.load(p_ids + at * K + s, mask=s < K, other=0)
        if (expert >= 0) & (expert < num_experts):
            row = at * SLOTS + s
            for c in range(first, last, BLOCK):
                b_c = c + tl.arange(0, BLOCK)
                b_x = tl.load(p_x + row * width + b_c, mask=b_c < last, other=0.0)
                mark_line(b_x, b_c, b_c < last, row, width, p_panel, p_row_ids, i_t, slot, num_signals, num_rows,
                          neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=["stride", *(f"{name}_{part}" for part in ("w", "a", "d", "r", "o") for name in MARK)])
def moe_combine_fwd_kernel(p_down, p_weights, p_ids, p_shared_logits, p_pads, p_act, p_out, stride, hidden, width,
                           num_experts,
                           p_panel_w, p_row_ids_w, slot_w, num_signals_w, num_rows_w, shape_w, neg_inf_w,
                           p_panel_a, p_row_ids_a, slot_a, num_signals_a, num_rows_a, shape_a, neg_inf_a,
                           p_panel_d, p_row_ids_d, slot_d, num_signals_d, num_rows_d, shape_d, neg_inf_d,
                           p_panel_r, p_row_ids_r, slot_r, num_signals_r, num_rows_r, shape_r, neg_inf_r,
                           p_panel_o, p_row_ids_o, slot_o, num_signals_o, num_rows_o, shape_o, neg_inf_o,
                           K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
                           MARKED: tl.constexpr, CHAINED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Weighted sum of one token's rows, slot 0 first; ``p_pads``: row ids, negative for a pad, or None.

    ``CHAINED``: weights and ids are read before the rows are there. ``MARKED``: there is a mark among those of the
    weights (w), the activations (a), the rows (d), the routed sum (r) and the output (o), and one program more than
    tokens, which says that they ran.
    """
    i_t = tl.program_id(0)
    i_h = tl.program_id(1)
    if MARKED:
        # a program of its own, so that no other's end waits for these words
        if i_t == tl.num_programs(0) - 1:
            wait(OVERLAP)
            if i_h == 0:
                if p_panel_w is not None:
                    mark_ran(p_panel_w, slot_w, num_signals_w, num_rows_w, shape_w)
                if p_panel_a is not None:
                    mark_ran(p_panel_a, slot_a, num_signals_a, num_rows_a, shape_a)
                if p_panel_d is not None:
                    mark_ran(p_panel_d, slot_d, num_signals_d, num_rows_d, shape_d)
                if p_panel_r is not None:
                    mark_ran(p_panel_r, slot_r, num_signals_r, num_rows_r, shape_r)
                if p_panel_o is not None:
                    mark_ran(p_panel_o, slot_o, num_signals_o, num_rows_o, shape_o)
            return
    if not CHAINED:
        wait(OVERLAP)
    # what is read before the wait is read past the L1 cache, which may hold it as it was a step ago
    b_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    b_is = b_h < hidden
    b_j = tl.arange(0, BLOCK_K)
    at = i_t.to(tl.int64)
    is_real = i_t >= 0
    if p_pads is not None:
        is_real = tl.load(p_pads + i_t, cache_modifier=".cg") >= 0
    # an id outside the experts is routed nowhere: its row was never written. One bit a slot, so that the rows' loads
    # wait for one load, not each for its own
    b_id = tl.load(p_ids + at * K + b_j, mask=b_j < K, other=-1, cache_modifier=".cg")
    b_bit = (b_j * 0 + 1).to(tl.int64) << b_j.to(tl.int64)
    routed = tl.sum(tl.where((b_id >= 0) & (b_id < num_experts), b_bit, 0), axis=0)
    gate = 1.0
    if p_shared_logits is not None:
        gate = tl.load(p_shared_logits + at * stride, cache_modifier=".cg").to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-gate))
    if CHAINED:
        wait(OVERLAP)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(p_weights + at * K + j)
        is_routed = ((routed >> j) & 1) != 0
        if K > 62:
            expert = tl.load(p_ids + at * K + j)
            is_routed = (expert >= 0) & (expert < num_experts)
        columns = tl.where(is_real & is_routed, hidden, 0)
        b_y = tl.load(p_down + (at * SLOTS + j) * hidden + b_h, mask=b_h < columns, other=0.0)
        b_sum += weight * b_y.to(tl.float32)
    if p_panel_r is not None:
        b_routed = tl.where(is_real, b_sum, 0.0)
        mark_line(b_routed, b_h, b_is, i_t, hidden, p_panel_r, p_row_ids_r, i_t, slot_r, num_signals_r, num_rows_r,
                  neg_inf_r)  # fmt: skip
    if SLOTS > K:
        columns = tl.where(is_real, hidden, 0)
        b_y = tl.load(p_down + (at * SLOTS + K) * hidden + b_h, mask=b_h < columns, other=0.0).to(tl.float32)
        if p_shared_logits is not None:
            b_y *= gate
        b_sum += b_y
    # a pad's is 0, but for weights that are not finite: it has no rows
    b_found = b_sum.to(p_out.dtype.element_ty)
    b_stored = tl.where(is_real, b_found, 0.0)
    tl.store(p_out + at * hidden + b_h, b_stored, mask=b_is)
    if MARKED:
        if is_any_bad(b_found):
            if i_h == 0:
                if p_panel_w is not None:
                    b_w = tl.load(p_weights + at * K + b_j, mask=b_j < K, other=0.0)
                    mark_line(b_w, b_j, b_j < K, i_t, K, p_panel_w, p_row_ids_w, i_t, slot_w, num_signals_w,
                              num_rows_w, neg_inf_w)  # fmt: skip
                if p_panel_a is not None:
                    if is_real:
                        _mark_routed_rows(p_act, 0, width, width, p_ids, num_experts, K, SLOTS, BLOCK_H, i_t,
                                          p_panel_a, p_row_ids_a, slot_a, num_signals_a, num_rows_a,
                                          neg_inf_a)  # fmt: skip
            if p_panel_d is not None:
                if is_real:
                    last = tl.minimum((i_h + 1) * BLOCK_H, hidden)
                    _mark_routed_rows(p_down, i_h * BLOCK_H, last, hidden, p_ids, num_experts, K, SLOTS, BLOCK_H, i_t,
                                      p_panel_d, p_row_ids_d, slot_d, num_signals_d, num_rows_d,
                                      neg_inf_d)  # fmt: skip
            if p_panel_o is not None:
                mark_line(b_stored, b_h, b_is, i_t, hidden, p_panel_o, p_row_ids_o, i_t, slot_o, num_signals_o,
                          num_rows_o, neg_inf_o)  # fmt: skip


def combine(
    down_out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_logits: Tensor | None,
    row_ids: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    act: Tensor | None,
    late_marks: tuple[Mark | None, Mark | None, Mark | None],
    routed_mark: Mark | None,
    mark: Mark | None,
    is_chained: bool = False,
) -> None:
    """Launch `moe_combine_fwd_kernel`; arguments as `firetower.ops.moe.torch_path.combine`."""
    num_tokens, hidden = out.shape
    if num_tokens == 0:
        return
    is_window = plan.block_m == WINDOW_BLOCK
    columns, warps = COMBINE_TILES[is_window]
    options = overlap_options(out, is_wanted=is_window)
    is_marked = any(m is not None for m in (*late_marks, routed_mark, mark))
    width = 0 if act is None else act.shape[1]
    weights_mark, act_mark, rows_mark = late_marks
    with torch.cuda.device_of(out):
        moe_combine_fwd_kernel[(num_tokens + is_marked, triton.cdiv(hidden, columns))](
            down_out,
            topk_weights,
            topk_ids,
            shared_logits,
            row_ids,
            act,
            out,
            0 if shared_logits is None else shared_logits.stride(0),
            hidden,
            width,
            plan.num_experts,
            *mark_arguments(weights_mark, topk_weights.dtype, num_tokens, plan.top_k),
            *mark_arguments(act_mark, out.dtype, plan.num_pairs, width),
            *mark_arguments(rows_mark, out.dtype, plan.num_pairs, hidden),
            *mark_arguments(routed_mark, torch.float32, num_tokens, hidden),
            *mark_arguments(mark, out.dtype, num_tokens, hidden),
            K=plan.top_k,
            SLOTS=plan.num_slots,
            BLOCK_K=triton.next_power_of_2(plan.top_k),
            BLOCK_H=columns,
            MARKED=is_marked,
            num_warps=warps,
            CHAINED=is_chained and options["OVERLAP"],
            **options,
        )
