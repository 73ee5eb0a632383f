"""`investigate`: run a call; when it burns, run it again from the same state at op level to name the op."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from firetower.attach.frame import Call
from firetower.attach.investigate_fire import fire_of_event, fire_of_output
from firetower.attach.investigate_page import page
from firetower.attach.state import CallState
from firetower.core.errors import InvestigateError, NonFiniteError
from firetower.core.records import BadValue, Fire, Kind, TensorSummary
from firetower.fires.safe import SafeStore
from firetower.fires.store import Store
from firetower.sensors.check import Frame, first_bad
from firetower.sensors.ops_events import Cause, LaunderEvent, OpEvent
from firetower.sensors.ops_mode import OpsMode, quiet
from firetower.sensors.ops_names import tensors_under
from firetower.sensors.ops_values import plain, readable
from firetower.sensors.summary import summarize

CLEAN_SECOND_RUN = "clean second run: state, ordering or layout"
_MAX_WEIGHTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What the cheap run saw: fires of the watched modules, a bad value in the result, an exception.

    ``bad_output`` is (path, first bad value, summary). ``error`` is the exception in words.
    """

    fires: tuple[Fire, ...] = ()
    bad_output: tuple[str, BadValue, TensorSummary] | None = None
    error: str | None = None
    num_modules: int = 0

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Investigation:
    """The outcome of `investigate`; ``print`` it to read it.

    Attributes:
        burned: a bad value was made, read or returned in either run.
        origin: the op where it began: name, module path, source line, place and bits. None when the second
            run was clean, or nothing burned.
        culprit: why, in a sentence.
        inputs, output: of the origin op. ``weights``: of the module that it ran in, and the bad tensor where
            one was bad already.
        propagators: ops that only spread it. ``laundered``: ops that made a bad value disappear.
        first_run, second_run: what each run saw; ``second_run`` is None where none was needed.
        notes: findings in words, such as state that could not be put back.
        fire: the incident as stored; None when nothing burned.
        result: what the first run returned, None where it raised.
        error: the exception of the first run in words, None where it returned.
    """

    burned: bool
    origin: OpEvent | None = None
    culprit: str = ""
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    weights: tuple[TensorSummary, ...] = ()
    propagators: tuple[OpEvent, ...] = ()
    laundered: tuple[LaunderEvent, ...] = ()
    first_run: FirstRun
    second_run: SecondRun | None = None
    notes: tuple[str, ...] = ()
    fire: Fire | None = None
    result: Any = None
    error: str | None = None

    def __str__(self) -> str:
        return page(self)


def investigate(
    fn_or_model: Callable[..., Any] | nn.Module,
    /,
    *args: Any,
    firetower_store: Store | str | Path | Literal[False] | None = None,
    **kwargs: Any,
) -> Investigation:
    """Find the op where a call's first bad value begins.

    The first run is cheap: the modules that the call runs are watched at level ``layers``, and what it
    returns is checked. If it burns or raises, random streams and state are put back and the call runs again
    with every ATen op checked. A call that runs no module has no signals to watch, so that its second run
    always happens: a bad value that disappears inside is found there. In a call that runs modules and is
    clean at its signals, none is looked for.

    Args:
        fn_or_model: a module, a bound method such as ``model.generate``, or any function.
        *args, **kwargs: passed on unchanged.
        firetower_store: where the fire goes: the default store (None), a path, a `Store`, or False for
            nowhere.

    Returns:
        What was found. Exceptions of the call are reported there and not raised.

    Raises:
        InvestigateError: state that cannot be put back, found before anything runs (an iterator, a generator,
            an open file), or a tensor too large to copy that the first run changed.
    """
    if not callable(fn_or_model):
        raise InvestigateError(f"fn_or_model={type(fn_or_model).__name__}: must be a module or a function")
    call = functools.partial(fn_or_model, *args, **kwargs)
    named = _named(fn_or_model, args, kwargs)
    state = CallState(fn_or_model, named)
    first, result = _first_run(call, state.modules)
    if state.modules and not first.is_suspicious:
        return Investigation(burned=False, first_run=first, result=result)
    state.restore()
    run = _OpRun(call, state.modules, named, first)
    return _conclude(run, first, result, state, fn_or_model, firetower_store)


