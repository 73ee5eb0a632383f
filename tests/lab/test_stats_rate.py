from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, nbinom

from firetower.core.errors import StatsError
from firetower.lab.stats import Round, fixed_support, rate, rounds_rate
from firetower.lab.stats.rounds import outcome_probabilities
from firetower.lab.stats.text import count, interval, share

RATES = np.concatenate([np.linspace(0.005, 0.05, 19), np.linspace(0.06, 0.99, 94)])


def fired(*tries: int) -> list[Round]:
    return [Round(tries=n) for n in tries]


def clean(*tries: int) -> list[Round]:
    return [Round(tries=n, fired=False) for n in tries]


@pytest.mark.parametrize(
    ("fires", "tries", "lower", "upper"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, row "Clopper-Pearson"
        (81, 263, 0.2527, 0.3676),
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_exact_binomial_interval_has_the_published_limits(fires, tries, lower, upper):
    result = rate(fires, tries)
    assert (round(result.lower, 4), round(result.upper, 4)) == (lower, upper)


def test_exact_binomial_interval_covers_at_every_rate():
    tries = 34
    limits = [rate(k, tries) for k in range(tries + 1)]
    for p in RATES:
        covered = sum(binom.pmf(x.fires, tries, p) for x in limits if x.lower <= p <= x.upper)
        assert covered >= 0.95 - 1e-12, p


def test_the_incident_comes_out_as_reported():
    result = rounds_rate(fired(6, 18, 1, 9))
    assert (result.fires, result.tries) == (4, 34)
    assert [round(x, 3) for x in (result.rate, result.lower, result.upper)] == [0.118, 0.033, 0.243]
    assert ".118" in result.sentence
    assert "95% .033-.243" in result.sentence
    support = fixed_support(result)
    assert (support.at_point, support.at_lower) == (24, 90)


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_rounds_until_a_fire_cover_at_every_rate(num_rounds):
    extra = np.arange(0, 4000)
    limits = [rounds_rate(fired(*[1] * (num_rounds - 1), 1 + int(x))) for x in extra]
    lower, upper = np.array([(x.lower, x.upper) for x in limits]).T
    for p in RATES:
        missed = nbinom.pmf(extra, num_rounds, p)[(p < lower) | (p > upper)].sum()
        # what lies beyond 4,000 clean tries counts as missed
        assert missed + nbinom.sf(extra[-1], num_rounds, p) <= 0.05 + 1e-12, p


def test_the_tighter_upper_limit_inverts_the_tail_of_tries():
    result = rounds_rate(fired(6, 18, 1, 9))
    # P(at least 34 tries for 4 fires) at the upper limit, P(at most 34) at the lower
    assert nbinom.sf(34 - 4 - 1, 4, result.upper) == pytest.approx(0.025, rel=1e-9)
    assert nbinom.cdf(34 - 4, 4, result.lower) == pytest.approx(0.025, rel=1e-9)
    assert result.upper < rate(4, 34).upper


def outcomes_by_hand(p: float, caps: list[int]) -> dict[tuple[int, int], float]:
    """Probability of (fires, tries), every course of every round written out."""
    found: dict[tuple[int, int], float] = {}
    courses = [[*((t, 1) for t in range(1, c + 1)), (c, 0)] for c in caps]
    for course in itertools.product(*courses):
        key = (sum(f for _, f in course), sum(t for t, _ in course))
        weight = float(np.prod([p**f * (1 - p) ** (t - f) for t, f in course]))
        found[key] = found.get(key, 0.0) + weight
    return found


@pytest.mark.parametrize("caps", [[1], [3], [4, 4], [5, 2, 5], [3, 3, 3, 7]], ids=str)
@pytest.mark.parametrize("p", [0.01, 0.3, 0.95])
def test_outcomes_of_capped_rounds_equal_those_written_out(caps, p):
    actual = outcome_probabilities(p, caps)
    assert actual.shape == (len(caps) + 1, sum(caps) + 1)
    expected = np.zeros_like(actual)
    for key, weight in outcomes_by_hand(p, caps).items():
        expected[key] = weight
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("caps", [[6, 6, 6], [8, 8, 3]], ids=str)
def test_capped_rounds_cover_at_every_rate(caps):
    possible = outcomes_by_hand(0.5, caps)
    limits = {key: capped(key, caps) for key in possible}
    for p in np.linspace(0.01, 0.99, 99):
        probabilities = outcome_probabilities(p, caps)
        covered = sum(probabilities[key] for key, (lower, upper) in limits.items() if lower <= p <= upper)
        assert covered >= 0.95 - 1e-9, p


def capped(key: tuple[int, int], caps: list[int]) -> tuple[float, float]:
    from firetower.lab.stats.rounds import _capped_limits

    return _capped_limits(*key, caps, 0.95)


def test_a_cap_that_nobody_reached_changes_little_and_one_that_bit_is_used():
    free, far = rounds_rate(fired(6, 18, 1, 9)), rounds_rate(fired(6, 18, 1, 9), cap=400)
    assert (far.lower, far.upper) == pytest.approx((free.lower, free.upper), abs=1e-6)
    read_off = rounds_rate([*fired(6, 18, 1, 9), *clean(40)])
    assert read_off == rounds_rate([*fired(6, 18, 1, 9), *clean(40)], cap=40)
    assert (read_off.fires, read_off.tries) == (4, 74)
    assert "40 tries" in read_off.method


def test_a_round_broken_off_early_has_its_own_length_as_its_cap():
    result = rounds_rate([*fired(2), *clean(6, 3)])
    assert (result.lower, result.upper) == capped((1, 11), [6, 6, 3])
    assert (result.lower, result.upper) != capped((1, 11), [6, 6, 6])


def test_rounds_that_never_fired_give_the_binomial_limit():
    result = rounds_rate(clean(40, 40))
    assert result.lower == 0
    assert result.upper == pytest.approx(rate(0, 80).upper, abs=1e-9)


def test_rounds_that_all_fired_at_once_exclude_no_high_rate():
    assert rounds_rate(fired(1, 1, 1)).upper == 1.0
    assert rounds_rate(fired(1, 1, 1), cap=5).upper == 1.0


def test_too_many_outcomes_fall_back_and_say_so():
    many = [*fired(*[50] * 300), *clean(100)]
    result = rounds_rate(many)
    assert "anytime" in result.method
    assert result.lower < 301 / 15100 < result.upper


@pytest.mark.parametrize(
    ("rounds", "cap", "message"),
    [
        ([], None, "must hold at least one round"),
        ([*fired(50), *clean(40)], None, "rounds=50: must not exceed the longest round without a fire, 40"),
        (fired(50), 40, "rounds=50: must not exceed the cap, 40"),
        (fired(5), 0, "cap=0: must be between 1"),
    ],
)
def test_rounds_that_cannot_be_are_refused(rounds, cap, message):
    with pytest.raises(StatsError, match=message):
        rounds_rate(rounds, cap=cap)


@pytest.mark.parametrize(
    ("fires", "tries", "message"),
    [
        (5, 3, "5/3: fires must not exceed tries"),
        (0, 0, "0/0: tries must be at least 1"),
        (-1, 3, "-1/3: fires must not be negative"),
        (1.5, 3, "1.5/3: fires and tries must be whole numbers"),
        (1, 10**10, "tries must be at most"),
    ],
)
def test_counts_that_cannot_be_are_refused(fires, tries, message):
    with pytest.raises(StatsError, match=message):
        rate(fires, tries)


@pytest.mark.parametrize("confidence", [0, 1, -0.1, float("nan"), float("inf")])
def test_a_confidence_outside_is_refused(confidence):
    with pytest.raises(StatsError, match="confidence="):
        rate(1, 3, confidence=confidence)


@settings(deadline=None)
@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_the_rate_lies_in_its_interval_and_more_confidence_widens_it(counts, confidence):
    narrow, wide = rate(*counts, confidence=confidence * 0.9), rate(*counts, confidence=confidence)
    assert 0 <= wide.lower <= narrow.lower <= narrow.rate <= narrow.upper <= wide.upper <= 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1176, ".118"),
        (0.0058, ".0058"),
        (-0.118, "-.118"),
        (0.00996, ".010"),
        (0.0000046, "4.6e-06"),
        (0.99999, ">.999"),
        (-0.99999, "<-.999"),
        (0, "0"),
        (1, "1"),
        (-1.0, "-1"),
    ],
)
def test_shares_are_never_rounded_to_certainty(value, text):
    assert share(value) == text


def test_words_for_counts_and_intervals():
    assert (count(1, "try"), count(1200, "try"), count(2, "clean try")) == ("1 try", "1,200 tries", "2 clean tries")
    assert (interval(0.033, 0.243), interval(-0.1, 0.2)) == (".033-.243", "-.100 to .200")


def test_without_scipy_the_extra_is_named():
    code = """
import sys
sys.modules["scipy"] = None  # makes every import of it fail, as where it is not installed
from firetower.cli.main import main
sys.exit(main(["stats", "4/34"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "firetower: statistics needs an optional dependency: pip install 'firetower[lab]'\n"
