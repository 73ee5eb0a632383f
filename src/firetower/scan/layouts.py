"""Where the floats sit in a block of each storage type, and how large a value they can stand for.

Only these fields are read. That is exact: the codes of a block are small integers or table entries, so its
values are finite if and only if scale and min are, as long as ``scale * gain`` stays below the fp32 maximum,
3.4e38. An fp16 field cannot get there (65504 * 4096 = 2.7e8). An fp32 or E8M0 scale can, and is reported as
absurd from 1e6.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from firetower.core.formats import FORMATS

Keys = npt.NDArray[np.unsignedinteger]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One float of a block.

    Args:
        role: ``value``, ``scale`` or ``min``.
        offset: byte offset within the block.
        dtype: a float name of `core.records.DTYPE_BITS`.
        gain: the largest factor between this field and an element of the block.
        columns: (start, stop) of the elements it reaches, within the block; None for all.
        is_packed: the fp16 scale of IQ1_M, spread over the top nibbles of four 16-bit words.
    """

    role: str
    offset: int = 0
    dtype: str = "float16"
    gain: float = 1.0
    columns: tuple[int, int] | None = None
    is_packed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One storage type: ``block_elements`` elements in ``block_bytes`` bytes; no fields if it has no floats.

    ``code_bytes`` is the range of the codes where a zero cannot be told from the scale (E8M0 has no zero),
    ``code_mask`` the bits of a code byte that are all clear when its values are zero. ``is_narrow``: the
    quantiser fills the type's whole range on purpose.
    """

    name: str
    block_elements: int
    block_bytes: int
    fields: tuple[Field, ...] = ()
    code_bytes: tuple[int, int] | None = None
    code_mask: int = 0xFF
    is_narrow: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitTest:
    """Non-finite patterns seen with integers: ``bits & mask`` orders magnitudes, bad from ``bad_from`` on."""

    uint: str
    mask: int
    bad_from: int
    is_fnuz: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return int(self.uint[1:])


@lru_cache
def bit_test(dtype: str) -> BitTest:
    """The integer test for a float type of `core.formats.FORMATS`."""
    form = FORMATS[dtype]
    uint = f"u{form.num_bits // 8}"
    full = (1 << form.num_bits) - 1
    mask = full >> 1 if form.is_signed else full
    if form.has_inf:
        return BitTest(uint=uint, mask=mask, bad_from=form.infinity)
    if form.nan_patterns == (1 << (form.num_bits - 1),):
        return BitTest(uint=uint, mask=mask, bad_from=mask + 1, is_fnuz=True)
    return BitTest(uint=uint, mask=mask, bad_from=min(form.nan_patterns) & mask)


def field_bits(
    data: npt.NDArray[np.uint8], num_blocks: int, layout: Layout, field: Field, order: str
) -> Keys:
    """Raw bits of one field of every block.

    Args:
        data: uint8, shape (at least ``num_blocks * layout.block_bytes``,).
        order: byte order of the file, ``<`` or ``>``.

    Returns:
        Unsigned integers of the field's width, shape (num_blocks,); a view of ``data`` unless packed.
    """
    if field.is_packed:
        words = (_view(data, num_blocks, layout, field.offset + 2 * i, f"{order}u2") for i in range(4))
        parts = [(w & np.uint16(0xF000)) >> np.uint16(12 - 4 * i) for i, w in enumerate(words)]
        return np.asarray(parts[0] | parts[1] | parts[2] | parts[3], dtype=np.uint16)
    return _view(data, num_blocks, layout, field.offset, order + bit_test(field.dtype).uint)


def magnitude_keys(bits: Keys, dtype: str) -> Keys:
    """Integers that order as the magnitudes do; non-finite from ``bit_test(dtype).bad_from`` on."""
    test = bit_test(dtype)
    keys: Keys = np.bitwise_and(bits, np.array(test.mask, dtype=test.uint))
    if test.is_fnuz:
        keys[bits == test.bad_from] = test.bad_from
    return keys


def _view(data: npt.NDArray[np.uint8], num_blocks: int, layout: Layout, offset: int, dtype: str) -> Keys:
    return np.ndarray(
        (num_blocks,), dtype=dtype, buffer=data.data, offset=offset, strides=(layout.block_bytes,)
    )


def plain(name: str, dtype: str, *, is_narrow: bool = False) -> Layout:
    """Layout of a tensor of plain floats; ``is_narrow`` where the quantiser fills the type's range (fp8)."""
    size = bit_test(dtype).itemsize
    field = Field(role="value", dtype=dtype)
    return Layout(name=name, block_elements=1, block_bytes=size, fields=(field,), is_narrow=is_narrow)


def opaque(name: str, block_elements: int, block_bytes: int) -> Layout:
    """Layout of a type that has no NaN and no Inf: integers, booleans, fp4 and fp6 codes."""
    return Layout(name=name, block_elements=block_elements, block_bytes=block_bytes)
