"""The GGUF block formats that the ops read in place: sizes, and where a unit of 16 code bytes finds its activations."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One block format of ggml.

    Attributes:
        name: as in `gguf.GGMLQuantizationType`.
        block_elements: weights of a block.
        block_bytes: bytes of a block.
        group: weights that share a scale.
        has_minimum: whether a group of 32 has a minimum as well: ``weight = scale * code - minimum``.
    """

    name: str
    block_elements: int
    block_bytes: int
    group: int
    has_minimum: bool = False


KINDS: dict[str, Kind] = {
    k.name: k
    for k in (
        Kind(name="Q8_0", block_elements=32, block_bytes=34, group=32),
        Kind(name="Q4_1", block_elements=32, block_bytes=20, group=32, has_minimum=True),
        Kind(name="Q4_K", block_elements=256, block_bytes=144, group=32, has_minimum=True),
        Kind(name="Q5_K", block_elements=256, block_bytes=176, group=32, has_minimum=True),
        Kind(name="Q6_K", block_elements=256, block_bytes=210, group=16),
        Kind(name="IQ4_XS", block_elements=256, block_bytes=136, group=32),
    )
}

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_XS stand for."""


def kind_of(name: str) -> Kind:
    """The format of a name.

    Raises:
        ConfigError: one that is not read in place.
    """
    if name not in KINDS:
        raise ConfigError(
            f"kind={name}: must be one of {', '.join(KINDS)}; requantise the tensor or dequantise it first"
        )
    return KINDS[name]


def columns_of(raw: Tensor, kind: Kind) -> int:
    """Weights of a row, K, of raw blocks ``[rows, row_bytes]``.

    Raises:
        ConfigError: raw that is not whole blocks as they stand in the file.
    """
    row_bytes = raw.shape[-1] if raw.ndim == 2 else 0
    if raw.dtype is not torch.uint8 or row_bytes == 0 or row_bytes % kind.block_bytes or not raw.is_contiguous():
        raise ConfigError(
            f"raw: {raw.dtype} {list(raw.shape)}: must be contiguous uint8 [rows, n * {kind.block_bytes}] for "
            f"{kind.name}, the bytes of the file"
        )
    if raw.storage_offset() % 4:
        raise ConfigError(
            f"raw: starts at byte {raw.storage_offset()} of its storage: must be a multiple of 4; clone it"
        )
    return row_bytes // kind.block_bytes * kind.block_elements
