"""What the lab says of a case, held against what was planted: verdict, refuter, and silence about the twin."""

from __future__ import annotations

import dataclasses

from firetower.core.verdict import Verdict
from firetower.drills.evidence import Evidence, remembered, subject_of
from firetower.drills.spec import Case, Drill, Variant
from firetower.lab.diagnose import diagnose
from firetower.lab.discriminate.look import Look

_NUM_REPLAYS = 40
_NUM_REPLAYS_OF_TWIN = {"smollm2": 12}
"""Replays of a test that replays. A twin decides nothing, so that all of them run: fewer where a run is slow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The lab on one variant.

    Attributes:
        wanted, said: the planted cause and the verdict's, ``FAMILY/DETAIL``.
        statement: the verdict in words.
        undecided_between: causes that the verdict leaves open.
        declared_open: causes that the variant said beforehand stay open.
        is_detected: the lab noticed that something is wrong: it decided, or the request went wrong.
        unnamed: words of the origin that neither the statement nor the evidence for it holds.
        refuter: the test that must overturn the verdict. refuted: the verdict once it came out the other way.
        twin_said: what the lab wrongly decided of the clean twin, None where it decided nothing.
    """

    wanted: str
    said: str
    statement: str
    undecided_between: tuple[str, ...]
    declared_open: tuple[str, ...]
    is_detected: bool
    unnamed: tuple[str, ...]
    refuter: str
    refuted: str
    twin_said: str | None

    @property
    def is_right(self) -> bool:
        """Whether the family is the planted one, or what was said beforehand to stay open is what stays open."""
        return self.family_said == self.wanted[0] or self.is_open_as_declared

    @property
    def is_open_as_declared(self) -> bool:
        """Whether the lab is undecided, and the variant said beforehand between which causes."""
        left = set(self.declared_open)
        return self.family_said == "V" and bool(left) and left <= set(self.undecided_between)

    @property
    def is_detail_right(self) -> bool:
        """Whether family and detail are the planted ones, or open as was said beforehand."""
        return self.said == self.wanted or self.is_open_as_declared

    @property
    def is_wrong(self) -> bool:
        """Whether another family was decided: worse than undecided."""
        return self.family_said not in ("V", self.wanted[0])

    @property
    def has_flipped(self) -> bool:
        """Whether the refuter overturned the verdict; there is none to overturn where the lab is undecided."""
        return self.refuted != self.wanted

    @property
    def family_said(self) -> str:
        """Letter of the family in the verdict, V when undecided."""
        return self.said[0]


def judge(drill: Drill, variant: Variant, fault: Case, twin: Case) -> Judgement:
    """Ask the lab of a fault, of the same fault refuted, and of its clean twin."""
    subject, clean = remembered(subject_of(fault)), remembered(subject_of(twin))
    refuter = drill.refuter_of(variant)
    verdict = diagnose(subject, num_replays=_NUM_REPLAYS)
    return Judgement(
        wanted=drill.verdict_of(variant),
        said=verdict.key,
        statement=verdict.statement,
        undecided_between=verdict.undecided_between,
        declared_open=variant.undecided_between,
        is_detected=verdict.decided or is_wrong(subject, _NUM_REPLAYS),
        unnamed=tuple(p for p in fault.places if p not in _text(verdict)),
        refuter=refuter.test,
        refuted=diagnose(refuter.flip(subject), num_replays=_NUM_REPLAYS).key,
        twin_said=_said_of_twin(clean, _NUM_REPLAYS_OF_TWIN.get(variant.host, _NUM_REPLAYS)),
    )


def _said_of_twin(clean: Evidence, num_replays: int) -> str | None:
    verdict = diagnose(clean, num_replays=num_replays)
    if verdict.decided:
        return verdict.key
    return "its request is wrong" if is_wrong(clean, num_replays) else None


def is_wrong(subject: Evidence, num_replays: int) -> bool:
    """Whether a run of the request went wrong: a bad value, or far from what it should be."""
    look = Look(subject)
    return look.has("run") and any(look.is_wrong(look.outcome(number=i)) for i in range(num_replays))


def _text(verdict: Verdict) -> str:
    supporting = (e.statement for e in verdict.evidence if verdict.key in e.supports)
    return "\n".join((verdict.statement, *supporting))
