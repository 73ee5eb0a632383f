"""Stopping only the burned rows of a ``generate()`` batch: their logits are made harmless, their output is cut.

The guard stands in the call as a logits processor and as a stopping criterion; both are duck-typed, so that this
file needs no Transformers. With beams the whole group of one prompt is the unit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firetower.core.errors import AttachError

_STEPWISE = (
    "scores",
    "logits",
    "attentions",
    "hidden_states",
    "decoder_attentions",
    "cross_attentions",
    "decoder_hidden_states",
)


class RowGuard:
    """Knows which sequences burned at which generated token of one ``generate()`` call.

    Args:
        num_beams: rows of the batch that belong to one prompt's search; 1 without beams.
        burned_now: called once a step, before a token is chosen; returns the sequences burned since it was last
            called, and how many sequences the model's last step had.
        isolate: whether burned rows are made harmless and stopped, or only observed.
        on_failure: told why, when rows burned that cannot be told apart; the guard then only observes.
    """

    def __init__(
        self,
        num_beams: int,
        burned_now: Callable[[], tuple[set[int], int]],
        *,
        isolate: bool,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.num_beams = num_beams
        self.burned_now = burned_now
        self.isolate = isolate
        self.on_failure = on_failure
        self.prompt_length: int | None = None
        self.num_rows = 0
        self.cut_at: dict[int, int] = {}

    @property
    def num_groups(self) -> int:
        """Prompts of the batch; 0 before the first token is chosen."""
        return self.num_rows // self.num_beams

    @property
    def all_burned(self) -> bool:
        """Whether no prompt of the batch is left."""
        return self.num_groups > 0 and len(self.cut_at) == self.num_groups

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits processor: [B, V] scores; burned rows become all zeros, every other row stays bit for bit."""
        num_rows = input_ids.shape[0]
        if self.prompt_length is None:
            self.prompt_length, self.num_rows = input_ids.shape[1], num_rows
        burned, batch = self.burned_now()
        if burned and self.isolate and not batch == num_rows == self.num_rows:
            self._give_up(f"{num_rows} rows of scores, {self.num_rows} at first, from a model step of {batch}")
        if not self.isolate:
            return scores
        for row in burned:
            self.cut_at.setdefault(row // self.num_beams, input_ids.shape[1])
        if not self.cut_at:
            return scores
        rows = self._rows(num_rows, self.num_beams, scores.device)
        return scores.masked_fill(rows[:, None], 0.0)

    def _give_up(self, reason: str) -> None:
        self.isolate = False
        self.cut_at.clear()
        message = f"on_fire='isolate': {reason}: cannot tell which row burned; the fire is only recorded"
        self.on_failure(AttachError(message))

    def stop(self, input_ids: Tensor) -> Tensor:
        """Stopping criterion: [rows] bool. In beam search the rows are candidates, several for each beam."""
        num_rows = input_ids.shape[0]
        each = max(1, num_rows // self.num_groups) if self.num_groups else 1
        return self._rows(num_rows, each, input_ids.device)

    def _rows(self, num_rows: int, each: int, device: torch.device) -> Tensor:
        rows = torch.zeros(num_rows, dtype=torch.bool, device=device)
        for group in self.cut_at:
            rows[group * each : (group + 1) * each] = True
        return rows

    def cut(self, sequences: Tensor, pad_token_id: int) -> Tensor:
        """Cut burned rows of [rows, L] before their bad token; the rest of the row becomes ``pad_token_id``."""
        if not self.cut_at:
            return sequences
        each = max(1, sequences.shape[0] // self.num_groups)
        sequences = sequences.clone()
        for group, length in self.cut_at.items():
            sequences[group * each : (group + 1) * each, length:] = pad_token_id
        if self.all_burned:
            sequences = sequences[:, : max(self.cut_at.values())]
        return sequences


class _Processor:
    def __init__(self, guard: RowGuard) -> None:
        self.guard = guard

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.guard.process(input_ids, scores)


class _Criterion:
    def __init__(self, guard: RowGuard) -> None:
        self.guard = guard

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.guard.stop(input_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Criterion:
        # generate() copies its criteria; the copy must see the same burned rows
        return self


class _GuardedStreamer:
    """Passes tokens on until the only sequence of the batch has burned."""

    def __init__(self, streamer: Any, guard: RowGuard) -> None:
        self._streamer = streamer
        self._guard = guard

    def put(self, value: Tensor) -> None:
        if not self._guard.all_burned:
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


def guarded_generate(
    model: Any, generate: Callable[..., Any], guard: RowGuard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``generate`` with the guard in place and cut what burned; keeps the caller's own processors and criteria."""
    processors = [*(kwargs.get("logits_processor") or []), _Processor(guard)]
    criteria = [*(kwargs.get("stopping_criteria") or []), _Criterion(guard)]
    kwargs = {**kwargs, "logits_processor": _list_like("LogitsProcessorList", processors)}
    if guard.isolate:
        kwargs["stopping_criteria"] = _list_like("StoppingCriteriaList", criteria)
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _GuardedStreamer(kwargs["streamer"], guard)
    result = generate(*args, **kwargs)
    if not guard.cut_at:
        return result
    pad = _pad_token_id(model, kwargs)
    if isinstance(result, Tensor):
        return guard.cut(result, pad)
    result.sequences = guard.cut(result.sequences, pad)
    if guard.all_burned:
        _shorten(result, max(guard.cut_at.values()) - (guard.prompt_length or 0))
    return result


def _shorten(result: Any, num_steps: int) -> None:
    """Cut what ``generate()`` returns one of a token to the tokens that are left."""
    for name in _STEPWISE:
        value = getattr(result, name, None)
        if isinstance(value, tuple):
            setattr(result, name, value[:num_steps])
    beams = getattr(result, "beam_indices", None)
    if isinstance(beams, Tensor):
        result.beam_indices = beams[:, :num_steps]


def by_name(
    generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A ``generate()`` call with its arguments by name; what a wrapper takes as ``*args`` stays as it is.

    None where the arguments do not fit: ``generate`` then says so itself.
    """
    parameters = inspect.signature(generate).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return args, kwargs
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = dict(zip(names, args, strict=False))
    if len(args) > len(names) or named.keys() & kwargs.keys():
        return None
    return (), {**named, **kwargs}


def takes_guard(generate: Any, model: Any) -> bool:
    """Whether a ``generate`` takes logits processors, itself or by handing them on to a language model inside."""
    parameters = inspect.signature(generate).parameters
    if "logits_processor" in parameters:
        return True
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    inner = (type(m) for m in model.modules() if m is not model)
    return hands_on and any(_is_transformers(getattr(t, "generate", None)) for t in inner)


def can_isolate(generate: Any) -> bool:
    """Whether rows of scores are the rows of the model's batch: in Transformers' own loop, and through wrappers.

    A ``generate`` that is a model's own (Whisper's segments, codebooks of a music model) may arrange them otherwise.
    """
    return _is_transformers(generate) or "logits_processor" not in inspect.signature(generate).parameters


def _is_transformers(generate: Any) -> bool:
    return getattr(generate, "__qualname__", "") == "GenerationMixin.generate"


def generation_option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """The value of a generation option: keyword, then the given or the model's generation config."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return getattr(config, name, None)


def _pad_token_id(model: Any, kwargs: dict[str, Any]) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        value = generation_option(model, kwargs, name)
        if isinstance(value, list) and value:
            value = value[0]
        if value is not None:
            return int(value)
    return 0


def _list_like(name: str, items: list[Any]) -> Any:
    import transformers

    return getattr(transformers, name)(items)
