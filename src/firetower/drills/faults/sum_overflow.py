"""B1: the sum that is stored with a quantised block overflows fp16 while the block's scale and values fit."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

_OVER, _UNDER = 2100.0, 2000.0  # 32 of them: 67,200 and 64,000; fp16 ends at 65,504


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"sum-overflow/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    block, row = rng.randrange(2), rng.randrange(num_tokens)
    sign = rng.choice((1, -1)) if host == "pure" else 1

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.quantising import BlockProduct
        from firetower.drills.truth import with_truth

        value = _OVER if fault else _UNDER
        case, projection, where = (
            _alone(seed, num_tokens, row, block, sign * value) if host == "pure" else _inside(host, seed, layer, value)
        )
        kernel = BlockProduct(projection, torch.float16)
        projection.forward = kernel

        def quantised() -> Any:
            if kernel.stored is None:
                case.call()
            return (kernel.stored,)

        case = dataclasses.replace(case, parts={"quantised": quantised})
        if not fault:
            return case
        if host == "pure":
            kind = Kind.POS_INF if sign > 0 else Kind.NEG_INF
            origin = Origin(module="", op="aten._to_copy.default", row=row, column=block, kind=kind)
            return dataclasses.replace(case, expected=origin)
        return with_truth(case, where)

    return Variant(id=f"layer{layer}-block{block}-row{row}of{num_tokens}", host=host, level=level_in(host), build=build)


def _alone(seed: int, tokens: int, row: int, block: int, value: float) -> tuple[Case, Any, Any]:
    import torch

    from firetower.drills.placing import generator
    from firetower.drills.pure import linear

    x = torch.randn(tokens, 64, generator=generator(seed))
    x[row, 32 * block : 32 * (block + 1)] = value
    model = linear(16, 64, seed)
    return Case(model=model, args=(x,)), model, None


def _inside(host: Host, seed: int, layer: int, value: float) -> tuple[Case, Any, Any]:
    """One block of the MLP's channels answers with ``value`` for one token."""
    from firetower.drills.placing import load, prompt, site, tensor_at
    from firetower.drills.quantising import toward

    rng = Random(seed)
    model = load(host, "fp32", seed)
    case = Case(model=model, args=(prompt(model, rng, rng.randint(3, 9)),))
    x = tensor_at(case, site(model, "gate", layer).at_input()).flatten(0, -2)
    target = x[rng.randrange(len(x))].float()
    mlp = model.get_submodule(site(model, "gate", layer).module.rpartition(".")[0])
    start = 32 * rng.randrange(mlp.gate_proj.out_features // 32)
    toward(mlp.gate_proj.weight.data[start : start + 32], target, 20.0)  # silu(20) is 20
    toward(mlp.up_proj.weight.data[start : start + 32], target, value / 20.0)
    return case, mlp.down_proj, site(model, "down", layer)


DRILL = Drill(
    name="sum-overflow",
    family="B",
    case="B1",
    title="the fp16 sum of a quantised block overflows, its scale does not",
    verdict="B/SCALE_OVERFLOW",
    refuter=refuters.WIDE_FIELD_NOT_FINITE,
    stages=frozenset({"down"}),
    variants=_variants,
)
