"""What a run of drills comes to: figures with their bars, a confusion matrix, a line a drill."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from firetower.core.families import FAMILIES
from firetower.core.verdict import UNDECIDED
from firetower.drills.runner import Result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A count of variants and the bar that its share must reach; ``at_most``: the bar is a ceiling."""

    name: str
    count: int
    total: int
    bar: float
    at_most: bool = False

    @property
    def share(self) -> float:
        """Of the total, 0 where there is none."""
        return self.count / self.total if self.total else 0.0

    @property
    def is_met(self) -> bool:
        """Whether the share reaches its bar."""
        return self.share <= self.bar if self.at_most else self.share >= self.bar

    def __str__(self) -> str:
        relation = "at most" if self.at_most else "at least"
        met = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.count} of {self.total} ({self.share:.1%}), bar {relation} {self.bar:.0%}: {met}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One drill's variants: how many ran, and of how many each thing holds."""

    drill: str
    verdict: str
    num_variants: int
    detected: int
    placed: int
    right: int
    flipped: int
    silent: int
    elapsed_ms: float


def ran(results: Sequence[Result]) -> list[Result]:
    """The results of variants that could run."""
    return [r for r in results if not r.skipped]


def figures(results: Sequence[Result]) -> tuple[Figure, ...]:
    """The figures of a board, over the variants that ran and were judged."""
    found = ran(results)

    def count(holds: Callable[[Result], bool]) -> int:
        return sum(map(holds, found))

    n = len(found)
    return (
        Figure(name="detected", count=count(lambda r: r.is_detected), total=n, bar=1.0),
        Figure(name="origin exact", count=count(lambda r: r.is_placed), total=n, bar=0.98),
        Figure(name="twins that fired", count=count(lambda r: not r.is_twin_silent), total=n, bar=0, at_most=True),
        Figure(name="family right", count=count(_is_right), total=n, bar=0.85),
        Figure(name="family wrong", count=count(_is_wrong), total=n, bar=0.02, at_most=True),
        Figure(name="undecided unannounced", count=count(_is_open), total=n, bar=0, at_most=True),
        Figure(name="refuter flips", count=count(_has_flipped), total=n, bar=1.0),
    )


def lines(results: Sequence[Result]) -> list[Line]:
    """A line a drill, in the order in which they ran."""
    by_drill: dict[str, list[Result]] = {}
    for r in ran(results):
        by_drill.setdefault(r.drill, []).append(r)
    return [
        Line(
            drill=name,
            verdict=", ".join(dict.fromkeys(r.judgement.wanted for r in group if r.judgement)),
            num_variants=len(group),
            detected=sum(r.is_detected for r in group),
            placed=sum(r.is_placed for r in group),
            right=sum(map(_is_right, group)),
            flipped=sum(map(_has_flipped, group)),
            silent=sum(r.is_twin_silent for r in group),
            elapsed_ms=sum(r.elapsed_ms for r in group),
        )
        for name, group in by_drill.items()
    ]


def confusion(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """Family planted -> family said -> how many variants; undecided is ``V``."""
    counts = Counter((r.judgement.wanted[0], r.judgement.family_said) for r in ran(results) if r.judgement is not None)
    planted = [f for f in FAMILIES if any(want == f for want, _ in counts)]
    said = [f for f in FAMILIES if f != UNDECIDED and any(got == f for _, got in counts)]
    return {want: {got: counts[want, got] for got in (*said, UNDECIDED)} for want in planted}


def misses(results: Sequence[Result]) -> list[Result]:
    """Variants of which anything at all was not as it should be."""
    return [r for r in ran(results) if not (r.is_detected and r.is_exact and _is_right(r) and _has_flipped(r))]


def _is_right(r: Result) -> bool:
    return r.judgement is not None and r.judgement.is_right


def _is_wrong(r: Result) -> bool:
    return r.judgement is not None and r.judgement.is_wrong


def _is_open(r: Result) -> bool:
    return r.judgement is not None and r.judgement.family_said == UNDECIDED and not r.judgement.is_right


def _has_flipped(r: Result) -> bool:
    return r.judgement is not None and r.judgement.has_flipped
