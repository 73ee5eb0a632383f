"""Q1: after a verify step the state of the whole window is kept, rejected drafts included."""

from __future__ import annotations

from random import Random

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"drafts-kept/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    window = rng.randint(3, 5)
    accepted, start, rest = rng.randint(1, window - 1), rng.randint(5, 12), rng.randint(2, 4)

    def build(fault: bool) -> Case:
        from firetower.drills.serving import stateful, verified

        kept = window if fault else accepted
        text = f"a window of {window} from {start}, {accepted} accepted, left it at {start + window}"
        return verified(
            stateful(host, seed),
            seed,
            start=start,
            window=window,
            accepted=accepted,
            kept=kept,
            rest=rest,
            places=(text,) if fault else (),
        )

    return Variant(id=f"{accepted}of{window}at{start}", host=host, level="finite", build=build)


DRILL = Drill(
    name="drafts-kept",
    family="Q",
    case="Q1",
    title="the state keeps drafts that were rejected",
    verdict="Q/STATE_KEPT_PAST_ACCEPTED",
    refuter=refuters.DRAFTS_OFF,
    variants=_variants,
)
