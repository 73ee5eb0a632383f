"""The window step in plain PyTorch, without a host sync. Every row is computed by itself in one fixed order.

Products with the state are sums over a fixed axis, not matrix products: a library picks another order of summation
when the number of rows changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.ops.gated_delta_rule.torch_path import l2norm
from firetower.ops.gated_delta_rule.window_state import WindowState
from firetower.sensors.marks import Mark, mark_rows


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
    """See `firetower.ops.gated_delta_rule.gated_delta_rule_window`; ``out`` is written."""
    if q.is_cpu:
        window_on_host(q, k, v, g, beta, state, state_slots, num_accepted, use_l2norm, scale, out, mark, state_mark)
        return
    dtype, num_tokens = state.state.dtype, q.shape[1]
    q, k = q.to(dtype), k.to(dtype)
    if use_l2norm:
        q, k = l2norm(q), l2norm(k)
    is_pad = state_slots < 0
    slots = state_slots.clamp_min(0).long()
    side = state.side[slots].long()
    recurrent = _with_accepted(state, slots, side, num_accepted)
    recurrent = torch.where(is_pad[:, None, None, None], 0.0, recurrent)
    # a pad puts back what the clean half of slot 0 holds, which no other row writes: it changes nothing
    halves = torch.where(is_pad, state.side[0].long(), 1 - side)
    _put(state.state, halves, slots, is_pad, recurrent)
    window_of = ((state.pending_k, k), (state.pending_v, v), (state.pending_g, g), (state.pending_beta, beta))
    for into, tokens in window_of:
        _put(into, halves, slots, is_pad, tokens)
    _put(state.num_pending, halves, slots, is_pad, torch.full_like(state_slots, num_tokens))
    mark_rows(recurrent.flatten(1), state_mark)
    group = v.shape[2] // k.shape[2]
    for t in range(num_tokens):
        k_t, q_t = (x[:, t].repeat_interleave(group, dim=1) for x in (k, q))
        recurrent = _delta_step(recurrent, k_t, v[:, t].to(dtype), g[:, t].to(dtype), beta[:, t].to(dtype))
        read = (recurrent * (scale * q_t)[..., None]).sum(-2)
        out[:, t] = torch.where(is_pad[:, None, None], 0.0, read).to(out.dtype)
    mark_rows(out.flatten(0, 1).flatten(1), mark)


def window_on_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: WindowState,
    state_slots: Tensor,
    num_accepted: Tensor,
    use_l2norm: bool,
    scale: float,
    out: Tensor,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """The same step where the host may look: pads are left out, not masked, and rows are copied by flat numbers."""
    real = [n for n, slot in enumerate(state_slots.tolist()) if slot >= 0]
    num_rows, written = len(state_slots), out
    if len(real) < num_rows:
        index = torch.tensor(real, dtype=torch.int64)
        q, k, v, g, beta, state_slots, num_accepted = (
            x.index_select(0, index) for x in (q, k, v, g, beta, state_slots, num_accepted)
        )
        written = torch.empty((len(real), *out.shape[1:]), dtype=out.dtype)
    slots = state_slots.long()
    side = state.side[slots].long()
    recurrent = _with_accepted(state, slots, side, num_accepted)
    to = (1 - side) * state.num_slots + slots
    state.state.flatten(0, 1).index_copy_(0, to, recurrent)
    if state_mark is not None:
        whole = recurrent
        if len(real) < num_rows:
            whole = recurrent.new_zeros((num_rows, *recurrent.shape[1:])).index_copy_(0, index, recurrent)
        mark_rows(whole.flatten(1), state_mark)
    dtype, num_tokens, group = state.state.dtype, q.shape[1], v.shape[2] // k.shape[2]
    q, k = q.to(dtype), k.to(dtype)
    if use_l2norm:
        q, k = l2norm(q), l2norm(k)
    window_of = ((state.pending_k, k), (state.pending_v, v), (state.pending_g, g), (state.pending_beta, beta))
    for into, tokens in window_of:
        into.flatten(0, 1)[:, :num_tokens].index_copy_(0, to, tokens.to(into.dtype))
    state.num_pending.view(-1).index_fill_(0, to, num_tokens)
    queries, keys = ((scale * q)[..., None], k[..., None])
    if group > 1:
        queries, keys = (x.repeat_interleave(group, dim=2) for x in (queries, keys))
    values, decays, beta = v.to(dtype), g.to(dtype).exp()[..., None, None], beta.to(dtype)[..., None]
    for t in range(num_tokens):
        recurrent = _decayed_step(recurrent, keys[:, t], values[:, t], decays[:, t], beta[:, t])
        written[:, t] = (recurrent * queries[:, t]).sum(-2)
    if written is not out:
        out.zero_().index_copy_(0, index, written)
    mark_rows(out.flatten(0, 1).flatten(1), mark)


def read_state(state: WindowState, state_slots: Tensor, num_accepted: Tensor) -> Tensor:
    """The clean states with the accepted pending tokens applied, for a prompt that goes on or a snapshot.

    On every device in PyTorch, without a host sync; changes nothing.

    Args:
        state_slots: int32 or int64 [N], none negative.
        num_accepted: int32 [N], as for the window step.

    Returns:
        [N, Hv, Dk, Dv] in the state's type.
    """
    slots = state_slots.long()
    return _with_accepted(state, slots, state.side[slots].long(), num_accepted)


def _with_accepted(state: WindowState, slots: Tensor, side: Tensor, num_accepted: Tensor) -> Tensor:
    """[N, Hv, Dk, Dv]: the clean states with the accepted pending tokens applied."""
    recurrent, dtype = state.state[side, slots], state.state.dtype
    accepted = torch.minimum(num_accepted, state.num_pending[side, slots])
    group = state.pending_v.shape[3] // state.pending_k.shape[3]
    if accepted.is_cpu:
        return _with_accepted_on_host(recurrent, state, slots, side, accepted.tolist(), group)
    # a device cannot be asked how many: it goes through the whole window
    for t in range(state.max_window):
        k_t = state.pending_k[side, slots, t].repeat_interleave(group, dim=1)
        v_t, g_t, beta_t = (x[side, slots, t] for x in (state.pending_v, state.pending_g, state.pending_beta))
        after = _delta_step(recurrent, k_t.to(dtype), v_t.to(dtype), g_t.to(dtype), beta_t.to(dtype))
        recurrent = torch.where((t < accepted)[:, None, None, None], after, recurrent)
    return recurrent


def _with_accepted_on_host(
    recurrent: Tensor, state: WindowState, slots: Tensor, side: Tensor, accepted: list[int], group: int
) -> Tensor:
    """The same with the counts known: no step for tokens that nobody accepted."""
    most, dtype = max(accepted, default=0), recurrent.dtype
    if most <= 0:
        return recurrent
    at = side * state.num_slots + slots
    parts = (state.pending_k, state.pending_v, state.pending_g, state.pending_beta)
    k, v, g, beta = (x.flatten(0, 1).index_select(0, at)[:, :most].to(dtype) for x in parts)
    keys = (k.repeat_interleave(group, dim=2) if group > 1 else k)[..., None]
    decays, beta, counts = g.exp()[..., None, None], beta[..., None], torch.tensor(accepted)
    for t in range(most):
        after = _decayed_step(recurrent, keys[:, t], v[:, t], decays[:, t], beta[:, t])
        everyone = t < min(accepted)
        recurrent = after if everyone else torch.where((t < counts)[:, None, None, None], after, recurrent)
    return recurrent


def _delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """State [N, Hv, Dk, Dv] after one token of k [N, Hv, Dk], v [N, Hv, Dv], g and beta [N, Hv]."""
    return _decayed_step(state, k[..., None], v, g.exp()[..., None, None], beta[..., None])


def _decayed_step(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The same, of k [N, Hv, Dk, 1], decay [N, Hv, 1, 1], beta [N, Hv, 1]."""
    state = state * decay
    delta = beta * (v - (state * k).sum(-2))
    return torch.addcmul(state, k, delta[..., None, :])


def _put(into: Tensor, halves: Tensor, slots: Tensor, is_pad: Tensor, rows: Tensor) -> None:
    """``into[half, slot] = row`` in the window's length, for rows that are no pads."""
    if into.ndim > 2 and into.shape[2] != rows.shape[1]:
        into = into[:, :, : rows.shape[1]]
    keep = is_pad.view(-1, *[1] * (rows.ndim - 1))
    into[halves, slots] = torch.where(keep, into[halves, slots], rows.to(into.dtype))
