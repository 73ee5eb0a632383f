"""One fire as a page of text: where it started, the first bad value and what its bits say, then the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from firetower.core.bits import read_bits
from firetower.core.codec import encode
from firetower.core.errors import BitsError
from firetower.core.records import BadValue, BurnedRow, Fire, Kind, Phase, SignalReading, TensorSummary
from firetower.fires.handin import UNKNOWN_STEP
from firetower.fires.text import visible

KIND_NAMES = {Kind.NAN: "NaN", Kind.POS_INF: "+Inf", Kind.NEG_INF: "-Inf"}
"""How a class of value is written for people."""

_MAX_SIGNALS = 12
_NEAR_MAXIMUM = 10_000  # headroom beyond this says nothing about overflow

_ARITHMETIC = {
    "nvidia": ("nvidia", "cuda"),
    "amd": ("instinct", "radeon", "gfx"),
    "x86": ("x86", "amd64", "i686", "intel", "epyc", "ryzen", "xeon"),
}


def fire_page(fire: Fire, *, last_seen: str | None = None) -> list[str]:
    """The lines of the page, origin first; text from models and files has its control characters escaped.

    Args:
        fire: what to show; of ``token_ids`` only the number is shown.
        last_seen: when it was last counted, for a fire seen more than once.
    """
    lines = [_origin_line(fire), *_origin_lines(fire), "", *_value_lines(fire)]
    lines += _section("Findings", _notes(fire))
    lines += _section("What the bits say", map(visible, _what_bits_say(fire.first, fire.device)))
    lines += _section("Verdict", _verdict(fire.verdict))
    lines += _section("Burned requests", (_burned(b) for b in fire.burned))
    lines += _section("Bad signals, first executed first", _signals(fire.bad_signals))
    lines += _section("Tensors of the first bad op", _tensors(fire))
    lines += _section("Incident", _facts(fire, last_seen))
    return lines


def value_name(first: BadValue) -> str:
    """``NaN 7e00 float16``."""
    return f"{KIND_NAMES[first.kind]} {first.bits_hex} {visible(first.dtype)}"


def arithmetic_of(device: str) -> str | None:
    """Whose arithmetic a device name stands for, in the words of `core.bits`; None when it does not tell."""
    name = device.lower()
    return next((whose for whose, parts in _ARITHMETIC.items() if any(p in name for p in parts)), None)


def _origin_line(fire: Fire) -> str:
    o = fire.origin
    module = f" ({visible(o.module)})" if o.module else ""
    return f"{KIND_NAMES[fire.first.kind]} first at {visible(o.name)}{module}"


def _origin_lines(fire: Fire) -> Iterator[str]:
    if fire.origin.op:
        yield f"  op       {visible(fire.origin.op)}"
    if fire.origin.source:
        yield f"  line     {visible(fire.origin.source)}"
    step = [] if fire.step == UNKNOWN_STEP else [f"step {fire.step}"]
    phase = [] if fire.phase is Phase.UNKNOWN else [str(fire.phase)]
    yield f"  when     {', '.join([*step, *phase]) or 'unknown'}"
    if fire.first.shape:
        yield f"  shape    {_shape(fire.first.shape)} {visible(fire.first.dtype)}"


def _value_lines(fire: Fire) -> Iterator[str]:
    b = fire.first
    yield f"First bad value: {value_name(b)}"
    yield f"  row {b.row}, column {b.column} (flat index {b.flat_index})"
    who = [
        f"{name} {value}"
        for name, value in (("sequence", b.sequence), ("token", b.token), ("position", b.position))
        if value is not None
    ]
    if b.is_pad is not None:
        who.append("a pad row" if b.is_pad else "a real row")
    if who:
        yield f"  {', '.join(who)}"


def _what_bits_say(first: BadValue, device: str) -> tuple[str, ...]:
    try:
        reading = read_bits(first.bits, first.dtype, arithmetic_of(device))
    except BitsError as e:
        return (f"cannot be read ({e})",)
    if reading.kind is not first.kind:
        is_what = KIND_NAMES[reading.kind] if reading.kind else f"the finite value {reading.value!r}"
        return (f"they are {is_what}, yet the record says {KIND_NAMES[first.kind]}: one of the two is wrong",)
    return reading.sentences


def _notes(fire: Fire) -> Iterator[str]:
    yield from (visible(note) for note in fire.notes)
    if fire.pad_before_real:
        yield "a pad row was bad before any real row: shared scales or tiles may have leaked it"
    if fire.laundered is True:
        yield "laundered: the bad value is gone again in the logits, so the output looks healthy"


def _verdict(verdict: Mapping[str, Any] | None) -> Iterator[str]:
    for name, value in (verdict or {}).items():
        yield f"{visible(name)}: {visible(value if isinstance(value, str) else str(encode(value)))}"


def _burned(row: BurnedRow) -> str:
    place = [
        f"{name} {value}"
        for name, value in (("token", row.token), ("column", row.column))
        if value is not None
    ]
    what = [value_name(row.first)] if row.first else []
    return f"sequence {row.sequence}: {', '.join([visible(row.signal.name), *place, *what])}"


def _signals(signals: tuple[SignalReading, ...]) -> Iterator[str]:
    for number, s in enumerate(signals[:_MAX_SIGNALS], start=1):
        first = f": {value_name(s.first)} at row {s.first.row}, column {s.first.column}" if s.first else ""
        module = f" ({visible(s.signal.module)})" if s.signal.module else ""
        yield f"{number}. {visible(s.signal.name)}{module}{first}"
    if len(signals) > _MAX_SIGNALS:
        yield f"and {len(signals) - _MAX_SIGNALS} more (--json has them all)"


def _tensors(fire: Fire) -> Iterator[str]:
    groups = (
        ("input", fire.inputs),
        ("output", (fire.output,) if fire.output else ()),
        ("weight", fire.weights),
    )
    for role, tensors in groups:
        yield from (f"{role:6} {_tensor(t)}" for t in tensors)


def _tensor(t: TensorSummary) -> str:
    counts = ((t.num_nan, "NaN"), (t.num_pos_inf, "+Inf"), (t.num_neg_inf, "-Inf"))
    bad = ", ".join(f"{n} {name}" for n, name in counts if n) or "all finite"
    absmax = "no finite element" if t.absmax is None else f"absmax {t.absmax:.4g}"
    near = t.headroom is not None and t.headroom < _NEAR_MAXIMUM
    headroom = f" ({t.headroom:.3g}x below the type's maximum)" if near else ""
    zeros = f", {t.zero_frac:.1%} zeros" if t.zero_frac else ""
    return f"{visible(t.name)} {_shape(t.shape)} {visible(t.dtype)}: {bad}, {absmax}{headroom}{zeros}"


def _facts(fire: Fire, last_seen: str | None) -> Iterator[str]:
    yield f"id       {fire.id}"
    seen = f", last {last_seen}" if last_seen and fire.count > 1 else ""
    yield f"seen     {fire.created_at}" + (f", {fire.count} times{seen}" if fire.count > 1 else "")
    yield f"outcome  {fire.outcome}"
    facts = (
        ("model", fire.model),
        ("runtime", fire.runtime),
        ("device", fire.device),
        ("source", fire.source),
        ("request", fire.request),
    )
    yield from (f"{name:8} {visible(value)}" for name, value in facts if value)
    if fire.coverage != (0, 0):
        yield f"coverage {fire.coverage[0]} of {fire.coverage[1]} signals ran"
    if fire.token_ids is not None:
        yield f"content  {len(fire.token_ids)} token ids kept (private; left out of exports)"
    yield from (
        f"{visible(k):8} {visible(v if isinstance(v, str) else str(encode(v)))}"
        for k, v in fire.extra.items()
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return ["", title, *body] if body else []
