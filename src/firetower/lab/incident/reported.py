"""What the reporter of an incident tested, held against the hypotheses.

An incident file may say outright what a test is ``against``. Where it gives a sentence only, the table below reads
it by its words, and says so; a test that no row fits is shown and bears on nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from firetower.core.analysis import Observation, Speaks
from firetower.lab.incident.hypotheses import CPU_KERNEL, GPU_KERNEL, SCALE_OVERFLOW, SLOT_MISMATCH, UNWRITTEN, keys_of
from firetower.lab.incident.records import RuledOut


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How words of a test are read. All ``words`` must occur in it; ``limit`` is what the test leaves open."""

    words: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    limit: str = ""


READINGS: tuple[Reading, ...] = (
    Reading(words=("scale", "overflow"), excludes=(SCALE_OVERFLOW,), limit="not wrong finite scales"),
    Reading(words=("slot", "identical"), excludes=(SLOT_MISMATCH, "M"), against=("K", "U"),
            limit="the slots compared, when they were; an eviction inside the forward is not seen"),
    Reading(words=("tier",), excludes=("M",), against=(SCALE_OVERFLOW,), limit="each tier is a file of its own"),
    Reading(words=("stale", "row"), against=(UNWRITTEN, "D"),
            limit="that a row is planned does not show that it was written before it was read"),
    Reading(words=("cpu", "kernel"), against=(CPU_KERNEL,), limit="the kernels that ran instead are not excluded"),
    Reading(words=("quantis",), against=(GPU_KERNEL,), limit="one kernel of the GPU side; the others stay"),
    Reading(words=("fused",), against=(GPU_KERNEL,), limit="one kernel of the GPU side; the others stay"),
    Reading(words=("sampl",), excludes=("N",)),
    Reading(words=("draft",), excludes=("Q",)),
    Reading(words=("eager",), excludes=("D", "O")),
    Reading(words=("graph",), excludes=("D",)),
    Reading(words=("compil",), excludes=("O",)),
    Reading(words=("serial",), against=("J",), limit="only what was serialised; the rest may still race"),
    Reading(words=("blocking",), against=("J",), limit="launches were serialised, host threads were not"),
    Reading(words=("another device",), excludes=("U",)),
    Reading(words=("another gpu",), excludes=("U",)),
    Reading(words=("prefix cache",), excludes=("R",)),
    Reading(words=("weights", "hash"), excludes=("K", "M")),
)  # fmt: skip
"""The first row whose words all occur, case ignored, reads a test; a later row is not looked at."""


def reported(tests: Sequence[RuledOut]) -> Iterator[Observation]:
    """One observation a test."""
    for test in tests:
        bearing, limit = _bearing(test)
        yield Observation(
            name=f"reporter: {test.what}",
            statement=f"{test.what}: {test.how}",
            limit=limit,
            speaks=bearing,
        )


def _bearing(test: RuledOut) -> tuple[dict[str, Speaks], str]:
    if test.against:
        return {k: "excludes" for name in test.against for k in keys_of(name)}, "as the reporter states it"
    text = f"{test.what} {test.how}".lower()
    reading = next((r for r in READINGS if all(w in text for w in r.words)), None)
    if reading is None:
        return {}, "not held against any hypothesis: the words do not tell which"
    bearing: dict[str, Speaks] = dict.fromkeys(reading.against, "against")
    bearing |= dict.fromkeys(reading.excludes, "excludes")
    return bearing, "; ".join(filter(None, ("read by its words", reading.limit)))
