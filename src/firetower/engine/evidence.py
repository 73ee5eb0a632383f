"""What is gathered on a fire before anything is cleared: the state audit, and the dump of the flight recorder.

Inference goes on whatever happens here: what fails is counted and said in the fire.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firetower.capture.environment import collect_environment
from firetower.capture.tensors import RawTensor
from firetower.core.records import Fire, Legal, Status, utc_now
from firetower.engine.audit import Audit, Holder
from firetower.engine.dump import AuditItem, Dump, DumpFolder, DumpRow, DumpSignal, DumpState, DumpStep
from firetower.engine.firelog import device_name
from firetower.engine.flight import Flight, Landed
from firetower.engine.guard import StepReading
from firetower.engine.recorder import FlightRecorder, Recorded
from firetower.engine.sequence import Sequence, Stage

if TYPE_CHECKING:
    from firetower.engine.loop import Loop

MAX_NEIGHBOURS = 16
"""Requests beside the burned ones that are audited: those whose rows are nearest."""

MAX_REMEMBERED = 1024
"""Burned requests that are remembered, to tell their rows in steps that were launched early from real ones."""

OVERHEAD_BYTES = 1024
"""Of headers and documents, for each tensor, signal and row of a dump: more than they take."""

MAX_BURNED = 32
"""Burned requests that are audited, and whose states are dumped."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Found:
    """What one bad step left: ``dump`` and ``tensors`` until they are written, ``path`` or ``no_dump`` after."""

    step: int
    audit: tuple[AuditItem, ...] = ()
    origin: str = ""
    dump: Dump | None = None
    tensors: dict[str, RawTensor] = dataclasses.field(default_factory=dict)
    path: str | None = None
    no_dump: str | None = None
    failure: str | None = None


