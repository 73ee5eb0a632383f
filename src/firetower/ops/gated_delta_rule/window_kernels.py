# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The window of the gated delta rule in Triton: what does not depend on the state, once for each token; then a launch
that reads each state once and writes it once.

A program of the second owns some columns of one head's state and keeps them in registers, token after token. The order
of every sum is fixed by the sizes of a head alone, and each token goes through the same instructions whether it is read
as pending or as new, so that neither the number of rows nor the way tokens are cut into windows changes a bit.

The sensors cost next to nothing while all is finite: an output is finite only if every element of its column of the
state is, and was before. A program reads back the few outputs that it stored, and its state only if one is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firetower.ops.gated_delta_rule.window_state import WindowState
from firetower.ops.overlap import overlap_options
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

COLUMNS, MAX_REGISTERS = 16, 128
"""Columns of a program, which is one warp, and registers of a thread; others are timed by benchmarks/ops/gdn_window.py.
One warp needs no barrier to sum over Dk. Bits depend on the columns, so that these never depend on N."""

MARK_ROWS = 8
"""Rows of a state that the rare path reads back at once: few, or its registers would be the kernel's."""


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """exp of a scalar to half an ulp: the device's own is off by a constant where decays repeat for 100,000 tokens.

    Cephes' polynomial; the power of two in two factors, so that subnormal results are kept.
    """
    x = tl.where(x < -104.0, -104.0, tl.where(x > 104.0, 104.0, x))
    b_n = tl.floor(x * 1.4426950408889634 + 0.5)
    b_r = tl.fma(b_n, -0.693359375, x)
    b_r = tl.fma(b_n, 2.12194440054690583e-4, b_r)
    b_p = tl.fma(b_r, 1.9875691500e-4, 1.3981999507e-3)
    b_p = tl.fma(b_p, b_r, 8.3334519073e-3)
    b_p = tl.fma(b_p, b_r, 4.1665795894e-2)
    b_p = tl.fma(b_p, b_r, 1.6666665459e-1)
    b_p = tl.fma(b_p, b_r, 5.0000001201e-1)
    b_y = tl.fma(b_r * b_r, b_p, b_r) + 1.0
    n = b_n.to(tl.int32)
    half = n >> 1
    return b_y * _power_of_two(half) * _power_of_two(n - half)


@triton.jit
def _load(p_x, b_mask, EVEN: tl.constexpr):
    """The sizes of usual models need no mask."""
    if EVEN:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=b_mask, other=0.0)
    return b_x


@triton.jit
def _store(p_x, b_x, b_mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(p_x, b_x)
    else:
        tl.store(p_x, b_x, mask=b_mask)


@triton.jit
def _normed(b_x, factor, L2NORM: tl.constexpr):
    """``factor * x / sqrt(sum(x^2) + 1e-6)`` of each row; above 2^60 scaled down by a power of two first. An Inf gives
    NaN."""
    b_x = b_x.to(tl.float32)
    if L2NORM:
        b_exponent = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
        b_down = tl.where(b_exponent > 187, (255 - b_exponent) << 23, 0x3F800000).to(tl.float32, bitcast=True)
        b_x = b_x * b_down[:, None]
        b_x *= (factor * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6 * b_down * b_down))[:, None]
    else:
        b_x *= factor
    return b_x


@triton.jit
def _by_rows(b_x, SPLIT: tl.constexpr, ROWS: tl.constexpr):
    """A vector over Dk in the order of the tile's rows: those of one thread lie side by side in memory."""
    return tl.reshape(tl.trans(tl.reshape(b_x, (SPLIT, ROWS))), (SPLIT * ROWS,))[:, None]


@triton.jit
def _delta_step(b_state, b_k, b_v, decay, beta):
    """The state after a token; ``b_k`` as a column, ``b_v`` as it was loaded."""
    b_state = b_state * decay
    b_read = tl.sum(b_state * b_k, axis=0)
    return tl.fma(b_k, (beta * (b_v.to(tl.float32) - b_read))[None, :], b_state)


