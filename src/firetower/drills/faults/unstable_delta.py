"""I3: keys of length above the square root of 2 make the delta rule grow without bound."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Recurrence


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"unstable-delta/{seed}")
    pure = [_pure(rng.randrange(1 << 30), dtype) for dtype in ("fp32", "bf16")]
    return distinct([*pure, *(_host(rng.randrange(1 << 30), layer) for layer in rng.sample(range(3), 3))])


def _pure(seed: int, dtype: str) -> Variant:
    tokens = Random(seed).randint(60, 80)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import DTYPES, generator
        from firetower.drills.pure import DeltaRule

        k, v = torch.randn(2, tokens, 16, generator=generator(seed)).to(DTYPES[dtype])
        k = k[:1].expand(tokens, -1) * (11.5**0.5 / k[:1].float().norm()).to(k.dtype)
        k = k.contiguous()
        used = k if fault else k / torch.linalg.vector_norm(k, dim=-1, keepdim=True)
        return Case(
            model=DeltaRule(norm_keys=not fault),
            args=(k, v),
            expected=_first_overflow(k, v) if fault else None,
            parts={"recurrences": (_recurrence("the head", used, torch.ones(tokens), v),)},
        )

    return Variant(id=f"recurrence-{tokens}tokens-{dtype}", host="pure", level="ops", build=build)


def _recurrence(name: str, k: Tensor, beta: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Recurrence:
    """Keys [T, D], beta [T] and values [T, D] as used, and the state's largest value after each token."""
    import torch

    from firetower.drills.arrays import to_array
    from firetower.lab.subject import Recurrence

    state, seen = torch.zeros(k.shape[-1], v.shape[-1], dtype=k.dtype), []
    decay = torch.ones(len(k)) if log_decay is None else log_decay.exp()
    for k_t, v_t, b, d in zip(k, v, beta.to(k.dtype), decay.to(k.dtype), strict=True):
        state = state * d
        state = state + torch.outer(k_t, b * (v_t - k_t @ state))
        seen.append(state.abs().amax().float())
    return Recurrence(
        name=name,
        state_dtype=str(k.dtype).removeprefix("torch."),
        keys=to_array("keys", k),
        beta=to_array("beta", beta),
        state_absmax=to_array("absmax", torch.stack(seen)),
    )


def _first_overflow(k: Tensor, v: Tensor) -> Origin:
    """Step through the recurrence op by op, whole tensors each: which op is first not finite, and where."""
    import torch

    from firetower.drills.truth import first_nonfinite

    state = torch.zeros(k.shape[-1], v.shape[-1], dtype=k.dtype)
    for k_t, v_t in zip(k, v, strict=True):
        recalled = k_t @ state
        delta = v_t - recalled
        write = torch.outer(k_t, delta)
        state = state + write
        # a vector times a matrix runs as a product of matrices
        ops = {"mm.default": recalled, "sub.Tensor": delta, "mul.Tensor": write, "add.Tensor": state}
        for op, value in ops.items():
            if place := first_nonfinite(value):
                place.pop("bits")
                return Origin(module="", op=f"aten.{op}", **place)
    raise AssertionError("the recurrence stayed finite")


def _host(seed: int, layer: int) -> Variant:
    """A Gated DeltaNet layer without its key norm and without decay."""
    tokens = Random(seed).randint(160, 200)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, replace_chunk_rule, site
        from firetower.drills.truth import with_truth

        model = load("qwen35moe", "fp32", seed)
        mixer = model.model.layers[layer].linear_attn
        mixer.A_log.data.fill_(-30.0)  # never forgets
        mixer.in_proj_b.weight.data.mul_(1e-3)  # beta is 1/2
        rule = _Recurrence(norm_keys=not fault)
        replace_chunk_rule(mixer, rule)
        case = Case(model=model, args=(prompt(model, Random(seed), tokens),))
        case.call()
        heads = tuple(_recurrence(f"layer {layer} head {i}", *rule.head(i)) for i in range(4))
        case = dataclasses.replace(case, parts={"recurrences": heads})
        return with_truth(case, site(model, "recurrent_state", layer)) if fault else case

    return Variant(id=f"layer{layer}-{tokens}tokens", host="qwen35moe", level="layers", build=build)


class _Recurrence:
    """Token-by-token gated delta rule; without the norm its keys have length 8."""

    def __init__(self, *, norm_keys: bool) -> None:
        self.norm_keys = norm_keys
        self.used: tuple[Tensor, ...] = ()

    def head(self, i: int) -> tuple[Tensor, ...]:
        """Keys, beta, values and log decay of one head of the first sequence."""
        return tuple(x[0, :, i] for x in self.used)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
        """q, k [B, T, Hk, D]; v [B, T, H, D]; g, beta [B, T, H] -> out [B, T, H, D], state [B, H, D, D]."""
        import torch.nn.functional as F

        from firetower.drills.pure import delta_rule

        repeat = value.shape[2] // key.shape[2]
        q, k = (F.normalize(x, dim=-1).repeat_interleave(repeat, 2) for x in (query, key))
        k = k if self.norm_keys else 8.0 * k
        self.used = tuple(x.detach().clone() for x in (k, beta, value, g))
        return delta_rule(q, k, value, g, beta)


DRILL = Drill(
    name="unstable-delta",
    family="I",
    case="I3",
    title="un-normalised keys make the delta rule's state explode",
    verdict="I/DELTA_RULE_UNSTABLE",
    refuter=refuters.KEYS_NORMALISED,
    stages=frozenset({"recurrent_state"}),
    variants=_variants,
)
