"""What many fires, or many tries, say together: the records that the lab makes and the report shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Speaks = Literal["for", "against", "excludes"]
"""How an observation bears on a hypothesis. ``excludes``: it cannot be the one cause of what was seen."""

Standing = Literal["favoured", "open", "weakened", "excluded"]
"""Where a hypothesis is left by all observations; none of the four is a proof."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One property over all fires. ``counts`` are (value, fires with it), the most frequent first.

    ``num_fires`` includes the fires of which the property is not known.
    """

    name: str
    counts: tuple[tuple[str, int], ...]
    num_fires: int

    @property
    def num_known(self) -> int:
        """Fires of which the property is known."""
        return sum(n for _, n in self.counts)

    @property
    def is_invariant(self) -> bool:
        """Whether at least two fires are known and all of them agree."""
        return len(self.counts) == 1 and self.counts[0][1] >= 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One thing that was seen over all fires: a column of the table hypothesis x evidence.

    ``limit`` says what it does not show. ``speaks`` maps keys of hypotheses to how it bears on them.
    ``fires`` are the ids it rests on; empty when it rests on the incident as a whole.
    """

    name: str
    statement: str
    limit: str = ""
    speaks: Mapping[str, Speaks] = dataclasses.field(default_factory=dict)
    fires: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One class of causes against all observations: a row of the table.

    ``key`` is a family's letter or ``FAMILY/DETAIL``; ``why`` what speaks for or against it, in words;
    ``test`` what would tell; ``prior`` how often it was met in public reports.
    """

    key: str
    title: str
    standing: Standing
    why: str
    test: str
    prior: str = ""

    @property
    def looks_like(self) -> str:
        """The hypothesis as a sentence: what it looks like, why, and which test tells."""
        prior = f" ({self.prior})" if self.prior else ""
        return f"looks like {self.key} {self.title}{prior} because {self.why}; the test that tells: {self.test}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FireLine:
    """One fire within the analysis. ``excludes`` are (hypothesis, reason) that this fire alone rules out for itself.

    ``first_layers`` maps a signal to the layer in which it was first bad, None where it stayed clean.
    """

    id: str
    summary: str
    origin: str = ""
    first_layers: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    excludes: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BitsLine:
    """One bit pattern that fires showed: where, in how many, and what it says and cannot prove."""

    bits_hex: str
    dtype: str
    where: str
    count: int
    sentences: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What several fires say together.

    Attributes:
        title: what was analysed.
        num_fires: all fires, also those of which nothing but their number is known.
        num_traced: fires of which the first bad signal is known.
        survivorship: in words, what the untraced fires leave open.
        traits: what is invariant and what varies.
        bits: the patterns that were seen.
        rate: sentences on the rate of fires and on what would support "fixed".
        observations, hypotheses: columns and rows of the table hypothesis x evidence.
        fires: each fire that is known by itself.
        reported: (what the reporter tested, how it bears on the hypotheses).
        conclusion: what follows, and what does not.
        next_steps: what to look at next, the most telling first.
        environment: (name, value) facts on engine, device and request.
    """

    title: str
    num_fires: int
    num_traced: int
    survivorship: str
    conclusion: str
    traits: tuple[Trait, ...] = ()
    bits: tuple[BitsLine, ...] = ()
    rate: tuple[str, ...] = ()
    observations: tuple[Observation, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    fires: tuple[FireLine, ...] = ()
    reported: tuple[tuple[str, str], ...] = ()
    next_steps: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def having(self, standing: Standing) -> tuple[Hypothesis, ...]:
        """The hypotheses left with one standing."""
        return tuple(h for h in self.hypotheses if h.standing == standing)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """Fires among the first ``tries``, with the interval of the rate that holds at every look at once."""

    tries: int
    fires: int
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalPoint:
    """Share of tries without a fire after a token position, with its interval."""

    position: int
    surviving: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArmCurve:
    """The tries of one arm. ``last`` is the furthest token position that any of its tries reached."""

    name: str
    settings: str
    points: tuple[RatePoint, ...]
    sentence: str
    survival: tuple[SurvivalPoint, ...] = ()
    survival_sentence: str = ""
    last: int = 0

    @property
    def tries(self) -> int:
        """Tries that count."""
        return self.points[-1].tries if self.points else 0

    @property
    def fires(self) -> int:
        """Fires among them."""
        return self.points[-1].fires if self.points else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignCurves:
    """A replay campaign as its report shows it.

    ``sentences`` compare the arms and say what clean tries support; ``notes`` are what limits them;
    ``facts`` are (name, value) on capture, target and environment.
    """

    title: str
    arms: tuple[ArmCurve, ...]
    sentences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
