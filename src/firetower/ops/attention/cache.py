"""`PagedKV`: the pages that hold keys and values, in a float type or in 8 bits with one scale a token and head."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.core.errors import ConfigError

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest magnitude that a quantised element holds."""

SMALLEST_SCALE = {torch.float16: 2.0**-24, torch.float32: 2.0**-126}
"""Least scale that is stored, so that no row divides by zero: what a row of zeros has."""

LARGEST_SCALE = {torch.float16: 65504.0, torch.float32: torch.finfo(torch.float32).max}
"""A scale saturates here; the row's elements then saturate too, and stay finite."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values of one layer.

    Attributes:
        key: [num_pages, page_size, num_kv_heads, head_dim], float16, bfloat16, float32, int8 or float8_e4m3fn. Any
            strides but the last, so that it can be a view of a pool that interleaves keys and values.
        value: likewise, with the strides of ``key``.
        key_scale: [num_pages, page_size, num_kv_heads], float16 or float32; what stands for an element is
            ``key * key_scale``. Given for the 8-bit types alone. NaN says that what was written was not finite.
        value_scale: likewise, with the strides of ``key_scale``.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.key.ndim != 4 or self.key.shape != self.value.shape or self.key.dtype != self.value.dtype:
            raise ConfigError(
                f"key={tuple(self.key.shape)} {self.key.dtype}, value={tuple(self.value.shape)} {self.value.dtype}: "
                f"must be alike, [num_pages, page_size, num_kv_heads, head_dim]"
            )
        if self.key.stride(-1) != 1 or self.key.stride() != self.value.stride():
            raise ConfigError(
                f"strides: {self.key.stride()} of key, {self.value.stride()} of value: must be equal, head_dim "
                f"contiguous; lay both pools out alike"
            )
        if not self.key.is_floating_point() and not self.is_quantised:
            raise ConfigError(f"key of {self.key.dtype}: must be a float type or one of {sorted(map(str, LARGEST))}")
        for name, scale in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            self._check_scale(name, scale)
        if self.key_scale is not None and self.value_scale is not None:
            self._check_alike(self.key_scale, self.value_scale)

    def _check_scale(self, name: str, scale: Tensor | None) -> None:
        if (scale is not None) != self.is_quantised:
            needed = "needs" if self.is_quantised else "has no"
            raise ConfigError(f"{name}: {self.key.dtype} {needed} scales; make the cache with new_kv()")
        if scale is not None and (scale.shape != self.key.shape[:3] or scale.dtype not in SMALLEST_SCALE):
            raise ConfigError(
                f"{name}={tuple(scale.shape)} {scale.dtype}: must be {tuple(self.key.shape[:3])}, float16 or float32"
            )

    def _check_alike(self, key_scale: Tensor, value_scale: Tensor) -> None:
        if key_scale.dtype != value_scale.dtype or key_scale.stride() != value_scale.stride():
            raise ConfigError("key_scale, value_scale: must have equal types and strides; make the cache with new_kv()")

    @property
    def is_quantised(self) -> bool:
        """Whether elements are 8 bits wide and have scales."""
        return self.key.dtype in LARGEST

    @property
    def num_slots(self) -> int:
        """Tokens that the pages hold; slot ``s`` is token ``s % page_size`` of page ``s // page_size``."""
        return self.key.shape[0] * self.key.shape[1]


def new_kv(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scale_dtype: torch.dtype = torch.float32,
) -> PagedKV:
    """Pages with nothing written in them; nothing that is not written is ever read.

    Args:
        num_pages: pages of the pool.
        page_size: tokens a page.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: of the elements, as `PagedKV` lists them.
        device: where.
        scale_dtype: of the scales of 8-bit types.
    """
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    if dtype not in LARGEST:
        return PagedKV(key=key, value=value)
    scales = [torch.empty(shape[:3], dtype=scale_dtype, device=device) for _ in range(2)]
    return PagedKV(key=key, value=value, key_scale=scales[0], value_scale=scales[1])
