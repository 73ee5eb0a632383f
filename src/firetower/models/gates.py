"""Decay and strength of a Gated DeltaNet token from its two gate inputs, in float32.

``g = -exp(A_log) * softplus(a + dt_bias)`` is the logarithm of the decay, at most 0; ``beta = sigmoid(b)``. Written so
that every finite input has a finite answer: softplus as ``max(x, 0) + log1p(exp(-|x|))``, and the sigmoid of -1e4 is 0.
A NaN stays in its head. ``a`` of +Inf gives a decay of -Inf, which forgets everything and is legal.

Source: Yang et al., "Gated Delta Networks" (2024); as in transformers 5.24, ``Qwen3NextGatedDeltaNet``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark, mark_rows

REGISTRY.register(
    "models.gates", "triton", "firetower.models.gates_kernels:gates", supports=needs_triton, devices=("cuda",)
)
REGISTRY.register("models.gates", "torch", "firetower.models.gates:gates_torch", supports=always)


def gates(
    b: Tensor, a: Tensor, decay_rate: Tensor, dt_bias: Tensor, *, mark: Mark | None = None
) -> tuple[Tensor, Tensor]:
    """Decay and strength of every token and value head.

    Args:
        b: [T, Hv], any float type, stride 1 in Hv. a: likewise.
        decay_rate: float32 [Hv], ``-exp(A_log)``. dt_bias: float32 [Hv].
        mark: signal of ``g``, [T, Hv]; -Inf is legal in it.

    Returns:
        (g, beta), float32 [T, Hv], contiguous. A row's bits depend on that row alone.
    """
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    kernel("models.gates", a)(b, a, decay_rate, dt_bias, g, beta, mark)
    return g, beta


def gates_torch(
    b: Tensor, a: Tensor, decay_rate: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor, mark: Mark | None
) -> None:
    """In PyTorch; exp and log1p alone, whose bits do not depend on an element's place as those of sigmoid do."""
    x = a.float() + dt_bias
    torch.mul(x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())), decay_rate, out=g)
    torch.reciprocal(1 + torch.exp(-b.float()), out=beta)
    mark_rows(g, mark)
