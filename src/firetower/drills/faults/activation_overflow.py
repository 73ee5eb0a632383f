"""A1: the product of activation and up projection overflows fp16; its operands and the weights are finite."""

from __future__ import annotations

from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"activation-overflow/{seed}")
    pure = [_pure(rng.randrange(1 << 30), sign) for sign in rng.sample((1, -1), 2)]
    return [
        *pure,
        _dense("qwen35moe", rng.randrange(1 << 30)),
        _expert(rng.randrange(1 << 30)),
        _expert_op(rng.randrange(1 << 30)),
        _dense("smollm2", rng.randrange(1 << 30)),
    ]


def _pure(seed: int, sign: int) -> Variant:
    rng = Random(seed)
    tokens, width = rng.randint(3, 9), rng.choice((64, 65, 96))
    row, column = rng.randrange(tokens), rng.randrange(width)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.pure import Swiglu

        mlp = Swiglu(hidden_size=64, intermediate_size=width, seed=seed)
        # token t is the unit vector t, so that gate[t, c] is the weight's element [c, t]
        mlp.gate_proj.weight.data.fill_(300.0)
        mlp.up_proj.weight.data.fill_(10.0)
        mlp.up_proj.weight.data[column, row] = sign * (260.0 if fault else 200.0)  # 78,000 or 60,000
        kind = Kind.POS_INF if sign > 0 else Kind.NEG_INF
        origin = Origin(module="", op="aten.mul.Tensor", row=row, column=column, kind=kind)
        x = torch.eye(64, dtype=torch.float16)[:tokens]
        return Case(model=mlp.half(), args=(x,), expected=origin if fault else None)

    id = f"mlp-{tokens}x{width}-row{row}-col{column}-{'pos' if sign > 0 else 'neg'}"
    return Variant(id=id, host="pure", level="ops", build=build)


def _dense(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer = rng.randrange(30 if host == "smollm2" else 4)
    num_tokens = rng.randint(4, 9)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, scale_product, site, tensor_at
        from firetower.drills.truth import with_truth

        pick = Random(seed)
        model = load(host, "fp16", seed)
        case = Case(model=model, args=(prompt(model, pick, num_tokens),))
        where = site(model, "gate", layer)
        x = tensor_at(case, site(model, "gate", layer).at_input()).flatten(0, -2)
        mlp = model.get_submodule(where.module.rpartition(".")[0])
        scale_product(mlp.gate_proj.weight, mlp.up_proj.weight, x, pick, fault=fault)
        return with_truth(case, site(model, "swiglu", layer)) if fault else case

    return Variant(id=f"layer{layer}-swiglu-fp16", host=host, level="layers", build=build)


def _expert(seed: int) -> Variant:
    layer = Random(seed).randrange(4)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import site
        from firetower.drills.truth import with_truth

        case, _ = _expert_case(seed, layer, fault)
        return with_truth(case, site(case.model, "routed", layer)) if fault else case

    return Variant(id=f"layer{layer}-expert-fp16", host="qwen35moe", level="layers", build=build)


def _expert_op(seed: int) -> Variant:
    layer = Random(seed).randrange(4)

    def build(fault: bool) -> Case:
        import dataclasses

        case, origin = _expert_case(seed, layer, fault)
        return dataclasses.replace(case, expected=origin) if fault else case

    return Variant(id=f"layer{layer}-expert-op-fp16", host="qwen35moe", level="ops", build=build)


def _expert_case(seed: int, layer: int, fault: bool) -> tuple[Case, Origin]:
    from firetower.drills.placing import load, prompt, scale_product, site, tensor_at

    rng = Random(seed + 1)
    model = load("qwen35moe", "fp16", seed)
    model.set_experts_implementation("eager")
    case = Case(model=model, args=(prompt(model, rng, rng.randint(5, 9)),))
    x = tensor_at(case, site(model, "routed", layer).at_input())
    moe = model.model.layers[layer].mlp
    _, _, chosen = moe.gate(x)  # [tokens, top_k]
    expert = rng.choice(sorted(set(chosen.flatten().tolist())))
    # an eager expert takes its tokens ordered by their place among the top k, then by token
    rows = (chosen == expert).T.nonzero()[:, 1]
    stacked = moe.experts.gate_up_proj.data[expert]
    half = len(stacked) // 2
    first = scale_product(stacked[:half], stacked[half:], x[rows], rng, fault=fault)
    return case, Origin(
        module=f"model.layers.{layer}.mlp.experts",
        op="aten.mul.Tensor",
        row=first.token,
        column=first.channel,
        kind=first.kind,
    )


DRILL = Drill(
    name="activation-overflow",
    family="A",
    case="A1",
    title="activation product overflows fp16 while its operands and weights are finite",
    verdict="A/OVERFLOW_ACTIVATION",
    refuter=refuters.WIDER_NOT_FINITE,
    stages=frozenset({"swiglu", "routed"}),
    variants=_variants,
)
