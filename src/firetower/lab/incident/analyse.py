"""From a case to its analysis: traits, table hypothesis x evidence, what is excluded, what to look at next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from firetower.core.analysis import Analysis, BitsLine, FireLine, Hypothesis, Observation, Standing, Trait
from firetower.core.bits import read_bits
from firetower.lab.incident.alone import exclusions
from firetower.lab.incident.case import Case
from firetower.lab.incident.hypotheses import CANDIDATES, CPU_KERNEL, GPU_KERNEL, Candidate
from firetower.lab.incident.rate import rate_sentences
from firetower.lab.incident.rules import observations
from firetower.lab.incident.sighting import ROUTED, SIDES, Sighting

MAX_FIRES = 200
"""Fires shown one by one; the traits and the table take all of them."""

MAX_NEXT = 5
NOTHING = "nothing that was seen bears on it"
FAVOURED = 2
"""Observations for a hypothesis, less those against it, from which it is favoured."""

_ORDER: dict[Standing, int] = {"favoured": 0, "open": 1, "weakened": 2, "excluded": 3}


def analyse(case: Case) -> Analysis:
    """Analyse a case.

    Raises:
        StatsError: tries that no rate can be made of.
    """
    seen = observations(case)
    hypotheses = _hypotheses(case, seen)
    return Analysis(
        title=case.title,
        num_fires=case.num_fires,
        num_traced=case.num_traced,
        survivorship=_survivorship(case),
        conclusion=_conclusion(case, hypotheses),
        traits=tuple(_traits(case)),
        bits=tuple(_bits(case)),
        rate=rate_sentences(case),
        observations=seen,
        hypotheses=hypotheses,
        fires=tuple(map(_line, case.sightings[:MAX_FIRES])),
        reported=tuple((r.what, r.how) for r in case.ruled_out) + _concluded(case),
        next_steps=tuple(_next_steps(case, hypotheses)),
        environment=case.environment,
    )


def _hypotheses(case: Case, seen: Sequence[Observation]) -> tuple[Hypothesis, ...]:
    has_sides = any(s.side in SIDES for s in case.sightings) or any(
        p.where.startswith(("cpu", "gpu")) for p in case.patterns
    )
    wanted = [c for c in CANDIDATES if (c.key in (GPU_KERNEL, CPU_KERNEL)) == has_sides or c.key[0] != "P"]
    found = [_hypothesis(c, seen) for c in wanted]
    rank = {h.key: (_ORDER[h.standing], -_balance(h.key, seen)) for h in found}
    return tuple(sorted(found, key=lambda h: rank[h.key]))


def _hypothesis(candidate: Candidate, seen: Sequence[Observation]) -> Hypothesis:
    said = [(o.speaks[candidate.key], o) for o in seen if candidate.key in o.speaks]
    named = {word: [o for w, o in said if w == word] for word in ("for", "against", "excludes")}
    if named["excludes"]:
        standing: Standing = "excluded"
        why = "; ".join(o.statement for o in named["excludes"])
    elif len(named["for"]) - len(named["against"]) >= FAVOURED:
        standing, why = "favoured", _weighed(named)
    elif len(named["against"]) > len(named["for"]):
        standing, why = "weakened", _weighed(named)
    else:
        standing, why = "open", _weighed(named) if said else NOTHING
    return Hypothesis(
        key=candidate.key,
        title=candidate.title,
        standing=standing,
        why=why,
        test=candidate.test,
        prior=candidate.prior,
    )


def _weighed(named: dict[str, list[Observation]]) -> str:
    parts = [f"{'; '.join(o.statement for o in named[word])}" for word in ("for",) if named[word]]
    if named["against"]:
        parts.append(f"against it: {'; '.join(o.name for o in named['against'])}")
    return "; ".join(parts)


def _balance(key: str, seen: Sequence[Observation]) -> int:
    return sum({"for": 1, "against": -1, "excludes": -1}[o.speaks[key]] for o in seen if key in o.speaks)


def _survivorship(case: Case) -> str:
    traced = f"{case.num_traced} of {case.num_fires} fires were traced to a first bad signal"
    routed = case.share(ROUTED)
    where = ""
    if routed and case.num_traced:
        where = f"; {routed} of {case.num_traced} traced began in routed expert rows"
    if case.num_traced == case.num_fires:
        return f"All {case.num_fires} fires were traced to a first bad signal{where}."
    missing = case.num_fires - case.num_traced
    return (
        f"{traced}{where}. What the other {missing} would have shown is not known: shares below are of the traced "
        "fires only, and fires that were traced may differ from the others (later builds, more watching)."
    )


def _conclusion(case: Case, hypotheses: Sequence[Hypothesis]) -> str:
    favoured = [h for h in hypotheses if h.standing == "favoured"]
    verdicts = Counter(s.verdict for s in case.sightings if s.verdict)
    if len(verdicts) == 1 and verdicts.total() == case.num_fires and case.num_fires > 1:
        verdict = next(iter(verdicts))
        return f"Every one of the {case.num_fires} fires has the verdict {verdict}, each with its own evidence."
    said = "No single cause is proven."
    if favoured:
        said += f" Best supported: {', '.join(f'{h.key} ({h.title})' for h in favoured[:4])}."
    excluded = [h.key for h in hypotheses if h.standing == "excluded"]
    if excluded:
        said += f" Excluded as the one cause, as far as the tests go: {', '.join(excluded)}."
    left = [h.key for h in hypotheses if h.standing in ("open", "weakened")]
    if not excluded:
        said += " Nothing is excluded."
    elif left:
        said += f" Not excluded: {', '.join(left)}."
    return said


def _traits(case: Case) -> Iterator[Trait]:
    if case.first_poisoned:
        yield Trait(name="first bad signal", counts=tuple(case.first_poisoned.most_common()), num_fires=case.num_fires)
    if case.layers:
        yield _trait(case, "layer", (str(x) for x in sorted(case.layers)))
    columns: tuple[tuple[str, Callable[[Sighting], object]], ...] = (
        ("kind of layer", lambda s: s.layer_kind),
        ("side", lambda s: SIDES.get(s.side, s.side)),
        ("residency", lambda s: s.residency),
        ("phase", lambda s: s.phase),
        ("column", lambda s: s.column),
        ("class of value", lambda s: s.kind),
        ("build", lambda s: s.build),
        (
            "input of the first bad op",
            lambda s: None if s.inputs_finite is None else "finite" if s.inputs_finite else "bad",
        ),
        ("verdict", lambda s: s.verdict),
    )
    for name, of in columns:
        values = [str(v) for s in case.sightings if (v := of(s)) not in (None, "")]
        if values:
            yield _trait(case, name, values)
    if case.patterns:
        counts = Counter[str]()
        for p in case.patterns:
            counts[" ".join(filter(None, (read_bits(p.bits, p.dtype).bits_hex, p.dtype, p.where)))] += p.count
        yield Trait(name="bits", counts=tuple(counts.most_common()), num_fires=case.num_fires)
    if case.positions:
        yield _trait(case, "token position", (f"{p:,}" for p in case.positions))
    yield from (Trait(name=c, counts=(("clean", case.num_fires),), num_fires=case.num_fires) for c in case.clean)


def _trait(case: Case, name: str, values: Iterable[str]) -> Trait:
    return Trait(name=name, counts=tuple(Counter(values).most_common()), num_fires=case.num_fires)


def _bits(case: Case) -> Iterator[BitsLine]:
    for p in case.patterns:
        reading = read_bits(p.bits, p.dtype, p.machine)
        yield BitsLine(
            bits_hex=reading.bits_hex, dtype=p.dtype, where=p.where, count=p.count, sentences=reading.sentences
        )


def _line(s: Sighting) -> FireLine:
    parts = [
        (f"{s.origin} ({s.layer_kind})" if s.layer_kind else s.origin) or "not traced",
        f"bits {s.bits_hex} {s.dtype}" if s.bits is not None else "",
        f"position {s.position:,}" if s.position is not None else "",
        f"try {s.try_number}" if s.try_number is not None else s.at,
        s.build,
        *s.audits,
        f"verdict {s.verdict}" if s.verdict else "",
        f"seen {s.count} times" if s.count > 1 else "",
    ]
    return FireLine(
        id=s.id,
        summary=", ".join(filter(None, parts)),
        origin=s.stage,
        first_layers=s.first_layers,
        excludes=exclusions(s),
    )


def _concluded(case: Case) -> tuple[tuple[str, str], ...]:
    return (("the reporter concluded (not used here)", case.concluded),) if case.concluded else ()


def _next_steps(case: Case, hypotheses: Sequence[Hypothesis]) -> Iterator[str]:
    supported = [h for h in hypotheses if h.standing == "open" and h.why != NOTHING]
    favoured = [h for h in hypotheses if h.standing == "favoured"] or supported
    for h in favoured[:MAX_NEXT]:
        yield f"{h.key}: {h.test}"
    untraced = case.num_fires - case.num_traced
    if untraced:
        yield f"trace every fire: {untraced} of {case.num_fires} show no first bad signal"
    num_bits = sum(p.count for p in case.patterns)
    if num_bits < case.num_fires:
        yield f"keep the bits of every first bad value: {case.num_fires - num_bits} of {case.num_fires} fires have none"
    if case.is_intermittent is None and case.num_fires > 1:
        yield "count tries: replay one request and note clean ones too (firetower replay CAPTURE --tries N)"
