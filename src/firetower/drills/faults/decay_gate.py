"""I2: exp(A_log) is Inf and softplus is 0, so the decay gate is Inf times 0."""

from __future__ import annotations

from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant

_A_LOG, _A_LOG_LARGE = 90.0, 88.0  # e^90 is beyond fp32, e^88 = 1.7e38 is not
_DT_BIAS = -130.0  # softplus is exactly 0


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"decay-gate/{seed}")
    return [
        _pure(rng.randrange(1 << 30)),
        _pure(rng.randrange(1 << 30)),
        _host(rng.randrange(1 << 30), "layers"),
        _host(rng.randrange(1 << 30), "ops"),
        _host(rng.randrange(1 << 30), "layers"),
    ]


def _pure(seed: int) -> Variant:
    rng = Random(seed)
    tokens, heads = rng.randint(1, 9), rng.choice((4, 16, 31))
    head = rng.randrange(heads)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import DecayGate

        a_log, dt_bias = torch.rand(heads, generator=generator(seed)) * 2.7, torch.ones(heads)
        a_log[head], dt_bias[head] = _A_LOG if fault else _A_LOG_LARGE, _DT_BIAS
        x = torch.randn(tokens, heads, generator=generator(seed + 1))
        origin = Origin(module="", op="aten.exp.default", row=0, column=head, kind=Kind.POS_INF)
        return Case(model=DecayGate(a_log, dt_bias), args=(x,), expected=origin if fault else None)

    return Variant(id=f"gate-{tokens}x{heads}-head{head}", host="pure", level="ops", build=build)


def _host(seed: int, level: Any) -> Variant:
    rng = Random(seed)
    layer, head, tokens = rng.randrange(3), rng.randrange(4), rng.randint(3, 9)

    def build(fault: bool) -> Case:
        import dataclasses

        from firetower.drills.placing import load, prompt, site
        from firetower.drills.truth import with_truth

        model = load("qwen35moe", "fp32", seed)
        mixer = model.model.layers[layer].linear_attn
        mixer.A_log.data[head] = _A_LOG if fault else _A_LOG_LARGE
        mixer.dt_bias.data[head] = _DT_BIAS
        case = Case(model=model, args=(prompt(model, Random(seed), tokens),))
        if not fault:
            return case
        if level == "layers":
            return with_truth(case, site(model, "recurrent_state", layer))
        module = f"model.layers.{layer}.linear_attn"
        origin = Origin(module=module, op="aten.exp.default", row=0, column=head, kind=Kind.POS_INF)
        return dataclasses.replace(case, expected=origin)

    return Variant(id=f"layer{layer}-head{head}-{level}", host="qwen35moe", level=level, build=build)


DRILL = Drill(
    name="decay-gate",
    family="I",
    case="I2",
    title="a decay gate of exp(A_log) = Inf times softplus = 0",
    verdict="I/DECAY_GATE_INF_TIMES_0",
    refuter=refuters.EXP_FINITE,
    stages=frozenset({"recurrent_state"}),
    variants=_variants,
)
