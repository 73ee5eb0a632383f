"""Running a campaign: which try is made next, where, and what a fire does to the place it happened in.

One thread decides and writes the journal; tries, canaries and restarts block in threads of their own, never more
than ``concurrency`` at a time.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from firetower.core.errors import FiretowerError, ReplayError
from firetower.core.records import utc_now
from firetower.lab.replay.arms import Arm
from firetower.lab.replay.canary import CanaryResult
from firetower.lab.replay.journal import Journal
from firetower.lab.replay.judge import Result
from firetower.lab.replay.plan import PlannedTry
from firetower.lab.replay.records import CampaignEnd, Canary, Isolation, Try, TryEnd
from firetower.lab.replay.request import RequestMaker
from firetower.lab.replay.seats import Condition, Options, Seat
from firetower.lab.replay.state import CampaignState

MAX_LOST_IN_A_ROW = 8
MAX_BURNED_OPENS = 3
_TICK_S = 0.25
_CLOSE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    """A task that ended: its seat, what it was, and what it gave."""

    seat: Seat
    what: str
    value: Any
    planned: PlannedTry | None = None
    started_at: str = ""
    attempt: int = 0
    seed: int | None = None


class CampaignRunner:
    """Makes the tries of a plan that are still to make.

    Args:
        plan: every try, in order.
        arms: by name.
        seats: by arm's name; arms may share them.
        maker: of requests.
        journal: open; its events are already in ``state``.
        state: is kept up to date.
        options: see there.
    """

    def __init__(
        self,
        *,
        plan: Sequence[PlannedTry],
        arms: Mapping[str, Arm],
        seats: Mapping[str, Sequence[Seat]],
        maker: RequestMaker,
        journal: Journal,
        state: CampaignState,
        options: Options,
    ) -> None:
        self._plan = plan
        self._arms = arms
        self._seats = seats
        self._all_seats = list(dict.fromkeys(s for group in seats.values() for s in group))
        self._maker = maker
        self._journal = journal
        self._state = state
        self._options = options
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._in_flight: set[int] = set()
        self._num_busy = 0
        self._num_opening = 0
        self._num_lost_in_a_row = 0
        self._told: set[str] = set()
        self._ended: CampaignEnd | None = None

    def run(self) -> CampaignEnd:
        """Make tries until the plan is done or something ends it; Ctrl-C is an end like others.

        Raises:
            ReplayError: the target cannot be used at all, or the journal cannot be written.
        """
        try:
            ended = self._loop()
        except KeyboardInterrupt:
            ended = CampaignEnd.INTERRUPTED
        finally:
            self._close()
        self._add("end", ended=ended)
        return ended

    def _loop(self) -> CampaignEnd:
        while True:
            while self._num_busy < self._options.concurrency and self._launch():
                pass
            self._options.tick(len(self._in_flight))
            if not self._num_busy and self._ended is not None:
                return self._ended
            if self._num_busy == self._num_opening and self._state.prefix(len(self._plan)) == len(self._plan):
                return CampaignEnd.PLANNED
            try:
                self._take(self._done.get(timeout=_TICK_S))
            except queue.Empty:
                continue
            if self._ended is CampaignEnd.EARLY:
                return self._ended

    def _launch(self) -> bool:
        """Start the most urgent thing that can be started; False where there is nothing."""
        for seat in self._all_seats:
            if seat.condition is Condition.SUSPECT and not seat.in_flight:
                return self._spawn(seat, "canary", partial(seat.probe.look, seat.place.run))
        if self._ended is not None:
            return False
        now = time.monotonic()
        for seat in self._all_seats:
            if seat.condition is Condition.WAITING and seat.look_at <= now and self._is_needed(seat):
                return self._spawn(seat, "canary", partial(seat.probe.look, seat.place.run))
        promised: dict[int, int] = {}
        return any(self._launch_try(planned, promised) for planned in self._next_tries())

    def _next_tries(self) -> Iterator[PlannedTry]:
        """Tries to make now, in order; a few ahead, so that one busy seat does not idle the others."""
        left = 2 * self._options.concurrency * max(1, len(self._arms))
        for number in range(self._state.prefix(len(self._plan)), len(self._plan)):
            if number in self._in_flight or self._state.is_settled(number) or self._state.is_held(number):
                continue
            yield self._plan[number]
            left -= 1
            if not left:
                return

    def _launch_try(self, planned: PlannedTry, promised: dict[int, int]) -> bool:
        """Make a try, or open a place for it; ``promised`` counts tries that places being opened will take."""
        seats = self._seats[planned.arm]
        for seat in seats:
            if seat.condition is Condition.READY and seat.in_flight < seat.place.capacity:
                return self._spawn_try(seat, planned)
        promised[id(seats)] = promised.get(id(seats), 0) + 1
        if promised[id(seats)] <= sum(s.place.capacity for s in seats if s.condition is Condition.OPENING):
            return False
        for seat in seats:
            if seat.condition is Condition.STALE and not seat.in_flight:
                return self._spawn(seat, "open", partial(self._open, seat, seat.place.restart))
        for seat in seats:
            if seat.condition is Condition.NEW:
                return self._spawn(seat, "open", partial(self._open, seat, seat.place.start))
        return False

    def _open(self, seat: Seat, start: Callable[[], None]) -> CanaryResult | None:
        """Start or restart a place and look whether it is well; None where it is fresh beyond doubt."""
        start()
        is_fresh = self._options.isolation is Isolation.PROCESS and seat.place.noun != "server"
        return None if is_fresh and seat.was_open else seat.probe.look(seat.place.run)

    def _spawn_try(self, seat: Seat, planned: PlannedTry) -> bool:
        attempt = self._state.num_attempts.get(planned.number, 0) + 1
        request = self._maker.request_for(self._arms[planned.arm], planned.number, attempt)
        self._add("start", number=planned.number, attempt=attempt, process=seat.name)
        seat.in_flight += 1
        self._in_flight.add(planned.number)
        details = {"planned": planned, "started_at": utc_now(), "attempt": attempt, "seed": request.seed}
        return self._spawn(seat, "try", lambda: seat.place.run(request), **details)

    def _spawn(self, seat: Seat, what: str, task: Callable[[], Any], **details: Any) -> bool:
        if what != "try":
            seat.condition = Condition.OPENING

        def work() -> None:
            try:
                value = task()
            except Exception as e:  # noqa: BLE001 - it belongs to the deciding thread, which raises it
                value = e
            self._done.put(_Done(seat, what, value, **details))

        self._num_busy += 1
        self._num_opening += what == "open"
        self._threads = {t for t in self._threads if t.is_alive()}
        thread = threading.Thread(target=work, name=f"firetower {what}", daemon=True)
        self._threads.add(thread)
        thread.start()
        return True

    def _take(self, done: _Done) -> None:
        self._num_busy -= 1
        self._num_opening -= done.what == "open"
        if isinstance(done.value, Exception):
            self._take_failure(done)
        elif done.what == "try":
            self._take_try(done)
        elif done.what == "open":
            self._take_open(done.seat, done.value)
        else:
            self._take_look(done.seat, done.value)

    def _take_failure(self, done: _Done) -> None:
        """A place that cannot be opened ends the campaign, unless others of its kind work."""
        others = [s for group in self._seats.values() if done.seat in group for s in group if s is not done.seat]
        if done.what == "open" and any(s.condition is Condition.READY for s in others):
            done.seat.condition = Condition.GONE
            self._say(f"one place less: {done.value}")
            return
        raise done.value if isinstance(done.value, FiretowerError) else _unexpected(done)

    def _take_try(self, done: _Done) -> None:
        seat, planned, result = done.seat, done.planned, done.value
        assert planned is not None
        seat.in_flight -= 1
        self._in_flight.discard(planned.number)
        made = _try_of(done, planned, result)
        self._add("try", **{"try": made})
        self._tell(result)
        if result.fatal:
            raise ReplayError(result.fatal)
        if seat.place.is_gone:
            seat.condition = Condition.STALE
        elif made.end is not TryEnd.CLEAN:
            seat.condition = Condition.SUSPECT
            seat.after = made.number if seat.after is None else seat.after
        elif self._options.isolation is Isolation.PROCESS:
            seat.condition = Condition.STALE
        self._num_lost_in_a_row = self._num_lost_in_a_row + 1 if made.end is TryEnd.LOST else 0
        if self._num_lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._ended = self._ended or CampaignEnd.FAILING
        self._ask_stop()

    def _take_open(self, seat: Seat, look: CanaryResult | None) -> None:
        self._name(seat)
        if look is None or self._take_canary(seat, look):
            self._welcome(seat)
            return
        if not look.prompts:
            if not seat.was_open and not self._state.counted:
                said = f": {look.message}" if look.message else ""
                raise ReplayError(f"target: gives no answer to two short prompts ({look.detail}{said})")
            self._wait(seat, CampaignEnd.FAILING)
            return
        seat.num_burned_opens += 1
        if seat.num_burned_opens >= MAX_BURNED_OPENS:
            self._ended = self._ended or CampaignEnd.POISONED
        if seat.place.can_restart:
            seat.condition = Condition.STALE
        else:
            self._wait(seat, CampaignEnd.POISONED)

    def _take_look(self, seat: Seat, look: CanaryResult) -> None:
        is_well = self._take_canary(seat, look)
        if seat.waits_since is not None:
            if is_well:
                # somebody restarted it, or it healed: either way another process to the statistics
                self._name(seat)
                self._welcome(seat)
            else:
                self._wait(seat, CampaignEnd.POISONED if look.prompts else CampaignEnd.FAILING)
        elif self._options.isolation is not Isolation.NONE and seat.place.can_restart:
            seat.condition = Condition.STALE
        elif is_well:
            seat.condition = Condition.READY
        else:
            self._wait(seat, CampaignEnd.POISONED if look.prompts else CampaignEnd.FAILING)
        self._ask_stop()

    def _take_canary(self, seat: Seat, look: CanaryResult) -> bool:
        canary = Canary(
            process=seat.name,
            after=seat.after,
            at=utc_now(),
            burned=look.burned,
            prompts=look.prompts,
            persists=look.persists,
            detail=look.detail,
        )
        self._add("canary", canary=canary)
        if look.fatal:
            raise ReplayError(look.fatal)
        if look.persists is False:
            seat.after = None
            return True
        what = "is poisoned, the canary shows it" if look.persists else "does not answer the canary"
        self._say(f"{seat.name} {what}: {look.detail}. {look.message}".rstrip())
        return False

    def _welcome(self, seat: Seat) -> None:
        seat.condition, seat.was_open = Condition.READY, True
        seat.waits_since, seat.num_burned_opens = None, 0

    def _wait(self, seat: Seat, ended: CampaignEnd) -> None:
        """Look again a little later, or give up."""
        now = time.monotonic()
        seat.waits_since = now if seat.waits_since is None else seat.waits_since
        waited = now - seat.waits_since
        if waited >= self._options.recover_wait_s:
            self._ended = self._ended or ended
        seat.condition = Condition.WAITING
        seat.look_at = now + min(max(0.2, waited), 10.0, max(0.2, self._options.recover_wait_s - waited))

    def _is_needed(self, seat: Seat) -> bool:
        """Whether any try is still to be made in a seat."""
        names = [arm for arm, seats in self._seats.items() if seat in seats]
        return any(p.arm in names for p in self._next_tries())

    def _ask_stop(self) -> None:
        if self._options.stop is not None and self._ended is None and self._options.stop():
            self._ended = CampaignEnd.EARLY

    def _name(self, seat: Seat) -> None:
        seat.after = None
        index = self._state.num_processes + 1
        seat.name = f"{seat.place.noun} {index}"
        self._add("process", index=index, name=seat.name)

    def _tell(self, result: Result) -> None:
        if result.end is TryEnd.LOST:
            self._say(f"{result.detail}: {result.message}" if result.message else result.detail)

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._options.say(text)

    def _add(self, event: str, **fields: Any) -> None:
        self._state.take(self._journal.add(event, at=utc_now(), **fields))

    def _close(self) -> None:
        if self._num_busy:
            for seat in self._all_seats:
                seat.place.abort()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for seat in self._all_seats:
            seat.place.close()


def _try_of(done: _Done, planned: PlannedTry, result: Result) -> Try:
    shared = {f.name for f in dataclasses.fields(Try)} & {f.name for f in dataclasses.fields(Result)}
    return Try(
        number=planned.number,
        attempt=done.attempt,
        arm=planned.arm,
        round=planned.round,
        process=done.seat.name,
        started_at=done.started_at,
        seed=done.seed,
        **{name: getattr(result, name) for name in shared},
    )


def _unexpected(done: _Done) -> ReplayError:
    return ReplayError(f"{done.what}: {type(done.value).__name__}: {done.value}")
