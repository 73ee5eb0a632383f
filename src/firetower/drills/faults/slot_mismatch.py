"""L1: a slot holds another expert than the map says: finite, plausible, wrong."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"slot-mismatch/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(4), rng.randint(3, 7)

    def build(fault: bool) -> Case:
        from firetower.drills.caching import cached, routed
        from firetower.drills.expert_cache import Flaws

        pick = Random(seed)
        call = routed(host, seed, layer, num_tokens)
        # one hit at least, one miss, and a resident expert that nobody needs
        hits = call.chosen[:3]
        idle = next(e for e in range(len(call.experts.down_proj)) if e not in call.chosen)
        resident = [*hits, idle]
        pick.shuffle(resident)
        slot = resident.index(pick.choice(hits))
        held = pick.choice([e for e in range(len(call.experts.down_proj)) if e != resident[slot]])
        # the twin has a slot with wrong content too: the idle one, which the step does not read
        swapped = {slot: held} if fault else {resident.index(idle): held}
        text = f"slot {slot}: the map says expert {resident[slot]}, the hash is that of expert {held}"
        flaws = Flaws(swapped=swapped)
        return cached(call, resident, flaws, loads=False, places=(text,) if fault else ())[0]

    return Variant(id=f"layer{layer}-{num_tokens}tokens", host=host, level="finite", build=build)


DRILL = Drill(
    name="slot-mismatch",
    family="L",
    case="L1",
    title="an expert slot holds another expert than the map says",
    verdict="L/EXPERT_SLOT_MISMATCH",
    refuter=refuters.SLOT_RIGHT,
    variants=_variants,
)
