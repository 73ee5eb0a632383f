"""The convolution in PyTorch: the CPU path, and what a CUDA device without Triton runs; no host sync there.

Legend: T rows, N sequences or requests, W tokens of a window, C channels, K taps, P = K - 1 columns of the past.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firetower.ops.activation import silu
from firetower.ops.causal_conv1d.host_window import mark_committed, put_columns, take_past
from firetower.sensors.marks import Mark, mark_rows


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
    num_past = weight.shape[1] - 1
    begin, length = _bounds(cu_seqlens, num_pads, x.shape[0])
    past = x.new_zeros(begin.numel(), num_past, x.shape[1])
    is_lost = torch.zeros_like(begin, dtype=torch.bool)
    if conv_state is not None and state_ids is not None and state_ids_out is not None:
        has = is_lost if has_initial_state is None else has_initial_state
        accepted = torch.zeros_like(begin) if num_accepted is None else num_accepted.long()
        past, is_lost = _past(conv_state, state_ids, state_ids_out, accepted, num_past)
        past = torch.where((has & (state_ids >= 0) & ~is_lost)[:, None, None], past, 0.0)
    # every row that any tap can read: a zero, the pasts, the inputs
    bank = torch.cat((x.new_zeros(1, x.shape[1]), past.flatten(0, 1), x))
    taps, is_real, sequence = _taps(bank, cu_seqlens, begin, x.shape[0], num_past)
    y = _convolve(taps, weight, bias, activation)
    out.copy_(y.masked_fill(is_lost[sequence][:, None], math.nan).masked_fill(~is_real[:, None], 0.0))
    mark_rows(out, mark)
    if conv_state is not None and state_ids is not None and state_ids_out is not None:
        kept = _last_columns(bank, begin, length, num_past)
        _write(conv_state, state_ids_out, (state_ids >= 0) & ~is_lost, kept, None, mark_state)


def _bounds(cu_seqlens: Tensor, num_pads: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """(first row that is no pad, rows from there on) of each sequence, never outside the input."""
    begin, end = cu_seqlens[:-1].long().clamp_min(0), cu_seqlens[1:].long().clamp_max(num_rows)
    begin = begin if num_pads is None else begin + num_pads.clamp_min(0)
    return begin, (end - begin).clamp_min(0)


def _taps(
    bank: Tensor, cu_seqlens: Tensor, begin: Tensor, num_rows: int, num_past: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(what each tap of every row reads, K of [T, C]; bool [T], no pad; sequence of each row [T])."""
    num_sequences = begin.numel()
    token = torch.arange(num_rows, device=bank.device)
    sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    is_inside = (sequence >= 0) & (sequence < num_sequences)
    sequence = sequence.clamp(0, num_sequences - 1)
    start = begin[sequence]
    is_real = is_inside & (token >= start)
    taps = []
    for tap in range(num_past + 1):
        source = token + tap - num_past
        old = 1 + sequence * num_past + source - start + num_past
        row = torch.where(source >= start, 1 + num_sequences * num_past + source, old)
        taps.append(bank[torch.where(is_real, row, 0)])
    return taps, is_real, sequence


def _last_columns(bank: Tensor, begin: Tensor, length: Tensor, num_past: int) -> Tensor:
    """The past of what follows each sequence, [N, P, C]."""
    num_sequences = begin.numel()
    column = torch.arange(num_past, device=bank.device)
    source = length[:, None] - num_past + column
    old = 1 + torch.arange(num_sequences, device=bank.device)[:, None] * num_past + length[:, None] + column
    return bank[torch.where(source >= 0, 1 + num_sequences * num_past + begin[:, None] + source, old)]


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
    if x.shape[0] == 0:
        return
    if x.is_cpu and _runs_on_host(x, weight, bias, conv_state, state_ids, state_ids_out, num_accepted, out, activation,
                                  mark, mark_state):  # fmt: skip
        return
    num_past, num_tokens = weight.shape[1] - 1, x.shape[1]
    past, is_lost = _past(conv_state, state_ids, state_ids_out, num_accepted.long(), num_past)
    both = torch.cat((past, x), dim=1)
    y = _convolve([both[:, tap : tap + num_tokens] for tap in range(num_past + 1)], weight, bias, activation)
    y = y.masked_fill(is_lost[:, None, None], math.nan).masked_fill((state_ids < 0)[:, None, None], 0.0)
    out.copy_(y)
    mark_rows(out, mark)
    _write(conv_state, state_ids_out, (state_ids >= 0) & ~is_lost, past, x, mark_state)


