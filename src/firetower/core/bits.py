"""What a bit pattern says, and what it cannot prove.

The default NaN of a machine's arithmetic looks the same whatever went wrong, so neither NVIDIA's ``7fffffff``
nor x86's ``ffc00000`` is proof of garbage. A payload, on the other hand, was carried from somewhere, and its
zero low bits may tell from which type. Bits are one piece of evidence, never the verdict.
"""

from __future__ import annotations

import dataclasses

from firetower.core.errors import BitsError
from firetower.core.facts import DEVICES, writers
from firetower.core.formats import FORMATS, Pattern, classify, decode, find_format, parse_bits
from firetower.core.records import Kind

__all__ = ["BitsReading", "Pattern", "Widening", "classify", "decode", "parse_bits", "read_bits", "read_text"]

WIDENED_FROM: dict[str, tuple[tuple[str, int], ...]] = {
    "float64": (("float32", 29), ("float16", 42), ("bfloat16", 45)),
    "float32": (("float16", 13), ("bfloat16", 16)),
    "float16": (("float8_e5m2", 8),),
}
"""For each type, the narrower types it is widened from and how many low bits that leaves zero."""

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """One reading of a NaN as widened from a narrower type, with the rival reading of the same zeros.

    ``bits`` is the pattern in the narrower ``dtype``; ``num_zero_bits`` low bits of the wide one are zero,
    which one random payload in ``2**num_zero_bits`` would be too; ``rival`` says what else the bits may be.
    """

    dtype: str
    bits: int
    bits_hex: str
    num_zero_bits: int
    rival: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitsReading:
    """What one pattern says when read as ``dtype``.

    ``kind`` is None for a finite value, and then ``quiet`` and ``payload`` are None too; ``quiet`` is also
    None for types without that notion. ``whose`` names everyone known to write this NaN, or ``unknown``.
    ``also`` lists the other types of the same width. ``sentences`` say all of it in words, what it cannot
    prove last.
    """

    bits: int
    bits_hex: str
    dtype: str
    kind: Kind | None
    value: float
    sign: int
    quiet: bool | None
    payload: int | None
    device: str | None
    whose: tuple[str, ...]
    widenings: tuple[Widening, ...]
    also: tuple[str, ...]
    cannot_prove: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()


def read_bits(bits: int, dtype: str | None = None, device: str | None = None) -> BitsReading:
    """Read a pattern given as a number.

    Args: bits: the raw pattern, in the low bits. dtype: its type; when omitted, the narrowest usual one that
        holds the bits: ``float8_e4m3fn``, ``float16``,
            ``float32`` or ``float64``. `read_text` guesses better, it sees the number of digits.
        device: where it was found, ``nvidia``, ``x86`` or ``amd``; None when unknown.

    Raises:
        BitsError: an unknown type or device, or bits that do not fit the type.
    """
    from firetower.core.sentences import cannot_prove, sentences

    if device is not None and device not in DEVICES:
        raise BitsError(f"device={device!r}: must be one of {', '.join(DEVICES)}; leave it out when unknown")
    form = find_format(dtype or _narrowest(bits))
    kind = classify(bits, form.name)
    is_nan = kind is Kind.NAN
    has_quiet = is_nan and form.quiet_bit != 0
    reading = BitsReading(
        bits=bits,
        bits_hex=f"{bits:0{form.num_bits // 4}x}",
        dtype=form.name,
        kind=kind,
        value=decode(bits, form.name),
        sign=bits >> (form.num_bits - 1) if form.is_signed else 0,
        quiet=bool(bits & form.quiet_bit) if has_quiet else None,
        payload=bits & (form.quiet_bit - 1) if has_quiet else None,
        device=device,
        whose=(writers(bits, form.name) or (UNKNOWN,)) if is_nan else (),
        widenings=_widenings(bits, form.name) if is_nan else (),
        also=tuple(f.name for f in FORMATS.values() if f.num_bits == form.num_bits and f is not form),
    )
    reading = dataclasses.replace(reading, cannot_prove=cannot_prove(reading))
    return dataclasses.replace(reading, sentences=sentences(reading))


def read_text(text: str, dtype: str | None = None, device: str | None = None) -> tuple[BitsReading, ...]:
    """Read a pattern as a person writes it: one reading, or one for each type that its digits fit.

    Args: text: hexadecimal digits, with or without ``0x``. With a ``dtype`` leading zeros may be left out.
        dtype: as for `read_bits`; when omitted, 16 digits are float64, 8 are float32, 4 are float16 and
        bfloat16,
            2 are the float8 types.
        device: as for `read_bits`.

    Raises:
        BitsError: not hexadecimal, a number of digits that no type has, or bits that do not fit ``dtype``.
    """
    pattern = parse_bits(text)
    if dtype is not None:
        return (read_bits(pattern.bits, dtype, device),)
    names = [f.name for f in FORMATS.values() if f.num_bits == pattern.num_bits]
    if not names:
        raise BitsError(
            f"bits={text!r}: has {pattern.num_bits // 4} hexadecimal digits, must be 2 (float8), "
            "4 (float16, bfloat16), 8 (float32) or 16 (float64); "
            "name the type if leading zeros are missing, write integers in hexadecimal"
        )
    return tuple(read_bits(pattern.bits, name, device) for name in names)


def _narrowest(bits: int) -> str:
    for num_bits, name in ((8, "float8_e4m3fn"), (16, "float16"), (32, "float32")):
        if bits < 1 << num_bits:
            return name
    return "float64"


def _widenings(bits: int, dtype: str) -> tuple[Widening, ...]:
    """Every narrower NaN that widens to exactly these bits."""
    return tuple(
        _widening(bits, dtype, name, num_zero_bits)
        for name, num_zero_bits in WIDENED_FROM.get(dtype, ())
        if not bits & ((1 << num_zero_bits) - 1)
    )


def _widening(bits: int, dtype: str, narrow_dtype: str, num_zero_bits: int) -> Widening:
    wide, narrow = FORMATS[dtype], FORMATS[narrow_dtype]
    mantissa = (bits & ((1 << wide.mantissa_bits) - 1)) >> num_zero_bits
    sign = bits >> (wide.num_bits - 1)
    narrow_bits = sign << (narrow.num_bits - 1) | narrow.infinity | mantissa
    return Widening(
        dtype=narrow_dtype,
        bits=narrow_bits,
        bits_hex=f"{narrow_bits:0{narrow.num_bits // 4}x}",
        num_zero_bits=num_zero_bits,
        rival=_rival(bits, wide.num_bits),
    )


def _rival(bits: int, num_bits: int) -> str:
    half = num_bits // 2
    digits = half // 4
    high, low = bits >> half, bits & ((1 << half) - 1)
    return f"two adjacent {half}-bit fields, high {high:0{digits}x} low {low:0{digits}x}"
