"""L2: loading one expert evicts another that the same step still needs."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"evicted-in-use/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens, capacity = rng.randrange(4), rng.randint(3, 7), rng.randint(3, 5)

    def build(fault: bool) -> Case:
        from firetower.drills.caching import cached, routed
        from firetower.drills.expert_cache import Flaws

        call = routed(host, seed, layer, num_tokens)
        # hot experts of other requests fill the cache; what this step needs comes in on top
        others = [e for e in range(len(call.experts.down_proj)) if e not in call.chosen]
        resident = [*others[: capacity - 1], call.chosen[-1]]
        case, cache = cached(call, resident, Flaws(unprotected=fault), loads=True, places=())
        if not fault:
            return case
        import dataclasses

        gone = next(e.what for e in cache.log if e.kind == "evict" and int(e.what.split()[1]) in call.chosen)
        return dataclasses.replace(case, places=(gone, "evicted in the step that needed it"))

    return Variant(id=f"layer{layer}-{num_tokens}tokens-{capacity}slots", host=host, level="finite", build=build)


DRILL = Drill(
    name="evicted-in-use",
    family="L",
    case="L2",
    title="an expert is evicted inside the forward that needs it",
    verdict="L/EVICTED_IN_USE",
    refuter=refuters.NOT_EVICTED_SLOT_RIGHT,
    variants=_variants,
)