def _runs_on_host(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_ids: Tensor,
    state_ids_out: Tensor,
    num_accepted: Tensor,
    out: Tensor,
    activation: str | None,
    mark: Mark | None,
    mark_state: Mark | None,
) -> bool:
    """The step with slots and counts known, if all of them are within the state; the same bits."""
    num_past, num_slots = weight.shape[1] - 1, conv_state.shape[0]
    read, write, accepted = state_ids.tolist(), state_ids_out.tolist(), num_accepted.tolist()
    real = [n for n, slot in enumerate(read) if slot >= 0]
    room = conv_state.shape[2] - num_past
    if not real or any(read[n] >= num_slots or write[n] >= num_slots or not 0 <= accepted[n] <= room for n in real):
        return False
    if len(real) == len(read):
        part, into = x, out
    else:
        part, into = x.index_select(0, torch.tensor(real)), None
    past = take_past(conv_state, [read[n] for n in real], [accepted[n] for n in real], num_past)
    both = torch.cat((past, part), dim=1)
    y = _convolve([both[:, tap : tap + x.shape[1]] for tap in range(num_past + 1)], weight, bias, activation)
    if into is None:
        out.zero_()
        out.index_copy_(0, torch.tensor(real), y.to(out.dtype))
    else:
        into.copy_(y)
    mark_rows(out, mark)
    kept = [i for i, n in enumerate(real) if write[n] >= 0]
    if kept:
        put_columns(conv_state, [write[real[i]] for i in kept], kept, past, part)
    if mark_state is not None:
        whole = past
        if len(real) < len(read):
            whole = past.new_zeros(len(read), *past.shape[1:])
            whole[real] = past
        mark_committed(whole, [real[i] for i in kept], mark_state)
    return True


def _convolve(taps: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Products and sums apart and in the order of time, so that bits do not depend on shapes."""
    wide = torch.float64 if taps[0].dtype is torch.float64 else torch.float32
    y = torch.zeros((), dtype=wide, device=weight.device) if bias is None else bias.to(wide)
    for tap, rows in enumerate(taps):
        y = y + rows.to(wide) * weight[:, tap].to(wide)
    return silu(y) if activation == "silu" else y


def _past(
    conv_state: Tensor, state_ids: Tensor, state_ids_out: Tensor, accepted: Tensor, num_past: int
) -> tuple[Tensor, Tensor]:
    """([N, P, C] after the accepted tokens, bool [N] whether the request is lost)."""
    num_slots, _, length = conv_state.shape
    room = length - num_past
    is_lost = (state_ids >= num_slots) | (state_ids_out >= num_slots) | (accepted < 0) | (accepted > room)
    is_lost = is_lost & (state_ids >= 0)
    column = accepted.clamp(0, room)[:, None] + torch.arange(num_past, device=conv_state.device)
    slot = state_ids.long().clamp(0, num_slots - 1)
    return conv_state.transpose(1, 2)[slot[:, None], column], is_lost


def _write(
    conv_state: Tensor, state_ids_out: Tensor, is_kept: Tensor, past: Tensor, x: Tensor | None, mark: Mark | None
) -> None:
    """Commit ``past`` [N, P, C], leave ``x`` [N, W, C] pending, NaN after it; where ``is_kept`` and a slot is named."""
    is_kept = is_kept & (state_ids_out >= 0)
    num_rest = conv_state.shape[2] - past.shape[1] - (0 if x is None else x.shape[1])
    rest = past.new_full((past.shape[0], num_rest, past.shape[2]), math.nan)
    columns = torch.cat((past, rest) if x is None else (past, x, rest), dim=1).transpose(1, 2)
    if conv_state.is_cpu:
        conv_state[state_ids_out[is_kept].long()] = columns[is_kept]
    else:
        # which request each slot belongs to, none as -1: a select on the device instead of a list of unknown length
        num_slots = conv_state.shape[0]
        slot = torch.where(is_kept, state_ids_out.long(), num_slots)
        owner = torch.full((num_slots + 1,), -1, device=slot.device)
        owner = owner.scatter(0, slot, torch.arange(slot.numel(), device=slot.device))[:-1]
        conv_state.copy_(torch.where((owner >= 0)[:, None, None], columns[owner.clamp_min(0)], conv_state))
    committed = torch.where(is_kept[:, None, None], past, 0.0)
    mark_rows(committed.flatten(1), mark)
