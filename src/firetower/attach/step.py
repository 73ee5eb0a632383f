"""One step of a watched model on the host: which signals ran, which were bad, and what the call was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from firetower.attach.discover import Tap
from firetower.attach.frame import Call
from firetower.attach.late import Late
from firetower.core.records import BadValue, BurnedRow, Reading, SignalReading, Status, TensorSummary
from firetower.sensors.check import Frame, burned_sequences, first_bad, plain
from firetower.sensors.summary import summarize

_NEVER = -2
"""Below every step number: a step that no Python began has number -1."""


@dataclasses.dataclass(slots=True)
class Finding:
    """A bad signal of the running step, with what had to be kept before the tensor is gone."""

    slot: int
    first: BadValue | None
    first_pad: BadValue | None
    order: int
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None


class Step:
    """The state of one forward call in one thread.

    ``ran[slot]`` holds the number of the last step in which the signal ran; a clean signal costs one store.
    """

    __slots__ = (
        "burned",
        "call",
        "clean_tensor",
        "clean_version",
        "depth",
        "findings",
        "from_device",
        "is_stray",
        "late",
        "number",
        "open",
        "pad_before_real",
        "ran",
        "reasons",
        "taps",
    )

    def __init__(self, taps: list[Tap]) -> None:
        self.taps = taps
        self.late = Late(len(taps))
        self.ran = [_NEVER] * len(taps)
        self.number = -1
        self.call: Call | None = None
        self.open = False
        self.is_stray = False
        self.depth = 0
        self.findings: dict[int, Finding] = {}
        self.burned: dict[int, BurnedRow] = {}
        self.reasons: dict[int, str] = {}
        self.from_device: set[int] = set()
        self.pad_before_real = False
        # the tensor last found clean and its version: the next layer's input is the last layer's output
        self.clean_tensor: Tensor | None = None
        self.clean_version = -1

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        """Open a step for one call of the root module, whose parameters have these names."""
        self.number += 1
        self.call = Call.begin(args, kwargs, names)
        self.open = True
        self.is_stray = False
        if self.findings:
            self.findings = {}
            self.burned = {}
        if self.reasons:
            self.reasons = {}
        self.from_device.clear()
        self.pad_before_real = False
        self.clean_tensor = None
        # what runs on a device is marked there, never read here
        tokens = self.call.tokens()
        batch, length = self.call.shape() if tokens is not None and tokens.is_cpu else (0, 0)
        self.late.begin(batch * length)

    def begin_stray(self) -> None:
        """Open a step because a submodule was called on its own; it stays open until the root is called or read."""
        self.begin((), {})
        # it has no end at which what waits would be checked
        self.late.end()
        self.is_stray = True

    def end(self, output: Any = None) -> Exception | None:
        """Close the step and let its tensors go; what the call says of its rows stays readable until the next.

        Returns:
            What went wrong in the checks that waited for the end, or None.
        """
        late = self.late
        error = None if late.read_held(self.ran, self.number) and late.read_rows() else late.settle(self)
        late.end()
        self.open = False
        self.clean_tensor = None
        if self.call is not None:
            self.call.release(output)
        return error

    def not_checked(self, slot: int, reason: str) -> None:
        """Note why a signal that passed by was not checked; it is then not covered, never clean."""
        self.ran[slot] = _NEVER
        self.reasons[slot] = reason

    @property
    def frame(self) -> Frame | None:
        """How this step's rows map; None for a step that did not start at the root."""
        if self.call is None or self.call.tokens() is None:
            return None
        return self.call.frame()

    def _frame_of(self, tap: Tap) -> Frame | None:
        if self.call is None or self.call.tokens() is None:
            return None
        is_encoder = "encoder" in tap.signal.module.split(".")
        return dataclasses.replace(self.call.frame(encoder=is_encoder), layout=tap.layout)

    def add(self, slot: int, x: Tensor, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Record that signal ``slot`` is bad in ``x``; the first record of a signal in a step wins."""
        before = self.findings.get(slot)
        if before is not None and before.first is not None:
            return
        tap = self.taps[slot]
        frame = self._frame_of(tap)
        first, first_pad = first_bad(x, tap.signal.legal, frame)
        if first is None and (first_pad is None or before is not None):
            return
        if before is not None:
            # only pads were bad so far: the real row comes now, after what was found in between
            del self.findings[slot]
            first_pad = before.first_pad
        order = 1 + max((f.order for f in self.findings.values()), default=-1)
        finding = Finding(slot, first, first_pad, order)
        if not self._any_real():
            was_pad = before is not None or any(f.first_pad is not None for f in self.findings.values())
            self.pad_before_real |= first is not None and was_pad
            finding.inputs = tuple(_summary(f"input {i}", t) for i, t in enumerate(inputs))
            finding.output = _summary("output", x)
        self.findings[slot] = finding
        if frame is not None and first is not None:
            self._add_burned(tap, burned_sequences(x, tap.signal.legal, frame))

    def _any_real(self) -> bool:
        return any(f.first is not None for f in self.findings.values())

    def _add_burned(self, tap: Tap, rows: dict[int, BadValue]) -> None:
        for sequence, bad in rows.items():
            if sequence not in self.burned:
                self.burned[sequence] = BurnedRow(
                    sequence=sequence, signal=tap.signal, token=bad.token, column=bad.column, first=bad
                )

    def origin(self) -> Finding | None:
        """The first finding in a real row."""
        return next((f for f in self.findings.values() if f.first is not None), None)

    def rows_burned(self) -> set[int]:
        """Sequences with a bad real row; the whole batch where the shape of the bad tensor does not say which."""
        if self.burned or self.origin() is None:
            return set(self.burned)
        return set(range(self.call.shape()[0])) if self.call is not None else {0}

    def reading(self) -> Reading:
        """This step's reading: bad signals first executed first, then the others in declared order."""
        found = sorted(self.findings.values(), key=lambda f: f.order)
        ordered = [f.slot for f in found] + [s for s in range(len(self.taps)) if s not in self.findings]
        call = self.call or Call((), {})
        num_sequences, num_tokens = call.shape()
        return Reading(
            step=self.number,
            phase=call.phase(),
            num_tokens=num_sequences * num_tokens,
            signals=tuple(self._signal(slot) for slot in ordered),
            burned=tuple(self.burned.values()),
            pad_before_real=self.pad_before_real,
        )

    def _signal(self, slot: int) -> SignalReading:
        signal = self.taps[slot].signal
        finding = self.findings.get(slot)
        if finding is not None:
            status = Status.CLEAN if finding.first is None else Status.BAD
            return SignalReading(
                signal=signal, status=status, first=finding.first, first_pad=finding.first_pad
            )
        if self.ran[slot] == self.number:
            return SignalReading(signal=signal, status=Status.CLEAN)
        reason = self.reasons.get(slot, "did not run in this step")
        return SignalReading(signal=signal, status=Status.NOT_COVERED, reason=reason)


def _summary(name: str, x: Tensor) -> TensorSummary:
    return summarize(name, plain(x) if x.is_nested else x)
