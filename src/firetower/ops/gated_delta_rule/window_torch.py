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
    # a device cannot be asked how many: it goes through the whole window
    most = int(accepted.max()) if accepted.is_cpu and accepted.numel() else state.max_window
    group = state.pending_v.shape[3] // state.pending_k.shape[3]
    for t in range(most):
        k_t = state.pending_k[side, slots, t].repeat_interleave(group, dim=1)
        v_t, g_t, beta_t = (x[side, slots, t] for x in (state.pending_v, state.pending_g, state.pending_beta))
        after = _delta_step(recurrent, k_t.to(dtype), v_t.to(dtype), g_t.to(dtype), beta_t.to(dtype))
        recurrent = torch.where((t < accepted)[:, None, None, None], after, recurrent)
    return recurrent


def _delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """State [N, Hv, Dk, Dv] after one token of k [N, Hv, Dk], v [N, Hv, Dv], g and beta [N, Hv]."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    return torch.addcmul(state, k[..., None], delta[..., None, :])


def _put(into: Tensor, halves: Tensor, slots: Tensor, is_pad: Tensor, rows: Tensor) -> None:
    """``into[half, slot] = row`` in the window's length, for rows that are no pads."""
    if into.ndim > 2 and into.shape[2] != rows.shape[1]:
        into = into[:, :, : rows.shape[1]]
    keep = is_pad.view(-1, *[1] * (rows.ndim - 1))
    into[halves, slots] = torch.where(keep, into[halves, slots], rows.to(into.dtype))
