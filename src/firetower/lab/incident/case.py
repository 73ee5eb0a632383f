"""Everything that is known of many fires, in one form for fires of the store and for an incident file."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from firetower.core.formats import classify
from firetower.core.records import Fire, Kind
from firetower.lab.incident.records import Incident, IncidentFire, Place, RuledOut
from firetower.lab.incident.sighting import LAYER_ORDER, SIDES, STATES, Sighting, machine_of, sighting_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One bit pattern: where it was seen, in whose arithmetic, in how many fires."""

    bits: int
    dtype: str
    where: str
    machine: str | None
    count: int

    @property
    def kind(self) -> Kind | None:
        """Its class; None for a finite value."""
        return classify(self.bits, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the rules see.

    Attributes:
        title: the fires in a few words.
        sightings: the fires that are known one by one.
        num_fires, num_traced: all fires; those of which the first bad signal is known.
        first_poisoned: signal to traced fires in which it was first; may exceed what ``sightings`` show.
        layers, positions: of traced fires, as far as known. ``position_note`` says them in words.
        patterns: the bits. ``clean``: what was found clean in every fire.
        ruled_out: what the reporter tested.
        persistence: ``clean`` or ``bad`` next requests; None where unknown.
        rounds, round_cap, tries: how often it fired; see `Incident`.
        environment: (name, value) facts.
    """

    title: str
    sightings: tuple[Sighting, ...]
    num_fires: int
    num_traced: int
    first_poisoned: Counter[str]
    layers: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    position_note: str = ""
    patterns: tuple[Pattern, ...] = ()
    clean: tuple[str, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    persistence: str | None = None
    rounds: tuple[int | None, ...] = ()
    round_cap: int | None = None
    tries: tuple[int, int] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    concluded: str = ""

    @property
    def kinds(self) -> Counter[Kind]:
        """Classes of the first bad values."""
        return Counter({k: sum(p.count for p in self.patterns if p.kind is k) for k in Kind})

    @property
    def is_intermittent(self) -> bool | None:
        """Whether the same request fires in some tries and not in others; None where no tries were counted."""
        if self.tries:
            return 0 < self.tries[0] < self.tries[1] if self.tries[0] else None
        if self.rounds:
            return any(r is None or r > 1 for r in self.rounds)
        return None

    def share(self, stages: Iterable[str]) -> int:
        """Traced fires whose first bad signal is one of ``stages``."""
        wanted = set(stages)
        return sum(n for stage, n in self.first_poisoned.items() if stage in wanted)


def case_of_fires(fires: Sequence[Fire], title: str) -> Case:
    """The case of stored fires; a merged fire counts once, as its merges were not told apart."""
    seen = tuple(map(sighting_of, fires))
    facts = [(name, sorted({getattr(f, name) for f in fires})) for name in ("model", "runtime", "device")]
    return Case(
        title=title,
        sightings=seen,
        num_fires=len(seen),
        num_traced=sum(s.is_traced for s in seen),
        first_poisoned=Counter(s.stage for s in seen if s.is_traced),
        layers=tuple(s.layer for s in seen if s.layer is not None),
        positions=tuple(s.position for s in seen if s.position is not None),
        patterns=_patterns(seen),
        environment=tuple((name, "; ".join(values)) for name, values in facts),
    )


def _patterns(seen: Sequence[Sighting]) -> tuple[Pattern, ...]:
    counts = Counter(
        (s.bits, s.dtype, SIDES.get(s.side, ""), s.machine)
        for s in seen
        if s.bits is not None and _is_readable(s.bits, s.dtype)
    )
    return tuple(
        Pattern(bits=bits, dtype=dtype, where=where, machine=machine, count=n)
        for (bits, dtype, where, machine), n in counts.most_common()
    )


def _is_readable(bits: int, dtype: str) -> bool:
    from firetower.core.errors import BitsError

    try:
        return classify(bits, dtype) is not None
    except BitsError:
        # a type that only the engine knows
        return False


def case_of_incident(incident: Incident) -> Case:
    """The case of an incident file: its aggregates, and its fires one by one."""
    seen = tuple(_sighting(f, incident) for f in incident.fires)
    first = Counter(dict(incident.first_poisoned)) or Counter(s.stage for s in seen if s.is_traced)
    layers = incident.first_poisoned_layers or tuple(s.layer for s in seen if s.layer is not None)
    told = [s.position for s in seen if s.position is not None]
    return Case(
        title=incident.what or f"{incident.fires_total} fires",
        sightings=seen,
        num_fires=incident.fires_total,
        num_traced=incident.fires_traced,
        first_poisoned=Counter({_stage(name): n for name, n in first.items()}),
        layers=layers,
        positions=tuple(sorted({*incident.positions, *told})),
        position_note=incident.position_note,
        patterns=_incident_patterns(incident) or _patterns(seen),
        clean=incident.clean_in_every_fire,
        ruled_out=incident.ruled_out,
        persistence=incident.persistence,
        rounds=incident.rounds,
        round_cap=incident.round_cap,
        tries=incident.tries,
        environment=_environment(incident),
        concluded=incident.concluded,
    )


def _stage(name: str) -> str:
    """``routed_expert_rows`` is the signal ``routed``; other names stand for themselves."""
    return "routed" if name.startswith("routed") else name


def _environment(incident: Incident) -> tuple[tuple[str, str], ...]:
    def shown(value: object) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    groups = (("engine", incident.engine), ("request", incident.request))
    return tuple((f"{group}.{k}", shown(v)) for group, facts in groups for k, v in facts.items() if v is not None)


def _incident_patterns(incident: Incident) -> tuple[Pattern, ...]:
    from firetower.lab.incident.schema import pattern_of

    found = []
    for side, patterns in incident.bits.items():
        for text, count in patterns.items():
            bits, dtype = pattern_of(text)
            machine = _machine(incident, "cpu" if side.startswith("cpu") else "device")
            found.append(Pattern(bits=bits, dtype=dtype, where=side.replace("_", " "), machine=machine, count=count))
    return tuple(found)


def _machine(incident: Incident, name: str) -> str | None:
    return machine_of(str(incident.engine.get(name, "")))


def _sighting(fire: IncidentFire, incident: Incident) -> Sighting:
    stage, layer, side = _origin(fire)
    place = fire.first.get(stage)
    input_layer = fire.first_layers.get("input", -1)
    input_is_clean = input_layer is None or (layer is not None and input_layer > layer) or "input" in fire.clean
    clean = (*fire.clean, *incident.clean_in_every_fire)
    return Sighting(
        id=fire.id,
        layer=layer,
        stage=stage,
        side=side,
        phase=fire.phase,
        position=fire.position,
        column=place.column if place else None,
        bits=place.bits if place else None,
        dtype=place.dtype if place else "",
        kind=classify(place.bits, place.dtype) if place else None,
        machine=_machine(incident, "cpu" if side == "miss" else "device"),
        residency={"hit": "resident", "miss": "not resident"}.get(side, ""),
        build=fire.build,
        try_number=fire.try_number,
        inputs_finite=True if stage and input_is_clean else None,
        states_finite=False if stage in STATES else True if any(_names(c, STATES) for c in clean) else None,
        first_layers=fire.first_layers,
        clean=(*fire.clean, *(f"{n} ({v:,} values)" for n, (v, bad) in fire.mapped.items() if not bad)),
        slot_is_identical=_slot(fire, identical=True),
        slot_differs=_slot(fire, identical=False),
        layer_kind=fire.layer_kinds.get(str(layer), ""),
        audits=tuple(_audit(name, place) for name, place in fire.audits.items()),
    )


def _origin(fire: IncidentFire) -> tuple[str, int | None, str]:
    """(signal, layer, side) of the first bad signal; both sides of one layer are its routed rows."""
    bad = {name: layer for name, layer in fire.first_layers.items() if layer is not None}
    if not bad:
        return _stage(fire.stage), fire.layer, fire.stage if fire.stage in SIDES else ""
    layer = min(bad.values())
    first = [name for name in bad if bad[name] == layer]
    sides = [name for name in first if name in SIDES]
    stage = min(first, key=lambda n: LAYER_ORDER.index(n) if n in LAYER_ORDER else len(LAYER_ORDER))
    if len(sides) == 2 and stage in SIDES:
        return "routed", layer, ""
    return stage, layer, stage if stage in SIDES else ""


def _names(text: str, words: Iterable[str]) -> bool:
    return text.split(" ")[0].split("(")[0].lower() in words


def _audit(name: str, place: Place) -> str:
    named = (("layer", place.layer), ("row", place.row), ("column", place.column), ("expert", place.expert))
    where = ", ".join(f"{k} {v}" for k, v in named if v is not None)
    what = " ".join(filter(None, (place.stage, place.bits_hex)))
    return ", ".join(filter(None, (f"{name.replace('_', ' ')}: {what}", where)))


def _slot(fire: IncidentFire, *, identical: bool) -> str:
    if fire.slot.get("identical") is not identical:
        return ""
    return ", ".join(f"{k} {v}" for k, v in fire.slot.items() if k != "identical")
