"""E2: a request gets a slot whose state is still that of another one: finite, and wrong until it is forgotten."""

from __future__ import annotations

from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"state-left-over/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    before, length = rng.randint(8, 20), rng.randint(3, 12)
    dtype = rng.choice(("fp32", "bf16")) if host == "qwen35moe" else "fp32"

    def build(fault: bool) -> Case:
        from firetower.drills.serving import after, fresh, records, resumed, stateful, tokens, zeroed
        from firetower.lab.subject import Switch

        model = stateful(host, seed, dtype)
        old = after(model, tokens(model, seed, before))
        slot = old if fault else _cleared(model, old)
        tags = {
            "owner": "request 1" if fault else None,
            "expected_owner": "request 2",
            "position": before if fault else 0,
            "expected_position": 0,
            "epoch": 1,
            "expected_epoch": 2,
            "is_fresh_expected": True,
            "written_by": "prefill" if fault else "reset",
        }
        states = records(slot, zeroed(slot), **tags)
        return resumed(
            model,
            tokens(model, seed + 1, length),
            used=slot,
            right=fresh(model),
            states=states,
            places=("a new request starts on", f"layer {states[0].layer}") if fault else (),
            cures=(Switch.FRESH_STATE,),
        )

    return Variant(id=f"{before}then{length}-{dtype}", host=host, level="finite", build=build)


def _cleared(model: Any, old: Any) -> Any:
    """A slot cleared by assignment; a recurrent state's zeros are negative ones, which are as good."""
    from firetower.drills.serving import fresh, held

    new = fresh(model)
    for i, layer in enumerate(old.layers):
        if hasattr(layer, "recurrent_states"):
            new.layers[i] = layer
    for h in held(new):
        h.put(h.value * 0 - 0.0 * h.value.abs())
    return new


DRILL = Drill(
    name="state-left-over",
    family="E",
    case="E2",
    title="a new request starts on the finite state of the one before",
    verdict="E/STALE_STATE_FINITE",
    refuter=refuters.STATE_FRESH,
    variants=_variants,
)
