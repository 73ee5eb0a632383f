"""A watch at op level: the dispatch mode stands around every call of the root module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from firetower.attach.step import Step
from firetower.core.records import Reading, SignalReading, Status
from firetower.sensors.ops_events import OpEvent
from firetower.sensors.ops_mode import OpsMode


class OpsWatch:
    """Enters and leaves `OpsMode` with the steps of a watch; the module-level signals run beside it."""

    def __init__(self, root: nn.Module) -> None:
        self._mode = OpsMode(root)
        self._is_on = False

    @property
    def origin(self) -> OpEvent | None:
        """The op where the first bad value of the step began, or None."""
        return self._mode.origin

    def begin(self, step: Step) -> None:
        """Start sensing for one call of the root."""
        assert step.call is not None
        self._mode.reset()
        self._mode.frame = lambda: step.frame
        self._mode.note_inputs(step.call.args, step.call.kwargs)
        self._mode.__enter__()
        self._is_on = True

    def end(self, output: Any) -> None:
        """Stop sensing; ``output`` is what the root returned, None when it raised."""
        if self._is_on:
            self._is_on = False
            self._mode.check_output(output)
            self._mode.__exit__(None, None, None)

    def rows_burned(self) -> set[int]:
        """Sequences in which an op's first bad value stood; empty where no op says."""
        return {e.first.sequence for e in self._mode.events if e.first.sequence is not None}

    def reading(self, step: Step) -> Reading:
        """The step's reading with the bad ops before the signals; clean ops are counted, not listed."""
        base = step.reading()
        events = sorted(self._mode.events, key=lambda e: e is not self._mode.origin)
        bad = tuple(SignalReading(signal=e.signal, status=Status.BAD, first=e.first) for e in events)
        return dataclasses.replace(
            base, signals=bad + base.signals, num_unlisted=max(0, self._mode.num_checked - len(bad))
        )

    def notes(self) -> Iterator[str]:
        """What op level adds to a fire, in words."""
        event = self._mode.origin
        if event is not None:
            yield event.culprit
            if event.seen_at:
                yield f"seen at {event.seen_at}"
            yield from event.notes
        for laundered in self._mode.laundered[:5]:
            yield f"laundered by {laundered}"
        for reason, count in self._mode.not_covered.items():
            yield f"not covered: {count} outputs, {reason}"
