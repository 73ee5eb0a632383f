"""Shapes, inputs and tolerances of the tests and the benchmark of `moe`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.ops.moe.weights import MoeWeights, SharedExpert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a block; ``shared_inner`` 0 stands for no shared expert."""

    hidden: int
    num_experts: int
    top_k: int
    inner: int
    shared_inner: int = 0
    has_gate: bool = True


SHAPES: dict[str, Shape] = {
    "small": Shape(hidden=32, num_experts=7, top_k=2, inner=16, shared_inner=16),
    "shared as wide": Shape(hidden=48, num_experts=11, top_k=3, inner=24, shared_inner=24),
    "shared wider": Shape(hidden=33, num_experts=5, top_k=2, inner=17, shared_inner=40),
    "shared narrower": Shape(hidden=64, num_experts=8, top_k=2, inner=32, shared_inner=16),
    "shared without a gate": Shape(hidden=32, num_experts=6, top_k=4, inner=16, shared_inner=16, has_gate=False),
    "no shared": Shape(hidden=40, num_experts=16, top_k=4, inner=20),
    "one expert": Shape(hidden=32, num_experts=1, top_k=1, inner=16),
    "every expert": Shape(hidden=32, num_experts=3, top_k=3, inner=16, shared_inner=16),
}

Q36 = Shape(hidden=2048, num_experts=256, top_k=8, inner=512, shared_inner=512)
"""The block of Qwen3.6-35B-A3B."""

NUM_TOKENS = (1, 2, 63, 64, 65, 1000, 4097)

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-13,  # sums of up to 2048 products, each 1.1e-16
    torch.float32: 2e-6,  # the same at 6e-8, and two exponentials
    torch.float16: 1e-3,  # three roundings of 2^-11: activation, each expert's row, output
    torch.bfloat16: 8e-3,  # the same at 2^-8
}
"""Frobenius error against float64 on the inputs as rounded, for the routing that the op chose."""


def generator(seed: int) -> torch.Generator:
    """Numbers that do not depend on the device."""
    return torch.Generator().manual_seed(seed)


def normal(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
) -> Tensor:
    """Normal numbers, made on the CPU in float32 and rounded."""
    return (torch.randn(shape, generator=generator(seed)) * scale).to(dtype).to(device)


def weights(
    shape: Shape, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", *, has_bias: bool = False
) -> MoeWeights:
    """Weights whose outputs are near 1 for inputs near 1."""
    hidden, inner, num_experts = shape.hidden, shape.inner, shape.num_experts

    def make(index: int, *size: int) -> Tensor:
        return normal(size, 100 * seed + index, dtype, device, scale=size[-1] ** -0.5)

    shared = None
    if shape.shared_inner:
        shared = SharedExpert(
            gate_up_proj=make(4, 2 * shape.shared_inner, hidden),
            down_proj=make(5, hidden, shape.shared_inner),
            gate=make(6, 1, hidden) if shape.has_gate else None,
        )
    return MoeWeights(
        router=make(1, num_experts, hidden),
        gate_up_proj=make(2, num_experts, 2 * inner, hidden),
        down_proj=make(3, num_experts, hidden, inner),
        selection_bias=normal((num_experts,), 100 * seed + 7, device=device, scale=0.1) if has_bias else None,
        shared=shared,
    )


def random_ids(num_tokens: int, shape: Shape, seed: int, device: str = "cpu") -> Tensor:
    """Distinct ids of each token, uniform: int32 [T, K]."""
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator(seed))
    return scores.topk(shape.top_k).indices.to(torch.int32).to(device)
