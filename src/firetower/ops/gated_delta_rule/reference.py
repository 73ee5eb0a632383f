"""The gated delta rule token by token, as the paper writes it: the truth in float64.

``S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q`` ("Gated Delta Networks", arXiv 2412.06464), with the
order of Hugging Face's ``torch_recurrent_gated_delta_rule``: decay first, then write, then read.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from firetower.ops.gated_delta_rule.window_state import WindowState

L2NORM_EPS = 1e-6


def l2norm_reference(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis, in the type of ``x``."""
    return x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt()


def delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The state after one token.

    Args:
        state: [..., Hv, Dk, Dv].
        k: [..., Hv, Dk], one for each value head. v: [..., Hv, Dv].
        g: [..., Hv], the logarithm of the decay. beta: [..., Hv].
    """
    state = state * g.exp()[..., None, None]
    read = torch.einsum("...kv,...k->...v", state, k)
    return state + k[..., :, None] * (beta[..., None] * (v - read))[..., None, :]


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_l2norm: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What `firetower.ops.gated_delta_rule.gated_delta_rule` computes, token by token; shapes as there.

    Args:
        dtype: type that everything is converted to, computed and returned in.

    Returns:
        (out [B, T, Hv, Dv], final state [B or num_sequences, Hv, Dk, Dv]).
    """
    batch, num_tokens = q.shape[:2]
    if cu_seqlens is None:
        spans = [(b, 0, num_tokens) for b in range(batch)]
    else:
        edges = cu_seqlens.tolist()
        spans = [(0, *edge) for edge in itertools.pairwise(edges)]
    shape = (len(spans), v.shape[2], k.shape[3], v.shape[3])
    states = torch.zeros(shape, dtype=dtype, device=q.device)
    if initial_state is not None:
        states = initial_state.to(dtype).clone()
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(v)
    for i, (b, begin, end) in enumerate(spans):
        state = states[i]
        for t in range(begin, end):
            state = delta_step(state, k[b, t], v[b, t], g[b, t], beta[b, t])
            out[b, t] = scale * torch.einsum("hkv,hk->hv", state, q[b, t])
        states[i] = state
    return out, states


def window_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    window: WindowState,
    *,
    state_slots: Tensor,
    num_accepted: Tensor,
    use_l2norm: bool = True,
    scale: float | None = None,
) -> Tensor:
    """What `firetower.ops.gated_delta_rule.gated_delta_rule_window` computes, row by row, token by token.

    Computes in the type of ``window.state``, which may be float64. Reads and writes ``window`` as the op does.

    Returns:
        [N, W, Hv, Dv] in that type.
    """
    dtype = window.state.dtype
    group = v.shape[2] // k.shape[2]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k, g, beta = (x.to(dtype) for x in (q, k, g, beta))
    if use_l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    num_tokens = v.shape[1]
    for n, slot in enumerate(state_slots.tolist()):
        if slot < 0:
            continue
        clean = int(window.side[slot])
        other = 1 - clean
        state = window.state[clean, slot]
        for t in range(max(0, min(int(num_accepted[n]), int(window.num_pending[clean, slot])))):
            k_t = window.pending_k[clean, slot, t].to(dtype).repeat_interleave(group, dim=0)
            v_t = window.pending_v[clean, slot, t].to(dtype)
            g_t, beta_t = window.pending_g[clean, slot, t], window.pending_beta[clean, slot, t]
            state = delta_step(state, k_t, v_t, g_t.to(dtype), beta_t.to(dtype))
        window.state[other, slot] = state
        window.pending_k[other, slot, :num_tokens] = k[n].to(window.pending_k.dtype)
        window.pending_v[other, slot, :num_tokens] = v[n].to(window.pending_v.dtype)
        window.pending_g[other, slot, :num_tokens] = g[n].to(window.pending_g.dtype)
        window.pending_beta[other, slot, :num_tokens] = beta[n].to(window.pending_beta.dtype)
        window.num_pending[other, slot] = num_tokens
        for t in range(num_tokens):
            k_t, q_t = (x[n, t].repeat_interleave(group, dim=0) for x in (k, q))
            state = delta_step(state, k_t, v[n, t].to(dtype), g[n, t], beta[n, t])
            out[n, t] = scale * torch.einsum("hkv,hk->hv", state, q_t)
    return out
