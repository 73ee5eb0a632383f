"""RMS norm row by row in float64, in Python's own numbers where it decides."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm_row(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """One row: float64 [width] times ``factor`` [width]; all NaN where it holds a NaN or an Inf."""
    if not bool(torch.isfinite(x).all()):
        return torch.full_like(x, math.nan)
    mean = math.fsum(v * v for v in x.tolist()) / x.numel()
    return x / math.sqrt(mean + eps) * factor


def rms_norm(
    hidden_states: Tensor,
    weight: Tensor,
    *,
    eps: float,
    is_zero_centred: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """What `firetower.ops.rms_norm.rms_norm` computes, in float64 and unrounded.

    Args:
        hidden_states: [..., width]; weight: [width]; gate: like ``hidden_states``.

    Returns:
        float64 [..., width].
    """
    factor = weight.double() + (1.0 if is_zero_centred else 0.0)
    rows = hidden_states.double().reshape(-1, hidden_states.shape[-1])
    y = torch.stack([rms_norm_row(row, factor, eps) for row in rows]) if len(rows) else rows
    y = y.view(hidden_states.shape)
    return y if gate is None else y * torch.nn.functional.silu(gate.double())


def add(hidden_states: Tensor, residual: Tensor) -> Tensor:
    """The new residual: the sum rounded once to the residual's type."""
    return (hidden_states.double() + residual.double()).to(residual.dtype)
