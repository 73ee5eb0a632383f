"""G1: a query row with nothing to attend to; its softmax divides nothing by nothing."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"fully-masked-row/{seed}")
    return [
        _pure(rng.randrange(1 << 30), fused=False),
        _pure(rng.randrange(1 << 30), fused=True),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("smollm2", rng.randrange(1 << 30)),
    ]


def _causal(tokens: int, empty_row: int | None) -> Tensor:
    """[tokens, tokens] bool, True where a query may look; ``empty_row`` may look nowhere."""
    import torch

    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if empty_row is not None:
        mask[empty_row] = False
    return mask


def _pure(seed: int, *, fused: bool) -> Variant:
    rng = Random(seed)
    tokens = rng.randint(3, 12)
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import MaskedAttention

        mask = _causal(tokens, row if fault else None)  # the twin is full of legal -inf too
        module = MaskedAttention(mask, hidden_size=16, seed=seed, fused=fused)
        # by hand the row's maximum is -inf, and -inf minus -inf is the first NaN
        op = "aten._softmax.default" if fused else "aten.sub.Tensor"
        origin = Origin(module="", op=op, row=row, column=0, kind=Kind.NAN)
        x = torch.randn(tokens, 16, generator=generator(seed))
        return Case(model=module, args=(x,), expected=origin if fault else None)

    name = f"{'fused' if fused else 'manual'}-softmax-row{row}of{tokens}"
    return Variant(id=name, host="pure", level="ops", build=build)


def _host(host: Host, seed: int) -> Variant:
    """A 4-dimensional float mask, as engines hand it in, with one row that is -inf throughout."""
    rng = Random(seed)
    tokens = rng.randint(5, 12)
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import layers_of, load, prompt, site
        from firetower.drills.truth import with_truth

        model = load(host, "fp32", seed)
        model.set_attn_implementation("eager")  # scaled_dot_product_attention answers with zeros
        allowed = _causal(tokens, row if fault else None)
        mask = torch.zeros(1, 1, tokens, tokens).masked_fill(~allowed, float("-inf"))
        ids = prompt(model, Random(seed), tokens)
        case = Case(model=model, args=(ids,), kwargs={"attention_mask": mask})
        layer = layers_of(model, "attention")[0]
        return with_truth(case, site(model, "attention", layer)) if fault else case

    return Variant(id=f"row{row}of{tokens}-eager-{seed % 1000}", host=host, level="layers", build=build)


DRILL = Drill(
    name="fully-masked-row",
    family="G",
    case="G1",
    title="a query row whose every key is masked has no softmax",
    verdict="G/FULLY_MASKED_ROW",
    refuter=refuters.ONE_KEY_ALLOWED,
    stages=frozenset({"attention"}),
    variants=_variants,
)
