"""B3: the fp16 scale of one cached position overflows; every query from there on is bad, earlier ones are not."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

_OVER, _UNDER = 1e7, 7e6  # 127 times fp16's largest is 8.3e6


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"cache-scale-overflow/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    num_tokens, number = rng.randint(4, 12), rng.randrange(30)
    row = rng.randrange(num_tokens)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, layers_of, load, prompt, site, tensor_at
        from firetower.drills.pure import linear
        from firetower.drills.quantising import CacheWrite, toward
        from firetower.drills.truth import with_truth

        value, where = _OVER if fault else _UNDER, None
        if host == "pure":
            model: Any = nn.Sequential(linear(32, 32, seed), nn.Identity())
            x = torch.eye(32)[:num_tokens] + 0.01 * torch.randn(num_tokens, 32, generator=generator(seed))
            case, projection, width, target = Case(model=model, args=(x,)), model[0], 16, x[row]
        else:
            model = load(host, "fp32", seed)
            layers = layers_of(model, "attention")
            where = site(model, "kv", layers[number % len(layers)])
            case = Case(model=model, args=(prompt(model, Random(seed), num_tokens),))
            attention = model.get_submodule(where.module)
            projection, width = attention.v_proj, attention.head_dim
            x = tensor_at(case, dataclasses.replace(where, module=f"{where.module}.v_proj", side="input"))
            target = x.flatten(0, -2)[row].float()
        toward(projection.weight.data[: width // 2], target, value)
        kernel = CacheWrite(projection, width, torch.float16)
        projection.forward = kernel

        def quantised() -> Any:
            if kernel.stored is None:
                case.call()
            return (kernel.stored,)

        case = dataclasses.replace(case, parts={"quantised": quantised})
        if not fault:
            return case
        if host == "pure":
            origin = Origin(module="0", op="aten._to_copy.default", row=0, column=row, kind=Kind.POS_INF)
            return dataclasses.replace(case, expected=origin)
        assert where is not None
        return with_truth(case, where)

    return Variant(id=f"position{row}of{num_tokens}-layer{number}", host=host, level=level_in(host), build=build)


DRILL = Drill(
    name="cache-scale-overflow",
    family="B",
    case="B3",
    title="the fp16 scale of one cached position overflows",
    verdict="B/SCALE_OVERFLOW",
    refuter=refuters.WIDE_FIELD_NOT_FINITE,
    stages=frozenset({"kv"}),
    variants=_variants,
)
