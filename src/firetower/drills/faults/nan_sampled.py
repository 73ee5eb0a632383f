"""N1: a sampler makes an ordinary token of a NaN row; only a look before the sampler can tell."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any, Literal

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"nan-sampled/{seed}")
    return [
        _pure(rng.randrange(1 << 30), "Argmax", "layers"),
        _pure(rng.randrange(1 << 30), "BlockwiseArgmax", "layers"),
        _pure(rng.randrange(1 << 30), "BlockwiseArgmax", "ops"),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("smollm2", rng.randrange(1 << 30)),
    ]


def _pure(seed: int, sampler: str, level: Literal["layers", "ops"]) -> Variant:
    rng = Random(seed)
    tokens, vocab_size = rng.randint(3, 9), rng.choice((63, 128))
    row, column = rng.randrange(tokens), rng.randrange(32)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills import pure

        model = pure.Head(vocab_size, 32, seed, getattr(pure, sampler)())
        ids = torch.tensor(rng_ids := Random(seed).sample(range(vocab_size), tokens))
        # one bad element of a hidden state makes the whole row of logits NaN
        model.embed.weight.data[rng_ids[row], column] = float("nan") if fault else 1e4
        origin = Origin(
            module="embed",
            stage="Embedding" if level == "layers" else None,
            op="aten.embedding.default" if level == "ops" else None,
            row=row,
            column=column,
            kind=Kind.NAN,
            bad_weight=True,
        )
        case = Case(model=model, args=(ids,), expected=origin if fault else None)
        return _seen_at_sampler(case, model.lm_head)

    id = f"{sampler.lower()}-row{row}of{tokens}-vocab{vocab_size}-{level}"
    return Variant(id=id, host="pure", level=level, build=build)


def _host(host: Host, seed: int) -> Variant:
    """Greedy `generate` with one bad row in the head: text comes out as if nothing were."""
    rng = Random(seed)
    num_new, token, column = rng.randint(2, 4), rng.randrange(3, 512), rng.randrange(128)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import load, prompt, site
        from firetower.drills.truth import with_truth

        pick = Random(seed)
        model = load(host, "fp32", seed)
        head = model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not the embeddings where these are tied
        head.weight.data[token, column] = float("nan") if fault else 0.0
        ids = prompt(model, pick, pick.randint(3, 6))
        options = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 0}
        case = Case(model=model, args=(ids,), kwargs=options, method="generate")
        case = _seen_at_sampler(case, head)
        return with_truth(case, site(model, "logits"), bad_weight=True, laundered=False) if fault else case

    return Variant(id=f"greedy-{num_new}tokens-token{token}-column{column}", host=host, level="layers", build=build)


def _seen_at_sampler(case: Case, head: Any) -> Case:
    """What a server sees: rows of logits and the tokens made of them; no weight, and no op before the head."""

    def sampled() -> tuple[Any, ...]:
        seen: list[Any] = []
        hook = head.register_forward_hook(lambda _, __, out: seen.append(out.reshape(-1, out.shape[-1]).clone()))
        chosen = case.call().flatten().tolist()
        hook.remove()
        # a step's last rows are the ones that were sampled
        logits = [row for step in seen for row in (step if case.method == "__call__" else step[-1:])]
        return tuple(_records(logits, chosen[-len(logits) :]))

    beyond = "weights first_bad_op reference states valid_rows slots recurrences launderers"
    unseen = dict.fromkeys(beyond.split())
    return dataclasses.replace(case, parts={**unseen, "sampled": sampled})


def _records(logits: list[Any], tokens: list[int]) -> list[Any]:
    from firetower.drills.arrays import to_array
    from firetower.lab.subject import Sampled

    pairs = zip(logits, tokens, strict=True)
    return [Sampled(row=i, logits=to_array("logits", x), token_id=t) for i, (x, t) in enumerate(pairs)]


DRILL = Drill(
    name="nan-sampled",
    family="N",
    case="N1",
    title="a sampler turns a NaN row into an ordinary token",
    verdict="N/NAN_LAUNDERED",
    refuter=refuters.LOGITS_FINITE,
    stages=frozenset({"logits"}),
    variants=_variants,
)
