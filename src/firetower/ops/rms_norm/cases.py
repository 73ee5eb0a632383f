"""Shapes, inputs and tolerances of the tests and the benchmark of `rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES: dict[str, tuple[int, ...]] = {
    "one token": (1, 2048),
    "odd width": (5, 63),
    "width 1": (3, 1),
    "heads": (3, 4, 128),
    "one row, no batch": (100,),
}

NUM_TOKENS = (1, 2, 63, 64, 65, 1000, 4097)

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-14,  # a sum of up to 16384 squares, each 1.1e-16
    torch.float32: 1e-6,  # 6e-8 for each of rsqrt (1e-7 on CUDA), two products, the gate's exp and the store
    torch.float16: 5e-4,  # one rounding at the store: at most 2^-11 in every element
    torch.bfloat16: 4e-3,  # the same, 2^-8
}
"""Frobenius error against float64 on the inputs as rounded."""


def generator(seed: int) -> torch.Generator:
    """Numbers that do not depend on the device."""
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Standard normal numbers, made on the CPU in float32 and rounded."""
    return torch.randn(shape, generator=generator(seed)).to(dtype).to(device)


def inputs(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden_states, residual, weight near 0, gate), of one type; the residual ten times larger, as in deep layers."""
    return (
        normal(shape, seed, dtype, device),
        normal(shape, seed + 1, dtype, device) * 10,
        normal(shape[-1:], seed + 2, dtype, device) * 0.2,
        normal(shape, seed + 3, dtype, device) * 3,
    )
