"""What becomes of requests that burned: they end, start again, or have their window run again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from firetower.core.records import Fire, Outcome
from firetower.engine.accept import count_accepted
from firetower.engine.errors import BurnedError, SamplingError
from firetower.engine.firelog import FireLog, build_fire
from firetower.engine.flight import Flight, land
from firetower.engine.guard import Burn, Guard, StepReading
from firetower.engine.recovery import Decision, OnFire, Recovery
from firetower.engine.request import FinishReason
from firetower.engine.sequence import Sequence
from firetower.ops.sample import Event

if TYPE_CHECKING:
    from firetower.engine.loop import Loop


class Burns:
    """Carries out what `Recovery` decides, and records every fire.

    Args:
        loop: whose requests they are.
        guard, firelog, recovery: its parts. model_name: for fires.
    """

    def __init__(
        self, loop: Loop, *, guard: Guard, firelog: FireLog, recovery: Recovery, model_name: str
    ) -> None:
        self.loop = loop
        self.guard = guard
        self.firelog = firelog
        self.recovery = recovery
        self.model_name = model_name

    def no_token(self, sequence: Sequence, event: int) -> None:
        """End a request that the sampler found no token for; ``event`` says why."""
        name = Event(event).name
        error = SamplingError(
            f"request {sequence.request.id}: no token can be chosen ({name}): a mask or bias bans every token, or a "
            "parameter is out of its range"
        )
        self.loop.finish(sequence, FinishReason.ERROR, error)

    def prompt(self, flight: Flight, sequence: Sequence, bad: StepReading) -> None:
        """A prompt burned: nothing of it was handed on, so it can only end or start again."""
        burn = bad.burned[0]
        if self._is_victim(sequence):
            self._redo(sequence, burn, bad)
            return
        decision = self._decide(sequence, burn)
        if decision.action is OnFire.FAIL or sequence.uses_reference:
            self._fail(sequence, burn, bad, decision, is_persistent=sequence.uses_reference)
            return
        is_healing = decision.action is OnFire.HEAL
        how = "restart on the reference path" if is_healing else "retry"
        self._record(sequence, burn, bad, Outcome.RECORDED, {"recovery": how})
        sequence.uses_reference = is_healing
        self._restart(sequence)

    def window(self, flight: Flight, row: int, bad: StepReading) -> None:
        """A row of a window burned; its state was not committed, and it is dead in what was launched since."""
        sequence, burn = flight.sequences[row], bad.burned[row]
        if self._is_victim(sequence):
            self._redo(sequence, burn, bad)
            return
        decision = self._decide(sequence, burn)
        if decision.action is OnFire.FAIL:
            self._fail(sequence, burn, bad, decision, is_persistent=False)
        elif decision.action is OnFire.RETRY or self._is_poisoned(sequence):
            # a window that reads a bad page again burns again
            self._record(sequence, burn, bad, Outcome.RECORDED, {"recovery": "retry"})
            self._restart(sequence)
        else:
            self._heal(flight, row, burn, bad, decision)

    def sharer(self, sequence: Sequence) -> None:
        """One that shares a bad block starts again before it burns; at the limit it is left to burn."""
        prefix = self.loop.prefix
        if prefix is not None and sequence.num_recoveries < self.recovery.config.max_per_request:
            prefix.num_redone += 1
            self._restart(sequence)

    def again(self, sequence: Sequence) -> None:
        """Start again a request whose states are not those of its text, though no value of it is bad."""
        is_burned = sequence.is_burned
        self._restart(sequence)
        sequence.is_burned = is_burned

    def _redo(self, sequence: Sequence, burn: Burn, bad: StepReading) -> None:
        """Start again a request that burned in what the prefix cache gave it."""
        self._record(sequence, burn, bad, Outcome.RECORDED, {"recovery": "redone from the last clean block"})
        self.sharer(sequence)

    def _is_victim(self, sequence: Sequence) -> bool:
        """Whether a shared block burned it that another request wrote; however fires are answered, it is redone."""
        prefix = self.loop.prefix
        is_within = sequence.num_recoveries < self.recovery.config.max_per_request
        return prefix is not None and is_within and prefix.is_victim(sequence)

    def _is_poisoned(self, sequence: Sequence) -> bool:
        return self.loop.prefix is not None and self.loop.prefix.is_poisoned(sequence)

    def _heal(self, flight: Flight, row: int, burn: Burn, bad: StepReading, decision: Decision) -> None:
        """Run the window again from the other half of its state, which the burned step left as it was."""
        sequence = flight.sequences[row]
        # of a chained row the token was not known at launch
        flight.fed[row, 0] = sequence.answer[-1]
        sequence.epoch += 1
        sequence.num_recoveries += 1
        again = self.loop.runner.redo(flight, row, is_reference=True)
        landed = land(again, self.loop.runner.num_signals)
        second = None if self.guard.is_clean(landed.words) else self.guard.read(again, landed.words)
        if second is not None and second.burned:
            self._fail(sequence, burn, bad, decision, is_persistent=True, second=second.burned[0])
            return
        path = self.guard.backend(again, burn.signal)
        extra: dict[str, object] = {"recovery": "heal", "result": "transient", "second_backend": path}
        self._record(sequence, burn, bad, Outcome.RECORDED, extra)
        count = int(count_accepted(again.fed, landed.tokens[:1], again.num_real)[0])
        if landed.events[0, 0] != Event.OK:
            self.no_token(sequence, int(landed.events[0, 0]))
            return
        self.loop.advance(sequence, landed.tokens[0, :count].tolist(), again, 0)
        if sequence.is_done:
            return
        rows, seat = self.loop.rows, sequence.seat
        rows.position[seat] = flight.position[row] + count
        rows.accepted[seat] = count
        rows.token[seat] = sequence.answer[-1]
        rows.source[seat] = -1
        rows.remaining[seat] = sequence.request.sampling.max_tokens - len(sequence.answer)

    def _restart(self, sequence: Sequence) -> None:
        """Back to the queue, from the prompt; pages and slot go through quarantine first."""
        sequence.epoch += 1
        sequence.num_recoveries += 1
        if len(sequence.answer) > len(sequence.replay):
            sequence.replay = sequence.answer
        sequence.answer, sequence.logprobs = [], []
        sequence.own_past, sequence.drafter = None, None
        sequence.repeats = 0
        sequence.is_burned = True
        sequence.is_restarting = True
        self.loop.scheduler.drop(sequence)
        if sequence.seat >= 0:
            self.loop.rows.leave(sequence)

    def _decide(self, sequence: Sequence, burn: Burn) -> Decision:
        return self.recovery.decide(burn, num_recoveries=sequence.num_recoveries, now=time.monotonic())

    def _fail(
        self, sequence: Sequence, burn: Burn, bad: StepReading, decision: Decision, *, is_persistent: bool,
        second: Burn | None = None,
    ) -> None:  # fmt: skip
        extra: dict[str, object] = {"recovery": "none" if decision.reason is None else decision.reason}
        if is_persistent:
            extra = {"recovery": "heal", "result": "persistent"}
        if second is not None:
            extra["second"] = f"{second.signal.name}, column {second.column}, bits {second.first.bits_hex}"
            extra["second_backend"] = second.backend
        fire = self._record(sequence, burn, bad, Outcome.ISOLATED, extra)
        sequence.is_burned = True
        is_retriable = not (is_persistent or decision.is_breaker_open)
        why = f" {decision.reason}." if decision.reason else ""
        why = " It came back when the work was done again." if is_persistent else why
        error = BurnedError(
            f"request {burn.request}: {burn.kind} first at {burn.signal.name}, column {burn.column}, bits "
            f"{burn.first.bits_hex} ({burn.dtype}), position {burn.position}, phase {burn.phase}.{why} "
            f"{'Safe to send again' if is_retriable else 'Sending it again will not help'}. Fire {fire.id}; next: "
            f"firetower fires show {fire.id}",
            fire=fire,
            request=sequence.request.id,
            is_retriable=is_retriable,
        )
        self.loop.finish(sequence, FinishReason.BURNED, error)

    def _record(
        self, sequence: Sequence, burn: Burn, bad: StepReading, outcome: Outcome, extra: dict[str, object]
    ) -> Fire:
        return self.firelog.record(
            build_fire(
                burn, bad.reading, model=self.model_name, device=self.loop.runner.device, outcome=outcome,
                token_ids=(*sequence.prompt, *sequence.answer), extra=extra,
            )
        )  # fmt: skip
