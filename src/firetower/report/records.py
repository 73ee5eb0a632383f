"""What a page is made of, beside the records of `core`."""

from __future__ import annotations

import dataclasses

from firetower.core.records import Fire
from firetower.core.verdict import Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FireView:
    """One fire to show.

    Attributes:
        fire: the record.
        verdict: on the fire, where there is one that can be read.
        verdict_source: where it comes from: ``stored with the fire``, ``made from the stored fire alone``.
        resembles: (family and why, reports and the test that tells) of public cases it looks like.
        last_seen: when it was last counted, for a fire seen more than once.
    """

    fire: Fire
    verdict: Verdict | None = None
    verdict_source: str = ""
    resembles: tuple[tuple[str, str], ...] = ()
    last_seen: str | None = None
