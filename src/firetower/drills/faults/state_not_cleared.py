"""E1: a poisoned state is "cleared" by a product with zero; every later request of the slot is bad."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"state-not-cleared/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    before, length = rng.randint(4, 12), rng.randint(3, 9)
    layer = rng.randrange(3) if host != "pure" else 0
    value = rng.choice(("nan", "inf", "-inf"))

    def build(fault: bool) -> Case:
        from firetower.drills.placing import site
        from firetower.drills.serving import after, fresh, records, recurrent, resumed, stateful, tokens, zeroed
        from firetower.drills.truth import with_truth
        from firetower.lab.subject import Switch

        pick = Random(seed)
        model = stateful(host, seed)
        slot = after(model, tokens(model, seed, before))
        burned = next(h for h in recurrent(slot) if h.layer == layer).value
        place = tuple(pick.randrange(n) for n in burned.shape)
        # the earlier request burned; the twin's was only large
        burned[place] = float(value) if fault else 3e4
        _clear_by_product(model, slot)
        tags = {
            "owner": "request 1",
            "expected_owner": "request 2",
            "position": 0,
            "expected_position": 0,
            "is_fresh_expected": True,
            "written_by": "reset",
        }
        case = resumed(
            model,
            tokens(model, seed + 1, length),
            used=slot,
            right=fresh(model),
            states=records(slot, zeroed(slot), **tags),
            places=("a new request starts on", f"layer {layer} recurrent_state", f"column {place[-1]} "),
            cures=(Switch.FRESH_STATE,),
        )
        if not fault:
            return dataclasses.replace(case, places=())
        if host == "pure":
            # the state is no module's: the first module after it
            return dataclasses.replace(case, expected=Origin(module="out", row=0, column=0, kind=Kind.NAN))
        return with_truth(case, site(model, "recurrent_state", layer))

    return Variant(id=f"layer{layer}-{value}-{before}then{length}", host=host, level="layers", build=build)


def _clear_by_product(model: Any, slot: Any) -> None:
    """Zero times the recurrent states, in place; a cache of keys and values is given back whole."""
    from firetower.drills.serving import fresh, held

    for i, layer in enumerate(fresh(model).layers):
        if not hasattr(layer, "recurrent_states"):
            slot.layers[i] = layer
    for h in held(slot):
        h.value.mul_(0.0)


DRILL = Drill(
    name="state-not-cleared",
    family="E",
    case="E1",
    title="a poisoned state is cleared by a product with zero and stays poisoned",
    verdict="E/STATE_NOT_CLEARED",
    refuter=refuters.FRESH_STATE,
    stages=frozenset({"recurrent_state"}),
    variants=_variants,
)
