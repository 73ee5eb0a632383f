"""M1: one block of a quantised weight has a NaN scale; its output column is NaN for every token."""

from __future__ import annotations

from random import Random
from typing import Literal

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant

_BLOCK = 32
_STAGES = {
    "self_attn.k_proj": "kv",
    "self_attn.v_proj": "kv",
    "self_attn.o_proj": "attention",
    "linear_attn.in_proj_qkv": "conv_state",
    "linear_attn.out_proj": "attention",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "mlp.shared_expert.gate_proj": "gate",
    "mlp.shared_expert.up_proj": "up",
    "mlp.shared_expert.down_proj": "down",
    "mlp.gate": "router",
}
"""First stage at which a NaN in this projection's weight is seen. Not the query's: on the CPU
`scaled_dot_product_attention` answers a NaN query with zeros, and no stage is bad."""


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"bad-weight/{seed}")
    return [
        _pure(rng.randrange(1 << 30), "layers"),
        _pure(rng.randrange(1 << 30), "ops"),
        *(_host("qwen35moe", rng.randrange(1 << 30), *place) for place in rng.sample(_places("qwen35moe"), 2)),
        *(_host("smollm2", rng.randrange(1 << 30), *place) for place in rng.sample(_places("smollm2"), 2)),
    ]


def _pure(seed: int, level: Literal["layers", "ops"]) -> Variant:
    rng = Random(seed)
    rows, columns, tokens = rng.choice((64, 100)), rng.choice((256, 320)), rng.randint(1, 9)
    bad_row, block = rng.randrange(rows), rng.randrange(columns // _BLOCK)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator
        from firetower.drills.pure import linear

        model = nn.Sequential(linear(columns, 16, seed), linear(rows, columns, seed + 1), nn.ReLU())
        weight = model.get_parameter("1.weight").data
        weight[bad_row, block * _BLOCK : (block + 1) * _BLOCK] = float("nan") if fault else 0.0
        # the first token is zero: a NaN weight is not hidden by a zero input
        x = torch.randn(tokens, 16, generator=generator(seed))
        x[0] = 0.0
        origin = Origin(
            module="1",
            stage="Linear" if level == "layers" else None,
            op="aten.mm.default" if level == "ops" else None,
            row=0,
            column=bad_row,
            kind=Kind.NAN,
            bad_weight=True,
        )
        return Case(model=model, args=(x,), expected=origin if fault else None)

    id = f"linear-{rows}x{columns}-row{bad_row}-block{block}-{level}"
    return Variant(id=id, host="pure", level=level, build=build)


def _host(host: Host, seed: int, layer: int, projection: str) -> Variant:
    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, site
        from firetower.drills.truth import with_truth

        pick = Random(seed)
        model = load(host, "fp32", seed)
        weight = model.get_submodule(f"model.layers.{layer}.{projection}").weight.data
        row, block = pick.randrange(weight.shape[0]), pick.randrange(weight.shape[1] // _BLOCK)
        # the twin's block is all zeros, as a pruned one may be
        weight[row, block * _BLOCK : (block + 1) * _BLOCK] = float("nan") if fault else 0.0
        case = Case(model=model, args=(prompt(model, pick, pick.randint(3, 9)),))
        where = site(model, _STAGES[projection], layer)
        return with_truth(case, where, bad_weight=True) if fault else case

    name = f"layer{layer}-{projection.rpartition('.')[2]}"
    return Variant(id=name, host=host, level="layers", build=build)


def _places(host: Host) -> list[tuple[int, str]]:
    """Every (layer, projection) of the host."""
    if host == "smollm2":
        dense = [p for p in _STAGES if p.count(".") == 1 and not p.startswith("linear_attn") and p != "mlp.gate"]
        return [(layer, p) for layer in range(30) for p in dense]
    experts = tuple(p for p in _STAGES if p.startswith("mlp.shared_expert") or p == "mlp.gate")
    mixers = ("linear_attn", "linear_attn", "linear_attn", "self_attn")
    chosen = [(i, p) for i, mixer in enumerate(mixers) for p in _STAGES if p.startswith(mixer)]
    return [*chosen, *((i, p) for i in range(len(mixers)) for p in experts)]


DRILL = Drill(
    name="bad-weight",
    family="M",
    case="M1",
    title="a weight block with a NaN scale: one output column NaN for every token",
    verdict="M/BAD_WEIGHT",
    refuter=refuters.FINITE_FOR_ZEROS,
    stages=frozenset({"kv", "attention", "conv_state", "gate", "up", "down", "router"}),
    variants=_variants,
)
