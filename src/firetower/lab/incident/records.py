"""An incident as its file tells it: facts on many fires, some of them known one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One bad value: where in its tensor, and its bits. Everything but the bits may be unknown."""

    bits: int
    dtype: str
    row: int | None = None
    column: int | None = None
    token: int | None = None
    slot: int | None = None
    expert: int | None = None
    layer: int | None = None
    stage: str = ""

    @property
    def bits_hex(self) -> str:
        """The bits in hexadecimal, in the width of the type."""
        from firetower.core.formats import find_format

        return f"{self.bits:0{find_format(self.dtype).num_bits // 4}x}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFire:
    """One fire of the incident.

    Attributes:
        id: name within the incident.
        build, try_number, position: engine build, number of the try within its round, token position.
        stage, layer: first bad signal, where it is given outright rather than by ``first_layers``.
        first_layers: signal to the layer where it was first bad; None where it stayed clean.
        layer_kinds: layer to its kind (``gdn``, ``attention``).
        first: signal to its first bad value.
        audits: name of an audit to the bad value it found.
        mapped: signal to (values looked at, of them non-finite).
        clean: what was looked at and found clean.
        slot: an expert slot compared with the file: ``slot``, ``layer``, ``expert``, ``identical``.
        facts: further facts of the import (log lines, request), shown and not judged.
    """

    id: str
    build: str = ""
    try_number: int | None = None
    position: int | None = None
    phase: str = ""
    stage: str = ""
    layer: int | None = None
    first_layers: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    layer_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    first: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    audits: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    mapped: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    clean: tuple[str, ...] = ()
    slot: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """What the reporter tested. ``against`` are the causes it excludes as he says; empty: read off the words."""

    what: str
    how: str
    against: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Many fires of one engine, as facts.

    Attributes:
        what: the incident in a sentence.
        engine, request: free facts, shown; ``device``, ``cpu`` and ``hidden_size`` of the engine are used.
        fires_total, fires_traced: all fires, and those of which the first bad signal is known.
        first_poisoned: signal to the number of traced fires in which it was first.
        first_poisoned_layers: layers in which traced fires began, without their numbers.
        positions: token positions at which fires began; ranges give their ends.
        position_note: the positions in words.
        bits: side to pattern to number of fires.
        clean_in_every_fire: what was looked at in each fire and found clean.
        round_cap, rounds: tries a round at most, and the try of the first fire of each (None: no fire).
        tries: (fires, tries) where the tries were counted instead.
        persistence: whether the next requests were ``clean`` or ``bad``.
        fires: those known one by one.
        ruled_out: the reporter's tests. concluded: what the reporter made of them; shown, not used.
    """

    what: str
    fires_total: int
    fires_traced: int = 0
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first_poisoned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first_poisoned_layers: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    position_note: str = ""
    bits: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    clean_in_every_fire: tuple[str, ...] = ()
    round_cap: int | None = None
    rounds: tuple[int | None, ...] = ()
    tries: tuple[int, int] | None = None
    persistence: Literal["clean", "bad"] | None = None
    fires: tuple[IncidentFire, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    concluded: str = ""