class Evidence:
    """Hangs on a loop: looks at what a bad step left before it is cleared, and gives it to the fires of the step.

    Args:
        loop: whose steps.
        audit: of states and weights; None for none.
        recorder, folder: the flight recorder and where its dumps go; both None for none.
        model_name: for dumps.
        with_content: whether dumps have token ids.

    Attributes:
        num_failures, last_error: of gathering, without those of writing dumps. seconds: that gathering took in all.
    """

    def __init__(
        self, loop: Loop, *, audit: Audit | None, recorder: FlightRecorder | None, folder: DumpFolder | None,
        model_name: str, with_content: bool = False,
    ) -> None:  # fmt: skip
        self.audit = audit
        self.recorder = recorder
        self.folder = folder
        self.num_failures = 0
        self.seconds = 0.0
        self.last_error: str | None = None
        self._loop = loop
        self._model_name = model_name
        self._with_content = with_content
        self._found: _Found | None = None
        # (request, its epoch) -> step that burned it: with the same epoch it is a pad in steps launched since
        self._burned_at: dict[tuple[int, int], int] = {}
        if audit is not None or recorder is not None:
            loop.on_bad.append(self.gather)
            loop.burns.firelog.witnesses.append(self.testify)

    def gather(self, flight: Flight, landed: Landed, bad: StepReading) -> None:
        """Look at what a bad step left; never raises."""
        self._found = None
        if not bad.burned:
            return
        found = self._found = _Found(step=flight.number)
        # only windows that are in flight matter; what is older has other epochs
        self._burned_at = dict(list(self._burned_at.items())[-MAX_REMEMBERED:])
        for row in bad.burned:
            self._burned_at.setdefault((flight.sequences[row].number, flight.epochs[row]), flight.number)
        if not any(_is_live(flight, row) for row in bad.burned):
            # of requests that have ended or started again there will be no fire
            return
        begin = time.perf_counter()
        try:
            if self.audit is not None:
                found.audit = tuple(self._audited(flight, bad, self.audit))
            if self.recorder is not None and self.folder is not None:
                self._prepare(found, flight, bad, self.recorder, self.folder)
        except Exception as e:  # noqa: BLE001 - the promise of this module: whatever it is, inference goes on
            self.num_failures += 1
            found.failure = self.last_error = f"{type(e).__name__}: {e}"
        self.seconds += time.perf_counter() - begin

    def testify(self, fire: Fire, fire_id: str) -> Fire:
        """A fire with what was found for its step; ``fire_id`` is what it will be known by."""
        found = self._found
        if found is None or found.step != fire.step:
            return fire
        if found.dump is not None and self.folder is not None:
            try:
                dump = dataclasses.replace(found.dump, fire=fire_id)
                path = self.folder.write(dump, found.tensors, found.origin)
                # in the usual place its name finds it; fires are handed on, and paths name people
                found.path = path.name if self.folder.is_usual else str(path)
            except Exception as e:  # noqa: BLE001 - as above
                found.no_dump = self.folder.failed(e)
            found.dump, found.tensors = None, {}
        extra: dict[str, Any] = {}
        notes = []
        if self.audit is not None and found.failure is None:
            extra["audit"] = summary(found.audit)
            notes = [f"state audit: {_said(item)}" for item in found.audit if item.status is Status.BAD]
        if found.failure is not None:
            extra["evidence_failure"] = found.failure
        if found.path is not None:
            extra["dump"] = found.path
        elif found.no_dump is not None:
            extra["no_dump"] = found.no_dump
        return dataclasses.replace(fire, notes=(*fire.notes, *notes), extra={**fire.extra, **extra})

    def counts(self) -> dict[str, Any]:
        """For the engine's status."""
        recorder, folder = self.recorder, self.folder
        return {
            "recorded_windows": 0 if recorder is None else recorder.num_windows,
            "recorder_bytes": 0 if recorder is None else recorder.num_bytes,
            "num_dumps": 0 if folder is None else folder.num_written,
            "num_dumps_refused": 0 if folder is None else folder.num_refused,
            "num_dump_failures": 0 if folder is None else folder.num_failed,
            "num_evidence_failures": self.num_failures,
            "evidence_s": self.seconds,
            "evidence_error": self.last_error if folder is None else self.last_error or folder.last_error,
        }

    # the audit

    def _audited(self, flight: Flight, bad: StepReading, audit: Audit) -> list[AuditItem]:
        items = audit.weights()
        burned = sorted(bad.burned)
        for row in burned[:MAX_BURNED]:
            items += audit.holder(self._burned(flight, row))
        neighbours = self._neighbours(flight, set(burned))
        for sequence, row in neighbours[:MAX_NEIGHBOURS]:
            items += audit.holder(self._neighbour(flight, sequence, row))
        left = max(0, len(burned) - MAX_BURNED), max(0, len(neighbours) - MAX_NEIGHBOURS)
        if any(left):
            reason = f"{left[0]} burned requests and {left[1]} neighbours more than are looked at"
            items.append(AuditItem(what="states", role="neighbour", status=Status.NOT_COVERED, reason=reason))
        return items

    def _burned(self, flight: Flight, row: int) -> Holder:
        sequence, begin = flight.sequences[row], int(flight.position[row])
        real = int(flight.num_real[row])
        is_window = flight.chunk is None
        return Holder(
            request=sequence.request.id, role="burned", slot=sequence.slot, pages=tuple(sequence.pages),
            num_tokens=begin + real, begin=begin, num_kept=int(flight.accepted[row]) if is_window else 0,
            num_written=real if is_window else None, is_kept_older=is_window,
        )  # fmt: skip

    def _neighbours(self, flight: Flight, burned: set[int]) -> list[tuple[Sequence, int]]:
        """Others that hold a slot, with their row in the step or -1; those of near rows first."""
        mine = {id(s) for s in flight.sequences}
        inside = [(s, row) for row, s in enumerate(flight.sequences) if row not in burned]
        inside.sort(key=lambda pair: min(abs(pair[1] - row) for row in burned))
        rest = [*self._loop.rows.sequences, *self._loop.scheduler.prefilling]
        return [*inside, *((s, -1) for s in rest if id(s) not in mine)]

    def _neighbour(self, flight: Flight, sequence: Sequence, row: int) -> Holder:
        is_ahead = any(sequence in other.sequences for other in self._loop.flights)
        if row >= 0 and flight.chunk is None:
            written = int(flight.position[row]) + int(flight.num_real[row])
            # a window that was launched since has one token, and its half is the one that is kept by now
            pending = 1 if is_ahead else int(flight.num_real[row])
        else:
            written = sequence.num_prefilled
            pending = 0
            if sequence.stage is Stage.DECODE and not is_ahead:
                written = int(self._loop.rows.position[sequence.seat])
                pending = int(self._loop.rows.accepted[sequence.seat])
        return Holder(
            request=sequence.request.id, role="neighbour", slot=sequence.slot, pages=tuple(sequence.pages),
            num_tokens=written, begin=written, num_kept=pending,
        )  # fmt: skip

    # the dump

    def _prepare(
        self, found: _Found, flight: Flight, bad: StepReading, recorder: FlightRecorder, folder: DumpFolder
    ) -> None:
        """Copy what the dump will hold to the host, before anything is cleared or written over."""
        first = bad.burned[min(bad.burned)]
        found.origin = f"{first.signal.name} {first.kind}"
        found.no_dump = folder.why_not(found.origin)
        if found.no_dump is not None:
            return
        guard, width = self._loop.guard, len(recorder.shapes) + 2
        room = folder.room() - OVERHEAD_BYTES * (len(guard.signals) + len(flight.sequences) + len(found.audit) + 8)
        left_out = []
        states: list[DumpState] = []
        for row in sorted(bad.burned)[:MAX_BURNED]:
            size = _state_bytes(self._loop.runner.state) + OVERHEAD_BYTES * 16
            if size > room:
                left_out.append(f"states of request {flight.sequences[row].request.id}: {size:,} bytes, no room")
                continue
            room -= size
            states += self._states(flight.sequences[row], found.tensors)
        windows: list[DumpStep] = []
        for window in reversed(recorder.windows):
            size = recorder.window_bytes(window) + OVERHEAD_BYTES * (width + len(window.flight.sequences))
            if size > room:
                left_out.append(f"window of step {window.flight.number}: {size:,} bytes, no room")
                continue
            room -= size
            windows.insert(0, self._window(window, flight, bad, recorder, found.tensors))
        burned_step = next((w for w in recorder.windows if w.flight is flight), None)
        if burned_step is None:
            left_out.append("signals of the step that burned: a prompt is not recorded, only windows are")
        slots = None if burned_step is None else burned_step.slots.tolist()
        device = self._loop.runner.device
        found.dump = Dump(
            fire="", created_at=utc_now(), model=self._model_name, device=device_name(device),
            environment=collect_environment(device_name(device)), step=self._step(flight, slots, set(bad.burned)),
            reading=bad.reading, windows=tuple(windows), states=tuple(states), audit=found.audit,
            left_out=tuple(left_out), has_content=self._with_content,
        )  # fmt: skip

    def _window(
        self, window: Recorded, flight: Flight, bad: StepReading, recorder: FlightRecorder,
        tensors: dict[str, RawTensor],
    ) -> DumpStep:  # fmt: skip
        signals = []
        for index, x in recorder.read(window).items():
            signal = self._loop.guard.signals[index]
            name = f"step {window.flight.number}/{index:04d} {signal.name}"
            tensors[name] = raw_tensor(x)
            signals.append(
                DumpSignal(
                    index=index, name=signal.name, stage=signal.stage, layer=signal.layer,
                    rows_per_token=recorder.shapes[index].rows_per_token, tensor=name,
                    is_neg_inf_legal=signal.legal is Legal.NEG_INF,
                )
            )  # fmt: skip
        burned = set(bad.burned) if window.flight is flight else set()
        return dataclasses.replace(self._step(window.flight, window.slots.tolist(), burned), signals=tuple(signals))

    def _step(self, flight: Flight, slots: list[int] | None, burned: set[int]) -> DumpStep:
        rows = []
        for row, sequence in enumerate(flight.sequences):
            begin, real = int(flight.position[row]), int(flight.num_real[row])
            slot = sequence.slot if slots is None else int(slots[row])
            rows.append(
                DumpRow(
                    request=sequence.request.id, position=begin, num_real=real, accepted=int(flight.accepted[row]),
                    slot=slot, seed=sequence.seed,
                    # pages of one that gave them back, or started again with others, are unknown by now
                    pages=tuple(sequence.pages) if sequence.slot == slot else (),
                    is_burned=row in burned,
                    is_dead=self._burned_at.get((sequence.number, flight.epochs[row]), flight.number) < flight.number,
                    token_ids=_tokens(flight, row) if self._with_content else None,
                )
            )  # fmt: skip
        return DumpStep(
            number=flight.number, phase=flight.phase, num_rows=flight.shape.num_rows, window=flight.shape.window,
            is_graphed=flight.is_graphed, rows=tuple(rows),
        )  # fmt: skip

    @torch.inference_mode()
    def _states(self, sequence: Sequence, tensors: dict[str, RawTensor]) -> list[DumpState]:
        """Both halves of the recurrent and convolution state of one request."""
        state, slot = self._loop.runner.state, sequence.slot
        if slot < 0 or not state.recurrent:
            return []
        parts = {f"recurrent {name}": x[:, :, slot] for name, x in state.slots.items()}
        parts["conv"] = state.conv_storage[:, 2 * slot : 2 * slot + 2]
        made = []
        for part, x in parts.items():
            name = f"state {sequence.number}/{part}"
            tensors[name] = raw_tensor(x.cpu())
            made.append(DumpState(request=sequence.request.id, part=part, side=int(state.side[slot]), tensor=name))
        return made


