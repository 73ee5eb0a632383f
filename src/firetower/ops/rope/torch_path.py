"""RoPE in PyTorch: the CPU path, and what a CUDA device without Triton runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firetower.ops.rope.table import LOW, RopeTable
from firetower.sensors.marks import Mark, mark_rows


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: RopeTable,
    q_out: Tensor,
    k_out: Tensor,
    *,
    mark_q: Mark | None,
    mark_k: Mark | None,
) -> None:
    """Write ``q_out`` and ``k_out``; arguments as `firetower.ops.rope.rope` has them."""
    cos, sin = cos_sin(positions, table)
    is_pad = (positions < 0)[:, None, None]
    for x, out, mark in ((q, q_out, mark_q), (k, k_out, mark_k)):
        out.copy_(_rotated(x, cos, sin, is_pad))
        mark_rows(out, mark)


def cos_sin(positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """float32 [T, rotary_dim / 2] each; NaN beyond the table, anything for a pad."""
    is_beyond = (positions >= table.num_positions)[:, None]
    inside = positions.clamp(0, table.num_positions - 1).long()
    low_cos, low_sin = table.low[inside % LOW].unbind(1)
    high_cos, high_sin = table.high[inside // LOW].unbind(1)
    cos = high_cos * low_cos - high_sin * low_sin
    sin = high_sin * low_cos + high_cos * low_sin
    return cos.masked_fill(is_beyond, math.nan), sin.masked_fill(is_beyond, math.nan)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_pad: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((torch.where(is_pad, x[..., : 2 * half], turned), x[..., 2 * half :]), dim=-1)