@triton.jit(do_not_specialize=["scale", "num_slots", "num_tokens"])
def gated_delta_rule_window_tokens_fwd_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_q_out, p_decay, p_pending_k, p_pending_v, p_pending_g, p_pending_beta, p_num_pending,
    p_side, p_state_slots, row_q, token_q, row_k, token_k, row_v, token_v, scale, num_slots, num_tokens,
    NUM_K_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    MAX_WINDOW: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, L2NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (Hk, N): the window as pending in the other half; q as it is multiplied; decays of pending and new tokens.

    With ``OVERLAP`` the next kernel may start at once: it loads states meanwhile, and then waits for this one.

    Args:
        p_q_out: fp32 [N, num_tokens, Hk, Dk]. p_decay: fp32 [N, 2, WINDOW, Hv], pending tokens first.
    """
    if OVERLAP:
        gdc_launch_dependents()
    i_kh, i_n = tl.program_id(0), tl.program_id(1)
    i_slot = tl.load(p_state_slots + i_n).to(tl.int64)
    if i_slot >= 0:
        group: tl.constexpr = NUM_V_HEADS // NUM_K_HEADS
        side = tl.load(p_side + i_slot).to(tl.int64)
        clean = side * num_slots + i_slot
        other = (1 - side) * num_slots + i_slot
        i_row = i_n.to(tl.int64)
        b_t, b_d = tl.arange(0, WINDOW)[:, None], tl.arange(0, BLOCK_K)[None, :]
        in_window = b_t < num_tokens
        in_k = in_window & (b_d < DK)
        b_k = tl.load(p_k + i_row * row_k + i_kh * DK + b_t * token_k + b_d, mask=in_k, other=0.0)
        b_to_k = b_t * (NUM_K_HEADS * DK) + i_kh * DK + b_d
        tl.store(p_pending_k + other * (MAX_WINDOW * NUM_K_HEADS * DK) + b_to_k, _normed(b_k, 1.0, L2NORM), mask=in_k)
        b_q = tl.load(p_q + i_row * row_q + i_kh * DK + b_t * token_q + b_d, mask=in_k, other=0.0)
        b_to_q = i_row * num_tokens * (NUM_K_HEADS * DK) + b_to_k
        tl.store(p_q_out + b_to_q, _normed(b_q, scale, L2NORM), mask=in_k)

        b_v, b_h = tl.arange(0, BLOCK_V)[None, :], tl.arange(0, BLOCK_H)[None, :]
        in_v = in_window & (b_v < group * DV)
        b_values = tl.load(p_v + i_row * row_v + i_kh * (group * DV) + b_t * token_v + b_v, mask=in_v)
        p_to_v = p_pending_v + other * (MAX_WINDOW * NUM_V_HEADS * DV) + i_kh * (group * DV)
        tl.store(p_to_v + b_t * (NUM_V_HEADS * DV) + b_v, b_values, mask=in_v)

        b_gate = b_t * NUM_V_HEADS + i_kh * group + b_h
        in_h = b_h < group
        in_gates = in_window & in_h
        from_gates = i_row * num_tokens * NUM_V_HEADS
        b_g = tl.load(p_g + from_gates + b_gate, mask=in_gates, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + from_gates + b_gate, mask=in_gates, other=0.0)
        in_pending = (b_t < MAX_WINDOW) & in_h
        gates: tl.constexpr = MAX_WINDOW * NUM_V_HEADS
        b_done = tl.load(p_pending_g + clean * gates + b_gate, mask=in_pending, other=0.0)
        tl.store(p_pending_g + other * gates + b_gate, b_g, mask=in_gates)
        tl.store(p_pending_beta + other * gates + b_gate, b_beta.to(tl.float32), mask=in_gates)
        p_decay += i_row * (2 * WINDOW * NUM_V_HEADS)
        tl.store(p_decay + b_gate, _exp(b_done), mask=in_h & (b_t >= 0))
        tl.store(p_decay + WINDOW * NUM_V_HEADS + b_gate, _exp(b_g), mask=in_h & (b_t >= 0))
        if i_kh == 0:
            tl.store(p_num_pending + other, num_tokens)


@triton.jit(do_not_specialize=[
    "num_slots", "num_tokens", "slot", "num_signals", "num_rows", "shape", "neg_inf", "slot_s",
    "num_signals_s", "num_rows_s", "shape_s", "neg_inf_s",
])  # fmt: skip
def gated_delta_rule_window_fwd_kernel(
    p_q, p_v, p_beta, p_decay, p_out, p_state, p_pending_k, p_pending_v, p_pending_beta, p_num_pending,
    p_side, p_state_slots, p_num_accepted, row_v, token_v, num_slots, num_tokens,
    p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
    p_panel_s, p_row_ids_s, slot_s, num_signals_s, num_rows_s, shape_s, neg_inf_s,
    NUM_K_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    MAX_WINDOW: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    EVEN: tl.constexpr, MARK_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(Dv, BLOCK_V), Hv, N). q and decays are those of the kernel before; the other half's pending k too."""
    i_v, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_V_HEADS // NUM_K_HEADS
    i_kh = i_h // group
    b_d = tl.arange(0, SPLIT * ROWS)
    b_c = tl.arange(0, BLOCK_V)
    in_d = b_d < DK
    in_c = i_v * BLOCK_V + b_c < DV
    if (i_v == 0) & (i_h == 0) & (i_n == 0):
        if p_panel is not None:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        if p_panel_s is not None:
            mark_ran(p_panel_s, slot_s, num_signals_s, num_rows_s, shape_s)

    i_gate = i_n.to(tl.int64) * num_tokens * NUM_V_HEADS + i_h
    p_beta += i_gate
    p_o = p_out + i_gate * DV + i_v * BLOCK_V + b_c
    i_slot = tl.load(p_state_slots + i_n).to(tl.int64)
    if i_slot < 0:
        for t in range(num_tokens):
            _store(p_o + t * NUM_V_HEADS * DV, tl.zeros([BLOCK_V], p_out.dtype.element_ty), in_c, EVEN)
        return
    p_q += (i_n.to(tl.int64) * num_tokens * NUM_K_HEADS + i_kh) * DK + b_d
    p_v += i_n.to(tl.int64) * row_v + i_h * DV + i_v * BLOCK_V + b_c
    p_decay += i_n.to(tl.int64) * (2 * WINDOW * NUM_V_HEADS) + i_h

    side = tl.load(p_side + i_slot).to(tl.int64)
    clean = side * num_slots + i_slot
    other = (1 - side) * num_slots + i_slot

    # rows of a thread lie side by side in Dk: see _by_rows
    b_row = (b_d % SPLIT) * ROWS + b_d // SPLIT
    b_tile = b_row[:, None] * DV + b_c[None, :]
    in_tile = (b_row < DK)[:, None] & in_c[None, :]
    head = i_h * DK * DV + i_v * BLOCK_V
    b_state = _load(p_state + (clean * (NUM_V_HEADS * DK * DV) + head) + b_tile, in_tile, EVEN)
    count = tl.minimum(tl.load(p_num_accepted + i_n).to(tl.int32), tl.load(p_num_pending + clean))

    if OVERLAP:
        gdc_wait()
    # both loops read one token ahead, and the first token before the state has arrived
    p_k_done = p_pending_k + (clean * MAX_WINDOW * NUM_K_HEADS + i_kh) * DK + b_d
    p_k = p_pending_k + (other * MAX_WINDOW * NUM_K_HEADS + i_kh) * DK + b_d
    p_v_done = p_pending_v + (clean * MAX_WINDOW * NUM_V_HEADS + i_h) * DV + i_v * BLOCK_V + b_c
    p_beta_done = p_pending_beta + (clean * MAX_WINDOW * NUM_V_HEADS + i_h)
    b_k_done = _load(p_k_done, in_d, EVEN)
    b_v_done = _load(p_v_done, in_c, EVEN)
    decay_done, beta_done = tl.load(p_decay), tl.load(p_beta_done)
    p_decay_new = p_decay + WINDOW * NUM_V_HEADS
    b_k, b_q = _load(p_k, in_d, EVEN), _load(p_q, in_d, EVEN)
    b_v = _load(p_v, in_c, EVEN)
    decay, beta = tl.load(p_decay_new), tl.load(p_beta).to(tl.float32)

    for t in range(count):
        i_next = tl.minimum(t + 1, count - 1)
        b_k_next = _load(p_k_done + i_next * (NUM_K_HEADS * DK), in_d, EVEN)
        b_v_next = _load(p_v_done + i_next * (NUM_V_HEADS * DV), in_c, EVEN)
        decay_next = tl.load(p_decay + i_next * NUM_V_HEADS)
        beta_next = tl.load(p_beta_done + i_next * NUM_V_HEADS)
        b_state = _delta_step(b_state, _by_rows(b_k_done, SPLIT, ROWS), b_v_done, decay_done, beta_done)
        b_k_done, b_v_done, decay_done, beta_done = b_k_next, b_v_next, decay_next, beta_next
    p_state_new = p_state + (other * (NUM_V_HEADS * DK * DV) + head)
    _store(p_state_new + b_tile, b_state, in_tile, EVEN)

    for t in range(num_tokens):
        i_next = tl.minimum(t + 1, num_tokens - 1)
        b_k_next = _load(p_k + i_next * (NUM_K_HEADS * DK), in_d, EVEN)
        b_q_next = _load(p_q + i_next * (NUM_K_HEADS * DK), in_d, EVEN)
        b_v_next = _load(p_v + i_next * token_v, in_c, EVEN)
        decay_next = tl.load(p_decay_new + i_next * NUM_V_HEADS)
        beta_next = tl.load(p_beta + i_next * NUM_V_HEADS).to(tl.float32)
        b_state = _delta_step(b_state, _by_rows(b_k, SPLIT, ROWS), b_v, decay, beta)
        b_o = tl.sum(b_state * _by_rows(b_q, SPLIT, ROWS), axis=0).to(p_out.dtype.element_ty)
        _store(p_o + t * (NUM_V_HEADS * DV), b_o, in_c, EVEN)
        b_k, b_q, b_v, decay, beta = b_k_next, b_q_next, b_v_next, decay_next, beta_next

    if p_panel is not None or p_panel_s is not None:
        # read back as stored, the state in small pieces: the registers of this path are the whole kernel's
        tl.debug_barrier()
        b_t = tl.arange(0, WINDOW)
        in_both = (b_t < num_tokens)[:, None] & in_c[None, :]
        b_stored = tl.load(p_o[None, :] + b_t[:, None] * (NUM_V_HEADS * DV), mask=in_both, other=0.0)
        b_is_bad = b_stored.to(tl.float32) * 0.0 != 0.0
        if tl.max(tl.max(b_is_bad.to(tl.int32), axis=1), axis=0) != 0:
            if p_panel is not None:
                b_col = i_h * DV + i_v * BLOCK_V + b_c[None, :]
                b_token_row = i_n * num_tokens + b_t[:, None]
                mark_tile(b_stored, b_token_row, b_col, in_both, NUM_V_HEADS * DV, p_panel, p_row_ids, slot,
                          num_signals, num_rows, neg_inf)  # fmt: skip
            if p_panel_s is not None:
                for i_row in range(0, DK, MARK_ROWS):
                    b_r = i_row + tl.arange(0, MARK_ROWS)
                    b_in = (b_r < DK)[:, None] & in_c[None, :]
                    b_at = b_r[:, None] * DV + b_c[None, :]
                    b_piece = tl.load(p_state_new + b_at, mask=b_in, other=0.0)
                    mark_tile(b_piece, i_n, head + b_at, b_in, NUM_V_HEADS * DK * DV, p_panel_s, p_row_ids_s, slot_s,
                              num_signals_s, num_rows_s, neg_inf_s)  # fmt: skip


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: WindowState,
    *,
    state_slots: Tensor,
    num_accepted: Tensor,
    use_l2norm: bool,
    scale: float,
    out: Tensor,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """Fill ``out`` and the halves of ``state`` that are not clean; arguments as `gated_delta_rule_window` has them."""
    num_rows, num_tokens, num_k_heads, head_k_dim = q.shape
    num_v_heads, head_v_dim = v.shape[2:]
    if num_rows == 0:
        return
    q, k, v = (_with_whole_tokens(x) for x in (q, k, v))
    g, beta = g.contiguous(), beta.contiguous()
    block_k = triton.next_power_of_2(head_k_dim)
    block_v = min(COLUMNS, triton.next_power_of_2(head_v_dim))
    block_window = triton.next_power_of_2(state.max_window)
    split, group = min(block_k, 128 // COLUMNS), num_v_heads // num_k_heads
    state_width = num_v_heads * head_k_dim * head_v_dim
    overlap = overlap_options(q)
    q_normed = torch.empty((num_rows, num_tokens, num_k_heads, head_k_dim), dtype=torch.float32, device=q.device)
    decays = torch.empty((num_rows, 2, block_window, num_v_heads), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(out):
        gated_delta_rule_window_tokens_fwd_kernel[(num_k_heads, num_rows)](
            q, k, v, g, beta, q_normed, decays, state.pending_k, state.pending_v, state.pending_g, state.pending_beta,
            state.num_pending, state.side, state_slots, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), scale, state.num_slots, num_tokens, NUM_K_HEADS=num_k_heads, NUM_V_HEADS=num_v_heads,
            DK=head_k_dim, DV=head_v_dim, MAX_WINDOW=state.max_window, WINDOW=block_window, BLOCK_K=block_k,
            BLOCK_V=triton.next_power_of_2(group * head_v_dim), BLOCK_H=triton.next_power_of_2(group),
            L2NORM=use_l2norm, OVERLAP=overlap["OVERLAP"], num_warps=4,
        )  # fmt: skip
        gated_delta_rule_window_fwd_kernel[(triton.cdiv(head_v_dim, block_v), num_v_heads, num_rows)](
            q_normed, v, beta, decays, out, state.state, state.pending_k, state.pending_v, state.pending_beta,
            state.num_pending, state.side, state_slots, num_accepted, v.stride(0), v.stride(1), state.num_slots,
            num_tokens, *mark_arguments(mark, out.dtype, num_rows * num_tokens, num_v_heads * head_v_dim),
            *mark_arguments(state_mark, torch.float32, num_rows, state_width), NUM_K_HEADS=num_k_heads,
            NUM_V_HEADS=num_v_heads, DK=head_k_dim, DV=head_v_dim, MAX_WINDOW=state.max_window,
            WINDOW=block_window, SPLIT=split, ROWS=block_k // split, BLOCK_V=block_v,
            EVEN=block_k == head_k_dim and head_v_dim % block_v == 0, MARK_ROWS=MARK_ROWS,
            **overlap, num_warps=1, maxnreg=MAX_REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip


def _with_whole_tokens(x: Tensor) -> Tensor:
    """Each token's heads contiguous, as in a view of one projection's output; a copy only where they are not."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()
