"""Quantised projections and caches, with the fields that they store: planted in hosts in place of a projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firetower.drills.arrays import to_array
from firetower.lab.subject import Quantised

BLOCK = 32


class BlockProduct:
    """Product of 4-bit-like weights with a minimum a block, and activations in blocks of 32 with scale and sum.

    As Q4_1 by Q8_1: ``y = (w - min) x + min sum(x)``. The fields are stored in ``field_dtype``.
    """

    def __init__(self, projection: Any, field_dtype: torch.dtype) -> None:
        self.projection, self.field_dtype = projection, field_dtype
        self.stored: Quantised | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.flatten(0, -2)
        blocks = rows.float().reshape(len(rows), -1, BLOCK)  # [rows, blocks, 32]
        wide_scale, wide_sum = blocks.abs().amax(-1) / 127, blocks.sum(-1)
        scale, total = wide_scale.to(self.field_dtype), wide_sum.to(self.field_dtype)
        codes = torch.round(blocks / wide_scale.clamp(min=1e-30).unsqueeze(-1))
        restored = (codes * scale.float().unsqueeze(-1)).flatten(-2)
        weight = self.projection.weight.float().reshape(self.projection.out_features, -1, BLOCK)  # [out, blocks, 32]
        minimum = weight.amin(-1).clamp(max=0)
        rest = (weight - minimum.unsqueeze(-1)).flatten(-2)
        y = F.linear(restored, rest) + F.linear(total.float(), minimum)
        self.stored = Quantised(
            name="activations",
            sink="activation",
            block_size=BLOCK,
            fields=(to_array("scale", scale), to_array("sum", total)),
            wide_fields=(to_array("scale", wide_scale), to_array("sum", wide_sum)),
            original=to_array("x", rows),
            max_code=127.0,
        )
        return y.reshape(*x.shape[:-1], -1).to(x.dtype)


class CacheWrite:
    """A projection whose first ``width`` channels go to an int8 cache, one scale a token, stored in fp16."""

    def __init__(self, projection: Any, width: int, field_dtype: torch.dtype) -> None:
        self.projection, self.width, self.field_dtype = projection, width, field_dtype
        self.native = projection.forward
        self.stored: Quantised | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], the first channels as the cache gives them back."""
        y: Tensor = self.native(x)
        group = y.flatten(0, -2)[:, : self.width].float()
        wide = group.abs().amax(-1) / 127
        scale = wide.to(self.field_dtype)
        codes = torch.round(group / scale.float().unsqueeze(-1))
        restored = codes * scale.float().unsqueeze(-1)
        self.stored = Quantised(
            name="the cache of values",
            sink="kv",
            block_size=self.width,
            fields=(to_array("scale", scale),),
            wide_fields=(to_array("scale", wide),),
            original=to_array("v", group),
            first_position=0,
            max_code=127.0,
        )
        back = torch.cat((restored, y.flatten(0, -2)[:, self.width :].float()), dim=-1)
        return back.reshape(y.shape).to(y.dtype)


class StaticScale:
    """A projection whose result goes to an FP8 cache under a scale fixed beforehand: what does not fit saturates."""

    MAX_CODE = 448.0

    def __init__(self, projection: Any, largest: float) -> None:
        self.projection, self.native = projection, projection.forward
        self.scale = largest / self.MAX_CODE
        self.stored: Quantised | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] as the cache gives it back."""
        y: Tensor = self.native(x)
        codes = (y.float() / self.scale).clamp(-self.MAX_CODE, self.MAX_CODE).to(torch.float8_e4m3fn)
        restored = codes.float() * self.scale
        self.stored = Quantised(
            name="the cache of values",
            sink="kv",
            block_size=y.numel(),
            fields=(to_array("scale", torch.tensor([self.scale])),),
            original=to_array("v", y),
            restored=to_array("v", restored),
            max_code=self.MAX_CODE,
            is_static=True,
        )
        return restored.to(y.dtype)


def toward(weight: Tensor, target: Tensor, height: float) -> None:
    """Make rows of a weight answer ``height`` for the input ``target``, and little else for others."""
    weight.copy_((height * target / (target @ target)).to(weight.dtype).expand_as(weight))
