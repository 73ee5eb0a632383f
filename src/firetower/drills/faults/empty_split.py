"""G2: a split of the softmax has no key, and is merged as if it had."""

from __future__ import annotations

import dataclasses
from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"empty-split/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    size, full, number = rng.choice((3, 4, 5)), rng.randint(1, 2), rng.randrange(30)
    length = size * full - rng.randrange(2)

    def build(fault: bool) -> Case:
        from firetower.drills.attention import Splits
        from firetower.drills.decoding import attending

        # the grid was made for one split more than this context fills
        rule = Splits(size, full + 1, skip=not fault)
        case = attending(host, seed, length, rule, number, fault=fault)
        case = dataclasses.replace(case, parts={"splits": lambda: rule.parts})
        if fault and host == "pure":
            origin = Origin(op="aten.sub.Tensor", module="", row=0, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return case

    return Variant(id=f"{length}keys-{full + 1}splitsof{size}", host=host, level=level_in(host), build=build)


DRILL = Drill(
    name="empty-split",
    family="G",
    case="G2",
    title="a split without keys is merged as if it had some",
    verdict="G/EMPTY_SPLIT_MERGE",
    refuter=refuters.SPLITS_HAVE_KEYS,
    stages=frozenset({"attention"}),
    variants=_variants,
)
