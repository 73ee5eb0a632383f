"""Float formats down to the bit: class and value of a pattern, for every type a record may name.

Pure integer arithmetic on bit patterns, no numpy: what it says of a pattern does not depend on the machine it
runs on. Sources: IEEE 754-2019 for the 16-, 32- and 64-bit types; the OCP OFP8 and MX specifications for
``float8_e4m3fn``, ``float8_e5m2`` and ``float8_e8m0fnu``; "8-bit numerical formats for deep neural networks"
(arXiv 2206.02915) for the ``fnuz`` ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from typing import NamedTuple

from firetower.core.errors import BitsError
from firetower.core.records import DTYPE_BITS, Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """Layout of one float type: sign bit on top (unless ``is_signed`` is False), exponent, mantissa.

    ``has_inf``: the top exponent is kept for Inf and NaN, as in IEEE 754. Otherwise ``nan_patterns`` lists
    the few patterns that are NaN and every other one is finite.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool = True
    is_signed: bool = True
    has_subnormals: bool = True
    nan_patterns: tuple[int, ...] = ()

    @property
    def num_bits(self) -> int:
        """Width of the type."""
        return self.is_signed + self.exponent_bits + self.mantissa_bits

    @property
    def quiet_bit(self) -> int:
        """The mantissa bit that makes a NaN quiet, not signalling; 0 where the type knows no difference."""
        return 1 << (self.mantissa_bits - 1) if self.has_inf else 0

    @property
    def infinity(self) -> int:
        """Pattern of +Inf; only meaningful when ``has_inf``."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def maximum(self) -> float:
        """Largest finite value."""
        top = self.infinity - 1 if self.has_inf else (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        while top in self.nan_patterns:
            top -= 1
        return decode(top, self.name)


FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat(name="float64", exponent_bits=11, mantissa_bits=52, bias=1023),
        FloatFormat(name="float32", exponent_bits=8, mantissa_bits=23, bias=127),
        FloatFormat(name="float16", exponent_bits=5, mantissa_bits=10, bias=15),
        FloatFormat(name="bfloat16", exponent_bits=8, mantissa_bits=7, bias=127),
        FloatFormat(name="float8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15),
        FloatFormat(
            name="float8_e4m3fn",
            exponent_bits=4,
            mantissa_bits=3,
            bias=7,
            has_inf=False,
            nan_patterns=(0x7F, 0xFF),
        ),
        FloatFormat(
            name="float8_e4m3fnuz",
            exponent_bits=4,
            mantissa_bits=3,
            bias=8,
            has_inf=False,
            nan_patterns=(0x80,),
        ),
        FloatFormat(
            name="float8_e5m2fnuz",
            exponent_bits=5,
            mantissa_bits=2,
            bias=16,
            has_inf=False,
            nan_patterns=(0x80,),
        ),
        FloatFormat(
            name="float8_e8m0fnu",
            exponent_bits=8,
            mantissa_bits=0,
            bias=127,
            has_inf=False,
            is_signed=False,
            has_subnormals=False,
            nan_patterns=(0xFF,),
        ),
    )
}
"""Every type of `DTYPE_BITS`, by name."""

ALIASES: dict[str, str] = {
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
    "e8m0fnu": "float8_e8m0fnu",
}
"""Short names that people type, to the names that records hold."""


class Pattern(NamedTuple):
    """Bits as written by a person: the number, and how many bits the digits stood for."""

    bits: int
    num_bits: int


def find_format(dtype: str) -> FloatFormat:
    """Look a type up by its record name, a short name (``bf16``) or with a ``torch.`` in front.

    Raises:
        BitsError: a type that is not known.
    """
    name = dtype.removeprefix("torch.").lower()
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        raise BitsError(f"dtype={dtype!r}: must be one of {', '.join(FORMATS)}") from None


def parse_bits(text: str) -> Pattern:
    """Read hexadecimal digits: ``7fd6e000``, ``0x7FD6E000``, ``0x7fd6_e000``.

    Raises:
        BitsError: not hexadecimal, or more than 64 bits.
    """
    digits = text.strip().lower().removeprefix("0x").replace("_", "")
    if not re.fullmatch(r"[0-9a-f]+", digits):
        raise BitsError(f"bits={text!r}: must be hexadecimal digits such as 7fd6e000 or 0x7fff")
    if len(digits) > 16:
        raise BitsError(
            f"bits={text!r}: has {len(digits)} digits, at most 16 (64 bits); give one value at a time"
        )
    return Pattern(int(digits, 16), 4 * len(digits))


def classify(bits: int, dtype: str) -> Kind | None:
    """Class of a pattern of ``dtype``: NaN, +Inf, -Inf, or None for a finite value.

    Raises:
        BitsError: an unknown type, or bits that do not fit it.
    """
    form = _fitting(bits, dtype)
    if not form.has_inf:
        return Kind.NAN if bits in form.nan_patterns else None
    exponent_and_mantissa = bits & ((1 << (form.num_bits - 1)) - 1)
    if exponent_and_mantissa < form.infinity:
        return None
    if exponent_and_mantissa > form.infinity:
        return Kind.NAN
    return Kind.NEG_INF if bits >> (form.num_bits - 1) else Kind.POS_INF


def decode(bits: int, dtype: str) -> float:
    """Value of a pattern, exact: every type here fits float64. A NaN of float64 keeps its payload.

    Raises:
        BitsError: an unknown type, or bits that do not fit it.
    """
    form = _fitting(bits, dtype)
    if form.name == "float64":
        value: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
        return value
    kind = classify(bits, dtype)
    if kind is not None:
        return math.nan if kind is Kind.NAN else math.inf if kind is Kind.POS_INF else -math.inf
    sign = -1.0 if form.is_signed and bits >> (form.num_bits - 1) else 1.0
    exponent = (bits >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    mantissa = bits & ((1 << form.mantissa_bits) - 1)
    if exponent == 0 and form.has_subnormals:
        return sign * math.ldexp(mantissa, 1 - form.bias - form.mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << form.mantissa_bits), exponent - form.bias - form.mantissa_bits)


def _fitting(bits: int, dtype: str) -> FloatFormat:
    form = find_format(dtype)
    if not 0 <= bits < 1 << form.num_bits:
        raise BitsError(
            f"bits={bits:#x}: must fit the {form.num_bits} bits of {form.name}; name a wider dtype"
        )
    return form


assert {name: form.num_bits for name, form in FORMATS.items()} == DTYPE_BITS
