"""An investigation as a page to read in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firetower.core.records import BadValue, TensorSummary
from firetower.sensors.ops_events import KIND_NAMES

if TYPE_CHECKING:
    from firetower.attach.investigate import Investigation
    from firetower.core.verdict import Verdict
    from firetower.sensors.ops_events import OpEvent

_MAX_LINES = 6


def page(found: Investigation) -> str:
    """The page: verdict first, then the evidence, then what to do next."""
    return "\n".join([_headline(found), *(f"  {label:<10} {text}".rstrip() for label, text in _lines(found))])


def _verdict_lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.decided:
        yield "verdict", f"{verdict.detail} (family {verdict.family}). {verdict.statement}"
        yield "refuter", verdict.refuter
        yield "cure", f"{verdict.cure} (retriable: {verdict.retriable}; spoils: {verdict.scope})"
    else:
        yield "verdict", f"undecided. {verdict.statement}"
    yield "next test", f"{verdict.next_test}: {verdict.next_command}"


def _headline(found: Investigation) -> str:
    if found.origin is not None:
        e = found.origin
        where = f" in {e.module}" if e.module else ""
        return f"Burned: {KIND_NAMES[e.first.kind]} begins at {e.op}{where}{_stage(e)}"
    if found.burned:
        return "Burned once: the second run, from the same state and random streams, was clean"
    if found.error is not None:
        return f"Not burned: no bad value was seen, yet the call raised {found.error}"
    if found.second_run is not None:
        return "Not burned: every op of the call is clean"
    return "Not burned: every signal and the result are clean"


def _stage(event: OpEvent) -> str:
    layer = [] if event.layer is None else [f"layer {event.layer}"]
    stage = [] if event.stage == "op" else [event.stage]
    return f" ({' '.join(layer + stage)})" if layer or stage else ""


def _lines(found: Investigation) -> Iterator[tuple[str, str]]:
    if found.origin is not None:
        yield from _origin_lines(found.origin)
    elif found.culprit:
        yield "culprit", found.culprit
    yield from _tensors("input", found.inputs)
    yield from _tensors("output", () if found.output is None else (found.output,))
    yield from _tensors("weight", found.weights)
    if found.propagators:
        spread = found.propagators[0]
        assert found.second_run is not None
        yield "spread by", f"{found.second_run.num_events - 1} ops, first {spread.op} at {spread.source}"
    yield from _first_few("laundered", [f"by {e}" for e in found.laundered])
    yield from _run_lines(found)
    yield from _first_few("note", list(found.notes))
    if found.verdict is not None:
        yield from _verdict_lines(found.verdict)
    if found.fire is not None:
        yield "fire", f"{found.fire.id}; next: firetower fires show {found.fire.id}"


def _origin_lines(e: OpEvent) -> Iterator[tuple[str, str]]:
    yield "line", e.source
    yield "place", _place(e.first)
    yield "culprit", e.culprit
    if e.seen_at:
        yield "seen at", e.seen_at
    if e.tensor_first is not None and e.tensor_summary is not None:
        yield "bad value", f"{_place(e.tensor_first)} in {e.tensor_summary.name}"
    for note in e.notes:
        yield "", note


def _place(bad: BadValue) -> str:
    text = f"row {bad.row}, column {bad.column} of {list(bad.shape)} {bad.dtype}, bits {bad.bits_hex}"
    if bad.sequence is not None:
        text += f"; sequence {bad.sequence}, token {bad.token}"
    if bad.position is not None and not bad.is_pad:
        text += f", position {bad.position}"
    return text + (", a pad" if bad.is_pad else "")


def _tensors(label: str, tensors: tuple[TensorSummary, ...]) -> Iterator[tuple[str, str]]:
    for t in tensors:
        absmax = "-" if t.absmax is None else f"{t.absmax:.4g}"
        headroom = "-" if t.headroom is None else f"{t.headroom:.3g}x" if t.headroom < 1e4 else "ample"
        bad = f"NaN {t.num_nan}, +Inf {t.num_pos_inf}, -Inf {t.num_neg_inf}" if t.num_nonfinite else "all finite"
        name = "" if t.name == label else f"{t.name} "
        numbers = f"absmax {absmax}, headroom {headroom}, zeros {t.zero_frac:.1%}"
        yield label, f"{name}{list(t.shape)} {t.dtype}: {bad}, {numbers}"


def _run_lines(found: Investigation) -> Iterator[tuple[str, str]]:
    first, second = found.first_run, found.second_run
    seen = [f"{f.origin.name} ({f.origin.module or 'model'})" for f in first.fires]
    if first.bad_output is not None:
        seen.append(f"{KIND_NAMES[first.bad_output[1].kind]} in {first.bad_output[0]}")
    if first.error is not None:
        seen.append(first.error)
    if first.was_stopped:
        seen.append("ended there")
    yield "first run", "bad at " + "; ".join(seen) if seen else f"clean, {first.num_modules} modules watched"
    if second is None:
        return
    covered = f"{second.num_ops} ops, {second.num_checked} outputs checked"
    if second.not_covered:
        covered += ", not covered: " + ", ".join(f"{n} ({reason})" for reason, n in second.not_covered.items())
    yield "second run", covered + (f"; {second.error}" if second.error else "")


def _first_few(label: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    for text in texts[:_MAX_LINES]:
        yield label, text
    if len(texts) > _MAX_LINES:
        yield label, f"and {len(texts) - _MAX_LINES} more"
