"""RoPE element by element, with Python's own cosine and sine of float64 angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, frequencies: Tensor, attention_factor: float = 1.0) -> Tensor:
    """Rotate one tensor.

    Args:
        x: [T, heads, head_dim]; positions: int [T], negative for a pad.
        frequencies: float64 [rotary_dim / 2]; attention_factor: of cosine and sine.

    Returns:
        float64 [T, heads, head_dim].
    """
    y = x.double().clone()
    half = frequencies.numel()
    for t, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        for i, frequency in enumerate(frequencies.tolist()):
            cos = math.cos(position * frequency) * attention_factor
            sin = math.sin(position * frequency) * attention_factor
            first, second = x[t, :, i].double(), x[t, :, i + half].double()
            y[t, :, i] = first * cos - second * sin
            y[t, :, i + half] = second * cos + first * sin
    return y


def cos_sin(position: int, frequencies: Tensor) -> Tensor:
    """float64 [2, pairs]: cosines and sines of one position."""
    angles = [position * f for f in frequencies.tolist()]
    return torch.tensor([[math.cos(a) for a in angles], [math.sin(a) for a in angles]], dtype=torch.float64)
