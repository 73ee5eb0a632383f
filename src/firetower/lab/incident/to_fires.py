"""Fires for the store from an incident: those whose first bad value has a place, and why the others have none."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from firetower.core.codec import fire_from_dict
from firetower.core.formats import classify
from firetower.core.records import Fire
from firetower.fires.handin import complete
from firetower.lab.incident.case import case_of_incident
from firetower.lab.incident.records import Incident, IncidentFire
from firetower.lab.incident.sighting import Sighting


class Converted(NamedTuple):
    """Fires that can be stored, and (id, what is missing) for the others."""

    fires: tuple[Fire, ...]
    missing: tuple[tuple[str, str], ...]


def incident_fires(incident: Incident, name: str) -> Converted:
    """Turn the fires of an incident into fires of the store; nothing is invented for what is not known.

    Args:
        incident: read from a file or from log lines.
        name: of the file; becomes part of the ids, so that importing twice adds nothing.

    Raises:
        RecordError: a value that no fire can hold.
    """
    fires, missing = [], []
    sightings = {s.id: s for s in case_of_incident(incident).sightings}
    for fire in incident.fires:
        seen = sightings[fire.id]
        lack = _lack(fire, seen.stage, incident)
        if lack:
            missing.append((fire.id, lack))
        else:
            fires.append(fire_from_dict(complete(_short_form(fire, incident, name, seen))))
    return Converted(tuple(fires), tuple(missing))


def _lack(fire: IncidentFire, stage: str, incident: Incident) -> str:
    if not stage:
        return "the first bad signal"
    place = fire.first.get(stage)
    if place is None:
        return f"the first bad value of {stage}"
    if place.row is None or place.column is None:
        return f"row and column of the first bad value of {stage}"
    if classify(place.bits, place.dtype) is None:
        return f"a first bad value of {stage} that is NaN or Inf ({place.bits_hex} is finite in {place.dtype})"
    if place.row and _width(incident, place.column) is None:
        return "engine.hidden_size, the width of a row"
    return ""


def _width(incident: Incident, column: int) -> int | None:
    width = incident.engine.get("hidden_size")
    return width if isinstance(width, int) and not isinstance(width, bool) and width > column else None


def _short_form(fire: IncidentFire, incident: Incident, name: str, seen: Sighting) -> dict[str, Any]:
    place = fire.first[seen.stage]
    assert place.row is not None
    assert place.column is not None
    width = _width(incident, place.column) or place.column + 1
    extra = {"side": seen.side, "slot": place.slot, "expert": place.expert, "build": fire.build, "try": fire.try_number}
    digest = hashlib.sha256(f"{name}\0{fire.id}".encode()).hexdigest()[:16]
    return {
        "id": f"incident-{digest}",
        "source": "incident",
        "runtime": str(fire.facts.get("runtime") or incident.engine.get("runtime") or fire.build or "unknown"),
        "model": str(fire.facts.get("model") or incident.engine.get("model") or "unknown"),
        "device": str(incident.engine.get("cpu" if seen.side == "miss" else "device") or "unknown"),
        "origin": {"stage": seen.stage, "layer": seen.layer},
        "phase": fire.phase or "unknown",
        "request": fire.facts.get("request"),
        "first": {
            "bits": place.bits,
            "dtype": place.dtype,
            "row": place.row,
            "column": place.column,
            "flat_index": place.row * width + place.column,
            "token": place.token,
            "position": fire.position,
        },
        "extra": {k: v for k, v in extra.items() if v not in (None, "")},
    }
