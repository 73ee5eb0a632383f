"""H2: a key that is zero is divided by its own length, without a floor."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"zero-key/{seed}")
    pure = [_pure(rng.randrange(1 << 30)) for _ in range(2)]
    return distinct([*pure, *(_host(rng.randrange(1 << 30), level) for level in ("layers", "ops", "layers"))])


def _pure(seed: int) -> Variant:
    rng = Random(seed)
    tokens = rng.randint(5, 20)
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import DeltaRule

        k, v = torch.randn(2, tokens, 16, generator=generator(seed))
        k[row] = 0.0 if fault else 1e-18
        origin = Origin(module="", op="aten.div.Tensor", row=row, column=0, kind=Kind.NAN)
        return Case(model=DeltaRule(norm_keys=True), args=(k, v), expected=origin if fault else None)

    return Variant(id=f"key{row}of{tokens}", host="pure", level="ops", build=build)


def _host(seed: int, level: Any) -> Variant:
    """A Gated DeltaNet layer whose rule normalises without a floor, and one key head that is zero."""
    rng = Random(seed)
    layer, head, tokens = rng.randrange(3), rng.randrange(2), rng.randint(3, 9)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, replace_chunk_rule, site
        from firetower.drills.truth import with_truth

        model = load("qwen35moe", "fp32", seed)
        mixer = model.model.layers[layer].linear_attn
        size = mixer.head_k_dim
        start = mixer.key_dim + head * size  # queries come first, then keys
        mixer.in_proj_qkv.weight.data[start : start + size] *= 0.0 if fault else 1e-15
        replace_chunk_rule(mixer, _rule)
        case = Case(model=model, args=(prompt(model, Random(seed), tokens),))
        if not fault:
            return case
        if level == "layers":
            return with_truth(case, site(model, "recurrent_state", layer))
        module = f"model.layers.{layer}.linear_attn"
        origin = Origin(module=module, op="aten.div.Tensor", row=head, column=0, kind=Kind.NAN)
        return dataclasses.replace(case, expected=origin)

    return Variant(id=f"layer{layer}-head{head}-{tokens}tokens-{level}", host="qwen35moe", level=level, build=build)


def _rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
    """Token-by-token gated delta rule; keys are divided by their length as it is."""
    import torch
    import torch.nn.functional as F

    from firetower.drills.pure import delta_rule

    repeat = value.shape[2] // key.shape[2]
    k = key / torch.linalg.vector_norm(key, dim=-1, keepdim=True)
    q, k = (x.repeat_interleave(repeat, 2) for x in (F.normalize(query, dim=-1), k))
    return delta_rule(q, k, value, g, beta)


DRILL = Drill(
    name="zero-key",
    family="H",
    title="a zero key is divided by its own length",
    verdict="H/DIVISION_BY_ZERO",
    refuter=refuters.NOT_DIVIDED_BY_ZERO,
    stages=frozenset({"recurrent_state"}),
    variants=_variants,
)
