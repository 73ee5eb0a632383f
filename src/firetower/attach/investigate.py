"""`investigate`: run a call; when it burns, run it again from the same state at op level to name the op."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from firetower.attach.investigate_fire import fire_of_event, fire_of_output
from firetower.attach.investigate_page import page
from firetower.attach.investigate_runs import FirstRun, OpRun, SecondRun, first_run
from firetower.attach.state import CallState
from firetower.core.errors import InvestigateError
from firetower.core.records import Fire, TensorSummary
from firetower.core.verdict import Verdict
from firetower.fires.safe import keep_fire
from firetower.fires.store import Store
from firetower.sensors.ops_events import Cause, LaunderEvent, OpEvent
from firetower.sensors.summary import summarize

CLEAN_SECOND_RUN = "clean second run: state, ordering or layout"
_MAX_WEIGHTS = 16


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
        verdict: class of cause, where the lab judged it (`firetower.investigate` does).
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
    verdict: Verdict | None = None

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
    first, result = first_run(call, state.modules)
    if state.modules and not first.is_suspicious:
        return Investigation(burned=False, first_run=first, result=result)
    state.restore()
    run = OpRun(call, state.modules, named, first)
    return _conclude(run, first, result, state, fn_or_model, firetower_store)


def _conclude(
    run: OpRun,
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
        notes += keep_fire(fire, store)
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


def _findings(run: OpRun, first: FirstRun) -> Iterator[str]:
    if run.mode.origin is None and first.is_bad:
        yield "run the call several times to learn how often it burns"
    if run.mode.origin is None and not first.is_bad and (first.fires or first.bad_output):
        yield "the -Inf that the first run saw is legal: an op wrote it on purpose, and none made harm of it"
    if first.was_stopped:
        yield "the run was ended at its first bad step: sampling from it would have failed on the device for good"
    elif first.error != run.error:
        ends = [error or "a result" for error in (first.error, run.error)]
        yield f"the first run ended with {ends[0]}, the second with {ends[1]}"
    if run.mode.failures:
        yield f"op-level sensing failed {run.mode.failures} times, last with {run.mode.last_failure}"


def _weights(run: OpRun, origin: OpEvent | None) -> Iterator[TensorSummary]:
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
