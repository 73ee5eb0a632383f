"""Shapes, inputs and tolerances for the dense projection."""

from __future__ import annotations

import torch
from torch import Tensor

Q36_SHAPE = (12288, 2048)
"""[N, K] of the widest projection of a 2048-wide hybrid model: that of the issue's figure."""

SHAPES = ((37, 100), (130, 65), (1, 1), (512, 256), (64, 640))
"""[N, K]: odd, one element, aligned, and one whose K is split by the kernel."""

RTOL = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Frobenius error against float64 of the same inputs. Sums are in float32, so the store's rounding rules 16-bit types:
half an ulp is 4.9e-4 in float16 and 3.9e-3 in bfloat16; twice that, and 16 half ulps of float32, are allowed."""


def make(num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """(hidden_states [T, K], weight [N, K], bias [N]) of outputs near 1."""
    n, k = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, k, generator=generator)
    w = torch.randn(n, k, generator=generator) * k**-0.5
    b = torch.randn(n, generator=generator)
    return tuple(t.to(device=device, dtype=dtype) for t in (x, w, b))
