"""Trace a GGUF model through llama.cpp: the first bad tensor, its op, row, column and bits.

`trace` runs a prompt greedily with llama.cpp's eval callback on. At level ``filtered`` only what leaves
attention and each layer, router logits and logits are watched; when one burns, the same tokens are run again
with every tensor of the burning step watched, which names the exact op and says whether a weight, a state or
the op itself is to blame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from firetower.attach.llama.report import make_fire
from firetower.attach.llama.run import LlamaRun
from firetower.attach.llama.runtime import LlamaOptions, LlamaSession
from firetower.attach.llama.sensor import CheckedTensor, EvalSensor, Level
from firetower.attach.llama.weights import WeightReader
from firetower.core.errors import ConfigError
from firetower.core.records import Fire, Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaTrace:
    """What a trace found.

    ``fire`` is None for a clean run. ``text`` and ``token_ids`` are what was generated, cut before the
    burning step; ``decode_tokens_per_s`` is None when nothing was decoded. ``num_checked`` tensors were
    checked in ``num_steps`` steps; ``not_covered`` counts those of a type that cannot be checked;
    ``num_integer`` cannot be bad. ``num_callback_errors`` counts firetower's own failures inside the
    callback, ``first_callback_error`` is the first. ``raw_prompt`` is true when the model has no chat
    template that llama.cpp knows, or none was wanted.
    """

    fire: Fire | None
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    level: str
    num_steps: int
    num_checked: int
    num_integer: int
    not_covered: Mapping[str, int]
    num_callback_errors: int
    first_callback_error: str | None
    prefill_s: float
    decode_tokens_per_s: float | None
    raw_prompt: bool
    runtime: str


def trace(
    model_path: Path | str,
    *,
    prompt: str = "The tower keeps watch over",
    max_tokens: int = 32,
    level: Level = "filtered",
    rerun: bool = True,
    raw: bool = False,
    options: LlamaOptions | None = None,
    on_tensor: Callable[[CheckedTensor], None] | None = None,
    on_piece: Callable[[str], None] | None = None,
) -> LlamaTrace:
    """Generate greedily with llama.cpp, watching its tensors; stop at the first bad one.

    Args:
        model_path: a GGUF file of a decoder-only model.
        prompt: the user's turn; put into the model's chat template unless ``raw``.
        max_tokens: most tokens to generate.
        level: ``filtered`` or ``full``.
        rerun: after a fire at level filtered, run again with every tensor watched in the burning step.
        raw: do not use the chat template.
        options: how llama.cpp runs.
        on_tensor: called for every checked tensor, from inside the callback; errors are counted, not raised.
        on_piece: called with each piece of text as it is generated.

    Returns:
        The trace, with a `Fire` when a tensor held a NaN or Inf that is not legal there.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        TraceError: the file is missing, not a GGUF, or refused by llama.cpp.
        ConfigError: an option out of range.
    """
    if level not in ("filtered", "full"):
        raise ConfigError(f"level={level!r}: must be filtered or full")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be at least 1")
    options = options or LlamaOptions()
    with LlamaSession(Path(model_path), options) as session:
        chat = None if raw else session.chat_prompt(prompt)
        prompt_ids = session.tokenize(prompt if chat is None else chat)
        if not prompt_ids:
            raise ConfigError(f"prompt={prompt!r}: has no tokens; give some text")
        sensor = _sensor(session, level, on_tensor)
        run = LlamaRun(session, sensor, prompt_ids)
        run.generate(max_tokens, options.ubatch_size, on_piece)
        again = (
            _rerun(session, run, sensor, on_tensor) if rerun and level == "filtered" and sensor.burn else None
        )
        return LlamaTrace(
            fire=make_fire(sensor, again, session, run) if sensor.burn else None,
            text=run.text,
            prompt_ids=prompt_ids,
            token_ids=tuple(run.token_ids),
            level=level,
            num_steps=len(run.plan),
            num_checked=sensor.num_checked,
            num_integer=sensor.num_integer,
            not_covered=dict(sensor.not_covered),
            num_callback_errors=sensor.num_errors,
            first_callback_error=sensor.first_error,
            prefill_s=run.prefill_s,
            decode_tokens_per_s=run.decode_tokens_per_s,
            raw_prompt=chat is None,
            runtime=session.runtime,
        )


def _sensor(
    session: LlamaSession, level: Level, on_tensor: Callable[[CheckedTensor], None] | None
) -> EvalSensor:
    return EvalSensor(
        session.ggml, WeightReader(session.ggml, session.path), level=level, on_tensor=on_tensor
    )


def _rerun(
    session: LlamaSession,
    run: LlamaRun,
    sensor: EvalSensor,
    on_tensor: Callable[[CheckedTensor], None] | None,
) -> EvalSensor:
    """Replay the tokens, watching all of the burning step; of every step if a state was bad in it."""
    assert sensor.burn is not None
    burning = sensor.burn.checked.step.index
    for full_from in (burning, 0) if burning else (0,):
        again = _sensor(session, "full", on_tensor)
        LlamaRun(session, again, run.prompt_ids).replay(run.plan, full_from=full_from)
        if again.burn is None or not any(
            s.role == "state" and s.status is Status.BAD for s in again.burn.sources
        ):
            break
    return again
