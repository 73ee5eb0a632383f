from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, binom

from firetower.lab.stats import anytime_p_value, anytime_rate, compare_watching, rate
from firetower.lab.stats.anytime import log_e_value, log_mixture

counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def three_errors(share: float, trials: int) -> float:
    return 3 * math.sqrt(share * (1 - share) / trials)


@pytest.mark.parametrize(("fires", "tries"), [(0, 5), (2, 9), (7, 7)])
def test_the_mixture_is_the_integral_it_claims(fires, tries):
    # p = sin^2(x) takes the poles of the Beta(1/2, 1/2) density out of the integral
    average, _ = quad(
        lambda x: math.sin(x) ** (2 * fires) * math.cos(x) ** (2 * (tries - fires)) * 2 / math.pi, 0, math.pi / 2
    )
    assert math.exp(log_mixture(fires, tries)) == pytest.approx(average, rel=1e-9)
    assert beta(0.5, 0.5).mean() == 0.5


@pytest.mark.parametrize("p", [0.03, 0.2, 0.5])
def test_the_martingale_keeps_its_mean_of_one(p):
    """The property behind Ville's inequality, summed over every outcome of n tries."""
    for tries in (1, 7, 40):
        fires = np.arange(tries + 1)
        ratio = np.array([math.exp(log_mixture(k, tries)) / (p**k * (1 - p) ** (tries - k)) for k in fires])
        assert binom.pmf(fires, tries, p) @ ratio == pytest.approx(1, rel=1e-9)


@settings(deadline=None)
@given(counts, st.floats(0.5, 0.999))
def test_the_limits_are_where_the_martingale_meets_its_bound(pair, confidence):
    result = anytime_rate(*pair, confidence=confidence)
    assert result.lower <= result.rate <= result.upper
    for p in (result.lower, result.upper):
        if 0 < p < 1:
            fires, tries = pair
            log_ratio = log_mixture(fires, tries) - fires * math.log(p) - (tries - fires) * math.log1p(-p)
            assert log_ratio == pytest.approx(-math.log1p(-confidence), abs=1e-6)


@cache
def limits_at(fires: int, tries: int, anytime: bool) -> tuple[float, float]:
    result = (anytime_rate if anytime else rate)(fires, tries)
    return result.lower, result.upper


def share_ever_missed(p: float, *, anytime: bool, runs: int, looks: int) -> float:
    """Share of simulated campaigns in which the interval misses ``p`` at one look at least."""
    fires = (np.random.default_rng(7).random((runs, looks)) < p).cumsum(axis=1)
    missed = np.zeros(runs, dtype=bool)
    for tries in range(1, looks + 1):
        for k in np.unique(fires[:, tries - 1]):
            lower, upper = limits_at(int(k), tries, anytime)
            if not lower <= p <= upper:
                missed |= fires[:, tries - 1] == k
    return float(missed.mean())


@pytest.mark.parametrize("p", [1 / 18, 0.3])
def test_peeking_after_every_try_does_not_break_the_anytime_interval(p):
    runs = 4000
    assert share_ever_missed(p, anytime=True, runs=runs, looks=150) <= 0.05 + three_errors(0.05, runs)


def test_peeking_does_break_the_interval_for_a_planned_number():
    """Shows that the simulation above can fail."""
    assert share_ever_missed(0.3, anytime=False, runs=300, looks=60) > 0.10


@cache
def p_value_at(fires_a: int, fires_b: int, tries: int) -> float:
    return anytime_p_value(fires_a, tries, fires_b, tries)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_peeking_at_equal_arms_seldom_shows_a_difference(p):
    runs, looks = 2000, 120
    rng = np.random.default_rng(11)
    fires_a, fires_b = ((rng.random((runs, looks)) < p).cumsum(axis=1) for _ in range(2))
    ever = np.zeros(runs, dtype=bool)
    for n in range(looks):
        p_values = [p_value_at(int(a), int(b), n + 1) for a, b in zip(fires_a[:, n], fires_b[:, n], strict=True)]
        ever |= np.array(p_values) <= 0.05
    assert ever.mean() <= 0.05 + three_errors(0.05, runs)


@pytest.mark.parametrize(("a", "b"), [((4, 34), (0, 90)), ((5, 5), (9, 11)), ((30, 40), (3, 40)), ((6, 6), (0, 7))])
def test_evidence_and_difference_are_the_least_product_over_shared_rates(a, b):
    """By brute force: both martingales on a fine grid of rates of A."""
    rates = np.linspace(0, 1, 20_001)
    result = compare_watching(rate(*a), rate(*b))

    def least_product(difference: float) -> float:
        other = rates + difference
        inside = (other >= 0) & (other <= 1)
        likelihood = binom.logpmf(a[0], a[1], rates[inside]) + binom.logpmf(b[0], b[1], other[inside])
        mixtures = sum(log_mixture(k, n) + math.log(math.comb(n, k)) for k, n in (a, b))
        return mixtures - float(likelihood.max())

    assert log_e_value(*a, *b) == pytest.approx(least_product(0.0), abs=1e-3)
    for limit in (result.difference_lower, result.difference_upper):
        if abs(limit) < 1:
            assert least_product(limit) == pytest.approx(math.log(20), abs=1e-2)


def test_a_difference_is_found_while_watching():
    found = compare_watching(rate(40, 340), rate(1, 340), names=("before", "after"))
    assert found.differs
    assert found.p_value == pytest.approx(1 / found.e_value)
    assert found.difference_upper < 0
    assert "after fires less often than before" in found.sentence
    assert "anytime-valid" in found.sentence


def test_watching_costs_width_and_evidence():
    from firetower.lab.stats import compare

    watched, planned = compare_watching(rate(4, 34), rate(0, 90)), compare(rate(4, 34), rate(0, 90))
    assert watched.p_value > planned.p_value
    assert watched.difference_lower < planned.difference_lower
    assert watched.difference_upper > planned.difference_upper


@settings(deadline=None)
@given(counts, counts)
def test_the_watched_difference_leaves_out_zero_exactly_when_the_evidence_suffices(a, b):
    result = compare_watching(rate(*a), rate(*b))
    assert -1 <= result.difference_lower <= result.difference + 1e-9
    assert result.difference - 1e-9 <= result.difference_upper <= 1
    if abs(log_e_value(*a, *b) - math.log(20)) > 1e-4:
        excludes_zero = result.difference_lower > 0 or result.difference_upper < 0
        assert excludes_zero == result.differs


@pytest.mark.slow
def test_the_watched_difference_covers_at_every_look():
    """d is excluded only where the product of both martingales at the true rates has reached 20."""
    runs, looks, p, q = 200, 50, 0.3, 0.1
    rng = np.random.default_rng(3)
    fires_a, fires_b = ((rng.random((runs, looks)) < r).cumsum(axis=1) for r in (p, q))
    missed = np.zeros(runs, dtype=bool)
    for n in range(9, looks, 10):
        for i in range(runs):
            result = watched(int(fires_a[i, n]), int(fires_b[i, n]), n + 1)
            missed[i] |= not result[0] <= q - p <= result[1]
    assert missed.mean() <= 0.05 + three_errors(0.05, runs)


@cache
def watched(fires_a: int, fires_b: int, tries: int) -> tuple[float, float]:
    result = compare_watching(rate(fires_a, tries), rate(fires_b, tries))
    return result.difference_lower, result.difference_upper


def test_overwhelming_evidence_is_infinite_and_not_an_error():
    result = compare_watching(rate(0, 5000), rate(5000, 5000))
    assert result.e_value == math.inf
    assert result.p_value == 0
    assert result.difference_upper == 1
