# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The convolution in Triton: prefill, the state after it, and the window that commits one call late.

Every tap is loaded by itself; all but the first of a row come from the L1 cache. Weights are loaded as they lie: with
channels contiguous (``weight.T.contiguous().T``) in wide loads, else each by itself. Sums have one order, so that
prefill and window agree. Legend as in `firetower.ops.causal_conv1d.torch_path`: P = K - 1 columns of the past.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.sensors.mark_stored import mark_stored
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

PREFILL_ROWS, PREFILL_CHANNELS, PREFILL_WARPS = 32, 128, 8
"""Tile of a prefill: 256 bytes of bf16 a row, 3 rows of halo in 32, 16 elements a thread. By reasoning for sm_90, with
the registers that ptxas counts; not tuned."""

STATE_CHANNELS = 256
"""Channels of a window's or a state's tile: no fewer than its threads, so that no element is read by two of them."""

NUM_WARPS = 4


@triton.jit
def _activated(b_x, SILU: tl.constexpr):
    # one return: Triton compiles what follows a return that was taken at compile time
    if SILU:
        b_x = b_x / (1.0 + tl.exp(-b_x))
    return b_x


@triton.jit
def _loaded(p_x, i, default):
    """An index, or ``default`` where the tensor is not given."""
    number = default
    if p_x is not None:
        number = tl.load(p_x + i).to(tl.int64)
    return number


@triton.jit
def _masked_by(b_mask, flag):
    """``b_mask`` where the scalar holds; Triton's interpreter cannot spread a bool over a tile."""
    return tl.where(b_mask, flag.to(tl.int32), 0) != 0


@triton.jit
def _sequence_of(p_cu_seqlens, b_token, num_sequences, num_steps):
    """The last sequence that begins at or before each token, by bisection; -1 before the first."""
    b_low = b_token * 0
    b_high = b_low + num_sequences + 1
    for i in range(num_steps):  # noqa: B007 - Triton has no while with a vector
        b_middle = (b_low + b_high) // 2
        b_is_in = b_middle <= num_sequences
        b_start = tl.load(p_cu_seqlens + b_middle, mask=b_is_in, other=2147483647)
        b_before = b_is_in & (b_start <= b_token)
        b_low = tl.where(b_before, b_middle + 1, b_low)
        b_high = tl.where(b_before, b_high, b_middle)
    return b_low - 1


