"""Shapes, inputs and tolerances for attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.ops.attention import PagedKV, new_kv, write_kv
from firetower.ops.attention.splits import Splits

RTOL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Frobenius error against float64 of the same inputs. In 16 bits the weights are rounded before they meet the values
and the answer at the store: two roundings of half an ulp (4.9e-4, 3.9e-3), times 1.5. In float32 a sum of some hundred
terms and the exponential, 2 ulp each."""

QUANTISED_RTOL = {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}
"""Frobenius error of what is read against what was written, normal data. int8: a step of amax / 127 is uniform over
+-half of itself, near 3 sigma / 127 / 12^0.5 = 0.7%; e4m3: 3 bits of fraction, 2^-4 / 3^0.5 at most 3.6% in each
element. Head-room for keys and values together."""


SMALL_SPLITS = Splits(unit_tokens=32, units_per_split=2, max_units=1)
"""Units and splits within 200 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a window: N, W, H, Hkv, D, tokens a page."""

    num_sequences: int = 2
    width: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16


Q36 = Shape(num_sequences=2, width=5, num_heads=16, num_kv_heads=2, head_dim=256, page_size=64)
"""Attention of the 35B hybrid model of the issue's figures."""

SHAPES = (
    Shape(),
    Shape(width=1, num_heads=3, num_kv_heads=1, head_dim=24, page_size=5),
    Shape(num_sequences=1, width=8, num_heads=2, num_kv_heads=1, head_dim=8, page_size=32),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Inputs of one window, its pages filled, everything that is not its own NaN."""

    query: Tensor
    kv: PagedKV
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    gate: Tensor
    scale: float
    key: Tensor
    value: Tensor


def make_window(
    shape: Shape,
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    kv_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_pages: int = 2,
) -> Window:
    """A window of sequences of the given lengths on pages in random order.

    Where a sequence is shorter than the window its first tokens are pads. ``key`` and ``value`` are what was written,
    [N, longest, Hkv, D]. Page entries beyond a length are ``2**30``: reading one shows.
    """
    g = torch.Generator().manual_seed(seed)
    n, longest = shape.num_sequences, max(*lengths, 1)
    per_row = -(-longest // shape.page_size)
    table = torch.randperm(n * per_row + spare_pages, generator=g)[: n * per_row].view(n, per_row)
    kv = new_kv(
        n * per_row + spare_pages, shape.page_size, shape.num_kv_heads, shape.head_dim, kv_dtype or dtype, device,
        scale_dtype,
    )  # fmt: skip
    fill(kv, float("nan"))
    dims = (n, longest, shape.num_kv_heads, shape.head_dim)
    key, value = (torch.randn(dims, generator=g).to(device=device, dtype=dtype) for _ in range(2))
    at = torch.arange(longest)
    slots = table[:, at // shape.page_size] * shape.page_size + at % shape.page_size
    is_used = at < torch.tensor(lengths)[:, None]
    write_kv(key, value, kv, torch.where(is_used, slots, -1).to(device))
    block_table = table.masked_fill(torch.arange(per_row) * shape.page_size >= torch.tensor(lengths)[:, None], 2**30)
    position = torch.tensor(lengths)[:, None] - shape.width + torch.arange(shape.width)
    mapping = torch.where(position >= 0, slots.gather(1, position.clamp_min(0)), -1)
    rows = (n, shape.width, shape.num_heads, shape.head_dim)
    query, gate = (torch.randn(rows, generator=g).to(device=device, dtype=dtype) for _ in range(2))
    return Window(
        query=query,
        kv=kv,
        block_table=block_table.int().to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        slot_mapping=mapping.to(device),
        gate=gate,
        scale=shape.head_dim**-0.5,
        key=key,
        value=value,
    )


def fill(kv: PagedKV, value: float) -> None:
    """Every element of the pages; of 8-bit pages every byte 0x7F, and ``value`` in the scales."""
    for x in (kv.key, kv.value):
        if x.itemsize == 1:
            x.view(torch.uint8).fill_(0x7F)
        else:
            x.fill_(value)
    for scale in (kv.key_scale, kv.value_scale):
        if scale is not None:
            scale.fill_(value)


def make_prefill(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int], Tensor]:
    """(query [T, H, D], key [Tk, Hkv, D], value, cu_seqlens_q, cu_seqlens_k, gate)."""
    g = torch.Generator().manual_seed(seed)
    bounds = []
    for lengths in (lengths_q, lengths_k):
        bounds.append([0, *torch.tensor(lengths).cumsum(0).tolist()])
    shapes = (
        (bounds[0][-1], num_heads, head_dim),
        (bounds[1][-1], num_kv_heads, head_dim),
        (bounds[1][-1], num_kv_heads, head_dim),
        (bounds[0][-1], num_heads, head_dim),
    )
    q, k, v, gate = (torch.randn(s, generator=g).to(device=device, dtype=dtype) for s in shapes)
    return q, k, v, bounds[0], bounds[1], gate
