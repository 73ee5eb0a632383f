"""Shapes, inputs and tolerances of the tests and the benchmark of `causal_conv1d`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

NUM_TOKENS = (1, 2, 63, 64, 65, 1000, 4097)

LENGTHS: dict[str, tuple[int, ...]] = {
    "one": (9,),
    "ragged": (5, 1, 2, 40, 3),
    "empty ones": (0, 4, 0, 0, 33, 0),
}

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,  # K products and sums, 6e-8 each, and the exp of the activation
    torch.float16: 5e-4,  # one rounding at the store, 2^-11
    torch.bfloat16: 4e-3,  # the same, 2^-8
}
"""Frobenius error against float64 on the inputs as rounded."""


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Standard normal numbers, made on the CPU in float32 and rounded."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def parameters(
    channels: int, taps: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(weight [channels, taps], bias [channels])."""
    return normal((channels, taps), seed, dtype, device) * 0.5, normal((channels,), seed + 1, dtype, device) * 0.5


def cu_seqlens(lengths: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """[N + 1] from N lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)
