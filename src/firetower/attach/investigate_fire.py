"""The fire of an investigation: what both runs saw, in the record that the store keeps."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from firetower.attach.frame import Call
from firetower.attach.incident import MAX_BAD_SIGNALS, runtime_name
from firetower.core.records import (
    Fire,
    Outcome,
    Phase,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
    new_fire_id,
    utc_now,
)
from firetower.sensors.ops_events import OpEvent
from firetower.sensors.ops_mode import OpsMode

if TYPE_CHECKING:
    from firetower.attach.investigate_runs import FirstRun


def fire_of_event(
    origin: OpEvent,
    mode: OpsMode,
    first_run: FirstRun,
    fn: Any,
    weights: tuple[TensorSummary, ...],
    notes: tuple[str, ...],
    step: int,
    call: Call | None,
) -> Fire:
    """The fire whose origin the op-level run named.

    Args:
        origin: the op.
        mode: the op-level run.
        first_run: the cheap run; its first fire says what was seen at module level.
        fn: what was investigated; names the model.
        weights: summaries of the origin module's weights.
        notes: findings of the two runs.
        step: which call of the model the origin belongs to, from 0.
        call: that call's arguments.
    """
    seen = f"seen at {origin.seen_at}" if origin.seen_at else None
    seen_first = first_run.fires[0] if first_run.fires else None
    return Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="investigate",
        runtime=runtime_name(),
        model=model_name(fn),
        device=device_name(fn),
        phase=call.phase() if call is not None else Phase.UNKNOWN,
        step=step,
        origin=origin.signal,
        first=origin.first,
        outcome=Outcome.RECORDED,
        bad_signals=_bad_signals(mode, origin),
        burned=() if seen_first is None else seen_first.burned,
        coverage=(mode.num_checked, mode.num_checked + sum(mode.not_covered.values())),
        pad_before_real=seen_first is not None and seen_first.pad_before_real,
        laundered=_is_laundered(mode, first_run),
        inputs=origin.inputs,
        output=origin.output,
        weights=weights,
        notes=tuple(n for n in (origin.culprit, seen, *origin.notes, *notes) if n),
        token_ids=None if call is None else call.token_ids(origin.first.sequence),
        extra=_extra(mode, seen_first),
    )


def _bad_signals(mode: OpsMode, origin: OpEvent) -> tuple[SignalReading, ...]:
    events = sorted(mode.events, key=lambda e: e is not origin)[:MAX_BAD_SIGNALS]
    return tuple(SignalReading(signal=e.signal, status=Status.BAD, first=e.first) for e in events)


def _extra(mode: OpsMode, seen_first: Fire | None) -> dict[str, Any]:
    return {
        "num_ops": mode.num_ops,
        "num_bad_ops": mode.num_events,
        "first_run": None if seen_first is None else seen_first.origin.name,
        "laundered_by": [str(e) for e in mode.laundered[:8]],
    }


def fire_of_output(first_run: FirstRun, fn: Any, notes: tuple[str, ...]) -> Fire:
    """The fire of a call that returned a bad value once, without any op having been caught at it."""
    assert first_run.bad_output is not None
    path, bad, summary = first_run.bad_output
    return Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="investigate",
        runtime=runtime_name(),
        model=model_name(fn),
        device=device_name(fn),
        phase=Phase.UNKNOWN,
        step=0,
        origin=Signal(stage="result", module=path),
        first=bad,
        outcome=Outcome.RECORDED,
        output=summary,
        notes=notes,
    )


def model_name(fn: Any) -> str:
    """Name of the model behind a call, or of the function."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        config = getattr(owner, "config", None)
        name = getattr(config, "name_or_path", None)
        return str(name).rstrip("/").rpartition("/")[2] if name else type(owner).__name__
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def device_name(fn: Any) -> str:
    """Name of the device that the model's weights are on; the processor where there is no model."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    p = next(owner.parameters(), None) if isinstance(owner, nn.Module) else None
    if p is not None and p.is_cuda:
        return torch.cuda.get_device_name(p.device)
    return platform.processor() or platform.machine()


def _is_laundered(mode: OpsMode, first_run: FirstRun) -> bool | None:
    """Whether the bad value was gone in the end: known where an op hid it and what came out is clean."""
    if first_run.fires and first_run.fires[0].laundered is not None:
        return first_run.fires[0].laundered or (bool(mode.laundered) and first_run.bad_output is None)
    return bool(mode.laundered) and first_run.bad_output is None
