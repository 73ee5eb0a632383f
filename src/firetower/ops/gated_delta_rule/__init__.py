"""The gated delta rule: prompts in chunks, windows of up to eight tokens with a commit that comes later.

For each value head a state S [Dk, Dv], in float32, goes through
``S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q``. Value head h reads key head ``h // (Hv // Hk)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule.prefill import needs_fla, needs_transformers
from firetower.ops.gated_delta_rule.window_state import (
    MAX_WINDOW,
    WindowState,
    commit_window,
    load_state,
    new_window_state,
)
from firetower.ops.gated_delta_rule.window_torch import read_state
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = [
    "MAX_WINDOW",
    "WindowState",
    "commit_window",
    "gated_delta_rule",
    "gated_delta_rule_window",
    "load_state",
    "new_window_state",
    "read_state",
]

_HERE = "firetower.ops.gated_delta_rule"
for _part, _triton, _torch in (
    ("prepare", "kernels:prepare", "torch_path:prepare"),
    ("scan", "scan_kernels:scan", "torch_path:scan"),
    ("window", "window_kernels:window", "window_torch:window"),
):
    REGISTRY.register(
        f"gated_delta_rule.{_part}", "triton", f"{_HERE}.{_triton}", supports=needs_triton, devices=("cuda",)
    )
    REGISTRY.register(f"gated_delta_rule.{_part}", "torch", f"{_HERE}.{_torch}", supports=always)
REGISTRY.register("gated_delta_rule.prefill", "own", f"{_HERE}.prefill:own", supports=always)
# on no device unless pinned
REGISTRY.register("gated_delta_rule.prefill", "fla", f"{_HERE}.prefill:fla", supports=needs_fla, devices=())
REGISTRY.register(
    "gated_delta_rule.prefill", "transformers", f"{_HERE}.prefill:transformers", supports=needs_transformers, devices=()
)


def gated_delta_rule(
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
    output_state: bool = True,
    chunk_size: int = 64,
    out: Tensor | None = None,
    mark: Mark | None = None,
    state_mark: Mark | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run whole prompts, a chunk at a time.

    Decays between tokens are exponentials of sums over each segment, never differences of a cumulative sum, so that
    every ``g <= 0`` is exact, -Inf included. Each chunk is solved on its residual against the state. Nothing is
    clamped. The state is float32 throughout. Products take operands of the type of ``q`` for bfloat16, else
    float32 (on CUDA in TF32 for float16), and accumulate in float32. Split at a multiple of ``chunk_size`` and given
    the state, a prompt has the same bits as in one call.

    A NaN or Inf in ``k``, ``g`` (but -Inf), ``beta`` at token t gives NaN in every output of its heads from t on and
    in their states; one in ``v`` the same in its column alone; one in ``q`` in that output row alone. Tokens before
    t keep their values. A finite input that overflows inside a chunk can burn that chunk from its first token.

    Args:
        q: float32, float16 or bfloat16 [B, T, Hk, Dk]. k: likewise.
        v: [B, T, Hv, Dv], Hv a multiple of Hk.
        g: [B, T, Hv], natural logarithm of the decay, at most 0; any float type, computed in float32.
        beta: [B, T, Hv], any float type.
        initial_state: float32 [num_sequences, Hv, Dk, Dv]; None for zeros.
        cu_seqlens: int32 or int64 [num_sequences + 1] on the same device: edges of sequences that lie one behind the
            other from token 0 on, then B = 1. Tokens behind the last edge are pads: in no state, their outputs 0.
            None: B sequences of T tokens.
        scale: of the outputs; None for ``Dk ** -0.5``.
        use_l2norm: divide q and k by ``sqrt(sum(x^2) + 1e-6)``, without overflow for any finite input.
        output_state: whether to return the final state.
        chunk_size: tokens of a chunk: 16, 32 or 64 for the Triton kernels.
        out: [B, T, Hv, Dv] contiguous, to be filled; None for a new one in the type of ``v``.
        mark: signal of the output, as [B * T, Hv * Dv]. state_mark: of the final state, as
            [num_sequences, Hv * Dk * Dv].

    Returns:
        (out, final state float32 [num_sequences, Hv, Dk, Dv] or None). T = 0 returns the initial state's bits.

    Raises:
        ConfigError: shapes that do not fit each other, or a chunk size that the backend cannot run.
    """
    _check(q, k, v, g, beta)
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ConfigError(f"q: batch of {q.shape[0]} with cu_seqlens: must be 1; lay sequences one behind the other")
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size}: must be positive; 64 is the usual one")
    num_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    state_shape = (num_sequences, v.shape[2], k.shape[3], v.shape[3])
    if initial_state is not None and tuple(initial_state.shape) != state_shape:
        raise ConfigError(f"initial_state: {tuple(initial_state.shape)}: must be {state_shape}")
    out = _out(out, v)
    if not v.numel():
        return out, _start(initial_state, state_shape, q) if output_state else None
    final_state = torch.empty(state_shape, dtype=_state_dtype(q), device=q.device) if output_state else None
    kernel("gated_delta_rule.prefill", q)(
        q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, use_l2norm=use_l2norm,
        scale=k.shape[3] ** -0.5 if scale is None else scale, chunk_size=chunk_size, out=out, final_state=final_state,
        mark=mark, state_mark=state_mark,
    )  # fmt: skip
    return out, final_state


