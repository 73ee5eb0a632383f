"""S: an all-reduce leaves one rank's part out."""

from __future__ import annotations

from firetower.drills import refuters
from firetower.drills.ranks import reduced
from firetower.drills.spec import Drill

DRILL = Drill(
    name="partial-missing",
    family="S",
    title="an all-reduce leaves one rank's part out",
    verdict="S/PARTIAL_MISSING",
    refuter=refuters.RESULT_IS_SUM,
    variants=lambda seed: reduced("partial-missing", seed, times=0, says="is the sum without rank {rank}"),
)
