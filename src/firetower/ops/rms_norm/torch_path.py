"""RMS norm in PyTorch: the CPU path, and what a CUDA device without Triton runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firetower.ops.activation import silu
from firetower.sensors.marks import Mark, mark_rows

_STEP = {torch.float32: 2.0**-40, torch.float64: 2.0**-300}
"""Applied twice: exact, and it brings the square of any number whose square overflowed far below the largest one."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
    *,
    eps: float,
    is_zero_centred: bool,
    mark: Mark | None,
    mark_input: Mark | None,
) -> None:
    """Write ``out``, and ``residual_out`` where there is a residual; arguments as `firetower.ops.rms_norm` has them."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    if residual is not None and residual_out is not None:
        residual_out.copy_(x.to(wide) + residual.to(wide))
        x = residual_out
    mark_rows(x, mark_input)
    factor = weight.to(wide) + 1.0 if is_zero_centred else weight.to(wide)
    y = _normed(x.to(wide), eps) * factor
    if gate is not None:
        y *= silu(gate.to(wide))
    out.copy_(y)
    mark_rows(out, mark)


def _normed(x: Tensor, eps: float) -> Tensor:
    mean = _row_mean(x * x)
    overflowed = ~mean.isfinite()
    if x.is_cpu and not bool(overflowed.any()):
        return x * torch.rsqrt(mean + eps)
    step = _STEP[x.dtype]
    small = x * step * step
    mean_small = _row_mean(small * small)
    scale = torch.where(mean_small.isfinite(), torch.rsqrt(mean_small) * step, math.nan)
    return torch.where(overflowed, x * step * scale, x * torch.rsqrt(mean + eps))


def _row_mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True) if x.is_cpu else fold(x) / x.shape[-1]


def fold(x: Tensor) -> Tensor:
    """Row sums [..., 1] by adding halves: PyTorch's own order of a sum on CUDA depends on the number of rows."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = torch.cat((x[..., : x.shape[-1] - half] + x[..., half:], x[..., x.shape[-1] - half : half]), dim=-1)
    return x
