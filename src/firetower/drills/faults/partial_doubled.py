"""S: an all-reduce takes one rank's part twice."""

from __future__ import annotations

from firetower.drills import refuters
from firetower.drills.ranks import reduced
from firetower.drills.spec import Drill

DRILL = Drill(
    name="partial-doubled",
    family="S",
    title="an all-reduce takes one rank's part twice",
    verdict="S/PARTIAL_DOUBLED",
    refuter=refuters.ONE_RANK,
    variants=lambda seed: reduced("partial-doubled", seed, times=2, says="has the part of rank {rank} twice"),
)
