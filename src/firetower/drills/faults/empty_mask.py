"""N3: a grammar mask allows no token; the arg-max of nothing is token 0, and no number is bad before the mask."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"empty-mask/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    num_tokens, batch = rng.randint(3, 7), rng.randint(1, 3)
    row = rng.randrange(batch)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.serving import fresh, stateful, step, tokens

        model = stateful(host, seed)
        ids = tokens(model, seed, num_tokens, batch)
        allowed = torch.zeros(batch, model.lm_head.out_features, dtype=torch.bool)
        pick = Random(seed)
        for i in range(batch):
            # grammars are strict: most rows allow one token to three of all
            allowed[i, pick.sample(range(allowed.shape[1]), pick.randint(1, 3))] = True
        if fault:
            allowed[row] = False
        rows: list[Any] = []

        def serve(_: int = 0) -> Tensor:
            logits = step(model, ids, fresh(model, batch)).logits[:, -1]
            banned = logits.float().masked_fill(~allowed, float("-inf"))
            chosen: Tensor = banned.argmax(-1)
            rows[:] = _sampled(logits, allowed, chosen)
            return chosen

        case = Case(
            model=model,
            serve=serve,
            places=(f"row {row}: the mask allows none of {allowed.shape[1]} tokens",) if fault else (),
            parts={"sampled": lambda: tuple(rows)},
        )
        case.call()
        return case

    return Variant(id=f"row{row}of{batch}-{num_tokens}tokens", host=host, level="finite", build=build)


def _sampled(logits: Tensor, allowed: Tensor, chosen: Tensor) -> list[Any]:
    from firetower.drills.arrays import to_array
    from firetower.lab.subject import Sampled

    return [
        Sampled(
            row=i,
            logits=to_array("logits", logits[i]),
            token_id=int(chosen[i]),
            allowed=to_array("mask", allowed[i]),
        )
        for i in range(len(logits))
    ]


DRILL = Drill(
    name="empty-mask",
    family="N",
    case="N3",
    title="a grammar mask allows no token at all",
    verdict="N/EMPTY_MASK",
    refuter=refuters.ONE_TOKEN_ALLOWED,
    variants=_variants,
)
