"""Order of events, and the expert cache: contents of slots, evictions, destinations, hit against miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Step, fact
from firetower.lab.subject import POISON, Event, Floats, RoutedRow, Slot, Switch


def _order(look: Look) -> Iterator[Fact]:
    events: Sequence[Event] = look.part("events")
    yield _overwritten(events)
    yield _evicted(events)


def _overwritten(events: Sequence[Event]) -> Fact:
    held: dict[str, Event] = {}
    for e in events:
        if e.kind == "write":
            held[e.what] = e
        elif e.kind == "read" and (found := _newer(held.get(e.what), e)) is not None:
            who = e.by or "the reader"
            text = f"{e.what}: {who} wanted version {e.version} and found {found}, written first"
            return fact("overwritten_before_use", True, text)
    return fact("overwritten_before_use", False, "every reader found the version that it wanted")


def _newer(write: Event | None, read: Event) -> int | None:
    """The version that a read found, where it is newer than the one it wanted."""
    if write is None or write.version is None or read.version is None:
        return None
    return write.version if write.version > read.version else None


def _evicted(events: Sequence[Event]) -> Fact:
    needed: dict[str, int] = {}
    gone: list[str] = []
    for e in events:
        if e.kind == "need":
            needed[e.what] = e.step
        elif e.kind == "evict" and needed.get(e.what) == e.step:
            gone.append(e.what)
        elif e.kind == "read":
            needed.pop(e.what, None)
    text = (
        f"{', '.join(gone)}: evicted in the step that needed it, before it was read"
        if gone
        else "nothing needed was evicted"
    )
    return fact("evicted_in_use", bool(gone), text)


def _slots(look: Look) -> Iterator[Fact]:
    slots: Sequence[Slot] = look.part("slots")
    hashed = [s for s in slots if s.hash_now is not None and s.source_hash is not None]
    wrong = [s for s in hashed if s.hash_now != s.source_hash]
    if not wrong:
        if len(hashed) == len(slots):
            yield fact(
                "slot_mismatch",
                False,
                f"{len(slots)} slots hash as their experts" if slots else "there are no expert slots",
            )
        return
    s = wrong[0]
    holds = next((expert for expert, h in s.known.items() if h == s.hash_now), None)
    what = f"expert {holds}" if holds is not None else "no known expert"
    text = f"slot {s.slot}: the map says expert {s.expert}, the hash is that of {what}{_paths(look)}"
    yield fact("slot_mismatch", True, text)


def _paths(look: Look) -> str:
    """Which path's rows are bad: ``; bad rows are hits (2 of 2), misses are clean (0 of 3)``."""
    rows: Sequence[RoutedRow] | None = look.part("routed_rows")
    if not rows:
        return ""
    counts = {p: (sum(r.is_bad for r in rows if r.path == p), sum(r.path == p for r in rows)) for p in ("hit", "miss")}
    parts = [f"{bad} of {num} {path} rows are bad" for path, (bad, num) in counts.items() if num]
    return f"; {', '.join(parts)}"


def _routed(look: Look) -> Iterator[Fact]:
    rows: Sequence[RoutedRow] = look.part("routed_rows")
    bad = {path for path in ("hit", "miss") if any(r.is_bad for r in rows if r.path == path)}
    both = {r.path for r in rows} == {"hit", "miss"}
    one = len(bad) == 1 and both
    text = _paths(look).removeprefix("; ") or "no row was routed"
    yield fact("one_path_bad", one, text)


def _poisoned(look: Look) -> Iterator[Fact]:
    if not look.can(Switch.POISON_DESTINATIONS):
        return
    outcome = look.outcome(Switch.POISON_DESTINATIONS)
    if outcome is None or not outcome.outputs:
        return
    rows = [i for a in outcome.outputs for i in _rows_with_poison(a.values)]
    text = (
        f"destinations poisoned with {POISON:g}: rows {rows} of the output still hold it"
        if rows
        else "every poisoned destination was written"
    )
    yield fact("destination_unwritten", bool(rows), text + (_paths(look) if rows else ""))


def _rows_with_poison(values: Floats) -> list[int]:
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    return [int(i) for i in np.flatnonzero(np.isclose(rows.astype(np.float64), POISON, rtol=2e-3).all(-1))]


def _misses(look: Look) -> Iterator[Fact]:
    cured = look.cures(Switch.ALL_MISS)
    if cured is not None:
        yield fact(
            "misses_cure",
            cured,
            f"with every expert from its source it is {'clean' if cured else 'still wrong'}",
        )


STEPS = (
    Step(
        name="order-of-events",
        title="was a buffer overwritten, or an expert evicted, before it was read?",
        cost=Cost.READ,
        needs=("events",),
        facts=("overwritten_before_use", "evicted_in_use"),
        command="log writes, reads and evictions of one step in order",
        run=_order,
    ),
    Step(
        name="slot-hash",
        title="does each slot hold the expert that the map says?",
        cost=Cost.READ,
        needs=("slots",),
        facts=("slot_mismatch",),
        command="hash every slot and compare with the expert's source",
        run=_slots,
    ),
    Step(
        name="hit-or-miss",
        title="are the bad routed rows hits or misses?",
        cost=Cost.READ,
        needs=("routed_rows",),
        facts=("one_path_bad",),
        command="note for every routed row whether its expert was resident",
        run=_routed,
    ),
    Step(
        name="poisoned-destinations",
        title="is every destination row written?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("destination_unwritten",),
        command="fill the experts' output with a known value before the kernel",
        run=_poisoned,
    ),
    Step(
        name="all-misses",
        title="does taking every expert from its source cure it?",
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=("misses_cure",),
        command="run with the expert cache off",
        run=_misses,
    ),
)
