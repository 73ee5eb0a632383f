"""From a bad step to a Fire: who, where first, bits, whether the weight itself is bad, and a message to read."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from firetower.attach.discover import Tap
from firetower.attach.ops import OpsWatch
from firetower.attach.step import Step
from firetower.core.records import (
    BadValue,
    BurnedRow,
    Fire,
    Outcome,
    Reading,
    Signal,
    Status,
    TensorSummary,
    new_fire_id,
    utc_now,
)
from firetower.sensors.check import first_bad, is_clean
from firetower.sensors.summary import summarize

MAX_BAD_SIGNALS = 64
"""How many bad signals of one step a fire lists; the rest follow from the first."""


def build_fire(
    model_name: str,
    root: nn.Module,
    step: Step,
    reading: Reading,
    outcome: Outcome,
    *,
    row: BurnedRow | None = None,
    ops: OpsWatch | None = None,
) -> Fire:
    """The fire of a bad reading.

    Args:
        model_name: what to call the model.
        root: the watched module.
        step: the step that was bad.
        reading: its reading.
        outcome: what is done about it.
        row: one burned sequence, to make the fire that sequence's; None for the first bad signal.
        ops: where an op-level watch knows the op; its origin wins.
    """
    finding = step.origin()
    event = ops.origin if ops is not None else None
    if event is not None:
        where = _Where(event.signal, event.first, event.inputs, event.output)
        weights = [event.tensor_summary] if event.tensor_summary is not None else []
        notes = list(ops.notes()) if ops is not None else []
    else:
        assert finding is not None
        assert finding.first is not None
        tap = step.taps[finding.slot]
        where = _Where(tap.signal, finding.first, finding.inputs, finding.output)
        if row is not None and row.first is not None:
            tap = next(t for t in step.taps if t.signal == row.signal)
            same = tap is step.taps[finding.slot]
            where = _Where(row.signal, row.first, finding.inputs if same else (), finding.output if same else None)
        bad = list(bad_weights(root, tap))
        weights = [summarize(name, p) for name, p in bad]
        notes = [*_weight_notes(bad), *_input_notes(bad, where)]
    return Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="attach",
        runtime=runtime_name(),
        model=model_name,
        device=_device(root),
        phase=reading.phase,
        step=reading.step,
        origin=where.signal,
        first=where.first,
        outcome=outcome,
        bad_signals=reading.bad[:MAX_BAD_SIGNALS],
        burned=reading.burned if row is None else (row,),
        coverage=reading.coverage,
        pad_before_real=reading.pad_before_real,
        laundered=laundered(reading),
        inputs=where.inputs,
        output=where.output,
        weights=tuple(weights),
        notes=(*notes, *_reading_notes(reading)),
        token_ids=None if step.call is None else step.call.token_ids(where.first.sequence),
    )


class _Where(NamedTuple):
    signal: Signal
    first: BadValue
    inputs: tuple[TensorSummary, ...]
    output: TensorSummary | None


def laundered(reading: Reading) -> bool:
    """Whether a bad value was gone again when the logits, or the output of a model of another kind, were reached."""
    logits = [s for s in reading.signals if s.signal.stage == "logits" or not (s.signal.module or s.signal.op)]
    ran = [s for s in logits if s.status is not Status.NOT_COVERED]
    return bool(reading.bad) and bool(ran) and all(s.status is Status.CLEAN for s in ran)


def bad_weights(root: nn.Module, tap: Tap) -> Iterator[tuple[str, torch.Tensor]]:
    """Non-finite parameters and buffers that the origin is computed from: its module's own, by dotted name.

    For the input of the first layer these are the token embeddings.
    """
    modules: list[tuple[str, nn.Module]] = [(tap.signal.module, tap.module)]
    if tap.signal.stage == "input":
        get = getattr(root, "get_input_embeddings", None)
        embeddings: object = get() if callable(get) else None
        modules = []
        if tap.signal.layer == 0:
            modules = [(n, m) for n, m in root.named_modules() if id(m) == id(embeddings)]
    for path, module in modules:
        tensors = [*module.named_parameters(), *module.named_buffers()] if module is not root else []
        for name, p in tensors:
            if p.is_floating_point() and not p.is_meta and not is_clean(p):
                yield f"{path}.{name}", p


def runtime_name() -> str:
    """Versions that decide what the arithmetic does: ``torch 2.13.0, transformers 5.24.0, Python 3.11.7``."""
    import sys

    parts = [f"torch {torch.__version__}"]
    if "transformers" in sys.modules:
        parts.append(f"transformers {sys.modules['transformers'].__version__}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def describe_fire(fire: Fire) -> str:
    """One paragraph for the terminal and for `NonFiniteError`: where first, what, and what to run next."""
    o, b = fire.origin, fire.first
    where = f"layer {o.layer}, {o.module}" if o.layer is not None else (o.module or "model output")
    if o.op is not None:
        where = f"{o.op} in {o.module or 'the model itself'}, {o.source}"
    place = [f"row {b.row}", f"column {b.column}", f"bits {b.bits_hex} ({b.dtype})"]
    when = [f"phase {fire.phase}"]
    if b.sequence is not None:
        when.append(f"sequence {b.sequence}")
    if b.position is not None:
        when.append(f"position {b.position}")
    text = f"{_KIND_NAMES[b.kind]} first at {where} [{o.stage}]: {', '.join(place)}; {', '.join(when)}."
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in fire.notes)
    return f"{text}{notes} Fire {fire.id}; next: firetower fires show {fire.id}"


_KIND_NAMES = {"nan": "NaN", "+inf": "+Inf", "-inf": "-Inf"}


def _device(root: nn.Module) -> str:
    p = next(iter([*root.parameters(), *root.buffers()]), None)
    if p is not None and p.is_cuda:
        return torch.cuda.get_device_name(p.device)
    return platform.processor() or platform.machine() if p is None or p.device.type == "cpu" else p.device.type


def _weight_notes(weights: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
    for name, p in weights:
        first, _ = first_bad(p)
        assert first is not None
        yield (
            f"the weight itself is non-finite: {name} {list(p.shape)} at row {first.row}, column {first.column}, "
            f"bits {first.bits_hex}"
        )


def _input_notes(weights: list[tuple[str, torch.Tensor]], where: _Where) -> Iterator[str]:
    # what a pre-hook reads has no inputs of its own to speak of
    if weights or not where.inputs or where.signal.stage in ("input", "swiglu"):
        return
    if all(t.num_nonfinite == 0 for t in where.inputs):
        yield "the inputs of its module are finite"


def _reading_notes(reading: Reading) -> Iterator[str]:
    if reading.pad_before_real:
        yield "a pad row was bad before any real row: a shared scale, tile or mask may have leaked it"
    if laundered(reading):
        yield "the bad value was gone again at the logits (laundered)"
