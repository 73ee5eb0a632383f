"""Block formats in plain PyTorch: codes and scales apart, dequantised tiles, row-invariant products; no host sync."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from firetower.ops.quant import activations
from firetower.ops.quant.activations import BLOCK, Activations
from firetower.ops.quant.kinds import IQ4_VALUES, Kind
from firetower.sensors.marks import Mark, mark_rows

TILE_ROWS = 512
"""Weight rows that are dequantised at a time; fixed, so that no product's shape depends on the number of tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Weights taken apart: ``scale * code - minimum``.

    Attributes:
        codes: int8 [rows, K].
        scale: [rows, K / group]; exact in fp32: an fp16 times an integer below 128.
        minimum: [rows, K / 32] or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None


def unpack(raw: Tensor, kind: Kind, dtype: torch.dtype = torch.float32) -> Parts:
    """Take raw blocks uint8 ``[rows, row_bytes]`` apart; scales in ``dtype``, fp32 or fp64."""
    blocks = raw.view(len(raw), -1, kind.block_bytes)
    codes, scale, minimum = _UNPACK[kind.name](blocks, dtype)
    return Parts(
        codes=codes.reshape(len(raw), -1),
        scale=scale.reshape(len(raw), -1),
        minimum=None if minimum is None else minimum.reshape(len(raw), -1),
    )


def dequantize(raw: Tensor, kind: Kind, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[rows, K]`` of raw blocks, computed in ``dtype``, fp32 or fp64; fp32 has the bits of the `gguf` package."""
    parts = unpack(raw, kind, dtype)
    rows, groups = parts.scale.shape
    weights = parts.codes.view(rows, groups, -1).to(dtype) * parts.scale[..., None]
    if parts.minimum is not None:
        weights = weights - parts.minimum[..., None]
    return weights.view(rows, -1)


Unpacked = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """The fp16 field at a byte offset of each block: [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).to(dtype)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _nibbles(x: Tensor, run: int) -> Tensor:
    """Codes of bytes [rows, blocks, n]: each run of ``run`` bytes gives its low nibbles, then its high ones."""
    runs = _split(x, x.shape[-1] // run, run)
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _q8_0(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0, dtype), None


def _q4_1(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    return _nibbles(blocks[..., 4:], 16).view(torch.int8), _half(blocks, 0, dtype), -_half(blocks, 2, dtype)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Sub-scales and sub-minima uint8 [..., 8] of the 12 bytes of a K block."""
    scale, minimum, rest = _split(packed, 3, 4).unbind(-2)
    sub_scale = torch.cat((scale & 63, (rest & 15) | (scale >> 2 & 48)), -1)
    return sub_scale, torch.cat((minimum & 63, (rest >> 4) | (minimum >> 2 & 48)), -1)


def _k_scales(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sub_scale, sub_minimum = _six_bits(blocks[..., 4:16])
    return _half(blocks, 0, dtype) * sub_scale, _half(blocks, 2, dtype) * sub_minimum


def _q4_k(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    return _nibbles(blocks[..., 16:], 32).view(torch.int8), *_k_scales(blocks, dtype)


def _q5_k(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    shift = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., None, 16:48] >> shift & 1).flatten(-2)
    return (_nibbles(blocks[..., 48:], 32) | high << 4).view(torch.int8), *_k_scales(blocks, dtype)


def _q6_k(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shift & 3).flatten(-3)
    codes = (_nibbles(blocks[..., :128], 64) | high << 4).view(torch.int8) - 32
    return codes, _half(blocks, 208, dtype) * blocks[..., 192:208].view(torch.int8), None


def _iq4_xs(blocks: Tensor, dtype: torch.dtype) -> Unpacked:
    low = _nibbles(blocks[..., 4:8], 1)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4, None] >> shift & 3).flatten(-2)
    sub_scale = (low | high << 4).view(torch.int8) - 32
    codes = iq4_values(blocks.device)[_nibbles(blocks[..., 8:], 16).int()]
    return codes, _half(blocks, 0, dtype) * sub_scale, None


_UNPACK: dict[str, Callable[[Tensor, torch.dtype], Unpacked]] = {
    "Q8_0": _q8_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip


@functools.cache
def iq4_values(device: torch.device) -> Tensor:
    """int8 [16], made once a device: a copy from the host is no part of a captured graph."""
    return torch.tensor(IQ4_VALUES, dtype=torch.int8, device=device)


def _tiles(raw: Tensor) -> Iterator[slice]:
    return (slice(at, min(at + TILE_ROWS, len(raw))) for at in range(0, len(raw), TILE_ROWS))


def linear(x: Tensor, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows] = x [T, K] W^T``, token by token, so that a token's bits do not depend on the others."""
    wide = x.float()
    for tile in _tiles(raw):
        weights = dequantize(raw[tile], kind)
        for token in range(len(x)):
            y[token, tile] = torch.mv(weights, wide[token])
    mark_rows(y, mark)


def prompt(x: Tensor, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """As `linear` by a matrix product of the library: fast for many tokens, its bits depend on how many."""
    wide = x.float() if x.device.type == "cpu" else x
    for tile in _tiles(raw):
        y[:, tile] = wide @ dequantize(raw[tile], kind).to(wide.dtype).T
    mark_rows(y, mark)


def linear_q8_1(x: Activations, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows]`` of quantised activations: integer products of each group, exact in any order, then scales.

    A weight format with minima takes ``minimum * total``, as ggml does: a total that saturated is felt there.
    """
    tokens = len(x.codes)
    for tile in _tiles(raw):
        parts = unpack(raw[tile], kind)
        rows, groups = parts.scale.shape
        width = parts.codes.shape[1] // groups
        codes = x.codes.view(tokens, groups, width).float().transpose(0, 1)
        # integers below 2**24: exact in fp32 whatever the order
        products = (codes @ parts.codes.view(rows, groups, width).float().permute(1, 2, 0)).permute(1, 2, 0)
        scale = x.scale.float().repeat_interleave(BLOCK // width, dim=-1)
        for token in range(tokens):
            total = (products[token].contiguous() * parts.scale * scale[token]).sum(-1)
            if parts.minimum is not None:
                total = total - (parts.minimum * x.total[token].float()).sum(-1)
            y[token, tile] = total
    mark_rows(y, mark)


def quantize(x: Tensor, mark: Mark | None) -> Activations:
    """`activations.quantize`; marks the scales as stored."""
    found = activations.quantize(x)
    mark_rows(found.scale, mark)
    return found
