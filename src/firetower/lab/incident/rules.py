"""What is observed over all fires and how it bears on each hypothesis: the columns of the table.

Each rule looks at the whole case and gives one observation, or None where it has nothing to go by. ``excludes`` is
kept for what cannot be squared with a hypothesis as the one cause; a tendency is ``for`` or ``against``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from firetower.core.analysis import Observation, Speaks
from firetower.core.bits import read_bits
from firetower.core.facts import writers
from firetower.core.records import Kind
from firetower.lab.incident.case import Case, Pattern
from firetower.lab.incident.hypotheses import (
    CPU_KERNEL,
    DETERMINISTIC,
    EVICTED,
    GPU_KERNEL,
    SCALE_OVERFLOW,
    SLOT_MISMATCH,
    STATE_NOT_CLEARED,
    TIMING,
    keys_of,
)
from firetower.lab.incident.reported import reported
from firetower.lab.incident.sighting import ATTENTION, ROUTED, STATES

L_KEYS = keys_of("L")
P_KEYS = (GPU_KERNEL, CPU_KERNEL)
FEW = 3
"""Fires from which on agreement between them means something."""

Rule = Callable[[Case], Observation | None]


def observations(case: Case) -> tuple[Observation, ...]:
    """Everything that the rules observe, in the order of `RULES`, then what the reporter tested."""
    found = [o for rule in RULES if (o := rule(case)) is not None]
    return (*found, *reported(case.ruled_out))


def speaks(**groups: Sequence[str]) -> dict[str, Speaks]:
    """``speaks(favours=("C", "J"), against=("A",), excludes=("M",))`` as the mapping of an observation."""
    words: dict[str, Speaks] = {"favours": "for", "against": "against", "excludes": "excludes"}
    return {key: words[group] for group, names in groups.items() for name in names for key in keys_of(name) or (name,)}


def _place(case: Case) -> Observation | None:
    """Which signal is bad first."""
    routed, attention, known = case.share(ROUTED), case.share(ATTENTION), case.num_traced
    if known < FEW:
        return None
    where = ", ".join(f"{stage} {n}" for stage, n in case.first_poisoned.most_common())
    limit = f"{case.num_fires - known} of {case.num_fires} fires were not traced" if known < case.num_fires else ""
    if routed >= 0.75 * known:
        rest = known - routed
        limit = "; ".join(
            filter(
                None,
                (f"{rest} of {known} began elsewhere: one cause for all must explain these too" if rest else "", limit),
            )
        )
        said = f"routed expert rows are first in {routed} of {known} traced fires ({where})"
        against = ("E", "F", "G", "I", "T")
        return Observation(name="place", statement=said, limit=limit, speaks=speaks(favours=L_KEYS, against=against))
    if attention >= 0.75 * known:
        said = f"attention or a state is first in {attention} of {known} traced fires ({where})"
        bearing = speaks(favours=("E", "G", "I"), against=("H", *L_KEYS))
        return Observation(name="place", statement=said, limit=limit, speaks=bearing)
    return Observation(name="place", statement=f"first bad in {known} traced fires: {where}", limit=limit)


def _layers(case: Case) -> Observation | None:
    """One layer or many."""
    if len(case.layers) < FEW:
        return None
    distinct = sorted(set(case.layers))
    listed = ", ".join(map(str, distinct[:16])) + (", ..." if len(distinct) > 16 else "")
    if len(distinct) == 1:
        said = f"all {len(case.layers)} fires begin in layer {distinct[0]}"
        return Observation(
            name="layers", statement=said, speaks=speaks(favours=("A", "H", "I", "M"), against=("C", "J", *L_KEYS))
        )
    if len(distinct) < FEW:
        return Observation(name="layers", statement=f"fires begin in layers {listed}")
    said = f"fires begin in {len(distinct)} different layers ({listed})"
    return Observation(
        name="layers",
        statement=said,
        limit="several bad tensors, or a fault in shared code, would vary as well",
        speaks=speaks(favours=("C", "J", EVICTED), against=("A", "M", "I")),
    )


def _columns(case: Case) -> Observation | None:
    """One output column or many."""
    columns = [(s.column, s.id) for s in case.sightings if s.column is not None and s.is_traced]
    if len(columns) < FEW:
        return None
    distinct = {c for c, _ in columns}
    ids = tuple(i for _, i in columns)
    if len(distinct) == 1:
        said = f"the first bad column is {columns[0][0]} in all {len(columns)} fires"
        # a row that is bad as a whole is bad from its first column on
        whole_rows = ("G", "H") if columns[0][0] else ()
        bearing = speaks(favours=("A", "M"), against=("C", "J", *whole_rows))
        return Observation(name="columns", statement=said, speaks=bearing, fires=ids)
    if len(distinct) < 0.5 * len(columns):
        return None
    said = f"the first bad column varies ({len(distinct)} different in {len(columns)} fires)"
    return Observation(name="columns", statement=said, speaks=speaks(against=("M",)), fires=ids)


def _inputs(case: Case) -> Observation | None:
    """Whether the bad value was made where it was first seen."""
    finite = tuple(s.id for s in case.sightings if s.inputs_finite)
    bad = tuple(s.id for s in case.sightings if s.inputs_finite is False)
    everywhere = next((c for c in case.clean if c.lower().startswith(("layer input", "input"))), "")
    if bad:
        said = f"the input of the first bad op was bad already in {len(bad)} fires: the origin lies before it"
        return Observation(name="inputs", statement=said, limit="trace the signals before it", fires=bad)
    if not finite and not everywhere:
        return None
    seen = f"clean in every fire: {everywhere}" if everywhere else f"the inputs were finite in {len(finite)} fires"
    return Observation(
        name="inputs",
        statement=f"{seen}: the value was made there, not brought there",
        limit="finite is not right: a wrong finite input was not looked for",
        speaks=speaks(against=(STATE_NOT_CLEARED,)),
        fires=() if everywhere else finite,
    )


def _states(case: Case) -> Observation | None:
    """Whether a state was bad."""
    bad = tuple(s.id for s in case.sightings if s.states_finite is False)
    if bad:
        said = f"a state was the first bad signal in {len(bad)} of {len(case.sightings)} fires"
        bearing = speaks(favours=(STATE_NOT_CLEARED, "I"), against=("C", "E/STALE_STATE_FINITE"), excludes=("N",))
        return Observation(name="states", statement=said, speaks=bearing, fires=bad)
    named = [c for c in case.clean if c.split(" ")[0].split("(")[0].lower() in STATES]
    if not named:
        return None
    return Observation(
        name="states",
        statement=f"states clean in every fire: {'; '.join(named)}",
        limit="clean means finite: a finite stale (E/STALE_STATE_FINITE) or wrong one (F) stays possible",
        speaks=speaks(against=("F", "I", "R"), excludes=(STATE_NOT_CLEARED,)),
    )


def _class(case: Case) -> Observation | None:
    """NaN or Inf first."""
    kinds, known = case.kinds, sum(case.kinds.values())
    if known < FEW:
        return None
    infinite = kinds[Kind.POS_INF] + kinds[Kind.NEG_INF]
    if infinite == known:
        said = f"the first bad value is an Inf in all {known} fires with bits"
        return Observation(
            name="class", statement=said, speaks=speaks(favours=("A", SCALE_OVERFLOW), against=("G", "H", "N"))
        )
    if infinite:
        return Observation(name="class", statement=f"first bad values: {kinds[Kind.NAN]} NaN, {infinite} Inf")
    return Observation(
        name="class",
        statement=f"the first bad value is a NaN in all {known} fires with bits; no Inf was seen before one",
        limit="an Inf inside a fused kernel is not seen",
        speaks=speaks(against=("A",)),
    )


def _sides(case: Case) -> Observation | None:
    """Whether both sides of a model split between GPU and CPU begin fires."""
    sides = Counter(s.side for s in case.sightings if s.side)
    gpu = sides["hit"] or sum(p.count for p in case.patterns if p.where.startswith("gpu"))
    cpu = sides["miss"] or sum(p.count for p in case.patterns if p.where.startswith("cpu"))
    ids = tuple(s.id for s in case.sightings if s.side)
    if gpu and cpu:
        return Observation(
            name="sides",
            statement="fires begin on the GPU side (hit) and on the CPU side (miss)",
            limit="two faults, one on each side, are not excluded",
            speaks=speaks(favours=("C", "J"), against=(*P_KEYS, *L_KEYS)),
            fires=ids,
        )
    if max(gpu, cpu) < FEW:
        return None
    name, own, other = ("GPU", GPU_KERNEL, CPU_KERNEL) if gpu else ("CPU", CPU_KERNEL, GPU_KERNEL)
    favours = (own, SLOT_MISMATCH, EVICTED) if gpu else (own,)
    said = f"all {max(gpu, cpu)} fires with a known side begin on the {name} side"
    return Observation(name="sides", statement=said, speaks=speaks(favours=favours, excludes=(other,)), fires=ids)


def _slots(case: Case) -> Observation | None:
    """Expert slots compared with the file."""
    differing = [s for s in case.sightings if s.slot_differs]
    if differing:
        said = f"an expert slot differs from the file in {len(differing)} fires ({differing[0].slot_differs})"
        bearing = speaks(favours=(SLOT_MISMATCH, EVICTED, "K", "U"))
        return Observation(name="slots", statement=said, speaks=bearing, fires=tuple(s.id for s in differing))
    ids = tuple(s.id for s in case.sightings if s.slot_is_identical)
    everywhere = next((c for c in case.clean if "slot" in c.lower()), "")
    if not ids and not everywhere:
        return None
    where = f"clean in every fire: {everywhere}" if everywhere else f"equal to the file in fires {', '.join(ids)}"
    return Observation(
        name="slots",
        statement=f"expert slots: {where}",
        limit="holds for the slots compared, when they were compared: bytes that came right again are not seen",
        speaks=speaks(excludes=(SLOT_MISMATCH, "M"), against=("K", "U")),
        fires=ids,
    )


def _repeats(case: Case) -> Observation | None:
    """Whether the same request fires every time."""
    if case.is_intermittent is None:
        return None
    count = (
        f"{case.tries[0]} of {case.tries[1]} tries"
        if case.tries
        else f"first at tries {', '.join(str(r or 'none') for r in case.rounds)}"
    )
    if case.is_intermittent:
        return Observation(
            name="repeats",
            statement=f"the same request fires in some tries only ({count})",
            limit="tries that sample differ in their tokens: with a fixed seed this weighs more",
            speaks=speaks(favours=TIMING, against=DETERMINISTIC),
        )
    return Observation(
        name="repeats",
        statement=f"the same request fires in every try ({count})",
        speaks=speaks(favours=("A", SCALE_OVERFLOW, "G", "H", "M"), against=("J", "U")),
    )


def _positions(case: Case) -> Observation | None:
    """Short requests or long ones."""
    if len(case.positions) < FEW:
        return None
    low, high = min(case.positions), max(case.positions)
    said = f"token positions {low:,} to {high:,}" + (f" ({case.position_note})" if case.position_note else "")
    if low == high:
        return Observation(
            name="positions",
            statement=f"every fire is at token position {low:,}",
            speaks=speaks(favours=("T", "M", "A"), against=("J",)),
        )
    if low < 4096 <= high:
        said += ": a long context is not needed"
        return Observation(
            name="positions",
            statement=said,
            limit="long requests make more steps, so more chances",
            speaks=speaks(against=("T",)),
        )
    return Observation(name="positions", statement=said)


def _payload(case: Case) -> Observation | None:
    """Bits that no arithmetic writes."""
    carried = [p for p in case.patterns if p.kind is Kind.NAN and not writers(p.bits, p.dtype)]
    if not carried:
        return None
    said = f"bits that no measured arithmetic writes, so carried there: {_listed(carried)}"
    if widened := list(dict.fromkeys(_widened(carried))):
        said += (
            f"; consistent with a 16-bit float NaN widened ({', '.join(widened)}), rival: two adjacent 16-bit fields"
        )
    return Observation(
        name="payload",
        statement=said,
        limit="who wrote them is not known; bits are one piece of evidence, never the verdict",
        speaks=speaks(favours=("C", "D", "J")),
    )


def _default_bits(case: Case) -> Observation | None:
    """Bits that plain arithmetic writes, often taken for garbage."""
    plain = [p for p in case.patterns if p.kind is Kind.NAN and writers(p.bits, p.dtype)]
    if not plain:
        return None
    whose = list(dict.fromkeys(w for p in plain for w in writers(p.bits, p.dtype) if w.endswith("arithmetic")))
    return Observation(
        name="default bits",
        statement=f"bits that arithmetic writes ({', '.join(whose) or 'a known constant'}): {_listed(plain)}",
        limit="any invalid operation leaves them: they speak neither for garbage nor for a certain op",
    )


def _widened(patterns: Sequence[Pattern]) -> Iterator[str]:
    for p in patterns:
        reading = read_bits(p.bits, p.dtype, p.machine)
        yield from (f"{w.dtype} {w.bits_hex}" for w in reading.widenings if reading.payload)


def _listed(patterns: Sequence[Pattern]) -> str:
    return ", ".join(f"{read_bits(p.bits, p.dtype).bits_hex} x{p.count}" for p in patterns)


def _persistence(case: Case) -> Observation | None:
    """Whether the next requests are bad as well."""
    if case.persistence == "bad":
        return Observation(
            name="after",
            statement="the requests after a fire are bad too",
            speaks=speaks(favours=("E", "K", "M"), against=("A", "C", "J", "N")),
        )
    if case.persistence == "clean":
        return Observation(
            name="after",
            statement="the requests after a fire are clean",
            speaks=speaks(excludes=(STATE_NOT_CLEARED,), against=("K", "M")),
        )
    return None


def _weights(case: Case) -> Observation | None:
    """Weights seen to be non-finite."""
    bad = [s for s in case.sightings if s.bad_weights]
    if not bad:
        return None
    names = sorted({n for s in bad for n in s.bad_weights})
    shown = ", ".join(names[:3])
    said = f"a weight of the first bad op is non-finite itself in {len(bad)} of {len(case.sightings)} fires ({shown})"
    limit = "from the file (M) or overwritten later (K): hash it against the file"
    return Observation(
        name="weights", statement=said, limit=limit, speaks=speaks(favours=("M", "K")), fires=tuple(s.id for s in bad)
    )


def _alone(case: Case) -> Observation | None:
    """What single fires rule out for themselves, so that it is not the one cause of all."""
    from firetower.lab.incident.alone import exclusions

    against: dict[str, list[str]] = {}
    for s in case.sightings:
        for key, _ in exclusions(s):
            for k in keys_of(key):
                against.setdefault(k, []).append(s.id)
    if not against or len(case.sightings) < 2:
        return None
    some = "; ".join(f"{k}: {', '.join(ids[:4])}{' ...' if len(ids) > 4 else ''}" for k, ids in sorted(against.items()))
    return Observation(
        name="single fires",
        statement=f"single fires rule out, for themselves: {some}",
        limit="as the one cause of all fires; another fire may still be due to it",
        speaks=speaks(against=tuple(against)),
        fires=tuple(sorted({i for ids in against.values() for i in ids})),
    )


def _verdicts(case: Case) -> Observation | None:
    """Verdicts that were reached for single fires."""
    counts = Counter(s.verdict for s in case.sightings if s.verdict)
    if not counts:
        return None
    said = ", ".join(f"{key} in {n}" for key, n in counts.most_common())
    undecided = len(case.sightings) - counts.total()
    ids = tuple(s.id for s in case.sightings if s.verdict)
    keys = tuple(k for key in counts for k in keys_of(key) or keys_of(key[0]))
    return Observation(
        name="verdicts",
        statement=f"verdicts of single fires: {said}",
        limit=f"{undecided} fires have no decided verdict" if undecided else "",
        speaks=speaks(favours=keys),
        fires=ids,
    )


RULES: tuple[Rule, ...] = (
    _verdicts, _place, _layers, _columns, _sides, _inputs, _states, _weights, _slots, _class, _payload, _default_bits,
    _positions,
    _repeats, _persistence, _alone,
)  # fmt: skip
