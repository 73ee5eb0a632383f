"""Dense projection of window rows, ``y = x W^T + b``, whose row bits do not depend on how many rows there are.

Numerics, all backends:

- Products and sums in float32 (TF32 is never used; float64 inputs on the CPU stay float64); bias added in float32; one
  rounding, at the store.
- Each row is summed in an order that follows from the shape of the weight alone: tiles, split of K and chunks of rows
  never depend on the number of rows or on what the other rows hold. No library chooses.
- A NaN or Inf in a row of ``hidden_states`` stays in that row, one in a row of ``weight`` in that column. Beyond 65504
  in float16 the answer is Inf: nothing is clamped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = ["linear"]

REGISTRY.register("linear", "triton", "firetower.ops.linear.kernels:linear", supports=needs_triton, devices=("cuda",))
REGISTRY.register("linear", "torch", "firetower.ops.linear.torch_path:linear", supports=always)


def linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    mark: Mark | None = None,
) -> Tensor:
    """``hidden_states @ weight.T + bias``, row-invariant.

    Args:
        hidden_states: [..., K], float16, bfloat16 or float32 (float64 too on the CPU).
        weight: [N, K], same type, last stride 1.
        bias: [N], same type, or None.
        out: contiguous [..., N], same type; made where None. Every element is written once.
        mark: signal of the answer as stored, ``[rows, N]``.

    Returns:
        [..., N] in the type of ``hidden_states``. A NaN in a row makes that row NaN and no other; so does an Inf, or
        it makes it Inf.

    Raises:
        ConfigError: shapes, types or devices that do not fit.
    """
    _check(hidden_states, weight, bias)
    shape = (*hidden_states.shape[:-1], weight.shape[0])
    y = torch.empty(shape, dtype=hidden_states.dtype, device=hidden_states.device) if out is None else out
    if y.shape != shape or y.dtype != hidden_states.dtype or not y.is_contiguous():
        raise ConfigError(f"out={tuple(y.shape)} {y.dtype}: must be contiguous {shape} of {hidden_states.dtype}")
    rows = hidden_states.reshape(-1, weight.shape[1])
    kernel("linear", hidden_states)(rows, weight, bias, y.view(-1, weight.shape[0]), mark)
    return y


def _check(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not hidden_states.is_floating_point() or hidden_states.ndim < 1:
        raise ConfigError(f"hidden_states of {hidden_states.dtype}: must be float [..., K]")
    if weight.ndim != 2 or weight.shape[1] != hidden_states.shape[-1] or 0 in weight.shape:
        raise ConfigError(
            f"weight={tuple(weight.shape)}: must be [N, K] with K={hidden_states.shape[-1]} as hidden_states has"
        )
    if weight.stride(1) != 1:
        raise ConfigError(f"weight with strides {weight.stride()}: K must be contiguous; call .contiguous() at load")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias={tuple(bias.shape)}: must be [{weight.shape[0]}]")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (x.dtype != hidden_states.dtype or x.device != hidden_states.device):
            raise ConfigError(
                f"{name} of {x.dtype} on {x.device}: must be {hidden_states.dtype} on {hidden_states.device}; "
                f"convert it at load"
            )
