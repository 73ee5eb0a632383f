"""Panel words: one int64 that says where a signal was first bad, and with which bits.

A *signal word* is `NOT_RUN`, `CLEAN`, or ``flat_index << 32 | low``: high half the flat row-major index (31
bits) of the first bad element, low half its raw bits. The smallest word is the first position, so that one
``atomic_min`` on the device gives position and bits together, whatever the order of threads; both sentinels
are larger than any position. The word does not name its type: the signal's declaration does, and
`unpack_word` is told it. 16- and 8-bit patterns sit in the low bits. A float64 keeps its high 32 bits
(`high_half`), enough for sign, class and the top 20 payload bits.

A *row word* is ``execution_index << 32 | column`` of the row's first bad signal, with the same sentinels.
"""

from __future__ import annotations

import dataclasses

from firetower.core.errors import BitsError
from firetower.core.formats import classify, find_format
from firetower.core.records import Kind, Status

NOT_RUN = 2**63 - 1
"""The signal did not run in this step; what a reset writes."""

CLEAN = 2**63 - 2
"""The signal ran and every element it checked was legal."""

MAX_INDEX = 2**31 - 2
"""Largest index a word can hold: the next one would collide with the sentinels."""

MAX_ELEMENTS = MAX_INDEX + 1
"""Most elements of one signal; a larger tensor is split by rows, or refused when it is declared."""

_LOW = 0xFFFF_FFFF
_FLOAT64_HIGH_MANTISSA = 0x000F_FFFF
_FLOAT64_HIGH_INFINITY = 0x7FF0_0000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalWord:
    """A signal word taken apart; ``flat_index``, ``bits`` and ``kind`` are None unless ``status`` is bad.

    ``bits`` has the width of the signal's type; for float64 the low 32 bits are unknown and given as zero.
    """

    status: Status
    flat_index: int | None = None
    bits: int | None = None
    kind: Kind | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowWord:
    """A row word taken apart; both numbers are None unless ``status`` is bad."""

    status: Status
    execution_index: int | None = None
    column: int | None = None


def pack(index: int, low: int) -> int:
    """Join the halves of any word; `pack_word` and `pack_row_word` check what the halves mean.

    Raises:
        BitsError: ``index`` over `MAX_INDEX`, or ``low`` over 32 bits.
    """
    if not 0 <= index <= MAX_INDEX:
        raise BitsError(f"index={index}: must be from 0 to {MAX_INDEX}; split the tensor by rows")
    if not 0 <= low <= _LOW:
        raise BitsError(f"low={low}: must fit 32 bits")
    return index << 32 | low


def pack_word(flat_index: int, bits: int, dtype: str = "float32") -> int:
    """Make the word of a bad element.

    Args:
        flat_index: row-major index into the tensor as stored, at most `MAX_INDEX`.
        bits: raw pattern in the width of ``dtype``.
        dtype: type of the signal; only float64 is packed differently (its high half).

    Raises:
        BitsError: an index or a pattern that does not fit.
    """
    low = high_half(bits) if dtype == "float64" else bits
    if not 0 <= low < 1 << min(32, find_format(dtype).num_bits):
        raise BitsError(f"bits={bits:#x}: must fit {dtype}")
    return pack(flat_index, low)


def unpack_word(word: int, dtype: str = "float32") -> SignalWord:
    """Take a signal word apart.

    Raises:
        BitsError: not a word: negative, over 63 bits, or bits wider than ``dtype``.
    """
    status = _status(word)
    if status is not Status.BAD:
        return SignalWord(status=status)
    bits = word & _LOW
    if dtype == "float64":
        bits <<= 32
    return SignalWord(status=status, flat_index=word >> 32, bits=bits, kind=classify(bits, dtype))


def pack_row_word(execution_index: int, column: int) -> int:
    """Make the word of a burned row: the execution index of its first bad signal, and the column there.

    Raises:
        BitsError: an index over `MAX_INDEX` or a column over 32 bits.
    """
    return pack(execution_index, column)


def unpack_row_word(word: int) -> RowWord:
    """Take a row word apart.

    Raises:
        BitsError: not a word: negative or over 63 bits.
    """
    status = _status(word)
    if status is not Status.BAD:
        return RowWord(status=status)
    return RowWord(status=status, execution_index=word >> 32, column=word & _LOW)


def high_half(bits: int) -> int:
    """High 32 bits of a float64, its class kept.

    A NaN whose payload lies in the low half alone would read as Inf: its lowest kept bit is set, which marks
    "there was more below".

    Raises:
        BitsError: bits that do not fit 64.
    """
    if not 0 <= bits < 1 << 64:
        raise BitsError(f"bits={bits:#x}: must fit float64")
    high = bits >> 32
    is_special = high & _FLOAT64_HIGH_INFINITY == _FLOAT64_HIGH_INFINITY
    if is_special and not high & _FLOAT64_HIGH_MANTISSA and bits & _LOW:
        return high | 1
    return high


def _status(word: int) -> Status:
    if word == NOT_RUN:
        return Status.NOT_COVERED
    if word == CLEAN:
        return Status.CLEAN
    if not 0 <= word < (MAX_INDEX + 1) << 32:
        raise BitsError(f"word={word}: is no panel word; must be from 0 to {CLEAN} or {NOT_RUN}")
    return Status.BAD
