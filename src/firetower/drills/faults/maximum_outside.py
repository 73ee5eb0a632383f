"""G4: the maximum of a softmax row is attained at a slot without a key; every real weight underflows to 0."""

from __future__ import annotations

import dataclasses
from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"maximum-outside/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    length, tail, number = rng.randint(4, 9), rng.randint(1, 5), rng.randrange(30)
    bias = -float(rng.randint(300, 900))

    def build(fault: bool) -> Case:
        from firetower.drills.attention import OpenTail
        from firetower.drills.decoding import attending

        case = attending(host, seed, length, OpenTail(tail, bias, inside=not fault), number, fault=fault)
        if fault and host == "pure":
            origin = Origin(op="aten.div.Tensor", module="", row=0, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return case

    return Variant(id=f"{length}keys-{tail}past-bias{bias:.0f}", host=host, level=level_in(host), build=build)


DRILL = Drill(
    name="maximum-outside",
    family="G",
    case="G4",
    title="a slot past the end sets the softmax row's maximum",
    verdict="G/OOB_SCORE_SETS_ROWMAX",
    refuter=refuters.ROW_MAXIMUM_INSIDE,
    stages=frozenset({"attention"}),
    variants=_variants,
)
