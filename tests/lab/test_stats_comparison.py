from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, boschloo_exact, fisher_exact, hypergeom, nchypergeom_fisher

from firetower.core.errors import StatsError
from firetower.lab.stats import compare, plan, power_at, rate
from firetower.lab.stats.comparison import MAX_BOSCHLOO_TABLES
from firetower.lab.stats.difference import exact_difference
from firetower.lab.stats.given_total import lower_tails


def against(a: str, b: str, **options):
    (fires_a, tries_a), (fires_b, tries_b) = (map(int, x.split("/")) for x in (a, b))
    return compare(rate(fires_a, tries_a), rate(fires_b, tries_b), **options)


def one_sided_boschloo(fires_a: int, tries_a: int, fires_b: int, tries_b: int) -> float:
    """By definition and by brute force: Fisher's p of every table by SciPy, 4,001 shared rates."""
    rates = np.linspace(0, 1, 4001)
    grid_a, grid_b = np.arange(tries_a + 1), np.arange(tries_b + 1)
    fisher = np.array([[hypergeom.cdf(y, tries_a + tries_b, x + y, tries_b) for y in grid_b] for x in grid_a])
    inside = fisher <= fisher[fires_a, fires_b] * (1 + 1e-9)
    pmf_a, pmf_b = binom.pmf(grid_a[:, None], tries_a, rates), binom.pmf(grid_b[:, None], tries_b, rates)
    return float(np.einsum("ag,ab,bg->g", pmf_a, inside, pmf_b).max())


def test_boschloo_has_the_value_of_its_published_example():
    # SciPy's documentation of boschloo_exact: satisfied are 74 of 117 professors, 31 of 63 scientists; one-sided .0355
    result = against("31/63", "74/117")
    assert result.test == "boschloo"
    assert result.p_value == pytest.approx(2 * 0.0355, abs=2e-4)  # printed there with four digits


@pytest.mark.parametrize("table", [(4, 12, 0, 20), (5, 15, 0, 15), (3, 10, 9, 11), (0, 8, 3, 8)], ids=str)
def test_boschloo_is_the_largest_tail_over_shared_rates(table):
    less = one_sided_boschloo(*table)
    more = one_sided_boschloo(table[2], table[3], table[0], table[1])
    result = compare(rate(*table[:2]), rate(*table[2:]))
    assert result.p_value == pytest.approx(min(1, 2 * min(less, more)), rel=1e-3)


def test_boschloo_is_never_weaker_than_doubled_fisher():
    for fires_a, fires_b in [(5, 0), (6, 1), (9, 3), (2, 2)]:
        table = [[fires_a, fires_b], [40 - fires_a, 40 - fires_b]]
        fisher = min(1.0, 2 * min(fisher_exact(table, alternative=a).pvalue for a in ("less", "greater")))
        assert against(f"{fires_a}/40", f"{fires_b}/40").p_value <= fisher + 1e-9


def test_many_tries_are_compared_by_fisher_and_the_sentence_says_so():
    assert MAX_BOSCHLOO_TABLES < 401 * 401
    result = against("17/400", "3/400")
    table = [[17, 3], [383, 397]]
    assert result.test == "fisher"
    assert result.p_value == pytest.approx(2 * fisher_exact(table, alternative="greater").pvalue, rel=1e-9)
    assert "Fisher's exact test" in result.sentence


def test_the_odds_ratio_has_the_published_limits():
    # R's fisher.test on Fisher's tea tasting: estimate 6.408309, one-sided 95% from 0.3135693, that is two-sided 90%
    result = against("1/4", "3/4", confidence=0.9)
    assert result.odds_ratio == pytest.approx(6.408309, rel=1e-5)
    assert result.odds_ratio_lower == pytest.approx(0.3135693, rel=2e-5)  # R's root finder stops there
    # 3 of the 4 fires in B, or more, at the lower limit
    assert nchypergeom_fisher.sf(2, 8, 4, 4, result.odds_ratio_lower) == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b"),
    [("4/34", "0/24"), ("4/34", "0/90"), ("5/40", "0/40"), ("6/40", "0/40"), ("1/40", "7/40"), ("3/20", "4/31")],
)
def test_the_difference_leaves_out_zero_exactly_when_the_test_rejects(a, b):
    result = against(a, b)
    excludes_zero = result.difference_lower > 0 or result.difference_upper < 0
    assert excludes_zero == result.differs == (result.p_value <= 0.05)
    assert result.difference_lower <= result.difference <= result.difference_upper


def test_the_far_limit_tells_something_too():
    # no rate of B is below 0, so the difference is no lower than minus the upper limit of A
    result = against("4/34", "0/90")
    assert result.difference_lower == pytest.approx(-result.a.upper, abs=1e-3)


def test_the_difference_covers_at_every_pair_of_rates():
    tries_a, tries_b = 6, 5
    limits = np.array([[exact_difference(x, tries_a, y, tries_b, confidence=0.9) for y in range(6)] for x in range(7)])
    grid = np.linspace(0.01, 0.99, 25)
    for p in grid:
        for q in grid:
            inside = (limits[..., 0] <= q - p + 1e-6) & (q - p - 1e-6 <= limits[..., 1])
            weights = np.outer(binom.pmf(range(7), tries_a, p), binom.pmf(range(6), tries_b, q))
            assert (weights * inside).sum() >= 0.9 - 1e-6, (p, q)


