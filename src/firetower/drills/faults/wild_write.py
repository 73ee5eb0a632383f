"""K1: a write past the end of a buffer lands in the weight that lies behind it, for good."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

_BUFFER = 128


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"wild-write/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    over = rng.randint(3, 24)
    value = rng.choice(("nan", "inf", "-inf"))

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, load, prompt, site
        from firetower.drills.pure import linear
        from firetower.drills.truth import kind_of, with_truth

        if host == "pure":
            model: Any = nn.Sequential(linear(40, 32, seed), linear(24, 40, seed + 1))
            args: Any = (torch.randn(num_tokens, 32, generator=generator(seed)),)
            path, where = "1", None
        else:
            model = load(host, "fp32", seed)
            args = (prompt(model, Random(seed), num_tokens),)
            where = site(model, "down", layer)
            path = where.module
        memory, weight = _side_by_side(model.get_submodule(path))
        loaded = weight.clone()
        # rows of a buffer are written; under the fault some more than it has
        end = _BUFFER + (over if fault else 0)
        memory[_BUFFER - 8 : end] = float(value)
        case = _case(model, args, path, weight, loaded)
        if not fault:
            return case
        if where is None:
            # infinities of one sign times activations of either may cancel to NaN, or not
            kind = kind_of(float(case.call()[0, 0]))
            origin = Origin(module="1", op="aten.mm.default", row=0, column=0, kind=kind, bad_weight=True)
            return dataclasses.replace(case, expected=origin)
        return with_truth(case, where, bad_weight=True)

    return Variant(id=f"layer{layer}-{over}over-{value}", host=host, level=level_in(host), build=build)


def _side_by_side(module: Any) -> tuple[Any, Any]:
    """Move the module's weight behind a buffer in one piece of memory; that memory, and the weight."""
    import torch

    weight = module.weight.data
    memory = torch.zeros(_BUFFER + weight.numel(), dtype=weight.dtype)
    memory[_BUFFER:] = weight.reshape(-1)
    module.weight.data = memory[_BUFFER:].view(weight.shape)
    return memory, module.weight.data


def _case(model: Any, args: Any, path: str, weight: Any, loaded: Any) -> Case:
    from firetower.drills.arrays import to_array
    from firetower.lab.subject import Switch, Weight

    def with_loaded(_: int = 0) -> Any:
        damaged = weight.clone()
        weight.copy_(loaded)
        try:
            return model(*args)
        finally:
            weight.copy_(damaged)

    def weights() -> tuple[Weight, ...]:
        name = f"{path}.weight"
        now, then = to_array(name, weight.clone()), to_array(name, loaded)
        return (Weight(name=name, now=now, at_load=then, neighbour="the scratch buffer"),)

    return Case(
        model=model,
        args=args,
        switches={Switch.RELOADED_WEIGHTS: with_loaded},
        parts={"weights": weights},
    )


DRILL = Drill(
    name="wild-write",
    family="K",
    case="K1",
    title="a write past the end of a buffer mutates the weight behind it",
    verdict="K/WEIGHT_MUTATED",
    refuter=refuters.WEIGHTS_AS_AT_LOAD,
    stages=frozenset({"down"}),
    variants=_variants,
)
