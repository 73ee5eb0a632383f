"""I1: a chunk's pairwise decays go through exp before the causal mask; above the diagonal they overflow."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"exp-before-mask/{seed}")
    return [
        _pure(rng.randrange(1 << 30)),
        _pure(rng.randrange(1 << 30)),
        _host(rng.randrange(1 << 30), "layers"),
        _host(rng.randrange(1 << 30), "ops"),
        _host(rng.randrange(1 << 30), "layers"),
    ]


def _pure(seed: int) -> Variant:
    rng = Random(seed)
    heads, tokens = rng.randint(1, 3), rng.choice((63, 64, 100))

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import DecayMatrix

        steps = -6.0 * torch.rand(heads, tokens, generator=generator(seed))
        # row 0 of the first head: the first column whose distance leaves the range of fp32's exp
        distance = steps[0, 0] - steps[0].cumsum(0)
        column = int((distance > 88.7228).nonzero()[0])
        origin = Origin(module="", op="aten.exp.default", row=0, column=column, kind=Kind.POS_INF)
        module = DecayMatrix(mask_first=not fault)
        return Case(model=module, args=(steps,), expected=origin if fault else None)

    return Variant(id=f"decay-{heads}x{tokens}x{tokens}", host="pure", level="ops", build=build)


def _host(seed: int, level: Any) -> Variant:
    """A Gated DeltaNet layer runs a chunk rule that masks too late."""
    rng = Random(seed)
    layer, tokens = rng.randrange(3), rng.randint(40, 60)

    def build(fault: bool) -> Case:
        import dataclasses

        from firetower.drills.placing import load, prompt, replace_chunk_rule, site
        from firetower.drills.truth import with_truth

        model = load("qwen35moe", "fp32", seed)
        mixer = model.model.layers[layer].linear_attn
        mixer.A_log.data.fill_(2.0)  # decays of about e^-9 a token: strong, legal and finite in the right order
        gates: list[Tensor] = []
        replace_chunk_rule(mixer, _Chunk(mask_first=not fault, gates=gates))
        case = Case(model=model, args=(prompt(model, Random(seed), tokens),))
        if not fault:
            return case
        if level == "layers":
            # the triangular solve never reads above the diagonal: the state stays clean, the output does not
            return with_truth(case, site(model, "attention", layer))
        case.call()
        total = gates[0][0, :, 0].float().cumsum(0)  # head 0: [tokens]
        column = int(((total[0] - total) > 88.7228).nonzero()[0])
        module = f"model.layers.{layer}.linear_attn"
        origin = Origin(module=module, op="aten.exp.default", row=0, column=column, kind=Kind.POS_INF)
        return dataclasses.replace(case, expected=origin)

    return Variant(id=f"layer{layer}-{tokens}tokens-{level}", host="qwen35moe", level=level, build=build)


class _Chunk:
    """One-chunk gated delta rule by a triangular solve; ``gates`` keeps the g of each call for the truth."""

    def __init__(self, *, mask_first: bool, gates: list[Tensor]) -> None:
        self.mask_first = mask_first
        self.gates = gates

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
        """q, k [B, T, Hk, D]; v [B, T, H, D]; g, beta [B, T, H] -> out [B, T, H, D], state [B, H, D, D]."""
        import torch
        import torch.nn.functional as F

        self.gates.append(g)
        repeat = value.shape[2] // key.shape[2]
        q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(repeat, 2).transpose(1, 2) for x in (query, key))
        v, (b, log_decay) = value.float().transpose(1, 2), (x.float().transpose(1, 2) for x in (beta, g))
        total = log_decay.cumsum(-1)
        pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
        upper = torch.ones(pairs.shape[-2:], dtype=torch.bool).triu(1)
        if self.mask_first:
            decay = pairs.masked_fill(upper, float("-inf")).exp()
        else:
            decay = pairs.exp() * ~upper
        system = (k * b.unsqueeze(-1)) @ k.mT * decay
        new = torch.linalg.solve_triangular(system, v * b.unsqueeze(-1), upper=False, unitriangular=True)
        out = (q @ k.mT * q.shape[-1] ** -0.5 * decay) @ new
        state = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT @ new
        return out.transpose(1, 2).to(query.dtype), state


DRILL = Drill(
    name="exp-before-mask",
    family="I",
    case="I1",
    title="pairwise decays overflow above the diagonal because exp comes before the causal mask",
    verdict="I/EXP_BEFORE_MASK",
    refuter=refuters.INF_IS_KEPT,
    stages=frozenset({"attention"}),
    variants=_variants,
)
