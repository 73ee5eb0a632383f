"""B4: the cache's FP8 scale was taken from a quiet warm-up; real values saturate, and no NaN appears."""

from __future__ import annotations

from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"warm-up-scale/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    num_tokens, number = rng.randint(4, 12), rng.randrange(30)
    quiet = rng.uniform(0.01, 0.2)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator, layers_of, load, prompt, site, tensor_at
        from firetower.drills.pure import linear
        from firetower.drills.quantising import StaticScale
        from firetower.drills.truth import Site

        if host == "pure":
            model: Any = linear(32, 24, seed)
            case = Case(model=model, args=(torch.randn(num_tokens, 24, generator=generator(seed)),))
            projection, where = model, Site(stage="v", module="")
        else:
            model = load(host, "fp32", seed)
            layers = layers_of(model, "attention")
            where = site(model, "kv", layers[number % len(layers)])
            where = Site(stage="v", module=f"{where.module}.v_proj")
            case = Case(model=model, args=(prompt(model, Random(seed), num_tokens),))
            projection = model.get_submodule(where.module)
        real = float(tensor_at(case, where).abs().max())
        right = case.call()
        kernel = StaticScale(projection, real * (quiet if fault else 1.1))
        projection.forward = kernel

        def quantised() -> Any:
            if kernel.stored is None:
                case.call()
            return (kernel.stored,)

        return Case(
            model=model,
            args=case.args,
            right=(lambda: right) if fault else None,
            places=("the cache of values", "beyond the range of a scale that was fixed before") if fault else (),
            parts={"quantised": quantised},
        )

    return Variant(id=f"{num_tokens}tokens-quiet{quiet:.2f}", host=host, level="finite", build=build)


DRILL = Drill(
    name="warm-up-scale",
    family="B",
    case="B4",
    title="a static FP8 scale from a quiet warm-up saturates real values",
    verdict="B/SCALE_MISCALIBRATED",
    refuter=refuters.VALUES_FIT,
    variants=_variants,
)