def _first_run(call: Callable[[], Any], modules: list[nn.Module]) -> tuple[FirstRun, Any]:
    from firetower.attach.watch import attach

    result, error, raised = None, None, None
    with contextlib.ExitStack() as stack:
        watches = [
            stack.enter_context(attach(m, level="layers", on_fire="record", store=False)) for m in modules
        ]
        try:
            result = call()
        except Exception as e:  # noqa: BLE001 - whatever the call raises is a finding
            error = f"{type(e).__name__}: {e}"
            raised = e.fire if isinstance(e, NonFiniteError) else None
        fires = [fire for watch in watches for fire in watch.fires]
    if raised is not None and not fires:
        fires = [raised]
    first = FirstRun(
        fires=tuple(fires), bad_output=_bad_output(result), error=error, num_modules=len(modules)
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


class _OpRun:
    """The second run: every op checked, with the calls of the model in it."""

    def __init__(
        self, call: Callable[[], Any], modules: list[nn.Module], named: Mapping[str, Any], first: FirstRun
    ) -> None:
        self.mode = OpsMode(modules[0] if len(modules) == 1 else None)
        self.root = modules[0] if len(modules) == 1 else None
        self.error: str | None = None
        self._named = named
        self._calls: list[tuple[int, Call]] = []
        self.mode.stack.on_root_call = self._begin
        self.mode.frame = self._frame
        self.mode.note_inputs((), named)
        # a +Inf that is harmless to the ops that read it, a gate's say, was bad where the first run saw it
        self.mode.watch_signals(f.origin.module for f in first.fires)
        with self.mode:
            try:
                self.result = call()
            except Exception as e:  # noqa: BLE001 - whatever the call raises is a finding
                self.result, self.error = None, f"{type(e).__name__}: {e}"
            self.mode.check_output(self.result)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with quiet():
            self._calls.append((self.mode.num_ops, Call.begin(args, kwargs)))
        self.mode.note_inputs(args, {**kwargs, **{n: v for n, v in self._named.items() if n not in kwargs}})

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


def _conclude(
    run: _OpRun,
    first: FirstRun,
    result: Any,
    state: CallState,
    fn: Any,
    store: Store | str | Path | Literal[False] | None,
) -> Investigation:
    origin = run.mode.origin
    weights = tuple(_weights(run, origin))
    notes = [*state.notes, *_findings(run, first)]
    fire = None
    if origin is not None:
        step, call = run.step_of(origin)
        fire = fire_of_event(origin, run.mode, first, fn, weights, tuple(notes), step, call)
    elif first.is_bad and first.fires:
        seen = first.fires[0]
        all_notes = (*seen.notes, CLEAN_SECOND_RUN, *notes)
        fire = dataclasses.replace(seen, source="investigate", notes=all_notes)
    elif first.is_bad:
        fire = fire_of_output(first, fn, (CLEAN_SECOND_RUN, *notes))
    if fire is not None:
        notes += _store(fire, store)
    culprit = origin.culprit if origin is not None else (CLEAN_SECOND_RUN if fire is not None else "")
    return Investigation(
        burned=fire is not None,
        origin=origin,
        culprit=culprit,
        inputs=origin.inputs if origin is not None else (),
        output=origin.output if origin is not None else None,
        weights=weights,
        propagators=tuple(run.mode.propagators),
        laundered=tuple(run.mode.laundered),
        first_run=first,
        second_run=run.second(),
        notes=tuple(notes),
        fire=fire,
        result=result,
        error=first.error,
    )


def _store(fire: Fire, target: Store | str | Path | Literal[False] | None) -> list[str]:
    """Store a fire; a store that fails is a note, since the finding is worth more than its copy."""
    if target is False:
        return []
    store = SafeStore(target)
    try:
        return [] if store.add(fire) is not None else [f"the fire was not stored: {store.last_error}"]
    finally:
        store.close()


def _findings(run: _OpRun, first: FirstRun) -> Iterator[str]:
    if run.mode.origin is None and first.is_bad:
        yield "run the call several times to learn how often it burns"
    if run.mode.origin is None and not first.is_bad and (first.fires or first.bad_output):
        yield "the -Inf that the first run saw is legal: an op wrote it on purpose, and none made harm of it"
    if first.error != run.error:
        ends = [error or "a result" for error in (first.error, run.error)]
        yield f"the first run ended with {ends[0]}, the second with {ends[1]}"
    if run.mode.failures:
        yield f"op-level sensing failed {run.mode.failures} times, last with {run.mode.last_failure}"


def _weights(run: _OpRun, origin: OpEvent | None) -> Iterator[TensorSummary]:
    if origin is None:
        return
    if origin.tensor_summary is not None and origin.cause in (Cause.WEIGHT, Cause.BUFFER):
        yield origin.tensor_summary
    named = {n: m for r in run.mode.stack.roots for n, m in r.named_modules()} if origin.module else {}
    module = named.get(origin.module)
    if module is None:
        return
    for name, p in list(module.named_parameters(recurse=False))[:_MAX_WEIGHTS]:
        path = f"{origin.module}.{name}"
        if isinstance(p, Tensor) and origin.tensor != path:
            yield summarize(path, p)


def _named(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the function gives them, as far as it says."""
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        names = [
            p.name
            for p in inspect.signature(target).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return {**{(names[i] if i < len(names) else str(i)): a for i, a in enumerate(args)}, **kwargs}