def _is_live(flight: Flight, row: int) -> bool:
    sequence = flight.sequences[row]
    return flight.epochs[row] == sequence.epoch and not sequence.is_done


def summary(items: tuple[AuditItem, ...]) -> dict[str, Any]:
    """An audit in a few plain values for a fire: how many are clean, what is bad, what was not looked at."""
    return {
        "num_clean": sum(item.status is Status.CLEAN for item in items),
        "bad": [_said(item) for item in items if item.status is Status.BAD],
        "not_covered": [f"{item.name}: {item.reason}" for item in items if item.status is Status.NOT_COVERED],
    }


def _said(item: AuditItem) -> str:
    if item.what == "weights":
        return f"weights differ from the load, {item.first}"
    when = "before the step that burned" if item.is_older else "written by or after it"
    return f"{item.name} first bad at {item.first}; {when}"


def _tokens(flight: Flight, row: int) -> tuple[int, ...]:
    """What a row ran; a window launched early took its token on the device, and the answer has it by now."""
    sequence, begin = flight.sequences[row], int(flight.position[row])
    if flight.chunk is None and flight.shape.window == 1:
        known = (*sequence.prompt, *sequence.answer)
        return tuple(known[begin : begin + 1])
    return tuple(int(t) for t in flight.fed[row, : flight.num_real[row]])


def _state_bytes(state: Any) -> int:
    """Memory of both halves of one slot."""
    slots = sum(x[:, :, 0].nbytes for x in state.slots.values())
    return int(slots + state.conv_storage[:, :2].nbytes)


def raw_tensor(x: Tensor) -> RawTensor:
    """A tensor of the host as its bytes, in whatever type."""
    flat = x.contiguous()
    return RawTensor(
        dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape),
        data=flat.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )  # fmt: skip
