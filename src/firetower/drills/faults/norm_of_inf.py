"""A2: one Inf reaches a norm, which answers with a NaN and zeros; the origin made the Inf, upstream."""

from __future__ import annotations

from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"norm-of-inf/{seed}")
    return [
        _pure(rng.randrange(1 << 30), residual=False),
        _pure(rng.randrange(1 << 30), residual=True),
        _residual_stream(rng.randrange(1 << 30)),
        _residual_stream(rng.randrange(1 << 30)),
        _down(rng.randrange(1 << 30)),
    ]


def _pure(seed: int, *, residual: bool) -> Variant:
    rng = Random(seed)
    tokens, width = rng.randint(2, 9), rng.choice((63, 64, 130))
    row, column = rng.randrange(tokens), rng.randrange(width)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import Channels

        x = torch.rand(tokens, width, generator=generator(seed)) + 0.5
        x[row, column] = 40.0
        scale, shift = torch.ones(width), torch.zeros(tokens, width) if residual else None
        scale[column] = 1000.0 if residual or not fault else 2000.0  # 40,000 is finite, 80,000 is not
        if shift is not None:
            shift[row, column] = 40000.0 if fault else 20000.0
        module = Channels(scale.half(), None if shift is None else shift.half())
        op = "aten.add.Tensor" if residual else "aten.mul.Tensor"
        origin = Origin(module="", op=op, row=row, column=column, kind=Kind.POS_INF)
        return Case(model=module, args=(x.half(),), expected=origin if fault else None)

    where = "residual" if residual else "scale"
    return Variant(id=f"{where}-{tokens}x{width}-row{row}-col{column}", host="pure", level="ops", build=build)


def _residual_stream(seed: int) -> Variant:
    """The embedding's large channel and the shared expert's output are finite; their sum is not."""
    layer = Random(seed).randrange(4)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import load, prompt, site, tensor_at
        from firetower.drills.truth import with_truth

        rng = Random(seed + 1)
        model = load("qwen35moe", "fp16", seed)
        ids = prompt(model, rng, rng.randint(4, 9))
        case, channel = Case(model=model, args=(ids,)), rng.randrange(model.config.hidden_size)
        moe = model.model.layers[layer].mlp
        model.model.embed_tokens.weight.data[ids[0], channel] = 60000.0 if fault else 20000.0
        x = tensor_at(case, site(model, "gate", layer).at_input())
        share = torch.sigmoid(moe.shared_expert_gate(x)).flatten()
        token = int(share.argmax())
        y = tensor_at(case, site(model, "swiglu", layer)).float()[token]
        row = moe.shared_expert.down_proj.weight.data[channel]
        row.copy_(y / y.abs().max() * 0.0)
        row[y.abs().argmax()] = (56000.0 if fault else 20000.0) / y[y.abs().argmax()]
        return with_truth(case, site(model, "output", layer)) if fault else case

    return Variant(id=f"layer{layer}-residual-{seed % 1000}-fp16", host="qwen35moe", level="layers", build=build)


def _down(seed: int) -> Variant:
    layer = Random(seed).randrange(30)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import FP16_MAX, load, prompt, site, tensor_at
        from firetower.drills.truth import with_truth

        rng = Random(seed + 1)
        model = load("smollm2", "fp16")
        case = Case(model=model, args=(prompt(model, rng, rng.randint(4, 9)),))
        where = site(model, "down", layer)
        y = tensor_at(case, where)[0].float()
        weight = model.model.layers[layer].mlp.down_proj.weight.data
        # only channels whose scaled weights stay far from the type's maximum themselves
        factor = (1.6 if fault else 0.3) * FP16_MAX / y.abs().amax(0)
        usable = (weight.abs().amax(1) * factor < 0.5 * FP16_MAX).nonzero().flatten().tolist()
        channel = rng.choice(usable)
        weight[channel] *= factor[channel]
        return with_truth(case, where) if fault else case

    return Variant(id=f"layer{layer}-down-fp16", host="smollm2", level="layers", build=build)


DRILL = Drill(
    name="norm-of-inf",
    family="A",
    case="A2",
    title="one Inf becomes a NaN and zeros in the next norm; the origin is upstream of it",
    verdict="A/OVERFLOW_ACTIVATION",
    refuter=refuters.WIDER_NOT_FINITE,
    stages=frozenset({"output", "down"}),
    variants=_variants,
)
