"""L5: the destination plan of the experts misses one routed row; its result is whatever was there."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"unwritten-row/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(4), rng.randint(3, 7)

    def build(fault: bool) -> Case:
        from firetower.drills.caching import cached, routed
        from firetower.drills.expert_cache import Flaws

        call = routed(host, seed, layer, num_tokens)
        resident = call.chosen[: max(2, len(call.chosen) // 2)]
        hits = [i for i, e in enumerate(call.ids.flatten().tolist()) if e in resident]
        row = Random(seed).choice(hits)
        flaws = Flaws(unwritten=frozenset({row}) if fault else frozenset())
        places = (f"rows [{row}] of the output", "1 of ", "hit rows are bad") if fault else ()
        return cached(call, resident, flaws, loads=False, places=places, rows=True)[0]

    return Variant(id=f"layer{layer}-{num_tokens}tokens", host=host, level="finite", build=build)


DRILL = Drill(
    name="unwritten-row",
    family="L",
    case="L5",
    title="the destination of one routed row is never written",
    verdict="L/UNWRITTEN_DST_ROW",
    refuter=refuters.POISON_GONE,
    variants=_variants,
)
