"""What clean tries prove: how many exclude a rate, and which rates those made so far exclude."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firetower.core.errors import StatsError
from firetower.lab.stats.binomial import Rate
from firetower.lab.stats.check import check_between, check_whole
from firetower.lab.stats.text import count, percent, share


@dataclass(frozen=True, kw_only=True)
class CleanNeeded:
    """``tries`` clean ones in a row exclude ``rate`` at ``confidence``; one fewer does not."""

    rate: float
    confidence: float
    tries: int

    @property
    def sentence(self) -> str:
        """The result in words."""
        return (
            f"{count(self.tries, 'clean try')} in a row needed to exclude a rate of {share(self.rate)} "
            f"at {percent(self.confidence)}."
        )


@dataclass(frozen=True, kw_only=True)
class CleanSoFar:
    """What a row of clean tries excludes.

    Attributes:
        tries: clean ones so far; 0 excludes nothing.
        confidence: of the exclusion, one-sided.
        excludes_above: every rate above it is excluded.
        rate: a rate to hold against it, or None.
        chance: how often ``rate`` would give as many clean tries by luck; None without ``rate``.
    """

    tries: int
    confidence: float
    excludes_above: float
    rate: float | None = None
    chance: float | None = None

    @property
    def sentence(self) -> str:
        """The result in words."""
        made = f"{count(self.tries, 'clean try')} so far"
        at = percent(self.confidence)
        said = (
            f"{made} exclude no rate."
            if not self.tries
            else f"{made} exclude rates above {share(self.excludes_above)} at {at}."
        )
        if self.rate is not None and self.chance is not None and self.tries:
            said += f" A rate of {share(self.rate)} would leave them all clean with probability {share(self.chance)}."
        return said


@dataclass(frozen=True, kw_only=True)
class FixedSupport:
    """Clean tries after a change that support "fixed", against two readings of the rate before it.

    Attributes:
        before: the rate before the change.
        confidence: at which the old rate is excluded.
        at_point: clean tries that exclude ``before.rate``: enough if that estimate is right.
        at_lower: clean tries that exclude ``before.lower``: enough even if the estimate was unlucky.
    """

    before: Rate
    confidence: float
    at_point: int
    at_lower: int

    @property
    def sentence(self) -> str:
        """The result in words."""
        return (
            f'To support "fixed" at {percent(self.confidence)} after a change: {count(self.at_point, "clean try")} '
            f"against the point rate {share(self.before.rate)}, {self.at_lower:,} against the lower limit "
            f"{share(self.before.lower)}, which allows for luck in the estimate."
        )


def clean_needed(rate: float, *, confidence: float = 0.95) -> CleanNeeded:
    """Smallest n with (1 - rate)^n <= 1 - confidence.

    Args:
        rate: to exclude, above 0 to 1.
        confidence: between 0 and 1.

    Raises:
        StatsError: a rate or confidence out of range, or more tries than anybody makes.
    """
    rate = check_between("rate", rate, one=True)
    confidence = check_between("confidence", confidence)
    if rate == 1:
        return CleanNeeded(rate=rate, confidence=confidence, tries=1)
    exact = math.log1p(-confidence) / math.log1p(-rate)
    # decimal inputs such as 0.99 and 0.9999 hit a whole number but for the last bits of the logarithms
    tries = max(1, math.ceil(exact - 1e-9 * max(1.0, exact)))
    return CleanNeeded(rate=rate, confidence=confidence, tries=check_whole("clean tries needed", tries, 1))


def clean_so_far(tries: int, *, rate: float | None = None, confidence: float = 0.95) -> CleanSoFar:
    """The rate 1 - (1 - confidence)^(1/tries), above which ``tries`` clean ones leave nothing standing.

    One-sided, exact for independent tries. No penalty for looking in between: a fire ends the row.

    Args:
        tries: clean ones in a row, 0 or more.
        rate: a rate to hold against it, above 0 to 1.
        confidence: between 0 and 1.

    Raises:
        StatsError: a number out of range.
    """
    tries = check_whole("clean", tries, 0)
    confidence = check_between("confidence", confidence)
    above = -math.expm1(math.log1p(-confidence) / tries) if tries else 1.0
    if rate is None:
        return CleanSoFar(tries=tries, confidence=confidence, excludes_above=above)
    rate = check_between("rate", rate, one=True)
    chance = (1 - rate) ** tries
    return CleanSoFar(tries=tries, confidence=confidence, excludes_above=above, rate=rate, chance=chance)


def fixed_support(before: Rate, *, confidence: float = 0.95) -> FixedSupport:
    """Clean tries that would support "fixed", at the point rate and at the lower limit of ``before``.

    Raises:
        StatsError: ``before`` has no fire, so there is no rate to exclude.
    """
    if not before.fires:
        raise StatsError(f"0/{before.tries}: no fire yet, so no rate that clean tries could exclude")
    return FixedSupport(
        before=before,
        confidence=confidence,
        at_point=clean_needed(before.rate, confidence=confidence).tries,
        at_lower=clean_needed(before.lower, confidence=confidence).tries,
    )
