"""A burned sequence is one incident, and only its own: requests that take turns are told apart by their caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import firetower
from firetower.drills import hosts


def poison_once(model: Any, layer: int, ids: Tensor, cache: Any) -> None:
    module = model.model.layers[layer]
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs).clone()
        out[0, 0, 1] = float("nan")
        return out

    module.forward = forward
    model(input_ids=ids, cache=cache)
    del module.forward


def test_requests_that_take_turns() -> None:
    model: Any = hosts.small_llama()
    ids = torch.tensor([[5, 6, 7]])
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        one, two = (model(input_ids=ids, use_cache=True).cache for _ in range(2))
        poison_once(model, 1, ids[:, :1], one)
        poison_once(model, 2, ids[:, :1], two)
        for _ in range(3):
            model(input_ids=ids[:, :1], cache=one)
            model(input_ids=ids[:, :1], cache=two)
        model(input_ids=ids[:, :1], cache=two)
        assert [(f.origin.layer, f.count) for f in watch.fires] == [(1, 4), (2, 5)]
        del one, two
        assert watch._burned._by_cache == {}


def test_a_static_cache_that_is_used_again_starts_anew() -> None:
    from transformers import StaticCache

    model: Any = hosts.small_llama()
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = torch.tensor([[5, 6, 7]])
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        model(input_ids=ids, cache=cache)
        poison_once(model, 1, ids[:, :1], cache)
        cache.reset()
        model(input_ids=ids, cache=cache)
        assert watch.last.is_clean
        poison_once(model, 2, ids[:, :1], cache)
    assert [(f.origin.layer, f.count) for f in watch.fires] == [(1, 1), (2, 1)]
