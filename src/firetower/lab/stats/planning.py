"""How many tries an A/B needs, before the first is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

from firetower.core.errors import StatsError
from firetower.lab.stats.check import check_between, check_whole
from firetower.lab.stats.given_total import lower_tails
from firetower.lab.stats.text import count, percent, share

MAX_PLANNED = 50_000
"""Tries an arm beyond which no plan is made: nobody replays that often."""

_NEGLIGIBLE = 1e-9
_LOOK_BACK = 12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``tries_per_arm`` tell ``rate_a`` from ``rate_b`` with probability ``power``.

    Attributes:
        rate_a, rate_b: the true rates planned for.
        confidence: of the test, two-sided.
        wanted_power: asked for.
        tries_per_arm: to make in each arm before looking.
        power: exact, of Fisher's test at that number; Boschloo's, which `compare` uses, has no less.
    """

    rate_a: float
    rate_b: float
    confidence: float
    wanted_power: float
    tries_per_arm: int
    power: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        return (
            f"{count(self.tries_per_arm, 'try')} in each arm tell a rate of {share(self.rate_a)} from "
            f"{share(self.rate_b)} at {percent(self.confidence)} in {percent(round(self.power, 3))} of all "
            f"campaigns (wanted: {percent(self.wanted_power)}). Plan the number, then look once."
        )


def plan(rate_a: float, rate_b: float, *, power: float = 0.8, confidence: float = 0.95) -> Plan:
    """Tries an arm so that `compare` at the planned n finds the difference with probability ``power``.

    The power is summed exactly over outcomes (those rarer than 1e-9 aside) for Fisher's two-sided test. It rises
    in a saw-tooth with n: the answer reaches the wanted power, one try fewer does not.

    Args:
        rate_a, rate_b: true rates to tell apart, 0 to 1, not equal.
        power: wanted, between 0 and 1.
        confidence: of the test, between 0 and 1.

    Raises:
        StatsError: a number out of range, equal rates, or more than `MAX_PLANNED` tries needed.
    """
    rate_a = check_between("rate", rate_a, zero=True, one=True)
    rate_b = check_between("rate", rate_b, zero=True, one=True)
    power = check_between("power", power)
    confidence = check_between("confidence", confidence)
    if rate_a == rate_b:
        raise StatsError(f"rates={share(rate_a)}, {share(rate_b)}: must differ; no number of tries tells them apart")

    @cache
    def reached(tries: int) -> bool:
        return power_at(tries, rate_a, rate_b, confidence=confidence) >= power

    tries = _first_that_reaches(reached, _normal_guess(rate_a, rate_b, power, confidence), (rate_a, rate_b))
    return Plan(
        rate_a=rate_a,
        rate_b=rate_b,
        confidence=confidence,
        wanted_power=power,
        tries_per_arm=tries,
        power=power_at(tries, rate_a, rate_b, confidence=confidence),
    )


def power_at(tries: int, rate_a: float, rate_b: float, *, confidence: float = 0.95) -> float:
    """Probability that Fisher's two-sided test (twice the smaller tail) rejects, ``tries`` in each arm.

    Raises:
        StatsError: a number out of range.
    """
    tries = check_whole("tries", tries, 1)
    fires_a, weight_a = _likely_fires(tries, check_between("rate", rate_a, zero=True, one=True))
    fires_b, weight_b = _likely_fires(tries, check_between("rate", rate_b, zero=True, one=True))
    total = fires_a[:, None] + fires_b[None, :]
    totals = np.arange(total.min(), total.max() + 1)
    fewest, most = int(min(fires_a[0], fires_b[0])), int(max(fires_a[-1], fires_b[-1]))
    # of at least 2 x fewest fires, one arm gets this few once in 10^20 times: no need to sum from 0
    least = max(0, fewest - 10 * math.isqrt(fewest + 1))
    tails = lower_tails(tries, tries, totals, least, most)
    row = total - total.min()
    # both arms have the same number of tries, so one table serves the fires of either
    smaller_tail = np.minimum(tails[row, fires_a[:, None] - least], tails[row, fires_b[None, :] - least])
    rejects = 2 * smaller_tail <= 1 - confidence + 1e-12
    return float(weight_a @ rejects @ weight_b)


def _likely_fires(tries: int, rate: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Numbers of fires that are not negligible, and their probabilities."""
    low, high = (int(x) for x in binom.ppf([_NEGLIGIBLE, 1 - _NEGLIGIBLE], tries, rate))
    fires = np.arange(max(low, 0), high + 1)
    return fires, binom.pmf(fires, tries, rate)


def _normal_guess(rate_a: float, rate_b: float, power: float, confidence: float) -> int:
    """The textbook normal approximation: where to start looking."""
    z = norm.ppf((1 + confidence) / 2) + max(0.0, norm.ppf(power))
    variance = rate_a * (1 - rate_a) + rate_b * (1 - rate_b)
    # a gap so small that its square would underflow needs too many tries anyway
    gap = max(abs(rate_a - rate_b), 1e-9)
    return max(2, math.ceil(float(z) ** 2 * variance / gap**2))


def _first_that_reaches(reached: Callable[[int], bool], guess: int, rates: tuple[float, float]) -> int:
    """Smallest number of tries that reaches the power, but for dips of the saw-tooth further below."""
    high = guess
    while high > MAX_PLANNED or not reached(high):
        high = math.ceil(high * 1.1) + 1
        if high > MAX_PLANNED:
            raise StatsError(
                f"rates={share(rates[0])}, {share(rates[1])}: would need more than {MAX_PLANNED:,} tries an arm; "
                "plan for a larger difference"
            )
    low = high * 3 // 4
    if low and reached(low):
        low, high = 0, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    # a dip of the saw-tooth may have stopped the bisection above a smaller n that reaches it
    while True:
        below = next((n for n in range(high - 1, max(0, high - _LOOK_BACK), -1) if reached(n)), None)
        if below is None:
            return high
        high = below
