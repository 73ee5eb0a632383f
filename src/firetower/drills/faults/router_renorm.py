"""H1: every chosen expert's sigmoid underflows to 0, and renormalising the weights divides 0 by 0."""

from __future__ import annotations

from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant, distinct

_UNDERFLOW = {"fp32": 120.0, "bf16": 120.0, "fp16": 40.0}
_FAINT = {"fp32": 20.0, "bf16": 20.0, "fp16": 8.0}


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"router-renorm/{seed}")
    pure = [_pure(rng.randrange(1 << 30), dtype) for dtype in rng.sample(("fp32", "bf16", "fp16"), 2)]
    hosts = [_host(rng.randrange(1 << 30), layer) for layer in rng.sample(range(4), 3)]
    return distinct([*pure, *hosts])


def _pure(seed: int, dtype: str) -> Variant:
    rng = Random(seed)
    tokens, num_experts, top_k = rng.randint(3, 9), rng.choice((15, 16, 32)), rng.choice((2, 4))
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import DTYPES, generator
        from firetower.drills.pure import SigmoidRouter

        weight = torch.randn(num_experts, 32, generator=generator(seed)) * 0.1
        # token t is the unit vector t: its logits are column t of the weight
        weight[:, row] = -(_UNDERFLOW if fault else _FAINT)[dtype]
        bias = torch.zeros(num_experts)
        bias[:top_k] = 12.0
        router = SigmoidRouter(weight, bias, top_k).to(DTYPES[dtype])
        x = torch.eye(32, dtype=DTYPES[dtype])[:tokens]
        origin = Origin(module="", op="aten.div.Tensor", row=row, column=0, kind=Kind.NAN, zero_input=None)
        return Case(model=router, args=(x,), expected=origin if fault else None)

    id = f"router-{num_experts}top{top_k}-row{row}of{tokens}-{dtype}"
    return Variant(id=id, host="pure", level="ops", build=build)


def _host(seed: int, layer: int) -> Variant:
    """The layer's softmax router is replaced by a sigmoid router that one token drives far down."""
    num_tokens = Random(seed).randint(4, 9)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import load, prompt, replace_forward, site, tensor_at
        from firetower.drills.pure import SigmoidRouter
        from firetower.drills.truth import with_truth

        rng = Random(seed + 1)
        model = load("qwen35moe", "fp32", seed)
        case = Case(model=model, args=(prompt(model, rng, num_tokens),))
        where = site(model, "router", layer)
        x = tensor_at(case, where.at_input())
        target = x[rng.randrange(num_tokens)]
        gate = model.get_submodule(where.module)
        depth = (_UNDERFLOW if fault else _FAINT)["fp32"]
        gate.weight.data -= (depth + 5.0) * target / (target @ target)
        bias = 12.0 * (torch.arange(len(gate.weight)) < gate.top_k)
        replace_forward(gate, SigmoidRouter(gate.weight.data, bias, gate.top_k).forward)
        return with_truth(case, where) if fault else case

    return Variant(id=f"layer{layer}-router", host="qwen35moe", level="layers", build=build)


DRILL = Drill(
    name="router-renorm",
    family="H",
    case="H1",
    title="routing weights renormalised by a sum of scores that underflowed to zero",
    verdict="H/ROUTER_RENORM_0_OVER_0",
    refuter=refuters.NOT_DIVIDED_BY_ZERO,
    stages=frozenset({"router"}),
    variants=_variants,
)
