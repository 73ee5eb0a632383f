"""H3: a norm's epsilon of 1e-8 is 0 in fp16; a zero vector then meets 1/sqrt(0)."""

from __future__ import annotations

from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant

_EPS, _EPS_THAT_SURVIVES = 1e-8, 1e-5


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"norm-epsilon/{seed}")
    return [
        _pure(rng.randrange(1 << 30)),
        _pure(rng.randrange(1 << 30)),
        _key_norm_op(rng.randrange(1 << 30)),
        _key_norm_op(rng.randrange(1 << 30)),
        _zero_embedding(rng.randrange(1 << 30)),
    ]


def _pure(seed: int) -> Variant:
    rng = Random(seed)
    tokens, width = rng.randint(2, 9), rng.choice((31, 64, 100))
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import RmsNorm

        x = torch.randn(tokens, width, generator=generator(seed)).half()
        x[row] = 0.0  # zero rows are legal: the twin has one as well
        norm = RmsNorm(width, eps=_EPS if fault else _EPS_THAT_SURVIVES)
        origin = Origin(module="", op="aten.rsqrt.default", row=row, column=0, kind=Kind.POS_INF, zero_input=None)
        return Case(model=norm, args=(x,), expected=origin if fault else None)

    return Variant(id=f"norm-{tokens}x{width}-row{row}-fp16", host="pure", level="ops", build=build)


def _key_norm_op(seed: int) -> Variant:
    """One key head of the attention layer is zero, and its per-head norm loses its epsilon."""
    rng = Random(seed)
    tokens, head = rng.randint(3, 9), rng.randrange(2)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import layers_of, load, prompt, replace_forward
        from firetower.drills.pure import RmsNorm

        model = load("qwen35moe", "fp16", seed)
        layer = layers_of(model, "attention")[0]
        attention = model.model.layers[layer].self_attn
        size = attention.head_dim
        attention.k_proj.weight.data[head * size : (head + 1) * size] = 0.0
        norm = RmsNorm(size, eps=_EPS if fault else _EPS_THAT_SURVIVES)
        replace_forward(attention.k_norm, norm.forward)
        # the norm sees [1, tokens, heads, size] and its root is [1, tokens, heads, 1]
        module = f"model.layers.{layer}.self_attn.k_norm"
        origin = Origin(module=module, op="aten.rsqrt.default", row=head, column=0, kind=Kind.POS_INF)
        ids = prompt(model, Random(seed), tokens)
        return Case(model=model, args=(ids,), expected=origin if fault else None)

    return Variant(id=f"key-norm-head{head}-{tokens}tokens-fp16", host="qwen35moe", level="ops", build=build)


def _zero_embedding(seed: int) -> Variant:
    """A token whose embedding is zero goes through the first layer's norm."""
    rng = Random(seed)
    tokens = rng.randint(3, 9)
    position = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, replace_forward, site
        from firetower.drills.pure import RmsNorm
        from firetower.drills.truth import with_truth

        model = load("smollm2", "fp16")
        ids = prompt(model, Random(seed), tokens)
        model.model.embed_tokens.weight.data[ids[0, position]] = 0.0
        native = model.model.layers[0].input_layernorm
        norm = RmsNorm(len(native.weight), eps=_EPS if fault else _EPS_THAT_SURVIVES)
        norm.weight.data.copy_(native.weight.data)
        replace_forward(native, norm.forward)
        case = Case(model=model, args=(ids,))
        return with_truth(case, site(model, "query", 0)) if fault else case

    return Variant(
        id=f"zero-embedding-position{position}of{tokens}-fp16",
        host="smollm2",
        level="layers",
        build=build,
    )


DRILL = Drill(
    name="norm-epsilon",
    family="H",
    case="H3",
    title="a norm's epsilon is zero in fp16 and the row it meets is zero too",
    verdict="H/NORM_EPSILON_LOST",
    refuter=refuters.NOT_DIVIDED_BY_ZERO,
    stages=frozenset({"query"}),
    variants=_variants,
)
