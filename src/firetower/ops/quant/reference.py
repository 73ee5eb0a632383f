"""Block formats element by element, in Python numbers: the oracle of the tests."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from firetower.ops.quant.kinds import IQ4_VALUES, Kind


def _halves(block: bytes, at: int, num: int) -> list[float]:
    return list(struct.unpack_from(f"<{num}e", block, at))


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _six_bits(packed: bytes, i: int) -> tuple[int, int]:
    """Sub-scale and sub-minimum ``i`` of the 12 bytes of a K block."""
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    return packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4


def _q8_0(b: bytes) -> list[float]:
    [d] = _halves(b, 0, 1)
    return [d * _signed(q) for q in b[2:]]


def _q4_1(b: bytes) -> list[float]:
    d, m = _halves(b, 0, 2)
    return [d * (b[4 + i % 16] >> 4 * (i // 16) & 15) + m for i in range(32)]


def _k(b: bytes, code: list[int]) -> list[float]:
    d, dmin = _halves(b, 0, 2)
    subs = [_six_bits(b[4:16], i) for i in range(8)]
    return [d * subs[i // 32][0] * q - dmin * subs[i // 32][1] for i, q in enumerate(code)]


def _q4_k(b: bytes) -> list[float]:
    return _k(b, [b[16 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15 for i in range(256)])


def _q5_k(b: bytes) -> list[float]:
    low = [b[48 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15 for i in range(256)]
    return _k(b, [low[i] | (b[16 + i % 32] >> i // 32 & 1) << 4 for i in range(256)])


def _q6_k(b: bytes) -> list[float]:
    [d] = _halves(b, 208, 1)
    weights = []
    for i in range(256):
        half, quarter, place = i // 128, i // 32 % 4, i % 32
        low = b[64 * half + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        high = b[128 + 32 * half + place] >> 2 * quarter & 3
        weights.append(d * _signed(b[192 + i // 16]) * ((low | high << 4) - 32))
    return weights


def _iq4_xs(b: bytes) -> list[float]:
    [d] = _halves(b, 0, 1)
    weights = []
    for i in range(256):
        sub, place = i // 32, i % 32
        scale = (b[4 + sub // 2] >> 4 * (sub % 2) & 15 | (b[2 + sub // 4] >> 2 * (sub % 4) & 3) << 4) - 32
        weights.append(d * scale * IQ4_VALUES[b[8 + 16 * sub + place % 16] >> 4 * (place // 16) & 15])
    return weights


_BLOCKS = {"Q8_0": _q8_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs}


def dequantize(raw: Tensor, kind: Kind) -> Tensor:
    """fp64 ``[rows, K]`` of raw blocks uint8 ``[rows, row_bytes]``."""
    rows = []
    for row in raw.cpu():
        data = bytes(row.tolist())
        blocks = (data[at : at + kind.block_bytes] for at in range(0, len(data), kind.block_bytes))
        rows.append([w for block in blocks for w in _BLOCKS[kind.name](block)])
    return torch.tensor(rows, dtype=torch.float64)


def linear(x: Tensor, raw: Tensor, kind: Kind) -> Tensor:
    """fp64 ``[T, rows]``: ``x [T, K]`` times the transposed weights."""
    return x.double().cpu() @ dequantize(raw, kind).T
