"""F1: a prefix cache hands out the state of an earlier position than the request goes on from."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"stale-checkpoint/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    length, rest = rng.randint(7, 16), rng.randint(2, 8)
    behind = rng.randint(2, 5)

    def build(fault: bool) -> Case:
        from firetower.drills.serving import after, records, resumed, stateful, tokens
        from firetower.lab.subject import Switch

        model = stateful(host, seed)
        ids = tokens(model, seed, length + rest)
        # a checkpoint a few tokens back is there in both: the twin takes the right one
        checkpoints = {n: after(model, ids[:, :n]) for n in (length - behind, length)}
        position = length - behind if fault else length
        used = checkpoints[position]
        states = records(
            used,
            owner="a",
            expected_owner="a",
            position=position,
            expected_position=length,
            written_by="prefill",
        )
        return resumed(
            model,
            ids[:, length:],
            used=used,
            right=checkpoints[length],
            states=states,
            places=(f"tagged {position} tokens, the request says {length}",) if fault else (),
            cures=(Switch.FRESH_STATE, Switch.COLD),
        )

    return Variant(id=f"{length - behind}for{length}plus{rest}", host=host, level="finite", build=build)


DRILL = Drill(
    name="stale-checkpoint",
    family="F",
    case="F1",
    title="a request goes on from the state of an earlier position",
    verdict="F/STATE_POSITION_MISMATCH",
    refuter=refuters.POSITION_AGREES,
    variants=_variants,
)
