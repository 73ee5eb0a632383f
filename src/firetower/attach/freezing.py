"""Keeping what is needed to run a burned call again: prompt ids, sampling, seeds and the random state, settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firetower.attach.frame import Call
from firetower.capture.freeze import freeze_call
from firetower.capture.records import Capture, ModelInfo
from firetower.capture.store import CaptureFolder
from firetower.capture.tensors import RawTensor
from firetower.core.records import Fire
from firetower.fires.store import Store

_NOT_SAMPLING = {"inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "streamer"}


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateCall:
    """A running ``generate()``: its arguments, and the host's random state when it began."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng_state: Tensor

    @classmethod
    def begin(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GenerateCall:
        """Note a call before it runs."""
        return cls(args, kwargs, torch.get_rng_state())


def capture_folder(
    captures: CaptureFolder | str | Path | bool | None, store: Store | str | Path | Literal[False] | None
) -> CaptureFolder | None:
    """Where captures go; None stands for "where the fires go": beside the store, nowhere without one."""
    if captures is False or (captures is None and store is False):
        return None
    if isinstance(captures, CaptureFolder):
        return captures
    if isinstance(captures, str | Path):
        return CaptureFolder(captures)
    if captures is None and store is not None:
        path = store.path if isinstance(store, Store) else Path(str(store))
        return CaptureFolder(path.with_name(path.name + ".captures"))
    return CaptureFolder()


def freeze(fire: Fire, model: nn.Module, level: str, call: Call | None, generate: GenerateCall | None) -> Capture:
    """The capture of a burned call.

    Args:
        fire: the incident.
        model: the watched module.
        level: of the watch.
        call: the forward call that burned.
        generate: the ``generate()`` around it, where there was one.
    """
    config = getattr(model, "config", None)
    parameter = next(model.parameters(), None)
    settings = {
        "level": level,
        "class": type(model).__name__,
        "dtype": "" if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "attn_implementation": getattr(config, "_attn_implementation", None),
        "experts_implementation": getattr(config, "_experts_implementation", None),
        "num_threads": torch.get_num_threads(),
    }
    special = {getattr(config, n, None) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocabulary = getattr(config, "vocab_size", None)
    info = ModelInfo(
        name=str(getattr(config, "name_or_path", "") or fire.model),
        vocabulary_size=vocabulary if isinstance(vocabulary, int) else None,
        special_ids=tuple(sorted(i for i in special if isinstance(i, int))),
    )
    tensors = {}
    if generate is not None:
        state = generate.rng_state
        tensors["torch_rng_state"] = RawTensor(
            dtype="uint8", shape=tuple(state.shape), data=bytes(state.tolist())
        )
    return freeze_call(
        fire,
        prompt_token_ids=_prompt(generate) if generate is not None else _rows_of(call),
        sampling=_sampling(generate),
        seeds={"torch": torch.initial_seed()},
        engine_settings=settings,
        model=info,
        tensors=tensors,
    )


def _prompt(generate: GenerateCall) -> list[list[int]] | None:
    ids = generate.kwargs.get("input_ids", generate.kwargs.get("inputs"))
    if ids is None and generate.args:
        ids = generate.args[0]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return None
    mask = generate.kwargs.get("attention_mask")
    kept = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), kept.cpu(), strict=True)]


def _rows_of(call: Call | None) -> list[list[int]] | None:
    if call is None or call.num_past:
        return None
    rows = [call.token_ids(i) for i in range(call.shape()[0])]
    return None if any(row is None for row in rows) else [list(row) for row in rows if row is not None]


def _sampling(generate: GenerateCall | None) -> dict[str, Any]:
    """The keyword arguments that JSON holds as they are."""
    if generate is None:
        return {}
    kwargs = {k: v for k, v in generate.kwargs.items() if k not in _NOT_SAMPLING}
    config = kwargs.pop("generation_config", None)
    given = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    return {k: v for k, v in {**given, **kwargs}.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)
