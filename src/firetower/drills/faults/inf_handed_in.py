"""A2: a norm is handed an Inf by something that nobody watched: all that can be said is "upstream of this norm"."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"inf-handed-in/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    tokens = rng.randint(3, 9)
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator, load
        from firetower.drills.pure import RmsNorm, linear

        # hidden states come from another stage of a pipeline; 3e38 squared is Inf, and harmless to this norm
        if host == "pure":
            model: Any = torch.nn.Sequential(RmsNorm(64), linear(24, 64, seed))
            size, norm, layer = 64, "0", None
        else:
            model = load(host, "fp32", seed)
            size, norm, layer = model.config.hidden_size, "model.layers.0.input_layernorm", 0
        x = torch.randn(tokens, size, generator=generator(seed))
        column = Random(seed).randrange(size)
        x[row, column] = float("inf") if fault else 1e4
        case = Case(model=model, args=(x,)) if host == "pure" else Case(model=model, kwargs={"inputs_embeds": x[None]})
        case = dataclasses.replace(case, kernels={norm: "rms_norm"})
        if not fault:
            return case
        if host == "pure":
            return dataclasses.replace(case, expected=Origin(module="0", row=row, column=column, kind=Kind.NAN))
        from firetower.drills.placing import site
        from firetower.drills.truth import with_truth

        return with_truth(case, site(model, "input", layer))

    return Variant(id=f"row{row}of{tokens}", host=host, level="layers", build=build)


DRILL = Drill(
    name="inf-handed-in",
    family="A",
    case="A2",
    title="a norm is handed an Inf by something that nobody watched",
    verdict="A/UPSTREAM_INF",
    refuter=refuters.INPUT_FINITE,
    stages=frozenset({"input"}),
    variants=_variants,
)
