"""Two arms compared once, at the numbers of tries that were planned."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import boschloo_exact, hypergeom
from scipy.stats.contingency import odds_ratio

from firetower.lab.stats.binomial import Rate, rate
from firetower.lab.stats.check import check_between
from firetower.lab.stats.difference import exact_difference
from firetower.lab.stats.text import count, interval, percent, share

MAX_BOSCHLOO_TABLES = 60_000
"""Possible outcomes (tries_a + 1) x (tries_b + 1) up to which Boschloo's test takes about a second."""

MAX_DIFFERENCE_TABLES = 500_000
"""Possible outcomes up to which the exact interval of the difference takes a few seconds."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arm B held against arm A.

    Attributes:
        a, b: the rate of each arm with its own exact interval.
        names: of A and B.
        p_value: two-sided, of "both arms have one rate".
        test: ``boschloo`` or ``fisher``, the exact test it comes from.
        difference, difference_lower, difference_upper: rate of B minus rate of A and its interval.
        odds_ratio, odds_ratio_lower, odds_ratio_upper: odds of a fire in B over those in A, conditional
            maximum likelihood with exact interval; 0 or Inf where an arm has no fire or no clean try, NaN
            where both have none.
        confidence: of the intervals, each at least kept.
    """

    a: Rate
    b: Rate
    names: tuple[str, str]
    p_value: float
    test: str
    difference: float
    difference_lower: float
    difference_upper: float
    odds_ratio: float
    odds_ratio_lower: float
    odds_ratio_upper: float
    confidence: float

    @property
    def differs(self) -> bool:
        """Whether the test rejects "one rate" at 1 - confidence."""
        return self.p_value <= 1 - self.confidence + 1e-12

    @property
    def sentence(self) -> str:
        """The result in words."""
        return (
            f"{verdict(self.a, self.b, self.names, self.differs)} "
            f"(p={share(self.p_value)}, {self.test.capitalize()}'s exact test at the planned n). Rate of "
            f"{self.names[1]} minus rate of {self.names[0]}: {share(self.difference)}, {percent(self.confidence)} "
            f"{interval(self.difference_lower, self.difference_upper)}."
        )


def compare(a: Rate, b: Rate, *, names: tuple[str, str] = ("A", "B"), confidence: float = 0.95) -> Comparison:
    """Exact test of "both arms have one rate", effect sizes with intervals.

    The test is Boschloo's (R. D. Boschloo, Statistica Neerlandica 24, 1970): exact for two arms whose numbers
    of tries were planned, and at no point weaker than Fisher's, which also fixes the total of fires that
    nobody fixed. Beyond `MAX_BOSCHLOO_TABLES` outcomes it is Fisher's. Both are two-sided as twice the
    smaller one-sided p. Only for one look at the planned n: while watching, use `compare_watching`.

    The interval of the difference (`exact_difference`) leaves out 0 exactly when Boschloo's test rejects.
    Beyond `MAX_DIFFERENCE_TABLES` it combines the exact intervals of the arms, each at the square root of
    ``confidence``: never too narrow, but wider. The odds ratio's interval is exact given the total and goes
    with Fisher's test.

    Args:
        a, b: only their counts are used.
        names: for the sentence.
        confidence: of the intervals; the test is at 1 - confidence.

    Raises:
        StatsError: a confidence outside 0 to 1.
    """
    confidence = check_between("confidence", confidence)
    test, p_value = exact_p_value(a.fires, a.tries, b.fires, b.tries)
    lower, upper = _difference_limits(a, b, confidence)
    odds = odds_ratio([[b.fires, a.fires], [b.tries - b.fires, a.tries - a.fires]], kind="conditional")
    odds_limits = odds.confidence_interval(confidence)
    return Comparison(
        a=rate(a.fires, a.tries, confidence=confidence),
        b=rate(b.fires, b.tries, confidence=confidence),
        names=names,
        p_value=p_value,
        test=test,
        difference=b.rate - a.rate,
        difference_lower=lower,
        difference_upper=upper,
        odds_ratio=float(odds.statistic),
        odds_ratio_lower=float(odds_limits.low),
        odds_ratio_upper=float(odds_limits.high),
        confidence=confidence,
    )


def exact_p_value(fires_a: int, tries_a: int, fires_b: int, tries_b: int) -> tuple[str, float]:
    """Name and two-sided p-value of the exact test that fits the size."""
    fires, tries = fires_a + fires_b, tries_a + tries_b
    if (tries_a + 1) * (tries_b + 1) > MAX_BOSCHLOO_TABLES:
        law = hypergeom(tries, fires, tries_b)
        return "fisher", float(min(1.0, 2 * min(law.cdf(fires_b), law.sf(fires_b - 1))))
    if fires in (0, tries):
        return "boschloo", 1.0  # no table says more for a difference in either direction
    table = [[fires_a, fires_b], [tries_a - fires_a, tries_b - fires_b]]
    return "boschloo", float(min(1.0, boschloo_exact(table).pvalue))


def _difference_limits(a: Rate, b: Rate, confidence: float) -> tuple[float, float]:
    if (a.tries + 1) * (b.tries + 1) <= MAX_DIFFERENCE_TABLES:
        return exact_difference(a.fires, a.tries, b.fires, b.tries, confidence=confidence)
    each = math.sqrt(confidence)
    wide_a, wide_b = rate(a.fires, a.tries, confidence=each), rate(b.fires, b.tries, confidence=each)
    return wide_b.lower - wide_a.upper, wide_b.upper - wide_a.lower


def verdict(a: Rate, b: Rate, names: tuple[str, str], differs: bool) -> str:
    """The comparison in words, without its figures of merit."""
    counts = f"{count(b.fires, 'fire')} in {count(b.tries, 'try')} against {a.fires:,} in {a.tries:,}"
    if differs:
        return f"{names[1]} fires {'less' if b.rate < a.rate else 'more'} often than {names[0]}: {counts}"
    return f"No difference shown between {names[0]} and {names[1]}, which does not prove them equal: {counts}"
