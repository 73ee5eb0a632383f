"""The exact interval of the difference of two rates that goes with Boschloo's test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import beta, binom

from firetower.lab.stats.given_total import lower_tails

NUM_SHARED_RATES = 200
"""Values of the rate of arm A over which a tail's largest probability is searched, then refined at the best."""


def exact_difference(
    fires_a: int, tries_a: int, fires_b: int, tries_b: int, *, confidence: float
) -> tuple[float, float]:
    """Interval for rate of B minus rate of A, exact at planned numbers of tries.

    For each limit, outcomes are ordered from the most extreme on, and the limit is where the probability of
    an outcome at least as extreme as the observed, largest over every rate that arm A may have, reaches half
    of 1 - ``confidence`` (R. J. Buehler, J. Amer. Statist. Assoc. 52, 1957). The order is Boschloo's where the
    outcome points that way: by Fisher's one-sided p up to 1/2. So at a difference of 0 the probability is
    Boschloo's p, and the interval leaves out 0 exactly when the test (twice the smaller p) rejects. Outcomes that point
    the other way, among which Fisher's p tells little, follow by the difference of the arms' own exact limits.
    Both orders rise with the fires of one arm and fall with those of the other, which makes the probability
    monotone in the difference.

    Args:
        fires_a, tries_a, fires_b, tries_b: counts that have been checked.
        confidence: kept at least, but for the search over rates (about 1e-6).
    """
    upper = _upper_limit(fires_a, tries_a, fires_b, tries_b, confidence)
    lower = -_upper_limit(fires_b, tries_b, fires_a, tries_a, confidence)
    return lower, upper


def _upper_limit(fires_a: int, tries_a: int, fires_b: int, tries_b: int, confidence: float) -> float:
    """Largest rate of B minus rate of A at which so few fires in B are not yet too rare."""
    if fires_a == 0 and fires_b == tries_b:
        return 1.0
    most_b = _largest_in_tail(fires_a, tries_a, fires_b, tries_b, confidence)

    def excess(difference: float) -> float:
        return _largest_probability(difference, tries_a, tries_b, most_b) - (1 - confidence) / 2

    end = 1 - 1e-9
    return 1.0 if excess(end) > 0 else float(brentq(excess, -end, end, xtol=1e-7))


def _largest_in_tail(fires_a: int, tries_a: int, fires_b: int, tries_b: int, confidence: float) -> NDArray[np.int64]:
    """For each number of fires in A, the most in B that speak as strongly for a low rate in B; -1 for none."""
    totals = np.arange(tries_a + tries_b + 1)
    by_total = lower_tails(tries_a, tries_b, totals, 0, tries_b)
    grid_a, grid_b = np.ogrid[: tries_a + 1, : tries_b + 1]
    fisher = by_total[grid_a + grid_b, grid_b]
    each = (1 - confidence) / 4
    highest_b = np.append(beta.isf(each, grid_b[0, :-1] + 1, tries_b - grid_b[0, :-1]), 1.0)
    lowest_a = np.insert(beta.ppf(each, grid_a[1:, 0], tries_a - grid_a[1:, 0] + 1), 0, 0.0)
    # the second part lies in 1 to 3, behind every p of the first
    order = np.where(fisher <= 0.5, fisher, 2 + highest_b[None, :] - lowest_a[:, None])
    # ties are ties but for the last bits of the logarithms
    inside = order <= order[fires_a, fires_b] * (1 + 1e-7)
    return np.asarray(np.where(inside, grid_b, -1).max(axis=1))


def _largest_probability(difference: float, tries_a: int, tries_b: int, most_b: NDArray[np.int64]) -> float:
    """Probability of the tail when B's rate is A's plus ``difference``, at the worst rate of A."""
    fires_a = np.arange(tries_a + 1)[:, None]

    def probability(rates: NDArray[np.float64]) -> NDArray[np.float64]:
        other = np.clip(rates + difference, 0.0, 1.0)
        return np.asarray((binom.pmf(fires_a, tries_a, rates) * binom.cdf(most_b[:, None], tries_b, other)).sum(axis=0))

    low, high = max(0.0, -difference), min(1.0, 1 - difference)
    rates = np.linspace(low, high, NUM_SHARED_RATES + 1)
    values = probability(rates)
    best = int(values.argmax())
    bounds = (rates[max(best - 1, 0)], rates[min(best + 1, NUM_SHARED_RATES)])
    refined = minimize_scalar(lambda p: -float(probability(np.array([p]))[0]), bounds=bounds, method="bounded")
    return max(float(values[best]), -float(refined.fun))
