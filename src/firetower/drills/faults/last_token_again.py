"""R1: a complete state is restored, and the last prompt token is applied to it once more."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"last-token-again/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    length, rest = rng.randint(4, 14), rng.randint(1, 4)

    def build(fault: bool) -> Case:
        from firetower.drills.serving import after, records, resumed, stateful, step, tokens
        from firetower.lab.subject import Switch

        model = stateful(host, seed)
        ids = tokens(model, seed, length + rest)
        right, used = after(model, ids[:, :length]), after(model, ids[:, :length])
        if fault:
            step(model, ids[:, length - 1 : length], used)
        states = records(
            used,
            owner="a",
            expected_owner="a",
            position=length + fault,
            expected_position=length,
            written_by="restore",
        )
        return resumed(
            model,
            ids[:, length:],
            used=used,
            right=right,
            states=states,
            places=(f"is tagged {length + 1} tokens", "came by a restore", "+1 token") if fault else (),
            cures=(Switch.COLD, Switch.FRESH_STATE),
        )

    return Variant(id=f"after{length}plus{rest}", host=host, level="finite", build=build)


DRILL = Drill(
    name="last-token-again",
    family="R",
    case="R1",
    title="the last prompt token is applied to a restored state that holds it already",
    verdict="R/LAST_TOKEN_REAPPLIED",
    refuter=refuters.COLD,
    variants=_variants,
)
