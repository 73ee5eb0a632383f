"""The rate of fires with its exact interval, for a number of tries that was fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import binomtest

from firetower.lab.stats.check import check_between, check_count
from firetower.lab.stats.text import count, interval, percent, share


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate of fires a try, and the interval that holds the true one with at least ``confidence``.

    Attributes:
        fires, tries: the counts.
        rate: fires / tries.
        lower, upper: two-sided interval for the true rate, within 0 to 1.
        confidence: what the interval promises, between 0 and 1.
        method: how the interval was made and which way of stopping it assumes, in words.
    """

    fires: int
    tries: int
    rate: float
    lower: float
    upper: float
    confidence: float
    method: str

    @property
    def sentence(self) -> str:
        """The result in words."""
        about = "" if self.fires in (0, self.tries) else f", about 1 in {1 / self.rate:.3g}"
        return (
            f"{count(self.fires, 'fire')} in {count(self.tries, 'try')}: rate {share(self.rate)}{about}; "
            f"{percent(self.confidence)} {interval(self.lower, self.upper)} ({self.method})."
        )


def rate(fires: int, tries: int, *, confidence: float = 0.95) -> Rate:
    """Rate with the exact binomial interval of Clopper and Pearson (Biometrika 26, 1934).

    Covers the true rate with at least ``confidence`` when the tries are independent and their number did
    not depend on what was seen. It also holds, wider than need be, when one went on to a planned number of
    fires (`rounds_rate` is tighter there). It does not hold when one looks now and then and stops when the
    result pleases: use `anytime_rate`.

    Raises:
        StatsError: counts that cannot be, or a confidence outside 0 to 1.
    """
    fires, tries = check_count(fires, tries)
    confidence = check_between("confidence", confidence)
    limits = binomtest(fires, tries).proportion_ci(confidence, method="exact")
    return Rate(
        fires=fires,
        tries=tries,
        rate=fires / tries,
        lower=float(limits.low),
        upper=float(limits.high),
        confidence=confidence,
        method="exact binomial interval, number of tries fixed beforehand",
    )
