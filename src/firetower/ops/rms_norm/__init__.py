"""RMS norm: plain, zero-centred weight, gated, with the residual added first; checks the residual while it reads it.

Numerics, all forms and backends:

- Sums and products in float32 (float64 for float64 inputs), one rounding, at the store.
- Any finite row has a finite root mean square: where the squares overflow they are summed again scaled by an exact
  power of two. Rows that do not overflow keep their bits.
- A row of zeros gives zeros: ``eps`` is added in float32, where it cannot vanish.
- A row that holds a NaN or an Inf has no root mean square: all of it comes out NaN. An Inf alone would give one NaN
  among zeros, and the zeros would pass for healthy. The sensor on the input names the element.
- Rows never see each other, and a row's bits do not depend on how many there are.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; zero-centred weight and gate as
in transformers 5.24, ``Qwen3NextRMSNorm`` and ``Qwen3NextRMSNormGated``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = ["add_rms_norm", "rms_norm"]

MAX_WIDTH = 16384
"""Longest row: one program of the kernel holds a whole one."""

_MIN_EPS, _MAX_EPS = 1e-24, 1.0

REGISTRY.register(
    "rms_norm", "triton", "firetower.ops.rms_norm.kernels:rms_norm", supports=needs_triton, devices=("cuda",)
)
REGISTRY.register("rms_norm", "torch", "firetower.ops.rms_norm.torch_path:rms_norm", supports=always)


def rms_norm(
    hidden_states: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    is_zero_centred: bool = False,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    mark: Mark | None = None,
    mark_input: Mark | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * w``, then ``* silu(gate)`` where there is a gate.

    Args:
        hidden_states: [..., width], float; width stride 1, others any.
        weight: [width], any float type. The factor is ``weight``, or ``1 + weight`` where ``is_zero_centred``.
        eps: added to the mean of the squares, in float32.
        gate: [..., width] like ``hidden_states``. A NaN or -Inf in it stays in its element; -200 gives 0.
        out: contiguous, where the answer goes; may be ``hidden_states``.
        mark: signal of the answer as stored, ``[rows, width]``.
        mark_input: signal of ``hidden_states`` as read.

    Returns:
        [..., width] in the type of ``hidden_states``. Beyond 65504 in float16 it is Inf: nothing is clamped.

    Raises:
        ConfigError: shapes, types or ``eps`` out of range.
    """
    _check(hidden_states, weight, eps)
    _check_like("gate", gate, hidden_states)
    y = _output("out", out, hidden_states, hidden_states.dtype)
    kernel("rms_norm", hidden_states)(
        hidden_states, weight, None, gate, y, None, eps=eps, is_zero_centred=is_zero_centred, mark=mark,
        mark_input=mark_input,
    )  # fmt: skip
    return y


def add_rms_norm(
    hidden_states: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    is_zero_centred: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    mark: Mark | None = None,
    mark_residual: Mark | None = None,
) -> tuple[Tensor, Tensor]:
    """``r = hidden_states + residual`` as stored, then ``r / sqrt(mean(r^2) + eps) * w``.

    Args:
        hidden_states: [..., width], float: what the last block adds.
        residual: [..., width], float, of its own type (float32 beside bfloat16, say).
        weight, eps, is_zero_centred, out, mark: as in `rms_norm`.
        residual_out: contiguous, of the residual's type, where ``r`` goes; may be ``residual``.
        mark_residual: signal of ``r`` as stored: where the sum left the type's range, it names the element.

    Returns:
        (answer [..., width] in the type of ``hidden_states``, ``r`` in the type of ``residual``).

    Raises:
        ConfigError: as `rms_norm`.
    """
    _check(hidden_states, weight, eps)
    _check_like("residual", residual, hidden_states)
    y = _output("out", out, hidden_states, hidden_states.dtype)
    total = _output("residual_out", residual_out, hidden_states, residual.dtype)
    kernel("rms_norm", hidden_states)(
        hidden_states, weight, residual, None, y, total, eps=eps, is_zero_centred=is_zero_centred, mark=mark,
        mark_input=mark_residual,
    )  # fmt: skip
    return y, total


def _check(hidden_states: Tensor, weight: Tensor, eps: float) -> None:
    width = hidden_states.shape[-1] if hidden_states.ndim else 0
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigError(f"hidden_states: width={width}: must be from 1 to {MAX_WIDTH}; reshape to [..., width]")
    if not hidden_states.is_floating_point() or hidden_states.stride(-1) != 1:
        raise ConfigError(
            f"hidden_states: {hidden_states.dtype} with strides {hidden_states.stride()}: must be float with stride 1 "
            "in the last dimension; call .contiguous()"
        )
    if weight.shape != (width,) or not weight.is_floating_point() or not weight.is_contiguous():
        raise ConfigError(f"weight: {weight.dtype} {list(weight.shape)}: must be contiguous float [{width}]")
    if not _MIN_EPS <= eps <= _MAX_EPS:
        raise ConfigError(
            f"eps={eps}: must be from {_MIN_EPS} to {_MAX_EPS}, so that a row of zeros has an answer in float32"
        )


def _check_like(name: str, x: Tensor | None, hidden_states: Tensor) -> None:
    if x is None:
        return
    if x.shape != hidden_states.shape or not x.is_floating_point() or x.stride(-1) != 1:
        raise ConfigError(
            f"{name}: {x.dtype} {list(x.shape)}: must be float {list(hidden_states.shape)} like hidden_states, with "
            "stride 1 in the last dimension"
        )


def _output(name: str, out: Tensor | None, hidden_states: Tensor, dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    if out.shape != hidden_states.shape or out.dtype is not dtype or not out.is_contiguous():
        raise ConfigError(
            f"{name}: {out.dtype} {list(out.shape)}: must be contiguous {dtype} {list(hidden_states.shape)}; leave it "
            "out to have it made"
        )
    return out