def gated_delta_rule_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: WindowState,
    *,
    state_slots: Tensor,
    num_accepted: Tensor,
    use_l2norm: bool = True,
    scale: float | None = None,
    out: Tensor | None = None,
    mark: Mark | None = None,
    state_mark: Mark | None = None,
) -> Tensor:
    """Run the next one to eight tokens of N requests, each from its own slot.

    For each row: take the slot's clean half, apply the first ``num_accepted`` of its pending tokens, write that state
    once into the other half, run the window on it without writing any state, write the outputs, and leave the window
    as the other half's pending one. ``side`` is not touched: call `commit_window` after the step has been read as
    clean. Until then the same call can be repeated and gives the same bits, whatever the step left.

    A row's bits depend on that row alone, not on N, W or the other rows. All arithmetic is float32. NaN and Inf go
    where the recurrence takes them: see `gated_delta_rule`.

    Args:
        q: float32, float16 or bfloat16 [N, W, Hk, Dk], W from 1 to the state's ``max_window``. k: likewise.
        v: [N, W, Hv, Dv], Hv a multiple of Hk, in the type of ``state.pending_v``.
        g: [N, W, Hv], natural logarithm of the decay, at most 0, -Inf allowed. beta: [N, W, Hv].
        state: written in place, the half that is not clean alone.
        state_slots: int32 or int64 [N], no slot twice; negative for a pad, which writes nothing and reads zeros.
        num_accepted: int32 [N]: how many of the pending tokens of the row's slot were accepted; at most as many as
            are pending, more counts as that.
        use_l2norm: divide q and k by ``sqrt(sum(x^2) + 1e-6)``, without overflow for any finite input.
        scale: of the outputs; None for ``Dk ** -0.5``.
        out: [N, W, Hv, Dv] contiguous, to be filled; None for a new one in the type of ``v``.
        mark: signal of the output, as [N * W, Hv * Dv]. state_mark: of the states written, as [N, Hv * Dk * Dv]; pads
            write none.

    Returns:
        out.

    Raises:
        ConfigError: shapes that do not fit each other or the state.
    """
    _check(q, k, v, g, beta)
    _check_window(q, v, state, state_slots, num_accepted)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    out = _out(out, v)
    kernel("gated_delta_rule.window", q)(
        q, k, v, g, beta, state, state_slots=state_slots, num_accepted=num_accepted, use_l2norm=use_l2norm, scale=scale,
        out=out, mark=mark, state_mark=state_mark,
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.ndim != 4 or q.shape != k.shape:
        raise ConfigError(f"q: {tuple(q.shape)}, k: {tuple(k.shape)}: must be the same [B, T, Hk, Dk]")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % k.shape[2]:
        raise ConfigError(
            f"v: {tuple(v.shape)}: must be [{q.shape[0]}, {q.shape[1]}, a multiple of {k.shape[2]} heads, Dv]"
        )
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ConfigError(f"g: {tuple(g.shape)}, beta: {tuple(beta.shape)}: must be {tuple(v.shape[:3])}, as v")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.dtype.is_floating_point:
        raise ConfigError(f"q, k, v: {q.dtype}, {k.dtype}, {v.dtype}: must be one float type; convert them")


def _check_window(q: Tensor, v: Tensor, state: WindowState, state_slots: Tensor, num_accepted: Tensor) -> None:
    num_rows, num_tokens = q.shape[:2]
    if not 1 <= num_tokens <= state.max_window:
        raise ConfigError(f"q: window of {num_tokens} tokens: must be from 1 to {state.max_window}, the state's most")
    need = (*q.shape[2:], *v.shape[2:])
    have = (*state.pending_k.shape[3:], *state.pending_v.shape[3:])
    if need != have:
        raise ConfigError(f"state: made for [Hk, Dk, Hv, Dv] {have}: must be {need}, as q and v")
    if v.dtype != state.pending_v.dtype:
        raise ConfigError(f"v: {v.dtype}: must be {state.pending_v.dtype}, the type of state.pending_v")
    if state_slots.shape != (num_rows,) or num_accepted.shape != (num_rows,):
        raise ConfigError(
            f"state_slots: {tuple(state_slots.shape)}, num_accepted: {tuple(num_accepted.shape)}: must be ({num_rows},)"
        )


def _start(initial_state: Tensor | None, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """The state before the first token."""
    if initial_state is None:
        return torch.zeros(shape, dtype=_state_dtype(q), device=q.device)
    return initial_state.to(_state_dtype(q), copy=True)


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _out(out: Tensor | None, v: Tensor) -> Tensor:
    if out is None:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.shape != v.shape or out.dtype != v.dtype or not out.is_contiguous():
        raise ConfigError(f"out: {out.dtype} {tuple(out.shape)}: must be contiguous {v.dtype} {tuple(v.shape)}, as v")
    return out
