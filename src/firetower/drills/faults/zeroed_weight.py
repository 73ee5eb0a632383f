"""M2: a weight was loaded as all zeros; the quantiser after it divides each row by its largest value."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"zeroed-weight/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    zeroed = rng.choice(("gate", "up"))

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, load, prompt, replace_forward, site
        from firetower.drills.pure import linear
        from firetower.drills.truth import with_truth

        if host == "pure":
            model: Any = nn.Sequential(linear(40, 32, seed), linear(24, 40, seed + 1))
            case = Case(model=model, args=(torch.randn(num_tokens, 32, generator=generator(seed)),))
            weight, projection = model[0].weight.data, model[1]
        else:
            model = load(host, "fp32", seed)
            case = Case(model=model, args=(prompt(model, Random(seed), num_tokens),))
            weight = model.get_submodule(site(model, zeroed, layer).module).weight.data
            projection = model.get_submodule(site(model, "down", layer).module)
        # in the twin all but one row is zero, as pruning may leave it; its quantiser has no floor either
        keep = 0 if fault else 1
        weight[keep:] = 0.0
        replace_forward(projection, _Quantised(projection))
        if not fault:
            return case
        if host == "pure":
            origin = Origin(module="1", op="aten.div.Tensor", row=0, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return with_truth(case, site(model, "down", layer))

    name = f"{num_tokens}tokens" if host == "pure" else f"layer{layer}-{zeroed}"
    return Variant(id=name, host=host, level=level_in(host), build=build)


class _Quantised:
    """int8 activations, one scale a row, without a floor: a row of zeros has none."""

    def __init__(self, projection: Any) -> None:
        self.projection = projection

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        import torch
        import torch.nn.functional as F

        scale = x.abs().amax(-1, keepdim=True) / 127
        return F.linear(torch.round(x / scale) * scale, self.projection.weight)


DRILL = Drill(
    name="zeroed-weight",
    family="M",
    case="M2",
    title="a weight is all zeros as loaded",
    verdict="M/ZEROED",
    refuter=refuters.WEIGHT_NOT_ZERO,
    stages=frozenset({"down"}),
    variants=_variants,
)
