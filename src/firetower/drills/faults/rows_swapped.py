"""F4: the rows of a batch are given each other's state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"rows-swapped/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    # without tags only the outputs can tell, and recomputing them with every order of the states
    return distinct([_variant(host, rng.randrange(1 << 30), tagged=i % 2 == 0) for i, host in enumerate(hosts)])


def _variant(host: Host, seed: int, *, tagged: bool) -> Variant:
    rng = Random(seed)
    rows, length, rest = rng.randint(2, 4), rng.randint(5, 9), rng.randint(1, 3)
    order = _other_order(rows, rng)

    def build(fault: bool) -> Case:
        from firetower.drills.arrays import arrays_of
        from firetower.drills.placing import fixed
        from firetower.drills.serving import after, held, stateful, step, tokens
        from firetower.lab.subject import Switch

        model = stateful(host, seed)
        ids = tokens(model, seed, length + rest, batch=rows)
        own = after(model, ids[:, :length])
        used = _in_order(own, order) if fault else own
        layer = next(held(used)).layer

        def from_cache(cache: Any) -> Any:
            return step(model, ids[:, length:], copy.deepcopy(cache))

        def recompute(wanted: Sequence[int]) -> Any:
            # row i given the state that row wanted[i] was given: the rows' own states, in another order
            return arrays_of(from_cache(_in_order(own, wanted)))[0]

        taken = order if fault else list(range(rows))
        swapped = next((i for i, j in enumerate(taken) if i != j), 0)
        places: tuple[str, ...] = ()
        if fault:
            by_tag = f"is tagged as the state of request {taken[swapped]}, the row is request {swapped}"
            places = (by_tag,) if tagged else (f"{taken} matches best",)
        return Case(
            model=model,
            serve=fixed(from_cache, used),
            right=lambda: from_cache(own),
            places=places,
            switches={Switch.FRESH_STATE: fixed(from_cache, own)},
            parts={
                "states": _one_a_row(used, layer, taken, length, tagged=tagged),
                "recompute_rows": recompute,
                "clean_twin_bit_stable": True,
            },
        )

    refuter = refuters.OWNER_AGREES_IN_ORDER if tagged else refuters.OWN_ORDER
    name = f"{rows}rows-{''.join(map(str, order))}-{'tags' if tagged else 'notags'}"
    return Variant(id=name, host=host, level="finite", build=build, refuter=refuter)


def _other_order(rows: int, rng: Random) -> list[int]:
    while True:
        order = rng.sample(range(rows), rows)
        if order != sorted(order):
            return order


def _in_order(cache: Any, order: Sequence[int]) -> Any:
    from firetower.drills.serving import held

    new = copy.deepcopy(cache)
    for h in held(new):
        h.put(h.value[list(order)].clone())
    return new


def _one_a_row(cache: Any, layer: int, taken: Sequence[int], length: int, *, tagged: bool) -> Any:
    """A record of one state of each row: the first of that layer."""
    from firetower.drills.arrays import tensor_hash, to_array
    from firetower.drills.serving import held
    from firetower.lab.subject import State

    first = next(h for h in held(cache) if h.layer == layer)
    return tuple(
        State(
            name=f"{first.name} of row {i}",
            layer=layer,
            owner=f"request {j}" if tagged else None,
            expected_owner=f"request {i}",
            position=length,
            expected_position=length,
            value=to_array("state", first.value[i]),
            hash_now=tensor_hash(first.value[i]),
            expected_hash=None if not tagged else tensor_hash(first.value[i]),
            written_by="decode",
        )
        for i, j in enumerate(taken)
    )


DRILL = Drill(
    name="rows-swapped",
    family="F",
    case="F4",
    title="the rows of a batch take each other's state",
    verdict="F/ROW_STATE_SWAP",
    refuter=refuters.OWN_ORDER,
    variants=_variants,
)
