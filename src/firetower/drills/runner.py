"""Runs a variant and its clean twin under the black box and compares what was seen with what was planted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

import torch

import firetower
from firetower.core.errors import FiretowerError
from firetower.core.records import Fire
from firetower.drills.judging import Judgement, judge
from firetower.drills.spec import Case, Drill, Host, Level, Origin, Variant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One variant's outcome.

    Attributes:
        drill, variant: names.
        host, level: where the fault lives and which level of the watch looked for it.
        expected, seen: the planted origin and the reported one; ``seen`` is None when nothing was reported.
        places: words that name the origin of a fault without a bad value; the lab's verdict must hold them.
        seen_by: what reported it, ``attach`` or ``investigate``; of the two, the one that was wrong.
        mismatches: fields of ``expected`` that ``seen`` does not match.
        twin: what was wrongly reported of the clean twin, or None.
        elapsed_ms: time for both runs, building included.
        failures: what went wrong in the black box itself.
        judgement: what the lab said, where it was asked.
        skipped: why the variant could not run, or None.
    """

    drill: str
    variant: str
    host: Host
    level: Level
    expected: Origin | None = None
    seen: Origin | None = None
    places: tuple[str, ...] = ()
    seen_by: str = ""
    mismatches: tuple[str, ...] = ()
    twin: Origin | None = None
    elapsed_ms: float = 0.0
    failures: tuple[str, ...] = ()
    judgement: Judgement | None = None
    skipped: str | None = None

    @property
    def is_detected(self) -> bool:
        """Whether the fault was noticed at all: by a watch, or by the lab where no value is bad."""
        if self.level == "finite":
            return self.judgement is not None and self.judgement.is_detected
        return self.seen is not None

    @property
    def is_placed(self) -> bool:
        """Whether the origin was named exactly."""
        if self.level == "finite":
            return self.is_detected and self.judgement is not None and not self.judgement.unnamed
        return self.seen is not None and not self.mismatches

    @property
    def is_twin_silent(self) -> bool:
        """Whether nothing was reported of the clean twin, by whoever looked."""
        by_lab = self.judgement is not None and self.judgement.twin_said is not None
        return self.twin is None and not by_lab and not self.failures

    @property
    def is_exact(self) -> bool:
        """Whether the fault was found at exactly its origin, and the twin and the box itself were silent."""
        return self.is_placed and self.is_twin_silent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one part of the black box said of one case; ``by`` names the part."""

    by: str
    origin: Origin | None
    failures: tuple[str, ...] = ()


def pick(drill: Drill, seed: int, num_variants: int | None, host: Host | None = None) -> list[Variant]:
    """The drill's variants of ``seed``, or ``num_variants`` of them, drawn from this seed and those after."""
    if num_variants is None:
        return [v for v in drill.variants(seed) if host in (None, v.host)]
    if not any(host in (None, v.host) for v in drill.variants(seed)):
        return []
    stream = (v for s in count(seed) for v in drill.variants(s) if host in (None, v.host))
    return list(islice(stream, num_variants))


def run(plan: Sequence[tuple[Drill, Variant]], *, verdicts: bool = False) -> Iterator[Result]:
    """Run each variant of the plan and yield its result as it comes; ``verdicts``: ask the lab of each."""
    for drill, variant in plan:
        yield run_variant(drill, variant, verdicts=verdicts)


def run_variant(drill: Drill, variant: Variant, *, verdicts: bool = False) -> Result:
    """Plant the fault, watch it burn; build the twin, watch it stay silent.

    A fault without a bad value is the lab's to find: it is asked of those in any case.
    """
    base = Result(drill=drill.name, variant=variant.id, host=variant.host, level=variant.level)
    start = time.perf_counter()
    try:
        case = variant.build(True)
    except FiretowerError as e:
        return dataclasses.replace(base, skipped=str(e))
    expected = case.expected
    assert (expected is None) is (variant.level == "finite"), variant.id
    clean = variant.build(False)
    burned, twin = observe(case, variant), observe(clean, variant)
    judgement = judge(drill, variant, case, clean) if verdicts or expected is None else None
    # of several observers, the one that is wrong is the one to show
    wrong = (o for o in burned if o.origin is None or (expected and expected.mismatches(o.origin)))
    shown = next(wrong, burned[0])
    return dataclasses.replace(
        base,
        expected=expected,
        places=case.places,
        judgement=judgement,
        seen=shown.origin,
        seen_by=shown.by,
        mismatches=expected.mismatches(shown.origin) if expected and shown.origin else (),
        twin=next((o.origin for o in twin if o.origin), None),
        elapsed_ms=1e3 * (time.perf_counter() - start),
        failures=tuple(f"{o.by}: {f}" for o in burned + twin for f in o.failures),
    )


def observe(case: Case, variant: Variant) -> list[Observation]:
    """Run a case under a watch at its variant's level; at ``ops`` it is investigated as well."""
    level: Level = "layers" if variant.level == "finite" else variant.level
    seen = [_guarded("attach", lambda: _watch(case, level))]
    if variant.level == "ops":
        seen.append(_guarded("investigate", lambda: _investigate(case)))
    return seen


def _guarded(by: str, look: Callable[[], Observation]) -> Observation:
    try:
        return look()
    except Exception as e:  # noqa: BLE001 - a board tells of every drill, those that break the black box too
        return Observation(by=by, origin=None, failures=(f"{type(e).__name__}: {e}",))


def _watch(case: Case, level: Level) -> Observation:
    assert level != "finite"
    with firetower.attach(case.model, level=level, on_fire="record", store=False) as watch:
        case.call()
        failures = [str(watch.last_failure)] if watch.failures else []
        if not watch.coverage()[0]:
            failures.append("no signal ran")
        origin = _origin_of(watch.fires[0]) if watch.fires else None
        return Observation(by="attach", origin=origin, failures=tuple(failures))


def _investigate(case: Case) -> Observation:
    function = case.model if case.method == "__call__" else getattr(case.model, case.method)
    with torch.no_grad():
        found = firetower.investigate(function, *case.args, firetower_store=False, **case.kwargs)
    failures = (found.error,) if found.error else ()
    return Observation(by="investigate", origin=_origin_of(found.fire) if found.fire else None, failures=failures)


def _origin_of(fire: Fire) -> Origin:
    return Origin(
        module=fire.origin.module,
        stage=fire.origin.stage,
        layer=fire.origin.layer,
        op=fire.origin.op,
        row=fire.first.row,
        column=fire.first.column,
        kind=fire.first.kind,
        bits=fire.first.bits,
        laundered=fire.laundered,
        bad_weight=any(w.num_nonfinite for w in fire.weights),
        zero_input=any(t.zero_frac == 1.0 for t in fire.inputs),
        pad_before_real=fire.pad_before_real,
    )
