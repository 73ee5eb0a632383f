"""F2: left pads are run through the recurrence, and the state counts them as tokens."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"pads-in-state/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    pads, length, rest = rng.randint(2, 9), rng.randint(4, 9), rng.randint(2, 5)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.serving import after, records, resumed, stateful, tokens
        from firetower.lab.subject import Rows, Switch

        model = stateful(host, seed)
        ids = tokens(model, seed, length + rest)
        padding = torch.full((1, pads), int(Random(seed).randrange(3)))
        padded = torch.cat((padding, ids[:, :length]), dim=1)
        right = after(model, ids[:, :length])
        # the twin is padded as well, but what it keeps is what the tokens alone give
        used = after(model, padded) if fault else right
        states = records(
            used,
            owner="a",
            expected_owner="a",
            position=pads + length if fault else length,
            expected_position=length,
            written_by="prefill",
        )
        batch = Rows(
            name="the padded prompt",
            step=0,
            is_valid=(False,) * pads + (True,) * length,
            written_at=(0,) * (pads + length),
        )
        places = (f"has {pads} tokens too many", f"tagged {pads + length} tokens") if fault else ()
        return resumed(
            model,
            ids[:, length:],
            used=used,
            right=right,
            states=states,
            places=places,
            cures=(Switch.FRESH_STATE, Switch.ALONE, Switch.EXACT_BUCKET),
            valid_rows=(batch,),
        )

    return Variant(id=f"{pads}pads-{length}plus{rest}", host=host, level="finite", build=build)


DRILL = Drill(
    name="pads-in-state",
    family="F",
    case="F2",
    title="left pads are run through the recurrence",
    verdict="F/PAD_TOKENS_IN_STATE",
    refuter=refuters.POSITION_AGREES,
    variants=_variants,
)
