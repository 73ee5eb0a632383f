"""Reading the tensors of a tap out of what a module hook is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from firetower.attach.frame import cache_of


def first_tensor(value: Any) -> Tensor | None:
    """The main float tensor of a module's output: itself, ``.logits``, ``.last_hidden_state``, or the first found."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() or value.is_complex() else None
    for name in ("logits", "last_hidden_state"):
        found = getattr(value, name, None)
        if isinstance(found, Tensor):
            return found
    return next(float_tensors(value), None)


def float_tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every float tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from float_tensors(item, depth - 1)
    elif depth and isinstance(value, tuple | list):
        for item in value:
            yield from float_tensors(item, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from float_tensors(getattr(value, field.name, None), depth - 1)


def input_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first float tensor that a module was called with; ``hidden_states`` wins among keywords."""
    if args:
        found = first_tensor(args[0])
        if found is not None:
            return found
    named = kwargs.get("hidden_states")
    return named if isinstance(named, Tensor) else next(float_tensors([*args, *kwargs.values()]), None)


def written_state(stage: str, kwargs: Mapping[str, Any], layer: int, num_tokens: int) -> Iterable[Tensor]:
    """What the module of a cache tap left in the cache: new keys and values, or the whole state.

    Keys and values come as [B, heads, T, D] views of the T rows written in this step. Nothing when the call has no
    cache or the cache keeps them in another form (quantised, paged).
    """
    found = cache_layer(kwargs, layer)
    if found is None:
        return ()
    if stage == "kv":
        stored = (getattr(found, "keys", None), getattr(found, "values", None))
        return [written_rows(found, s, num_tokens) for s in stored if isinstance(s, Tensor) and s.ndim == 4]
    states = getattr(found, f"{stage}s", None)
    return [s for s in (states.values() if isinstance(states, dict) else [states]) if isinstance(s, Tensor)]


def cache_layer(kwargs: Mapping[str, Any], layer: int) -> Any:
    """One layer of the cache that a call was given, or None."""
    layers = getattr(cache_of(kwargs), "layers", None)
    return None if layers is None or layer >= len(layers) else layers[layer]


def written_rows(layer: Any, stored: Tensor, num_tokens: int) -> Tensor:
    """The rows that a step of ``num_tokens`` wrote in keys or values [B, heads, length, D] of one cache layer."""
    length = stored.shape[2]
    if getattr(layer, "max_cache_len", None) != length:
        return stored.narrow(2, length - num_tokens, num_tokens) if num_tokens < length else stored
    # a static cache is longer than what is written: its own count says where this step's rows end
    end = layer.get_seq_length()
    if isinstance(end, Tensor):
        num_tokens = min(num_tokens, length)
        # a window that has rolled on counts more than it holds: its last rows are the newest
        last = end.reshape(-1)[:1].clamp(max=length) - num_tokens
        rows = last + torch.arange(num_tokens, device=stored.device)
        return stored.index_select(2, rows.clamp(0, length - 1))
    # a window shorter than the prompt holds its last rows only
    num_tokens = min(num_tokens, length)
    begin = min(max(0, int(end) - num_tokens), length - num_tokens)
    return stored.narrow(2, begin, num_tokens)