@triton.jit(do_not_specialize=[
    "num_rows_x", "num_sequences", "num_steps", "num_slots", "slot", "num_signals", "num_rows", "shape", "neg_inf",
])  # fmt: skip
def causal_conv1d_fwd_kernel(p_x, p_weight, p_bias, p_y, p_cu_seqlens, p_state, p_ids, p_ids_out, p_has, p_accepted,
                             p_pads, num_rows_x, num_sequences, num_steps, num_slots, stride_x, stride_wc, stride_wk,
                             stride_slot, stride_c, stride_l, p_panel, p_row_ids, slot, num_signals, num_rows, shape,
                             neg_inf, CHANNELS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr,
                             SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                             STEP: tl.constexpr):  # fmt: skip
    """Grid (cdiv(T, ROWS), cdiv(channels, BLOCK))."""
    i_tile = tl.program_id(0)
    i_block = tl.program_id(1)
    b_token = i_tile * ROWS + tl.arange(0, ROWS)
    b_channel = i_block * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_here = (b_token < num_rows_x)[:, None] & (b_channel < CHANNELS)
    b_seq = _sequence_of(p_cu_seqlens, b_token, num_sequences, num_steps)
    b_inside = (b_seq >= 0) & (b_seq < num_sequences) & (b_token < num_rows_x)
    b_begin = tl.load(p_cu_seqlens + b_seq, mask=b_inside, other=0).to(tl.int32)
    b_begin = tl.maximum(b_begin, 0)
    if p_pads is not None:
        b_pads = tl.load(p_pads + b_seq, mask=b_inside, other=0).to(tl.int32)
        b_begin += tl.maximum(b_pads, 0)
    b_real = b_inside & (b_token >= b_begin)
    b_lost = b_seq < -1
    if p_state is not None:
        b_id = tl.load(p_ids + b_seq, mask=b_inside, other=-1).to(tl.int64)
        b_id_out = tl.load(p_ids_out + b_seq, mask=b_inside, other=-1).to(tl.int64)
        b_accepted = b_id * 0
        if p_accepted is not None:
            b_accepted = tl.load(p_accepted + b_seq, mask=b_inside, other=0).to(tl.int64)
        b_lost = (b_id >= num_slots) | (b_id_out >= num_slots) | (b_accepted < 0) | (b_accepted > ROOM)
        b_lost = b_lost & (b_id >= 0)
        if p_has is not None:
            b_flag = tl.load(p_has + b_seq, mask=b_inside, other=0) != 0
            b_has = b_flag & (b_id >= 0) & (b_lost == 0) & b_real
            p_old = p_state + b_id[:, None] * stride_slot + b_channel * stride_c

    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + b_channel, mask=b_channel < CHANNELS, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        b_source = b_token + (k - (K - 1))
        b_new = b_real & (b_source >= b_begin)
        p_row = p_x + b_source.to(tl.int64)[:, None] * stride_x + b_channel
        b_x = tl.load(p_row, mask=b_new[:, None] & b_here, other=0.0).to(tl.float32)
        if p_has is not None:  # noqa: SIM102 - two decisions at compile time, in any version of Triton
            if k < K - 1:
                b_column = b_accepted + b_source - b_begin + (K - 1)
                b_from = (b_has & (b_source < b_begin))[:, None] & b_here
                b_past = tl.load(p_old + b_column[:, None] * stride_l, mask=b_from, other=0.0).to(tl.float32)
                b_x = tl.where(b_from, b_past, b_x)
        b_weight = tl.load(p_weight + b_channel * stride_wc + k * stride_wk, mask=b_channel < CHANNELS, other=0.0).to(
            tl.float32
        )
        b_sum += b_x * b_weight
    b_y = _activated(b_sum, SILU)
    b_y = tl.where(b_lost[:, None], float("nan"), b_y)
    b_out = tl.where(b_real[:, None], b_y, 0.0).to(p_y.dtype.element_ty)
    b_row = b_token[:, None]
    p_out = p_y + b_row.to(tl.int64) * CHANNELS
    tl.store(p_out + b_channel, b_out, mask=b_here)
    if p_panel is not None:
        if (i_tile == 0) & (i_block == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_stored(b_out, b_here, p_out, b_row, b_row < num_rows_x, i_block * BLOCK, CHANNELS, BLOCK, STEP, p_panel,
                    p_row_ids, slot, num_signals, num_rows, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows_x", "num_slots", "slot", "num_signals", "num_rows", "shape", "neg_inf"])
def causal_conv1d_state_fwd_kernel(p_x, p_cu_seqlens, p_state, p_ids, p_ids_out, p_has, p_accepted, p_pads, num_rows_x,
                                   num_slots, stride_x, stride_slot, stride_c, stride_l,
                                   p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                                   CHANNELS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr,
                                   BLOCK: tl.constexpr):  # fmt: skip
    """The columns that each sequence leaves; grid (N, cdiv(channels, BLOCK)), after the prefill has read them all."""
    i_seq = tl.program_id(0)
    i_block = tl.program_id(1)
    b_channel = i_block * BLOCK + tl.arange(0, BLOCK)
    b_here = b_channel < CHANNELS
    if p_panel is not None:  # noqa: SIM102 - the outer one is decided at compile time
        if (i_seq == 0) & (i_block == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
    i_in = tl.load(p_ids + i_seq).to(tl.int64)
    i_out = tl.load(p_ids_out + i_seq).to(tl.int64)
    accepted = _loaded(p_accepted, i_seq, i_in * 0)
    is_kept = (i_in >= 0) & (i_in < num_slots) & (i_out >= 0) & (i_out < num_slots)
    is_kept = is_kept & (accepted >= 0) & (accepted <= ROOM)
    if is_kept:
        begin = tl.maximum(tl.load(p_cu_seqlens + i_seq).to(tl.int64), 0)
        begin += tl.maximum(_loaded(p_pads, i_seq, i_in * 0), 0)
        end = tl.minimum(tl.load(p_cu_seqlens + i_seq + 1).to(tl.int64), num_rows_x)
        length = tl.maximum(end - begin, 0)
        has = _loaded(p_has, i_seq, i_in * 0) != 0
        p_old = p_state + i_in * stride_slot + b_channel * stride_c
        p_new = p_state + i_out * stride_slot + b_channel * stride_c
        for i in tl.static_range(K - 1):
            source = length - (K - 1) + i
            b_new = _masked_by(b_here, source >= 0)
            b_x = tl.load(p_x + (begin + source) * stride_x + b_channel, mask=b_new, other=0.0)
            b_mask = _masked_by(b_here, (source < 0) & has)
            # in place, the column read is never one written already: accepted + length + i >= i
            b_past = tl.load(p_old + (accepted + length + i) * stride_l, mask=b_mask, other=0.0)
            b_kept = tl.where(b_mask, b_past, b_x)
            tl.store(p_new + i * stride_l, b_kept, mask=b_here)
            if p_panel is not None:
                mark_tile(b_kept, i_seq, b_channel + i * CHANNELS, b_here, (K - 1) * CHANNELS, p_panel, p_row_ids,
                          slot, num_signals, num_rows, neg_inf)  # fmt: skip
        for i in tl.static_range(ROOM):
            tl.store(p_new + (K - 1 + i) * stride_l, float("nan"), mask=b_here)


@triton.jit(do_not_specialize=[
    "num_tokens", "num_slots", "slot", "num_signals", "num_rows", "shape", "neg_inf", "slot_state",
    "num_signals_state", "num_rows_state", "shape_state", "neg_inf_state",
])  # fmt: skip
def causal_conv1d_window_fwd_kernel(p_x, p_weight, p_bias, p_y, p_state, p_ids, p_ids_out, p_accepted, num_tokens,
                                    num_slots, stride_x, stride_wc, stride_wk, stride_slot, stride_c, stride_l,
                                    p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                                    p_panel_state, p_row_ids_state, slot_state, num_signals_state, num_rows_state,
                                    shape_state, neg_inf_state,
                                    CHANNELS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr, SILU: tl.constexpr,
                                    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """One program a request and block of channels; grid (B, cdiv(channels, BLOCK))."""
    i_request = tl.program_id(0)
    i_block = tl.program_id(1)
    i_in = tl.load(p_ids + i_request).to(tl.int64)
    i_out = tl.load(p_ids_out + i_request).to(tl.int64)
    accepted = tl.load(p_accepted + i_request).to(tl.int64)
    is_lost = (i_in >= num_slots) | (i_out >= num_slots) | (accepted < 0) | (accepted > ROOM)
    is_live = (i_in >= 0) & (is_lost == 0)

    b_token = tl.arange(0, TOKENS)[:, None]
    b_channel = i_block * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_here = (b_token < num_tokens) & (b_channel < CHANNELS)
    first = i_request * num_tokens
    p_first = p_x + first.to(tl.int64) * stride_x
    p_old = p_state + tl.where(is_live, i_in, 0) * stride_slot + accepted * stride_l
    b_sum = tl.zeros([TOKENS, BLOCK], tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + b_channel, mask=b_channel < CHANNELS, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        b_source = b_token + (k - (K - 1))
        b_new = b_here & (b_source >= 0)
        b_x = tl.load(p_first + b_source * stride_x + b_channel, mask=b_new, other=0.0).to(tl.float32)
        if k < K - 1:
            b_from = _masked_by(b_here & (b_source < 0), is_live)
            p_column = p_old + (b_source + (K - 1)) * stride_l + b_channel * stride_c
            b_past = tl.load(p_column, mask=b_from, other=0.0).to(tl.float32)
            b_x = tl.where(b_from, b_past, b_x)
        b_weight = tl.load(p_weight + b_channel * stride_wc + k * stride_wk, mask=b_channel < CHANNELS, other=0.0).to(
            tl.float32
        )
        b_sum += b_x * b_weight
    b_y = _activated(b_sum, SILU)
    b_y = tl.where(is_lost, float("nan"), b_y)
    b_out = tl.where(i_in >= 0, b_y, 0.0).to(p_y.dtype.element_ty)
    b_row = first + b_token
    p_out = p_y + b_row.to(tl.int64) * CHANNELS
    tl.store(p_out + b_channel, b_out, mask=b_here)
    if (i_request == 0) & (i_block == 0):
        if p_panel is not None:
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        if p_panel_state is not None:
            mark_ran(p_panel_state, slot_state, num_signals_state, num_rows_state, shape_state)
    if p_panel is not None:
        mark_stored(b_out, b_here, p_out, b_row, b_token < num_tokens, i_block * BLOCK, CHANNELS, BLOCK, STEP, p_panel,
                    p_row_ids, slot, num_signals, num_rows, neg_inf)  # fmt: skip

    # in place, what was read above is written below, perhaps by another thread
    tl.debug_barrier()
    if is_live & (i_out >= 0):
        b_lane = i_block * BLOCK + tl.arange(0, BLOCK)
        b_is_in = b_lane < CHANNELS
        p_new = p_state + i_out * stride_slot + b_lane * stride_c
        for i in tl.static_range(K - 1):
            # ascending: the column read is never one written already
            b_kept = tl.load(p_old + i * stride_l + b_lane * stride_c, mask=b_is_in, other=0.0)
            tl.store(p_new + i * stride_l, b_kept, mask=b_is_in)
            if p_panel_state is not None:
                mark_tile(b_kept, i_request, b_lane + i * CHANNELS, b_is_in, (K - 1) * CHANNELS, p_panel_state,
                          p_row_ids_state, slot_state, num_signals_state, num_rows_state, neg_inf_state)  # fmt: skip
        for i in tl.static_range(ROOM):
            b_ran = _masked_by(b_is_in, num_tokens > i)
            b_input = tl.load(p_first + i * stride_x + b_lane, mask=b_ran, other=float("nan"))
            tl.store(p_new + (K - 1 + i) * stride_l, b_input, mask=b_is_in)


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor | None,
    state_ids: Tensor | None,
    state_ids_out: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted: Tensor | None,
    num_pads: Tensor | None,
    out: Tensor,
    *,
    activation: str | None,
    mark: Mark | None,
    mark_state: Mark | None,
) -> None:
    """Write ``out`` [T, C] and the state; arguments as `firetower.ops.causal_conv1d.causal_conv1d` has them."""
    (num_rows, channels), taps = x.shape, weight.shape[1]
    num_sequences = cu_seqlens.numel() - 1
    num_slots, room, strides = _geometry(conv_state, taps)
    flags = None if has_initial_state is None or conv_state is None else has_initial_state.view(torch.uint8)
    per_sequence = (conv_state, state_ids, state_ids_out, flags, num_accepted, num_pads)
    with torch.cuda.device_of(x):
        if num_rows:
            grid = (triton.cdiv(num_rows, PREFILL_ROWS), triton.cdiv(channels, PREFILL_CHANNELS))
            causal_conv1d_fwd_kernel[grid](
                x, weight, bias, out, cu_seqlens, *per_sequence, num_rows, num_sequences,
                (num_sequences + 1).bit_length(), num_slots, x.stride(0), *weight.stride(), *strides,
                *mark_arguments(mark, out.dtype, num_rows, channels), CHANNELS=channels, K=taps, ROOM=room,
                SILU=activation == "silu", ROWS=PREFILL_ROWS, BLOCK=PREFILL_CHANNELS,
                STEP=64 * PREFILL_WARPS // PREFILL_ROWS, num_warps=PREFILL_WARPS,
            )  # fmt: skip
        if conv_state is not None:
            causal_conv1d_state_fwd_kernel[(num_sequences, triton.cdiv(channels, STATE_CHANNELS))](
                x, cu_seqlens, *per_sequence, num_rows, num_slots, x.stride(0), *strides,
                *mark_arguments(mark_state, x.dtype, num_sequences, (taps - 1) * channels), CHANNELS=channels, K=taps,
                ROOM=room, BLOCK=STATE_CHANNELS, num_warps=NUM_WARPS,
            )  # fmt: skip


def window(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_ids: Tensor,
    state_ids_out: Tensor,
    num_accepted: Tensor,
    out: Tensor,
    *,
    activation: str | None,
    mark: Mark | None,
    mark_state: Mark | None,
) -> None:
    """Write ``out`` [B, W, C] and the state; arguments as `firetower.ops.causal_conv1d.causal_conv1d_window`."""
    (num_requests, num_tokens, channels), taps = x.shape, weight.shape[1]
    if num_requests == 0:
        return
    num_slots, room, strides = _geometry(conv_state, taps)
    rows, tokens = x.reshape(-1, channels), triton.next_power_of_2(num_tokens)
    with torch.cuda.device_of(x):
        causal_conv1d_window_fwd_kernel[(num_requests, triton.cdiv(channels, STATE_CHANNELS))](
            rows, weight, bias, out, conv_state, state_ids, state_ids_out, num_accepted, num_tokens, num_slots,
            rows.stride(0), *weight.stride(), *strides,
            *mark_arguments(mark, out.dtype, num_requests * num_tokens, channels),
            *mark_arguments(mark_state, x.dtype, num_requests, (taps - 1) * channels), CHANNELS=channels, K=taps,
            ROOM=room, SILU=activation == "silu", TOKENS=tokens, BLOCK=STATE_CHANNELS, STEP=64 * NUM_WARPS // tokens,
            num_warps=NUM_WARPS,
        )  # fmt: skip


def _geometry(conv_state: Tensor | None, taps: int) -> tuple[int, int, tuple[int, ...]]:
    """(slots, pending columns, strides) of the state; zeros where there is none."""
    if conv_state is None:
        return 0, 0, (0, 0, 0)
    return conv_state.shape[0], conv_state.shape[2] - taps + 1, conv_state.stride()
