"""Q2: after a verify step the state of another column of the window is committed."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"wrong-column/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    window, start, rest = rng.randint(4, 6), rng.randint(5, 12), rng.randint(2, 4)
    accepted = rng.randint(2, window - 1)
    # the first column, or the one before the right one
    kept = rng.choice((1, accepted - 1))

    def build(fault: bool) -> Case:
        from firetower.drills.serving import stateful, verified

        text = f"is tagged {start + kept} tokens, the request says {start + accepted}"
        return verified(
            stateful(host, seed),
            seed,
            start=start,
            window=window,
            accepted=accepted,
            kept=kept if fault else accepted,
            rest=rest,
            places=(text, "was written by a verify step") if fault else (),
        )

    return Variant(id=f"{kept}for{accepted}of{window}at{start}", host=host, level="finite", build=build)


DRILL = Drill(
    name="wrong-column",
    family="Q",
    case="Q2",
    title="the state of another column of the verify window is committed",
    verdict="Q/STATE_READ_AT_WRONG_COLUMN",
    refuter=refuters.POSITION_AGREES,
    variants=_variants,
)
