"""Depthwise causal convolution over tokens, with a state that rejected drafts and burned steps cannot touch.

``y[t] = act(bias + sum_k weight[k] * x[t - K + 1 + k])``, each channel by itself; what lies before a sequence is its
state, or zeros.

The state of a slot has ``K - 1`` committed columns, then room for one window:

    committed: the last K - 1 inputs that count | pending: the inputs of the last window, NaN where none stood

A window reads the K - 1 columns from ``num_accepted`` on, which is the state after the tokens accepted last time. It
writes those to the committed columns of the slot in ``state_ids_out`` and its own inputs to the pending ones. So the
state is committed one call late: a rejected draft is never among the committed columns, and a step that burned is
dropped by accepting none of its tokens. With two slots a request, read and written in turn, a step that is run again
from the same slot and the same ``num_accepted`` gives the same bits.

Numerics, all backends: products and sums in float32 (float64 for float64), taps in the order of time, one rounding at
the store; the state holds inputs bit for bit. A NaN or Inf in one input burns its channel for K tokens of its own
sequence, no other. Pads are never multiplied: no value in them, NaN included, reaches an answer; their own answer is
zero. What cannot be right is NaN and writes nothing: a slot beyond the pool, more tokens accepted than ran.

Source: Dao and Gu, "Mamba" (2023), section 3.4; window form as in transformers 5.24, ``causal_conv1d_update``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = ["causal_conv1d", "causal_conv1d_window", "new_conv_state"]

MAX_KERNEL_SIZE = 8
"""Taps; the kernels unroll them."""

MAX_WINDOW = 16
"""Tokens of a window; the kernels unroll the pending columns."""

_INDEX = (torch.int32, torch.int64)
_FOLDER = "firetower.ops.causal_conv1d"

for _part in ("prefill", "window"):
    REGISTRY.register(
        f"causal_conv1d.{_part}", "triton", f"{_FOLDER}.kernels:{_part}", supports=needs_triton, devices=("cuda",)
    )
    REGISTRY.register(f"causal_conv1d.{_part}", "torch", f"{_FOLDER}.torch_path:{_part}", supports=always)


def new_conv_state(
    num_slots: int,
    channels: int,
    *,
    kernel_size: int,
    max_window: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """An empty state: committed columns zero, pending ones NaN.

    Returns:
        [num_slots, channels, kernel_size - 1 + max_window], channels contiguous in memory.

    Raises:
        ConfigError: ``kernel_size`` or ``max_window`` out of range.
    """
    if not 2 <= kernel_size <= MAX_KERNEL_SIZE or not 0 <= max_window <= MAX_WINDOW:
        raise ConfigError(
            f"kernel_size={kernel_size}, max_window={max_window}: must be from 2 to {MAX_KERNEL_SIZE} and from 0 to "
            f"{MAX_WINDOW}"
        )
    columns = torch.zeros(num_slots, kernel_size - 1 + max_window, channels, dtype=dtype, device=device)
    columns[:, kernel_size - 1 :] = math.nan
    return columns.transpose(1, 2)


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    conv_state: Tensor | None = None,
    state_ids: Tensor | None = None,
    state_ids_out: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted: Tensor | None = None,
    num_pads: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    out: Tensor | None = None,
    mark: Mark | None = None,
    mark_state: Mark | None = None,
) -> Tensor:
    """Sequences of any lengths, one after another.

    Args:
        hidden_states: [T, channels], float; channels stride 1.
        weight: [channels, K], any float type and strides; the last tap is the token itself. Channels contiguous
            (``weight.T.contiguous().T``) are read fastest. ``bias``: [channels].
        cu_seqlens: int32 or int64 [N + 1]: sequence n has the rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``,
            exclusive; may be empty. Rows of no sequence are pads.
        conv_state: [num_slots, channels, K - 1 + room], of the type of ``hidden_states``, any strides.
        state_ids: int32 or int64 [N], slot that a sequence starts from; negative: it starts from zeros, and no state is
            written.
        state_ids_out: slot that its end is committed to; None: the same. Negative: nothing is written.
        has_initial_state: bool [N]; None: no sequence has one. Without one the slot is not read: nothing that a former
            request left in it can matter.
        num_accepted: [N], tokens of the slot's pending window that count; None: 0.
        num_pads: [N], left pads: the first rows of each sequence that are none of it; None: 0.
        activation: SiLU, or None.
        out: contiguous [T, channels]; not ``hidden_states``.
        mark: signal of the answer, ``[T, channels]``.
        mark_state: signal of the committed columns as written, ``[N, (K - 1) * channels]``, oldest first; sequences
            whose state is not written are not checked.

    Returns:
        [T, channels] in the type of ``hidden_states``; zeros in pads.

    Raises:
        ConfigError: shapes, types or sizes that do not fit.
    """
    num_sequences = cu_seqlens.numel() - 1
    _check(hidden_states, weight, bias, conv_state, activation, ndim=2)
    if cu_seqlens.ndim != 1 or num_sequences < 1 or cu_seqlens.dtype not in _INDEX:
        raise ConfigError(f"cu_seqlens: {cu_seqlens.dtype} {list(cu_seqlens.shape)}: must be int32 or int64 [N + 1]")
    if (conv_state is None) != (state_ids is None):
        raise ConfigError("conv_state, state_ids: must be given together, or neither")
    _check_ids(num_sequences, state_ids=state_ids, state_ids_out=state_ids_out, num_accepted=num_accepted,
               num_pads=num_pads)  # fmt: skip
    if has_initial_state is not None and (
        has_initial_state.dtype is not torch.bool or has_initial_state.shape != (num_sequences,)
    ):
        raise ConfigError(f"has_initial_state: {has_initial_state.dtype}: must be bool [{num_sequences}]")
    y = _output(out, hidden_states)
    kernel("causal_conv1d.prefill", hidden_states)(
        hidden_states, weight, bias, cu_seqlens, conv_state, state_ids,
        state_ids if state_ids_out is None else state_ids_out, has_initial_state, num_accepted, num_pads, y,
        activation=activation, mark=mark, mark_state=mark_state,
    )  # fmt: skip
    return y


def causal_conv1d_window(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor,
    state_ids: Tensor,
    state_ids_out: Tensor | None = None,
    num_accepted: Tensor,
    activation: Literal["silu"] | None = "silu",
    out: Tensor | None = None,
    mark: Mark | None = None,
    mark_state: Mark | None = None,
) -> Tensor:
    """The next tokens of each request, of which some may be rejected afterwards.

    Args:
        hidden_states: [B, W, channels], float; channels stride 1. A request with fewer tokens has pads at its end,
            which cannot reach the others and must not be accepted.
        weight, bias, activation: as in `causal_conv1d`.
        conv_state: [num_slots, channels, K - 1 + room], of the type of ``hidden_states``; ``W`` at most ``room``.
        state_ids: int32 or int64 [B], slot that is read; negative: a pad row, zeros out and nothing written.
        state_ids_out: slot that is written; None: the same. Negative: nothing is written.
        num_accepted: int32 or int64 [B], tokens of the window pending in the slot that count: 0 after a prefill.
        out: contiguous [B, W, channels]; not ``hidden_states``.
        mark: signal of the answer, ``[B * W, channels]``.
        mark_state: signal of the committed columns as written, ``[B, (K - 1) * channels]``, oldest first: bad where
            the state was bad before this step.

    Returns:
        [B, W, channels] in the type of ``hidden_states``.

    Raises:
        ConfigError: shapes, types or sizes that do not fit.
    """
    _check(hidden_states, weight, bias, conv_state, activation, ndim=3)
    room = conv_state.shape[2] - weight.shape[1] + 1
    if not 1 <= hidden_states.shape[1] <= room:
        raise ConfigError(
            f"hidden_states: window={hidden_states.shape[1]}: must be from 1 to the {room} pending columns of "
            "conv_state; make it with new_conv_state(max_window=...)"
        )
    num_requests = hidden_states.shape[0]
    _check_ids(num_requests, state_ids=state_ids, state_ids_out=state_ids_out, num_accepted=num_accepted)
    y = _output(out, hidden_states)
    kernel("causal_conv1d.window", hidden_states)(
        hidden_states, weight, bias, conv_state, state_ids, state_ids if state_ids_out is None else state_ids_out,
        num_accepted, y, activation=activation, mark=mark, mark_state=mark_state,
    )  # fmt: skip
    return y


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor | None, activation: str | None, *, ndim: int
) -> None:
    if x.ndim != ndim or not x.is_floating_point() or x.stride(-1) != 1:
        raise ConfigError(
            f"hidden_states: {x.dtype} {list(x.shape)}: must be float with {ndim} dimensions, channels last, stride 1"
        )
    channels = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.is_floating_point():
        raise ConfigError(f"weight: {weight.dtype} {list(weight.shape)}: must be float [{channels}, K]")
    taps = weight.shape[1]
    if not 2 <= taps <= MAX_KERNEL_SIZE:
        raise ConfigError(f"weight: K={taps}: must be from 2 to {MAX_KERNEL_SIZE}")
    if bias is not None and (bias.shape != (channels,) or not bias.is_contiguous()):
        raise ConfigError(f"bias: {list(bias.shape)}: must be contiguous [{channels}]")
    if activation not in ("silu", None):
        raise ConfigError(f"activation={activation!r}: must be 'silu' or None")
    if conv_state is None:
        return
    room = conv_state.shape[-1] - taps + 1
    if conv_state.ndim != 3 or conv_state.shape[1] != channels or not 0 <= room <= MAX_WINDOW:
        raise ConfigError(
            f"conv_state: {list(conv_state.shape)}: must be [num_slots, {channels}, {taps - 1} to "
            f"{taps - 1 + MAX_WINDOW}]; make it with new_conv_state()"
        )
    if conv_state.dtype is not x.dtype or conv_state.shape[0] < 1:
        raise ConfigError(
            f"conv_state: {conv_state.dtype}, {conv_state.shape[0]} slots: must hold inputs as they are, {x.dtype}, in "
            "at least one slot"
        )


def _check_ids(num_rows: int, **tensors: Tensor | None) -> None:
    for name, ids in tensors.items():
        if ids is not None and (ids.dtype not in _INDEX or ids.shape != (num_rows,) or not ids.is_contiguous()):
            raise ConfigError(f"{name}: {ids.dtype} {list(ids.shape)}: must be contiguous int32 or int64 [{num_rows}]")


def _output(out: Tensor | None, x: Tensor) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype is not x.dtype or not out.is_contiguous() or out.data_ptr() == x.data_ptr():
        raise ConfigError(
            f"out: {out.dtype} {list(out.shape)}: must be contiguous {x.dtype} {list(x.shape)}, and not hidden_states"
        )
    return out
