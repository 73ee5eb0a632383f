"""From a burnt sensor to a stored incident: the Fire and what its notes say."""

from __future__ import annotations

import platform

from firetower.attach.llama.run import LlamaRun
from firetower.attach.llama.runtime import LlamaSession
from firetower.attach.llama.sensor import Burn, EvalSensor, signal_of
from firetower.attach.llama.sources import Source
from firetower.core.records import BurnedRow, Fire, Outcome, SignalReading, Status, new_fire_id, utc_now


def make_fire(sensor: EvalSensor, again: EvalSensor | None, session: LlamaSession, run: LlamaRun) -> Fire:
    """Build the fire of a burnt run.

    Args:
        sensor: the sensor that burned; its readings become ``bad_signals``, after the origin.
        again: the sensor of the full rerun; where it burned too, it gives the origin.
        session: the model.
        run: the pass that burned.
    """
    assert sensor.burn is not None
    burn = sensor.burn if again is None or again.burn is None else again.burn
    signal, first = signal_of(burn.checked), burn.first
    activations = [s.summary for s in burn.sources if s.role != "weight" and s.summary is not None]
    weights = [s.summary for s in burn.sources if s.role == "weight" and s.summary is not None]
    return Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="trace",
        runtime=session.runtime,
        model=session.path.name,
        device=_device(burn.device),
        phase=burn.checked.step.phase,
        step=burn.checked.step.index,
        origin=signal,
        first=first,
        outcome=Outcome.RECORDED,
        bad_signals=_bad_signals(sensor, burn),
        burned=(BurnedRow(sequence=0, signal=signal, token=first.token, column=first.column, first=first),),
        coverage=(
            sensor.num_checked,
            sensor.num_checked + sum(sensor.not_covered.values()) + sensor.num_errors,
        ),
        laundered=None if sensor.logits_bad is None else not sensor.logits_bad,
        inputs=tuple(activations),
        output=burn.output,
        weights=tuple(weights),
        notes=tuple(notes(sensor, again)),
        token_ids=(*run.prompt_ids, *run.token_ids),
        extra={
            "tensor": burn.checked.name,
            "level": sensor.level if again is None else f"{sensor.level}, rerun full",
            **{f"src{i}": describe_source(s) for i, s in enumerate(burn.sources)},
        },
    )


def _bad_signals(sensor: EvalSensor, burn: Burn) -> tuple[SignalReading, ...]:
    # the rerun's origin was executed before all that level filtered saw of the step
    origin = SignalReading(signal=signal_of(burn.checked), status=Status.BAD, first=burn.first)
    return (() if burn is sensor.burn else (origin,)) + tuple(sensor.bad_signals)


def _device(buffer: str) -> str:
    # ggml calls every processor "CPU"; whose arithmetic it is helps to read the bits
    return platform.machine() if buffer.startswith("CPU") else buffer


def notes(sensor: EvalSensor, again: EvalSensor | None) -> list[str]:
    """What the incident shows, in words; the first note is the finding, the others its limits."""
    assert sensor.burn is not None
    out: list[str] = []
    burn = sensor.burn if again is None or again.burn is None else again.burn
    out.extend(_blame(burn, every_tensor=sensor.level == "full" or burn is not sensor.burn))
    if again is not None and again.burn is None:
        out.append(
            "a rerun of the same tokens with every tensor watched was clean: "
            "not a fixed fault of weights or input; look at what differs (threads, memory, order)"
        )
    weight_is_bad = any(s.role == "weight" and s.status is Status.BAD for s in burn.sources)
    if again is None and sensor.level == "filtered" and not weight_is_bad:
        out.append(
            "seen at level filtered: the exact op is at or before this tensor, after the last clean one"
        )
    if (
        again is not None
        and again.burn is not None
        and again.burn.checked.step.index < sensor.burn.checked.step.index
    ):
        out.append(
            f"first seen at level filtered in step {sensor.burn.checked.step.index}; it started earlier"
        )
    if sensor.num_bad > len(sensor.bad_signals):
        out.append(
            f"{sensor.num_bad} tensors of this step were bad; the first {len(sensor.bad_signals)} are kept"
        )
    return out


def _blame(burn: Burn, *, every_tensor: bool) -> list[str]:
    bad = [s for s in burn.sources if s.status is Status.BAD]
    weights = [s for s in bad if s.role == "weight"]
    if weights:
        return [f"the weight itself is non-finite: {s.name} {s.detail}" for s in weights]
    if bad:
        return [f"a source was bad before this op: {s.role} {s.name}" for s in bad]
    unknown = [s for s in burn.sources if s.status is Status.NOT_COVERED]
    if unknown and every_tensor:
        return [f"source not checked: {s.role} {s.name} ({s.type_name}: {s.detail})" for s in unknown]
    if every_tensor:
        return [f"every source of {burn.checked.op} is finite: this op made the bad value"]
    return []


def describe_source(source: Source) -> str:
    """One line for people: role, name, type, state."""
    detail = f" ({source.detail})" if source.detail else ""
    return f"{source.role} {source.name} {source.type_name}: {source.status}{detail}"
