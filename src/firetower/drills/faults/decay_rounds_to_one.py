"""I5: a decay of e^-0.001 is exactly 1 in bfloat16: the state never forgets."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Recurrence


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"decay-rounds-to-one/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, head = rng.randrange(3), rng.randrange(4)
    num_tokens = rng.randint(60, 90) if host == "pure" else rng.randint(40, 70)
    gate = -(10 ** rng.uniform(-3.4, -2.9))

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator, load, prompt, replace_chunk_rule

        dtype = torch.bfloat16 if fault else torch.float32
        rule = _Rule(dtype)
        if host == "pure":
            q, k, v = torch.randn(3, 1, num_tokens, 1, 16, generator=generator(seed))
            g, beta = torch.full((1, num_tokens, 1), gate), torch.full((1, num_tokens, 1), 0.05)
            model: Any = _module(rule)
            case = Case(model=model, args=(q, k, v, g, beta))
            case.call()
            return dataclasses.replace(
                case,
                places=("the head: the decay is exactly 1 in bfloat16",) if fault else (),
                parts={"recurrences": tuple(rule.heads("the head"))},
            )
        model = load("qwen35moe", "fp32", seed)
        mixer = model.model.layers[layer].linear_attn
        # a slow head, as trained models have
        mixer.A_log.data[head] = float(torch.log(torch.tensor(-gate)))
        mixer.dt_bias.data[head] = 0.5413  # softplus is 1
        mixer.in_proj_a.weight.data[head] *= 0.01
        replace_chunk_rule(mixer, rule)
        case = Case(model=model, args=(prompt(model, Random(seed), num_tokens),))
        case.call()
        name = f"layer {layer}"
        return dataclasses.replace(
            case,
            places=(f"{name} head {head}: the decay is exactly 1 in bfloat16",) if fault else (),
            parts={"recurrences": tuple(rule.heads(name))},
        )

    where = "" if host == "pure" else f"layer{layer}-head{head}-"
    return Variant(id=f"{where}{num_tokens}tokens-gate{gate:.1e}", host=host, level="finite", build=build)


def _module(rule: _Rule) -> Any:
    from torch import nn

    class Head(nn.Module):
        """The rule as a module."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            """[B, T, H, D] each, gates [B, T, H]."""
            out: Tensor = rule(q, k, v, g=g, beta=beta)[0]
            return out

    return Head()


class _Rule:
    """Token-by-token gated delta rule whose decay and state are kept in one type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.used: tuple[Tensor, ...] = ()
        self.absmax: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
        """q, k [B, T, Hk, D]; v [B, T, H, D]; g, beta [B, T, H] -> out [B, T, H, D], state [B, H, D, D]."""
        import torch
        import torch.nn.functional as F

        repeat = value.shape[2] // key.shape[2]
        q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(repeat, 2) for x in (query, key))
        decay = g.float().exp().to(self.dtype)
        state = torch.zeros(value.shape[0], value.shape[2], k.shape[-1], value.shape[-1], dtype=self.dtype)
        outputs, self.absmax = [], []
        for t in range(value.shape[1]):
            state = state * decay[:, t, :, None, None]
            recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state.float())
            delta = (value[:, t].float() - recalled) * beta[:, t].float().unsqueeze(-1)
            state = (state.float() + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)).to(self.dtype)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state.float()) * k.shape[-1] ** -0.5)
            self.absmax.append(state.float().abs().amax((-1, -2))[0])
        self.used = (k, beta, g, decay)
        return torch.stack(outputs, 1).to(query.dtype), state.float()

    def heads(self, name: str) -> list[Recurrence]:
        """What the last run used, head by head, of the first sequence."""
        import torch

        from firetower.drills.arrays import to_array
        from firetower.lab.subject import Recurrence

        k, beta, g, decay = (x[0] for x in self.used)
        absmax = torch.stack(self.absmax)
        return [
            Recurrence(
                name=name if k.shape[1] == 1 else f"{name} head {i}",
                state_dtype=str(self.dtype).removeprefix("torch."),
                log_decay=to_array("g", g[:, i].float()),
                decay=to_array("decay", decay[:, i]),
                keys=to_array("keys", k[:, i]),
                beta=to_array("beta", beta[:, i].float()),
                state_absmax=to_array("absmax", absmax[:, i]),
            )
            for i in range(k.shape[1])
        ]


DRILL = Drill(
    name="decay-rounds-to-one",
    family="I",
    case="I5",
    title="a state in bfloat16 never forgets: its decay rounds to 1",
    verdict="I/STATE_PRECISION",
    refuter=refuters.DECAY_HELD,
    variants=_variants,
)
