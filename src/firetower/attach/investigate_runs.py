"""The two runs of an investigation: the cheap one at module level, and the one that checks every op."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from firetower.attach.frame import Call
from firetower.core.errors import NonFiniteError
from firetower.core.records import BadValue, Fire, Kind, TensorSummary
from firetower.sensors.check import Frame, first_bad
from firetower.sensors.ops_events import OpEvent
from firetower.sensors.ops_mode import OpsMode, quiet
from firetower.sensors.ops_names import tensors_under
from firetower.sensors.ops_values import plain, readable
from firetower.sensors.summary import summarize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What the cheap run saw: fires of the watched modules, a bad value in the result, an exception.

    ``bad_output`` is (path, first bad value, summary). ``error`` is the exception in words.
    ``was_stopped``: the run was ended at its first bad step, to spare the device.
    """

    fires: tuple[Fire, ...] = ()
    bad_output: tuple[str, BadValue, TensorSummary] | None = None
    error: str | None = None
    num_modules: int = 0
    was_stopped: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether it saw a NaN or +Inf; a -Inf can be legal, the second run tells."""
        seen = [fire.first.kind for fire in self.fires]
        if self.bad_output is not None:
            seen.append(self.bad_output[1].kind)
        return any(kind is not Kind.NEG_INF for kind in seen)

    @property
    def is_suspicious(self) -> bool:
        """Whether a second run is needed to tell."""
        return bool(self.fires) or self.bad_output is not None or self.error is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondRun:
    """What the op-level run saw. ``origin`` None means that it was clean."""

    origin: OpEvent | None
    num_ops: int
    num_checked: int
    num_events: int
    not_covered: Mapping[str, int]
    error: str | None = None


def must_stop_early(modules: list[nn.Module]) -> bool:
    """Whether a run must end with its first bad step.

    On a CUDA device a sampler asserts that probabilities are finite, and a failed assertion there ends every use of
    the device in this process.
    """
    return any(p.is_cuda for m in modules for p in [*m.parameters(), *m.buffers()])


def first_run(call: Callable[[], Any], modules: list[nn.Module]) -> tuple[FirstRun, Any]:
    """Run the call with ``modules`` watched at level ``layers``; returns what was seen and what the call returned."""
    from firetower.attach.watch import attach

    result, error, raised = None, None, None
    on_fire: Any = "raise" if must_stop_early(modules) else "record"
    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(attach(m, level="layers", on_fire=on_fire, store=False)) for m in modules]
        try:
            result = call()
        except Exception as e:  # noqa: BLE001 - whatever the call raises is a finding
            error = f"{type(e).__name__}: {e}"
            raised = e.fire if isinstance(e, NonFiniteError) else None
        fires = [fire for watch in watches for fire in watch.fires]
    was_stopped = raised is not None and any(fire.id == raised.id for fire in fires)
    if raised is not None and not fires:
        fires = [raised]
    first = FirstRun(
        fires=tuple(fires),
        bad_output=_bad_output(result),
        error=None if was_stopped else error,
        num_modules=len(modules),
        was_stopped=was_stopped,
    )
    return first, result


def _bad_output(result: Any) -> tuple[str, BadValue, TensorSummary] | None:
    found = None
    for path, x in tensors_under(result, "result"):
        if not readable(x):
            continue
        bad, _ = first_bad(plain(x))
        if bad is not None and (found is None or found[1].kind is Kind.NEG_INF):
            found = (path, bad, summarize(path, x))
            if bad.kind is not Kind.NEG_INF:
                return found
    return found


class _StopRun(Exception):  # noqa: N818 - not an error: the run has shown what it was made for
    """Ends a run after its first bad step."""


class OpRun:
    """The second run: every op checked, with the calls of the model in it.

    Attributes:
        mode: what was sensed.
        result, error: what the call returned, or its exception in words.
    """

    def __init__(
        self, call: Callable[[], Any], modules: list[nn.Module], named: Mapping[str, Any], first: FirstRun
    ) -> None:
        self.mode = OpsMode(modules[0] if len(modules) == 1 else None)
        self.result: Any = None
        self.error: str | None = None
        self._stops_early = must_stop_early(modules)
        self._named = named
        self._calls: list[tuple[int, Call]] = []
        self.mode.stack.on_root_call = self._begin
        self.mode.stack.on_root_return = self._end
        self.mode.frame = self._frame
        self.mode.note_inputs((), named)
        # a +Inf that is harmless to the ops that read it, a gate's say, was bad where the first run saw it
        self.mode.watch_signals(f.origin.module for f in first.fires)
        self._run(call)

    def _run(self, call: Callable[[], Any]) -> None:
        with self.mode:
            try:
                self.result = call()
            except _StopRun:
                return
            except Exception as e:  # noqa: BLE001 - whatever the call raises is a finding
                self.error = f"{type(e).__name__}: {e}"
            self.mode.check_output(self.result)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with quiet():
            self._calls.append((self.mode.num_ops, Call.begin(args, kwargs)))
        self.mode.note_inputs(args, {**kwargs, **{n: v for n, v in self._named.items() if n not in kwargs}})

    def _end(self, output: Any) -> None:
        self.mode.check_output(output)
        if self._stops_early and self.mode.origin is not None:
            raise _StopRun

    def _frame(self) -> Frame | None:
        return self._calls[-1][1].frame() if self._calls and self._calls[-1][1].tokens() is not None else None

    def step_of(self, event: OpEvent) -> tuple[int, Call | None]:
        """Number and arguments of the model call that an event belongs to."""
        before = [(i, call) for i, (start, call) in enumerate(self._calls) if start <= event.index]
        return before[-1] if before else (0, None)

    def second(self) -> SecondRun:
        """What is kept of it."""
        return SecondRun(
            origin=self.mode.origin,
            num_ops=self.mode.num_ops,
            num_checked=self.mode.num_checked,
            num_events=self.mode.num_events,
            not_covered=dict(self.mode.not_covered),
            error=self.error,
        )
