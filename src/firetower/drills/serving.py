"""Requests on caches that outlive them: what an engine does with states, in a few lines.

Works on the hosts and on `pure.TinyRecurrent`. A cache of Transformers has a layer a decoder layer, with ``keys`` and
``values``, or ``conv_states`` and ``recurrent_states``; all of these are a request's state.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from firetower.drills.arrays import tensor_hash, to_array
from firetower.drills.placing import fixed, load, prompt
from firetower.drills.pure import TinyRecurrent
from firetower.drills.spec import Case, Host
from firetower.lab.subject import State, Switch, Window

_NAMES = {"keys": "kv keys", "values": "kv values", "conv_states": "conv_state", "recurrent_states": "recurrent_state"}


def stateful(host: Host, seed: int, dtype: str = "fp32") -> Any:
    """A model that carries state: `pure.TinyRecurrent`, or a host."""
    return TinyRecurrent(seed).eval() if host == "pure" else load(host, dtype, seed)


def tokens(model: Any, seed: int, num_tokens: int, batch: int = 1) -> Tensor:
    """Random ids [batch, num_tokens], all different where the vocabulary allows."""
    if isinstance(model, TinyRecurrent):
        rng = Random(seed)
        return torch.tensor([[rng.randrange(model.vocab_size) for _ in range(num_tokens)] for _ in range(batch)])
    return prompt(model, Random(seed), num_tokens, batch)


def fresh(model: Any, batch: int = 1) -> Any:
    """The cache of a request that has not begun."""
    if isinstance(model, TinyRecurrent):
        return model.fresh(batch)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@torch.no_grad()
def step(model: Any, ids: Tensor, cache: Any, **kwargs: Any) -> Any:
    """Run tokens [B, T] of requests whose state is ``cache``, which is written; the model's output."""
    if isinstance(model, TinyRecurrent):
        return model(ids, cache)
    parameters = inspect.signature(type(model.model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{name: cache}, **kwargs)


def after(model: Any, ids: Tensor) -> Any:
    """The cache once these tokens are in."""
    cache = fresh(model, len(ids))
    if ids.shape[1]:
        step(model, ids, cache)
    return cache


def zeroed(cache: Any) -> Any:
    """A copy of a cache with zeros in it."""
    new = copy.deepcopy(cache)
    for h in held(new):
        h.put(torch.zeros_like(h.value))
    return new


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a cache: of which layer, what it is, and how to put another one in its place."""

    layer: int
    name: str
    value: Tensor
    put: Callable[[Tensor], None]


def held(cache: Any) -> Iterator[Held]:
    """Every tensor of a cache, layer by layer."""
    for i, layer in enumerate(cache.layers):
        for attribute, name in _NAMES.items():
            value = getattr(layer, attribute, None)
            if isinstance(value, dict) and isinstance(value.get(0), Tensor):
                yield Held(i, name, value[0], functools.partial(value.__setitem__, 0))
            elif isinstance(value, Tensor):
                yield Held(i, name, value, functools.partial(setattr, layer, attribute))


def recurrent(cache: Any) -> list[Held]:
    """The recurrent states alone."""
    return [h for h in held(cache) if h.name == "recurrent_state"]


def records(cache: Any, noted: Any = None, **tags: Any) -> tuple[State, ...]:
    """The lab's records of a cache whose tags are given. ``noted``: the cache as it was when it was stored."""
    then = [tensor_hash(h.value) for h in held(noted)] if noted is not None else []
    found = []
    for i, h in enumerate(held(cache)):
        now = tensor_hash(h.value)
        found.append(
            State(
                name=h.name,
                layer=h.layer,
                value=to_array(h.name, h.value.clone()),
                hash_now=now,
                expected_hash=then[i] if i < len(then) else now,
                **tags,
            )
        )
    return tuple(found)


def resumed(
    model: nn.Module,
    rest: Tensor,
    *,
    used: Any,
    right: Any,
    states: Sequence[State],
    places: tuple[str, ...],
    cures: Sequence[Switch],
    **parts: Any,
) -> Case:
    """A request that goes on with tokens ``rest`` from the cache ``used``, where ``right`` is the one it should be.

    Every run starts from copies. ``cures``: switches under which it gets the right cache.
    """

    def from_cache(cache: Any) -> Any:
        return step(model, rest, copy.deepcopy(cache))

    return Case(
        model=model,
        serve=fixed(from_cache, used),
        right=functools.partial(from_cache, right),
        places=places,
        switches=dict.fromkeys(cures, fixed(from_cache, right)),
        parts={"states": tuple(states), **parts},
    )


def verified(
    model: Any,
    seed: int,
    *,
    start: int,
    window: int,
    accepted: int,
    kept: int,
    rest: int,
    places: tuple[str, ...],
) -> Case:
    """A request after a verify step: ``window`` drafts from position ``start``, of which ``accepted`` are right.

    ``kept``: how many of the window's tokens are in the state that is committed. The text goes on with ``rest``
    tokens after the accepted ones; rejected drafts are other tokens than those.
    """
    text = tokens(model, seed, start + accepted + rest)
    drafts = torch.cat((text[:, start : start + accepted], tokens(model, seed + 1, window - accepted)), dim=1)
    proposed = torch.cat((text[:, :start], drafts), dim=1)
    used, right = after(model, proposed[:, : start + kept]), after(model, text[:, : start + accepted])
    states = records(
        used,
        owner="a",
        expected_owner="a",
        position=start + kept,
        expected_position=start + accepted,
        written_by="verify",
        window=Window(start=start, num_tokens=window, num_accepted=accepted),
    )
    return resumed(
        model,
        text[:, start + accepted :],
        used=used,
        right=right,
        states=states,
        places=places,
        cures=(Switch.DRAFTS_OFF,),
    )