def test_the_test_rejects_equal_arms_no_more_often_than_promised():
    tries_a, tries_b = 7, 5
    rejects = np.array(
        [[against(f"{x}/{tries_a}", f"{y}/{tries_b}").differs for y in range(6)] for x in range(8)], dtype=float
    )
    assert rejects.any()
    for p in np.linspace(0.01, 0.99, 99):
        level = binom.pmf(range(8), tries_a, p) @ rejects @ binom.pmf(range(6), tries_b, p)
        assert level <= 0.05 + 1e-6, p


def test_the_interval_beyond_the_table_limit_is_the_wide_one():
    result = against("40/2000", "10/2000")
    each = math.sqrt(0.95)
    a, b = rate(40, 2000, confidence=each), rate(10, 2000, confidence=each)
    assert result.difference_lower == b.lower - a.upper
    assert result.difference_upper == b.upper - a.lower


def test_swapping_the_arms_mirrors_everything():
    one, other = against("4/34", "1/60"), against("1/60", "4/34")
    assert one.p_value == pytest.approx(other.p_value, rel=1e-6)
    assert one.difference_lower == pytest.approx(-other.difference_upper, abs=1e-6)
    assert one.odds_ratio == pytest.approx(1 / other.odds_ratio, rel=1e-6)


@pytest.mark.parametrize(("a", "b"), [("0/3", "0/4"), ("3/3", "4/4")])
def test_arms_without_contrast_show_no_difference(a, b):
    result = against(a, b)
    assert result.p_value == 1
    assert math.isnan(result.odds_ratio)
    assert result.difference_lower < 0 < result.difference_upper
    assert result.sentence.startswith("No difference shown")


def test_the_sentence_names_the_arms_and_the_direction():
    assert against("4/34", "0/90", names=("before", "after")).sentence.startswith(
        "after fires less often than before: 0 fires in 90 tries against 4 in 34 (p=.0058, Boschloo's"
    )
    assert "more often" in against("0/90", "4/34").sentence


def test_bulk_tails_equal_those_of_scipy():
    totals = np.arange(0, 61)
    expected = hypergeom.cdf(np.arange(21)[None], 60, totals[:, None], 20)
    np.testing.assert_allclose(lower_tails(40, 20, totals, 0, 20), expected, rtol=1e-11)


def power_by_hand(tries: int, rate_a: float, rate_b: float) -> float:
    total = 0.0
    for x in range(tries + 1):
        for y in range(tries + 1):
            table = [[x, y], [tries - x, tries - y]]
            tails = [fisher_exact(table, alternative=a).pvalue for a in ("less", "greater")]
            if 2 * min(tails) <= 0.05 + 1e-12:
                total += binom.pmf(x, tries, rate_a) * binom.pmf(y, tries, rate_b)
    return total


@pytest.mark.parametrize(("tries", "rates"), [(8, (0.9, 0.1)), (14, (0.5, 0.02)), (17, (0.0, 0.4))], ids=str)
def test_power_is_the_sum_over_every_outcome(tries, rates):
    assert power_at(tries, *rates) == pytest.approx(power_by_hand(tries, *rates), abs=1e-7)


@pytest.mark.parametrize(
    ("rate_a", "rate_b", "power"), [(0.5, 0.05, 0.8), (0.3, 0.0, 0.9), (1, 0, 0.8), (0.4, 0.6, 0.1)]
)
def test_a_plan_is_the_smallest_number_that_reaches_the_power(rate_a, rate_b, power):
    result = plan(rate_a, rate_b, power=power)
    powers = [power_at(n, rate_a, rate_b) for n in range(1, result.tries_per_arm + 1)]
    assert powers[-1] == result.power >= power
    assert all(p < power for p in powers[:-1])


def test_boschloo_keeps_the_power_that_was_planned_with_fisher():
    result = plan(0.5, 0.05)
    tries = result.tries_per_arm
    achieved = 0.0
    for x in range(tries + 1):
        for y in range(tries + 1):
            weight = binom.pmf(x, tries, 0.5) * binom.pmf(y, tries, 0.05)
            if weight > 1e-4:
                p = boschloo_exact([[x, y], [tries - x, tries - y]]).pvalue
                achieved += weight * (p <= 0.05)
    assert achieved >= result.power - 0.005  # the outcomes left out above


def test_a_plan_for_the_incident():
    result = plan(1 / 18, 1 / 100)
    assert (result.tries_per_arm, round(result.power, 3)) == (255, 0.801)
    assert result.sentence.startswith("255 tries in each arm tell a rate of .056 from .010 at 95%")


@pytest.mark.parametrize(
    ("rates", "options", "message"),
    [
        ((0.2, 0.2), {}, "must differ"),
        ((0.056, 0.0559), {}, "more than 50,000 tries"),
        ((1e-300, 0.0), {}, "more than 50,000 tries"),
        ((1.2, 0.1), {}, "rate=1.2"),
        ((0.2, 0.1), {"power": 1.0}, "power=1.0"),
    ],
)
def test_plans_that_cannot_be_are_refused(rates, options, message):
    with pytest.raises(StatsError, match=message):
        plan(*rates, **options)
