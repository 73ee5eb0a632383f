"""C1: slots of a value page that nobody wrote get a softmax weight of exactly 0; 0 times their NaN is NaN."""

from __future__ import annotations

import dataclasses
from random import Random

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"unwritten-slot/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    length, free, number = rng.randint(4, 9), rng.choice((4, 7, 9)), rng.randrange(30)
    # at op level a +Inf that was there before is itself the origin, not the op that it harms
    dirt = rng.choice(("nan", "-inf") if host == "pure" else ("nan", "inf", "-inf"))

    def build(fault: bool) -> Case:
        from firetower.drills.attention import Page
        from firetower.drills.decoding import attending
        from firetower.drills.placing import fills

        page = Page(length + free, float(dirt), seed, select=not fault)
        case = attending(host, seed, length, page, number, fault=fault)
        case = dataclasses.replace(case, switches=fills(page.filled, case.call), parts={"valid_rows": page.rows})
        if fault and host == "pure":
            origin = Origin(op="aten.bmm.default", module="", row=0, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return case

    return Variant(id=f"{length}of{length + free}-{dirt}", host=host, level=level_in(host), build=build)


DRILL = Drill(
    name="unwritten-slot",
    family="C",
    case="C1",
    title="a page slot that nobody wrote is multiplied by a weight of 0",
    verdict="C/UNINIT_READ",
    refuter=refuters.FILLS_ALIKE,
    stages=frozenset({"attention"}),
    variants=_variants,
)
