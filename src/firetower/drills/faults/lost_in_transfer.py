"""R: a state arrives with one layer missing, or as it was some tokens earlier, under the right tag."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"lost-in-transfer/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    length, rest = rng.randint(5, 14), rng.randint(1, 4)
    how = rng.choice(("zeros", "half"))
    place = rng.random()
    by = rng.choice(("transfer", "restore"))

    def build(fault: bool) -> Case:
        from firetower.drills.serving import after, held, records, resumed, stateful, tokens
        from firetower.lab.subject import Switch

        model = stateful(host, seed)
        ids = tokens(model, seed, length + rest)
        sent = after(model, ids[:, :length])
        arrived = copy.deepcopy(sent)
        lost = list(held(arrived))
        h = lost[int(place * len(lost))]
        if fault:
            h.put(_damaged(h.value, how))
        states = records(
            arrived,
            sent,
            owner="a",
            expected_owner="a",
            position=length,
            expected_position=length,
            written_by=by,
        )
        return resumed(
            model,
            ids[:, length:],
            used=arrived,
            right=sent,
            states=states,
            places=(f"layer {h.layer} {h.name}", f"came by a {by}") if fault else (),
            cures=(Switch.COLD,),
        )

    return Variant(id=f"{by}-{how}-after{length}", host=host, level="finite", build=build)


def _damaged(x: Any, how: str) -> Any:
    """Nothing arrived, or the first half of the heads' values only."""
    import torch

    new = x.clone()
    if how == "zeros":
        return torch.zeros_like(new)
    new[..., new.shape[-1] // 2 :] = 0
    return new


DRILL = Drill(
    name="lost-in-transfer",
    family="R",
    title="a state arrives otherwise than it was sent",
    verdict="R/STATE_LOST_IN_TRANSFER",
    refuter=refuters.STATE_AS_SENT,
    variants=_variants,
)
