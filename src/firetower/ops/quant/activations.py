"""q8_1-like activations: int8 codes in blocks of 32, with an fp16 scale and sum that saturate and never overflow."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

BLOCK = 32
LARGEST = 65504.0
"""Largest fp16: where scale and sum stop."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Quantised activations of T tokens.

    Attributes:
        codes: int8 [T, K] in [-127, 127].
        scale: fp16 [T, K / 32]; NaN where the block has a NaN or Inf, and then its codes are 0.
        total: fp16 [T, K / 32]: ``scale * sum(codes)``, what a weight's minimum is multiplied with.
    """

    codes: Tensor
    scale: Tensor
    total: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[T, K]`` as the codes give them back."""
        blocks = in_blocks(self.codes).to(dtype)
        return (blocks * self.scale.to(dtype)[..., None]).flatten(-2)

    def saturated(self) -> tuple[Tensor, Tensor]:
        """How many blocks of each token stand at the largest fp16: int64 [T] of the scale and of the sum."""
        return (self.scale.abs() == LARGEST).sum(-1), (self.total.abs() == LARGEST).sum(-1)


def in_blocks(x: Tensor) -> Tensor:
    """``[T, K]`` as ``[T, K / 32, 32]``."""
    return x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)


def quantize(x: Tensor) -> Activations:
    """Quantise ``[T, K]``, K a multiple of 32; plain PyTorch."""
    blocks = in_blocks(x.float())
    largest = blocks.abs().amax(-1)
    is_bad = ~largest.isfinite()
    # by a tensor: CUDA turns a division by a number into a product with its rounded inverse
    scale = (largest / torch.full_like(largest, 127.0)).clamp_max(LARGEST).to(torch.float16)
    # by the scale as stored: what was lost in rounding it is not lost again
    wide = torch.where(is_bad | (scale == 0), 1.0, scale.float())
    codes = (blocks / wide[..., None]).round().clamp(-127, 127)
    codes = torch.where((is_bad | (scale == 0))[..., None], 0.0, codes).to(torch.int8)
    total = (codes.sum(-1, dtype=torch.int32) * scale.float()).clamp(-LARGEST, LARGEST).to(torch.float16)
    return Activations(
        codes=codes.flatten(-2),
        scale=torch.where(is_bad, torch.nan, scale),
        total=torch.where(is_bad, torch.nan, total),
    )
