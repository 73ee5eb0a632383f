"""Cases of experts behind a cache of slots: the model, the router's choice, and the lab's parts of it."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import torch
from torch import Tensor

from firetower.drills.expert_cache import ExpertCache, Flaws, TinyExperts
from firetower.drills.placing import generator, load, prompt, replace_forward, site, tensor_at
from firetower.drills.spec import Case, Host
from firetower.lab.subject import Switch


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """A call whose experts can be put behind a cache. ``ids`` [T, K]: what the router chooses in it."""

    model: Any
    args: tuple[Any, ...]
    experts: Any
    ids: Tensor

    @property
    def chosen(self) -> list[int]:
        """The chosen experts in the order in which the step needs them."""
        return list(dict.fromkeys(self.ids.flatten().tolist()))


def routed(host: Host, seed: int, layer: int, num_tokens: int) -> Routed:
    """A call of a tiny model, or of a host whose experts of one layer are in question."""
    if host == "pure":
        model = TinyExperts(12, 2, 32, seed)
        x = torch.randn(num_tokens, 32, generator=generator(seed))
        with torch.no_grad():
            ids = torch.softmax(model.router(x), -1).topk(2, dim=-1).indices
        return Routed(model, (x,), model.experts, ids)
    model = load(host, "fp32", seed)
    args = (prompt(model, Random(seed), num_tokens),)
    where = site(model, "routed", layer)
    gate = model.model.layers[layer].mlp.gate
    x = tensor_at(Case(model=model, args=args), where.at_input()).flatten(0, -2)
    with torch.no_grad():
        ids = gate(x)[2]
    return Routed(model, args, model.get_submodule(where.module), ids)


def cached(
    call: Routed, resident: list[int], flaws: Flaws, *, loads: bool, places: tuple[str, ...], rows: bool = False
) -> tuple[Case, ExpertCache]:
    """The call with its experts behind a cache. ``rows``: the routed rows are what the run gives."""
    cache = ExpertCache(call.experts, resident, flaws, loads=loads)
    replace_forward(call.experts, cache)

    def serve(_: int = 0) -> Any:
        out = call.model(*call.args)
        return cache.destinations if rows else out

    case = Case(
        model=call.model,
        args=call.args,
        serve=serve,
        right=lambda: cache.missing(serve),
        places=places,
        switches={
            Switch.ALL_MISS: lambda _: cache.missing(serve),
            Switch.POISON_DESTINATIONS: lambda _: cache.poisoned(serve),
        },
    )
    case.call()
    parts = {"slots": cache.slots(), "routed_rows": tuple(cache.rows), "events": tuple(cache.log)}
    return dataclasses.replace(case, parts=parts), cache
