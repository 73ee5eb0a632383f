"""The step loop: launch what is due, read what has landed, and deal with what burned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from firetower.core.errors import FiretowerError
from firetower.engine.accept import count_accepted
from firetower.engine.advance import advance, deliver, logprobs_of
from firetower.engine.buckets import window_limit
from firetower.engine.burns import Burns
from firetower.engine.choose import OwnPast
from firetower.engine.config import EngineConfig
from firetower.engine.drafts import SuffixDrafter
from firetower.engine.errors import CancelledError, DeviceMemoryError
from firetower.engine.firelog import FireLog
from firetower.engine.flight import Flight, Landed, land
from firetower.engine.guard import Burn, Guard, StepReading
from firetower.engine.invariants import Invariants
from firetower.engine.isolate import Quarantine
from firetower.engine.prefix import PrefixCache
from firetower.engine.recovery import Recovery
from firetower.engine.request import FinishReason
from firetower.engine.rows import RowTable
from firetower.engine.runner import Runner
from firetower.engine.scheduler import Chunk, Scheduler
from firetower.engine.sequence import Sequence, Stage
from firetower.ops.sample import Event

Ints = npt.NDArray[np.int64]


class Loop:
    """One engine's steps. Not thread-safe: whoever calls it holds the engine's lock.

    Args:
        config: options. model_name: for fires.
        runner, guard, scheduler, quarantine, firelog, recovery: the parts.

    Attributes:
        burns: deals with what burned.
        prefix: the prefix cache; None for none. invariants: what must not stay as it is for long.
        on_clean: called with every flight that was read as clean, in order: where things that must wait for a clean
            reading hang.
        on_bad: called with every bad one and its reading, before anything is cleared.
        on_free: called with every sequence whose pages and slot are about to be given back.
        release_caches: called when the device has no memory left: give back what can be made again.
        num_steps, num_tokens, num_bad_steps, num_pad_burns: counts.
    """

    def __init__(
        self, config: EngineConfig, *, runner: Runner, guard: Guard, scheduler: Scheduler, quarantine: Quarantine,
        firelog: FireLog, recovery: Recovery, model_name: str, overlap: bool,
    ) -> None:  # fmt: skip
        self.config = config
        self.runner = runner
        self.guard = guard
        self.scheduler = scheduler
        self.quarantine = quarantine
        self.burns = Burns(self, guard=guard, firelog=firelog, recovery=recovery, model_name=model_name)
        self.prefix: PrefixCache | None = None
        self.invariants = Invariants(config.invariants)
        self.depth = 1 if overlap else 0
        self.rows = RowTable(config.max_batch)
        self.flights: deque[Flight] = deque()
        self.on_clean: list[Callable[[Flight, Landed], None]] = []
        self.on_bad: list[Callable[[Flight, Landed, StepReading], None]] = []
        self.on_free: list[Callable[[Sequence], None]] = []
        self.release_caches: list[Callable[[], None]] = []
        self.num_steps = self.num_tokens = self.num_bad_steps = self.num_pad_burns = self.num_out_of_memory = 0
        self.num_windows = self.num_chained = self.num_ended = self.num_drafted = self.num_accepted = 0
        self.last_pad_burn: Burn | None = None
        self._admitted: deque[Sequence] = deque()
        self._launching: Sequence | None = None

    def use_prefix(self, prefix: PrefixCache) -> None:
        """Hang a prefix cache on the steps."""
        self.prefix = self.scheduler.prefix = prefix
        self.on_clean.append(lambda flight, _: prefix.commit(flight.number))
        self.on_bad.append(
            lambda flight, _, bad: prefix.inspect(flight.number, [flight.sequences[row] for row in bad.burned])
        )
        self.on_free.append(prefix.forget)
        self.release_caches.append(prefix.clear)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        scheduler = self.scheduler
        return not (self.flights or self.rows.sequences or scheduler.prefilling or scheduler.queue)

    def step(self) -> bool:
        """Launch one step if one is due, and read one that has landed if it is time; False when idle."""
        if self.is_idle:
            return False
        flight = self._guarded_launch()
        if flight is not None:
            self.flights.append(flight)
            self.num_steps += 1
        if self.flights and (flight is None or len(self.flights) > self.depth):
            self._read(self.flights.popleft())
        return True

    def drain(self) -> None:
        """Read everything that was launched."""
        while self.flights:
            self._read(self.flights.popleft())

    def cancel(self, sequence: Sequence, error: FiretowerError | None = None) -> None:
        """End a request now, wherever it stands."""
        if not sequence.is_done:
            error = error or CancelledError(f"request {sequence.request.id}: cancelled")
            self.finish(sequence, FinishReason.CANCELLED, error)

    # launching

    def _guarded_launch(self) -> Flight | None:
        """A step that finds no memory is tried once more without caches, then costs one request its life."""
        for is_last in (False, True):
            try:
                return self._launch()
            except torch.OutOfMemoryError as e:
                self.num_out_of_memory += 1
                # a request whose chunk or window did not run: nothing of the step counts
                self.drain()
                for release in self.release_caches:
                    release()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                if not is_last:
                    self._undo_chunk()
                else:
                    self._fail_for_memory(str(e).splitlines()[0])
        return None

    def _undo_chunk(self) -> None:
        """A chunk broke off: layers that it has run through hold states behind it, and must not run it again."""
        sequence = self._launching
        # a first chunk starts from nothing, whatever the slot holds
        if sequence is not None and sequence.stage is Stage.PREFILL and sequence.num_prefilled:
            self.burns.again(sequence)
            self._let_go(sequence)

    def _fail_for_memory(self, what: str) -> None:
        # the one whose prompt it was; else the one that came last
        victim = self._launching or max(self.rows.sequences, key=lambda s: s.number, default=None)
        if victim is not None:
            name = victim.request.id
            error = DeviceMemoryError(f"request {name}: no memory on the device, also without caches: {what}")
            self.finish(victim, FinishReason.ERROR, error)

    def _launch(self) -> Flight | None:
        self._launching = None
        # one that found no memory here is begun again by the next try, with those behind it
        self._admitted.extend(self.scheduler.admit())
        while self._admitted:
            if (sequence := self._admitted[0]).stage is Stage.PREFILL:
                self._launching = sequence
                self._begin(sequence)
            self._admitted.popleft()
        self._launching = None
        chunk = self.scheduler.next_chunk(num_decoding=len(self.rows))
        if chunk is not None:
            return self._launch_chunk(chunk)
        return self._launch_window()

    def _begin(self, sequence: Sequence) -> None:
        """A request was admitted: tell the device its pages, and make what it needs beside them."""
        self.runner.set_pages(sequence.slot, sequence.pages)
        if self.prefix is not None:
            self.prefix.begin(sequence)
        sampling = sequence.request.sampling
        config = self.runner.model.config
        if sampling.counts_tokens:
            sequence.own_past = OwnPast(sequence, config.vocab_size, self.runner.device)
        elif self.config.max_window > 1:
            sequence.drafter = SuffixDrafter(self.config.drafts, sequence.prompt)
        stop = set(sampling.stop_token_ids)
        sequence.stop_ids = frozenset(stop if sampling.ignore_eos else stop | set(config.eos_token_ids))

    def _launch_chunk(self, chunk: Chunk) -> Flight:
        self._launching = chunk.sequence
        flight = self.runner.launch_chunk(chunk)
        if self.prefix is not None:
            self.prefix.after_chunk(chunk.sequence, chunk.end, flight.number)
        self.scheduler.chunk_launched(chunk)
        chunk.sequence.num_flights += 1
        return flight

    def _launch_window(self) -> Flight | None:
        rows = self.rows
        if not rows.sequences:
            return None
        has_window_out = any(flight.chunk is None for flight in self.flights)
        if has_window_out and not self._can_chain():
            # what it says decides the next one
            return None
        seats = rows.to_launch()
        if not len(seats):
            return None
        drafts = {} if has_window_out else self._drafts(seats)
        if self.prefix is not None:
            self.prefix.before_window(rows, seats, self.runner.num_steps + 1)
        flight = self.runner.launch_window(rows, seats, drafts, is_chained=has_window_out)
        self.scheduler.window_launched()
        self.num_windows += 1
        self.num_chained += has_window_out
        for sequence in flight.sequences:
            sequence.num_flights += 1
        if flight.shape.window == 1:
            rows.position[seats] += 1
            rows.remaining[seats] -= 1
            rows.accepted[seats] = 1
            rows.source[seats] = np.arange(len(seats))
        return flight

    def _can_chain(self) -> bool:
        """Whether the next window needs nothing of the last one but its tokens: no drafts, no penalties."""
        if any(flight.chunk is None and flight.shape.window > 1 for flight in self.flights):
            return False
        drafts = self._most_drafts(len(self.rows)) > 0
        return not any(
            s.own_past is not None or (drafts and s.drafter is not None and s.drafter.is_on)
            for s in self.rows.sequences
        )

    def _most_drafts(self, num_rows: int) -> int:
        return window_limit(num_rows, self.config.max_window, self.config.max_window_rows) - 1

    def _drafts(self, seats: Ints) -> dict[int, list[int]]:
        most = self._most_drafts(len(seats))
        if most < 1:
            return {}
        drafts = {}
        for place, seat in enumerate(seats):
            drafter = self.rows.sequences[seat].drafter
            if drafter is not None and drafter.is_on:
                tokens = drafter.propose(min(most, int(self.rows.remaining[seat]) - 1))
                if tokens:
                    drafts[place] = tokens
        return drafts

    # reading

    def _read(self, flight: Flight) -> None:
        landed = land(flight, self.runner.num_signals)
        for sequence in flight.sequences:
            sequence.num_flights -= 1
        bad = None
        if self.guard.is_clean(landed.words):
            for hook in self.on_clean:
                hook(flight, landed)
        else:
            bad = self._read_bad(flight, landed)
        if flight.chunk is not None:
            self._land_chunk(flight, landed, bad)
        else:
            self._land_window(flight, landed, bad)
        if bad is not None and self.prefix is not None:
            self._redo_sharers(self.prefix)
        for sequence in flight.sequences:
            self._let_go(sequence)

    def _read_bad(self, flight: Flight, landed: Landed) -> StepReading:
        bad = self.guard.read(flight, landed.words)
        self.num_bad_steps += bool(bad.burned)
        if bad.pads:
            self.num_pad_burns += len(bad.pads)
            self.last_pad_burn = bad.pads[0]
        for hook in self.on_bad:
            hook(flight, landed, bad)
        return bad

    def _redo_sharers(self, prefix: PrefixCache) -> None:
        """Those who share a bad block and have not met it yet start again, before they do."""
        in_flight = [s for flight in self.flights for s in flight.sequences]
        live = {s.number: s for s in (*self.scheduler.prefilling, *self.rows.sequences, *in_flight)}
        for sequence in live.values():
            if not (sequence.is_done or sequence.is_restarting) and prefix.is_poisoned(sequence):
                self.burns.sharer(sequence)
                self._let_go(sequence)
        prefix.sweep()

    def _land_chunk(self, flight: Flight, landed: Landed, bad: StepReading | None) -> None:
        [sequence] = flight.sequences
        if sequence.is_done or flight.epochs[0] != sequence.epoch:
            sequence.is_burned |= bad is not None and bool(bad.burned)
            return
        if bad is not None and bad.burned:
            self.burns.prompt(flight, sequence, bad)
            return
        if not flight.has_token:
            return
        if landed.events[0, 0] != Event.OK:
            self.burns.no_token(sequence, int(landed.events[0, 0]))
            return
        token = int(landed.tokens[0, 0])
        sequence.stage = Stage.DECODE
        self.rows.seat(sequence, token)
        self.advance(sequence, [token], flight, 0)

    def _land_window(self, flight: Flight, landed: Landed, bad: StepReading | None) -> None:
        num_rows = len(flight.sequences)
        tokens, events = landed.tokens[:num_rows], landed.events[:num_rows]
        counts = count_accepted(flight.fed, tokens, flight.num_real).tolist()
        lists, first_events = tokens.tolist(), events[:, 0].tolist()
        on: list[tuple[Sequence, int]] = []
        for row, sequence in enumerate(flight.sequences):
            if flight.epochs[row] != sequence.epoch or sequence.is_done:
                # it ended before this was read; what it holds may be bad all the same
                sequence.is_burned |= bad is not None and row in bad.burned
                continue
            if bad is not None and row in bad.burned:
                self.burns.window(flight, row, bad)
                continue
            if first_events[row] != Event.OK:
                self.burns.no_token(sequence, first_events[row])
                continue
            if sequence.drafter is not None:
                sequence.drafter.judge(int(flight.num_real[row]) - 1, counts[row] - 1)
                self.invariants.judge(int(flight.num_real[row]) - 1, counts[row] - 1, step=flight.number)
            self.advance(sequence, lists[row][: counts[row]], flight, row)
            if not sequence.is_done:
                on.append((sequence, counts[row]))
        self._update_rows(flight, on)

    def _update_rows(self, flight: Flight, on: list[tuple[Sequence, int]]) -> None:
        """Where the next window of each row starts; a chained one has started already."""
        if not on or any(other.chunk is None for other in self.flights):
            return
        rows = self.rows
        seats = np.fromiter((s.seat for s, _ in on), dtype=np.int64, count=len(on))
        rows.token[seats] = np.fromiter((s.answer[-1] for s, _ in on), dtype=np.int64, count=len(on))
        rows.source[seats] = -1
        if flight.shape.window > 1:
            counts = np.fromiter((count for _, count in on), dtype=np.int64, count=len(on))
            rows.position[seats] += counts
            rows.remaining[seats] -= counts
            rows.accepted[seats] = counts

    def advance(self, sequence: Sequence, tokens: list[int], flight: Flight, row: int) -> None:
        """New tokens of a clean row: to the answer, and on to whoever asked."""
        found = logprobs_of(flight, row, len(tokens), sequence.request.sampling.num_logprobs)
        before = len(sequence.answer)
        reason, error = advance(sequence, tokens, found)
        self.num_tokens += len(sequence.answer) - before
        if sequence.own_past is not None:
            sequence.own_past.count(sequence.answer[before:])
        if reason is FinishReason.REPEATED:
            request, token = sequence.request.id, sequence.answer[-1]
            self.invariants.repeated(request, token, sequence.repeats, step=flight.number)
        if reason is not None:
            self.finish(sequence, reason, error, since=before)
        else:
            deliver(sequence, before)

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: FiretowerError | None = None, *, since: int | None = None
    ) -> None:
        """End a request; what it holds is given back as soon as no step on the device uses it.

        Args:
            sequence: of the request.
            reason, error: why.
            since: tokens of the answer from here on have not been handed on yet.
        """
        sequence.stage = Stage.ENDED
        sequence.finish_reason, sequence.error = reason, error
        sequence.ended_at = time.perf_counter()
        sequence.is_restarting = False
        self.num_ended += 1
        if sequence.drafter is not None:
            self.num_drafted += sequence.drafter.num_drafted
            self.num_accepted += sequence.drafter.num_accepted
        self.scheduler.drop(sequence)
        if sequence.seat >= 0:
            self.rows.leave(sequence)
        deliver(sequence, len(sequence.answer) if since is None else since)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Give back what a sequence holds, once it has ended or starts again and no step uses it."""
        if sequence.num_flights or not (sequence.is_done or sequence.is_restarting):
            return
        if sequence.slot >= 0:
            for hook in self.on_free:
                hook(sequence)
            pages, slots = self.scheduler.release(sequence)
            if pages or slots:
                self.quarantine.clear(pages, slots)
            sequence.is_burned = False
        if sequence.is_restarting:
            sequence.is_restarting = False
            self.scheduler.requeue(sequence)
