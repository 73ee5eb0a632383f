"""What one fire rules out for itself, whatever the others show."""

from __future__ import annotations

from collections.abc import Iterator

from firetower.lab.incident.hypotheses import CPU_KERNEL, GPU_KERNEL, SLOT_MISMATCH, STATE_NOT_CLEARED, keys_of
from firetower.lab.incident.sighting import ATTENTION, ROUTED, Sighting


def exclusions(s: Sighting) -> tuple[tuple[str, str], ...]:
    """(hypothesis, reason) for everything that this fire excludes for itself; one reason a hypothesis."""
    found: dict[str, str] = {}
    for key, why in (*_by_verdict(s), *_by_place(s), *_by_sides(s), *_by_states(s)):
        found.setdefault(key, why)
    return tuple(found.items())


def _by_verdict(s: Sighting) -> Iterator[tuple[str, str]]:
    for key, why in s.ruled_out.items():
        # a detail that the table has no row for says nothing about the rest of its family
        if keys_of(key):
            yield key, why


def _by_place(s: Sighting) -> Iterator[tuple[str, str]]:
    if s.layer is None or not s.inputs_finite:
        return
    if s.stage in ATTENTION:
        yield "L", f"layer {s.layer}: attention is bad before any expert runs, and its input is clean"
        yield "H", f"layer {s.layer}: attention is bad before the router runs, and its input is clean"
    if s.stage in ROUTED and _later(s, "attention"):
        for key in ("G", "I"):
            yield key, f"attention is clean in layer {s.layer}, where the routed rows are bad"


def _by_sides(s: Sighting) -> Iterator[tuple[str, str]]:
    looked = {"hit", "miss"} <= set(s.first_layers)
    if s.side == "hit" and looked and _later(s, "miss"):
        values = next((f" ({c})" for c in s.clean if c.startswith("miss")), "")
        yield CPU_KERNEL, f"the CPU side is clean{values} when the hit rows of layer {s.layer} are bad"
    if s.side == "miss" and looked and _later(s, "hit"):
        yield GPU_KERNEL, f"the GPU side is clean in layer {s.layer}, where the miss rows are bad"
    if s.slot_is_identical:
        yield SLOT_MISMATCH, f"the slot holds the file's bytes ({s.slot_is_identical})"


def _by_states(s: Sighting) -> Iterator[tuple[str, str]]:
    if s.states_finite:
        yield STATE_NOT_CLEARED, "the states were looked at and are finite"


def _later(s: Sighting, signal: str) -> bool:
    """Whether a signal that was looked at is clean in the layer of the origin."""
    if signal not in s.first_layers or s.layer is None:
        return False
    layer = s.first_layers[signal]
    return layer is None or layer > s.layer
