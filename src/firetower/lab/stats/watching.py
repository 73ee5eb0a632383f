"""Two arms compared while the tries come in: look as often as you like, stop when you like."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq, minimize_scalar

from firetower.lab.stats.anytime import anytime_rate, log_e_value, log_likelihood, log_mixture
from firetower.lab.stats.binomial import Rate
from firetower.lab.stats.check import check_between
from firetower.lab.stats.comparison import verdict
from firetower.lab.stats.text import interval, percent, share


@dataclass(frozen=True, kw_only=True)
class WatchedComparison:
    """Arm B held against arm A, valid at every look at once.

    Attributes:
        a, b: the rate of each arm with its own anytime-valid interval.
        names: of A and B.
        p_value: of "both arms have one rate"; at or below 1 - confidence one may stop and say they differ.
        e_value: the evidence against one rate, 1 / p_value where that is below 1; Inf beyond the largest double.
        difference, difference_lower, difference_upper: rate of B minus rate of A and its interval; it
            leaves out 0 exactly when p_value is below 1 - confidence.
        confidence: of the intervals, at least kept.
    """

    a: Rate
    b: Rate
    names: tuple[str, str]
    p_value: float
    e_value: float
    difference: float
    difference_lower: float
    difference_upper: float
    confidence: float

    @property
    def differs(self) -> bool:
        """Whether one may stop now and say that the arms differ."""
        return self.p_value <= 1 - self.confidence + 1e-12

    @property
    def sentence(self) -> str:
        """The result in words."""
        return (
            f"{verdict(self.a, self.b, self.names, self.differs)} "
            f"(p={share(self.p_value)}, anytime-valid: looking as often as you like is allowed). Rate of "
            f"{self.names[1]} minus rate of {self.names[0]}: {share(self.difference)}, {percent(self.confidence)} "
            f"{interval(self.difference_lower, self.difference_upper)}."
        )


def compare_watching(
    a: Rate, b: Rate, *, names: tuple[str, str] = ("A", "B"), confidence: float = 0.95
) -> WatchedComparison:
    """Anytime-valid comparison (see `anytime`): p-value, evidence, difference with interval.

    The interval holds every difference d for which the product of both martingales, at the shared rate p
    and p + d where it is least, is still below 1 / (1 - confidence).

    Args:
        a, b: only their counts are used.
        names: for the sentence.
        confidence: of the intervals.

    Raises:
        StatsError: a confidence outside 0 to 1.
    """
    confidence = check_between("confidence", confidence)
    log_e = log_e_value(a.fires, a.tries, b.fires, b.tries)
    return WatchedComparison(
        a=anytime_rate(a.fires, a.tries, confidence=confidence),
        b=anytime_rate(b.fires, b.tries, confidence=confidence),
        names=names,
        p_value=min(1.0, math.exp(-log_e)),
        e_value=math.exp(log_e) if log_e < 709 else math.inf,
        difference=b.rate - a.rate,
        difference_lower=-_upper_difference(b, a, confidence),
        difference_upper=_upper_difference(a, b, confidence),
        confidence=confidence,
    )


def _upper_difference(a: Rate, b: Rate, confidence: float) -> float:
    """Largest rate of ``b`` minus rate of ``a`` that is not excluded."""
    barrier = log_mixture(a.fires, a.tries) + log_mixture(b.fires, b.tries) + math.log1p(-confidence)
    estimate = b.rate - a.rate

    def excess(difference: float) -> float:
        return barrier - _best_log_likelihood(a, b, difference)

    # the log-likelihood is concave in both rates, so its best over p falls steadily away from the estimate
    end = 1 - 1e-12
    if estimate >= end or excess(end) <= 0:
        return 1.0
    return float(brentq(excess, estimate, end, xtol=1e-10))


def _best_log_likelihood(a: Rate, b: Rate, difference: float) -> float:
    """Largest log-likelihood of two arms whose rates are p and p + ``difference``, over all p."""

    def cost(p: float) -> float:
        # the ends are rounded: p + difference must not leave 0 to 1 by a last bit
        other = min(max(p + difference, 0.0), 1.0)
        return -log_likelihood(a.fires, a.tries, p) - log_likelihood(b.fires, b.tries, other)

    low, high = max(0.0, -difference), min(1.0, 1 - difference)
    best = minimize_scalar(cost, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    return -float(best.fun)
