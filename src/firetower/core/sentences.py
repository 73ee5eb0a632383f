"""A bits reading in plain sentences, for a person who meets such a pattern for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firetower.core.facts import DEVICES, arithmetic_patterns, integer_twin, nan_facts
from firetower.core.formats import FORMATS, classify, decode
from firetower.core.records import Kind

if TYPE_CHECKING:
    from firetower.core.bits import BitsReading, Widening

ABSURD = 1e16
"""Magnitude that no healthy activation, weight or state has; unwritten memory often does."""

NEAR_MAXIMUM_FRAC = 0.1
"""Share of the type's maximum from which the next product is likely to overflow."""

_NAMES = {Kind.NAN: "NaN", Kind.POS_INF: "+Inf", Kind.NEG_INF: "-Inf"}


def cannot_prove(reading: BitsReading) -> tuple[str, ...]:
    """The conclusions that this pattern does not allow, however tempting."""
    if reading.kind is None:
        return ()
    if reading.kind is not Kind.NAN:
        return ("which op overflowed or divided by zero: look at the first bad signal and its inputs",)
    by_arithmetic = [w.removesuffix(" arithmetic") for w in reading.whose if w.endswith(" arithmetic")]
    if by_arithmetic:
        return (
            f"garbage: {' or '.join(by_arithmetic)} arithmetic leaves this pattern whatever went wrong",
            "which operation made it: most invalid operations leave the same bits",
        )
    if reading.whose != ("unknown",):
        return (
            "who wrote it: a constant, and a fill of unwritten memory if that was switched on, look the same",
        )
    if reading.payload is None:
        return ("where it came from: the type has too few NaN patterns to carry a trace",)
    return (
        "unwritten memory: a payload survives copies, index_select and where on a GPU and arithmetic on x86, "
        "so it may come from a weight file, another type's bits or an earlier step",
        "where it started: the first signal that holds it may only have received it",
    )


def sentences(reading: BitsReading) -> tuple[str, ...]:
    """All that the reading says, in reading order; what it cannot prove comes last."""
    if reading.kind is None:
        return tuple(_finite(reading))
    if reading.kind is not Kind.NAN:
        lines = [*_infinite(reading)]
    else:
        lines = [_class(reading), *_whose(reading), *_on_device(reading)]
        lines += _widened(reading)
        if twin := integer_twin(reading.bits_hex):
            lines.append(f"Rival without any float: {twin}.")
    lines += [f"It cannot prove {what}." for what in reading.cannot_prove]
    return (*lines, "Bits are one piece of evidence, never the verdict.")


def _finite(r: BitsReading) -> Iterator[str]:
    form = FORMATS[r.dtype]
    yield f"{r.bits_hex} read as {r.dtype} is finite: {r.value:.9g}. By itself it is no fire."
    magnitude = abs(r.value)
    if magnitude >= ABSURD and form.maximum > ABSURD and r.dtype != "float8_e8m0fnu":
        yield (
            f"A magnitude of {magnitude:.1e} is absurd for an activation, weight or state: consistent with "
            "unwritten memory or with bits of another type. It does not prove either."
        )
    elif magnitude >= NEAR_MAXIMUM_FRAC * form.maximum and r.dtype != "float8_e8m0fnu":
        share = f"{magnitude / form.maximum:.0%} of the largest {r.dtype} ({form.maximum:.9g})"
        yield f"That is {share}: little headroom is left."
    elif 0 < magnitude < 2.0 ** (1 - form.bias) and form.has_subnormals:
        yield "It is subnormal: flushed to zero where a kernel runs with flush-to-zero on."


def _infinite(r: BitsReading) -> Iterator[str]:
    form = FORMATS[r.dtype]
    assert r.kind is not None
    word = _NAMES[r.kind]
    yield f"{r.bits_hex} read as {r.dtype} is {word}, not a NaN: an overflow, or a non-zero number over zero."
    yield (
        f"The largest finite {r.dtype} is {form.maximum:.9g}; NaN follows where Inf meets 0 or another Inf, "
        "often at the next norm."
    )
    if r.kind is Kind.NEG_INF:
        yield "-Inf is legal in masks, banned logits and gates; a softmax row of nothing else turns into NaN."


def _class(r: BitsReading) -> str:
    form = FORMATS[r.dtype]
    if r.payload is None:
        return f"{r.bits_hex} read as {r.dtype} is NaN; the type has no Inf, so an overflow may end here too."
    quiet = "a quiet NaN" if r.quiet else "a signalling NaN"
    digits = -(-(form.mantissa_bits - 1) // 4)
    return f"{r.bits_hex} read as {r.dtype} is {quiet}, sign {r.sign}, payload {r.payload:0{digits}x}."


def _whose(r: BitsReading) -> Iterator[str]:
    if r.whose != ("unknown",):
        yield f"Known to write it: {'; '.join(r.whose)}."
    elif any(arithmetic_patterns(device, r.dtype) for device in DEVICES):
        yield (
            "No arithmetic that was measured writes it, so its payload was carried here: from a constant, a "
            "file, another type's bits or memory that nobody wrote."
        )
    else:
        yield f"What arithmetic writes in {r.dtype} was not measured."
    if r.quiet is False:
        yield "Arithmetic makes NaNs quiet, so a signalling one was moved here, not computed."


def _on_device(r: BitsReading) -> Iterator[str]:
    if r.device is None:
        return
    patterns = arithmetic_patterns(r.device, r.dtype)
    if patterns and r.bits not in patterns:
        default = " or ".join(f"{p:0{len(r.bits_hex)}x}" for p in patterns)
        yield f"Arithmetic on {r.device} writes {default}: this one was moved or converted there."
        if moves := nan_facts()["moves"].get(r.device):
            yield f"On {r.device}: {moves}."
    for pair, what in nan_facts()["conversions"].get(r.device, {}).items():
        source, target = pair.split("->")
        from_here = source in {w.dtype for w in r.widenings} or source == "anything" or r.bits_hex in what
        if target == r.dtype and from_here:
            yield f"On {r.device}, conversion {pair}: {what}."


def _widened(r: BitsReading) -> Iterator[str]:
    if not r.payload and r.widenings:
        names = " or ".join(w.dtype for w in r.widenings)
        yield f"Its payload is zero, as in the default NaN of {names} widened: that tells nothing."
        return
    for w in r.widenings:
        yield (
            f"Its low {w.num_zero_bits} bits are zero (so are those of one random payload in "
            f"{1 << w.num_zero_bits:,}): consistent with the {w.dtype} NaN {w.bits_hex} widened, as if a "
            f"{w.dtype} field was read as NaN{_quietened(w)}. Rival: {w.rival}{_fields(r)}."
        )


def _quietened(w: Widening) -> str:
    """On x86 the float16 conversion makes a signalling NaN quiet, so two fields widen to the same bits."""
    quiet_bit = FORMATS[w.dtype].quiet_bit
    if w.dtype != "float16" or not w.bits & quiet_bit:
        return ""
    return f" (or {w.bits ^ quiet_bit:04x}, made quiet by the conversion)"


def _fields(r: BitsReading) -> str:
    """The two halves of a float32 as the 16-bit floats they would be, low half first in memory."""
    if r.dtype != "float32":
        return ""
    low, high = r.bits & 0xFFFF, r.bits >> 16
    return f" (as float16 {_short(high, 'float16')} and {_short(low, 'float16')})"


def _short(bits: int, dtype: str) -> str:
    kind = classify(bits, dtype)
    return _NAMES[kind] if kind else f"{decode(bits, dtype):.5g}"
