"""N4: a guard (nan_to_num, where, fmax, a comparison, a cast) makes a NaN vanish; the logits look clean."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant

GUARDS = ("nan_to_num", "where", "fmax", "compare", "cast")
"""Each makes something finite of a NaN."""


def guard(name: str) -> Callable[[Any], Any]:
    """A function on a float tensor that keeps the shape and launders NaN as ``name`` does."""
    import torch

    return {
        "nan_to_num": torch.nan_to_num,
        "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)),
        "compare": lambda x: (torch.sigmoid(x) > 0.5).to(x.dtype),
        "cast": lambda x: x.to(torch.int64).clamp(-8, 8).to(x.dtype),
    }[name]


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"nan-guarded/{seed}")
    first, second, *others = rng.sample(GUARDS, 4)
    return [
        _pure(rng.randrange(1 << 30), first),
        _pure(rng.randrange(1 << 30), second),
        *(_host("qwen35moe", rng.randrange(1 << 30), g) for g in others),
        _host("smollm2", rng.randrange(1 << 30), "nan_to_num"),
    ]


def _pure(seed: int, name: str) -> Variant:
    rng = Random(seed)
    tokens, width = rng.randint(2, 9), rng.choice((16, 31))
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import Guarded

        x = torch.rand(tokens, width, generator=generator(seed)) + 0.1
        x[row] = 0.0 if fault else 1e-30  # a row that sums to nothing has no shares
        origin = Origin(module="shares", op="aten.div.Tensor", row=row, column=0, kind=Kind.NAN)
        return Case(model=Guarded(guard(name)), args=(x,), expected=origin if fault else None)

    return Variant(
        id=f"{name}-row{row}of{tokens}x{width}",
        host="pure",
        level="ops",
        build=build,
        # what made it is the cause; that a guard hid it comes after
        verdict="H/DIVISION_BY_ZERO",
        refuter=refuters.NOT_DIVIDED_BY_ZERO,
    )


def _host(host: Host, seed: int, name: str) -> Variant:
    """A layer's MLP is guarded: a bad weight burns one of its stages and everything after it is finite."""
    rng = Random(seed)
    layer = rng.randrange(30 if host == "smollm2" else 4)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, replace_forward, site
        from firetower.drills.truth import with_truth

        pick = Random(seed)
        model = load(host, "fp32", seed)
        where = site(model, "down", layer)
        weight = model.get_submodule(where.module).weight.data
        weight[pick.randrange(weight.shape[0]), pick.randrange(weight.shape[1])] = float("nan") if fault else 0.0
        mlp = model.get_submodule(where.module.rpartition(".")[0])
        native, launder = mlp.forward, guard(name)
        replace_forward(mlp, lambda x: launder(native(x)))
        case = Case(model=model, args=(prompt(model, pick, pick.randint(3, 9)),))
        return with_truth(case, where, laundered=True, bad_weight=True) if fault else case

    return Variant(id=f"layer{layer}-{name}", host=host, level="layers", build=build)


DRILL = Drill(
    name="nan-guarded",
    family="N",
    case="N4",
    title="a guard makes a NaN disappear before the logits",
    verdict="M/BAD_WEIGHT",
    refuter=refuters.WEIGHT_FINITE,
    stages=frozenset({"down"}),
    variants=_variants,
)
