"""What the events of a campaign add up to: which tries count, which are set aside, which are still to make.

A pure fold over the journal, so that a campaign which goes on after a kill knows exactly what one that was never
killed would. Rules:

* After a fire or a lost try, its process is *in question*: what ends there afterwards is held back. The next
  canary decides: well, and they count; burned or silent, and they are set aside as dependent. Whether a try counts
  never hangs on its own outcome.
* A number counts once. What was set aside or lost is made again under the same number, until it counts or
  was lost ``max_attempts`` times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from firetower.core.errors import RecordError, ReplayError
from firetower.lab.replay.records import COUNTED_ENDS, Canary, Try, TryEnd
from firetower.lab.replay.schema import record_from_dict

HELD_BACK = "ended after a fire in its process, before a canary could tell"
POISONED = "its process was poisoned by the fire before it"


@dataclasses.dataclass(slots=True)
class _Process:
    """One process as far as its events tell."""

    in_question: bool = False
    is_poisoned: bool = False
    held: list[Try] = dataclasses.field(default_factory=list)


class CampaignState:
    """The running sum of a campaign's events.

    Args:
        max_attempts: how often a number may be lost.

    Attributes:
        counted: the one try that counts, by number.
        aside: attempts that do not count, in order; those held back are not in it yet.
        canaries: in order.
        num_attempts: attempts begun, by number.
        num_processes: processes named so far.
        unfinished: attempts that were begun and never ended (the campaign was killed), by number.
        ended: the last word of the journal about why it stopped, or None.
        last_at: time of the last event.
    """

    def __init__(self, max_attempts: int = 3) -> None:
        self.max_attempts = max_attempts
        self.counted: dict[int, Try] = {}
        self.aside: list[Try] = []
        self.canaries: list[Canary] = []
        self.num_attempts: dict[int, int] = {}
        self.num_lost: dict[int, int] = {}
        self.num_processes = 0
        self.unfinished: set[tuple[int, int]] = set()
        self.ended: str | None = None
        self.last_at = ""
        self._order: list[Try] = []
        self._held: set[int] = set()
        self._first_open = 0
        self._processes: dict[str, _Process] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event.

        Raises:
            ReplayError: an event that no campaign writes.
        """
        kind = event.get("event")
        handler = {
            "start": self._take_start,
            "try": self._take_try,
            "canary": self._take_canary,
            "process": self._take_process,
            "session": self._take_session,
            "end": self._take_end,
        }.get(str(kind))
        if handler is None:
            raise ReplayError(f"journal: event={kind!r}: unknown; was it written by a newer firetower?")
        try:
            handler(event)
        except (KeyError, TypeError, RecordError) as e:
            raise ReplayError(f"journal: a broken {kind!r} event: {e}") from e
        self.last_at = str(event.get("at", self.last_at))

    def take_all(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take events in order."""
        for event in events:
            self.take(event)

    def is_settled(self, number: int) -> bool:
        """Whether nothing more is to be made under a number: it counts, or was lost too often."""
        return number in self.counted or self.num_lost.get(number, 0) >= self.max_attempts

    def is_held(self, number: int) -> bool:
        """Whether an attempt of it waits for a canary."""
        return number in self._held

    def prefix(self, size: int) -> int:
        """How many numbers from 0 on, of a plan of ``size``, are settled without a gap."""
        while self.is_settled(self._first_open):
            self._first_open += 1
        return min(self._first_open, size)

    def tries(self) -> tuple[Try, ...]:
        """Every attempt that ended, in the order of their ends; held ones as dependent."""
        dependent = {(t.number, t.attempt): t for t in self.aside}
        for process in self._processes.values():
            dependent |= {(t.number, t.attempt): _set_aside(t, HELD_BACK) for t in process.held}
        return tuple(dependent.get((t.number, t.attempt), t) for t in self._order)

    def _take_start(self, event: Mapping[str, Any]) -> None:
        number, attempt = int(event["number"]), int(event["attempt"])
        self.num_attempts[number] = max(attempt, self.num_attempts.get(number, 0))
        self.unfinished.add((number, attempt))
        self.ended = None

    def _take_try(self, event: Mapping[str, Any]) -> None:
        made = record_from_dict(Try, event["try"], "try")
        self.unfinished.discard((made.number, made.attempt))
        self._order.append(made)
        process = self._processes.setdefault(made.process, _Process())
        if process.is_poisoned:
            self.aside.append(_set_aside(made, POISONED))
        elif process.in_question:
            process.held.append(made)
            self._held.add(made.number)
        else:
            self._settle(made)
        if made.end is not TryEnd.CLEAN:
            process.in_question = True

    def _take_canary(self, event: Mapping[str, Any]) -> None:
        canary = record_from_dict(Canary, event["canary"], "canary")
        self.canaries.append(canary)
        process = self._processes.setdefault(canary.process, _Process())
        held, process.held = process.held, []
        self._held -= {t.number for t in held}
        process.in_question = False
        process.is_poisoned = canary.persists is not False
        for made in held:
            if process.is_poisoned:
                self.aside.append(_set_aside(made, POISONED if canary.persists else HELD_BACK))
            else:
                self._settle(made)

    def _take_process(self, event: Mapping[str, Any]) -> None:
        self.num_processes = max(self.num_processes, int(event["index"]))
        self.ended = None

    def _take_session(self, event: Mapping[str, Any]) -> None:
        """Another run of the command: nobody will ever ask a canary about what was held back before."""
        self.ended = None
        self._held.clear()
        for process in self._processes.values():
            held, process.held = process.held, []
            self.aside += [_set_aside(t, HELD_BACK) for t in held]

    def _take_end(self, event: Mapping[str, Any]) -> None:
        self.ended = str(event["ended"])

    def _settle(self, made: Try) -> None:
        if made.end not in COUNTED_ENDS:
            self.aside.append(made)
            self.num_lost[made.number] = self.num_lost.get(made.number, 0) + 1
        elif made.number in self.counted:
            self.aside.append(_set_aside(made, "made twice; the first counts"))
        else:
            self.counted[made.number] = made


def _set_aside(made: Try, why: str) -> Try:
    if made.end not in COUNTED_ENDS:
        return made
    return dataclasses.replace(made, end=TryEnd.DEPENDENT, detail=why)
