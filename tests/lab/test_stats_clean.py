from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import StatsError
from firetower.lab.stats import clean_needed, clean_so_far, fixed_support, rate


@pytest.mark.parametrize(
    ("excluded", "confidence", "tries"),
    [
        (1 / 18, 0.95, 53),
        # S. S. Wilks, Ann. Math. Statist. 12 (1941): the one-sided 95/95, 95/99 and 99/95 samples
        (0.05, 0.95, 59),
        (0.05, 0.99, 90),
        (0.01, 0.95, 299),
        (0.10, 0.90, 22),
    ],
)
def test_clean_tries_needed_have_the_published_numbers(excluded, confidence, tries):
    assert clean_needed(excluded, confidence=confidence).tries == tries


@settings(deadline=None)
@given(st.integers(1, 999), st.integers(1, 99))
def test_clean_tries_needed_are_the_fewest_in_exact_arithmetic(thousandths, percents):
    rate_, missed = Fraction(thousandths, 1000), Fraction(100 - percents, 100)
    tries = clean_needed(thousandths / 1000, confidence=percents / 100).tries
    assert (1 - rate_) ** tries <= missed
    assert tries == 1 or (1 - rate_) ** (tries - 1) > missed


def test_a_whole_number_of_tries_is_not_pushed_up_by_the_last_bits():
    # (1 - .9)^2 = 1 - .99 in decimals, not in binary
    assert clean_needed(0.9, confidence=0.99).tries == 2
    assert clean_needed(0.99, confidence=0.9999).tries == 2
    assert clean_needed(1.0).tries == 1


def test_eight_clean_tries_exclude_a_third_and_not_an_eighteenth():
    result = clean_so_far(8, rate=1 / 18)
    assert result.excludes_above == pytest.approx(1 - 0.05 ** (1 / 8), rel=1e-12)
    assert result.chance == pytest.approx((17 / 18) ** 8, rel=1e-12)
    assert "8 clean tries so far exclude rates above .312 at 95%" in result.sentence
    assert "probability .633" in result.sentence


def test_no_try_excludes_nothing():
    result = clean_so_far(0, rate=0.1)
    assert result.excludes_above == 1
    assert result.sentence == "0 clean tries so far exclude no rate."


@settings(deadline=None)
@given(st.floats(1e-6, 0.9), st.floats(0.01, 0.999))
def test_needed_and_excluded_are_two_views_of_one_thing(excluded, confidence):
    tries = clean_needed(excluded, confidence=confidence).tries
    assert clean_so_far(tries, confidence=confidence).excludes_above <= excluded * (1 + 1e-6)
    if tries > 1:
        assert clean_so_far(tries - 1, confidence=confidence).excludes_above > excluded * (1 - 1e-6)


def test_without_a_fire_there_is_nothing_to_exclude():
    with pytest.raises(StatsError, match="0/24: no fire yet"):
        fixed_support(rate(0, 24))


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan")])
def test_rates_that_cannot_be_excluded_are_refused(value):
    with pytest.raises(StatsError, match="rate="):
        clean_needed(value)


def test_a_rate_that_needs_more_tries_than_anybody_makes_is_refused():
    with pytest.raises(StatsError, match="clean tries needed"):
        clean_needed(1e-12)


@pytest.mark.parametrize("tries", [-1, 1.5, "8"])
def test_clean_tries_that_cannot_be_are_refused(tries):
    with pytest.raises(StatsError, match="clean="):
        clean_so_far(tries)
