from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import chi2_contingency, hypergeom

from firetower.core.errors import StatsError
from firetower.lab.stats import Round, dispersion, rounds_dispersion
from firetower.lab.stats.scatter import _compositions


def fired(*tries: int) -> list[Round]:
    return [Round(tries=n) for n in tries]


def test_the_index_is_chi_square_over_its_degrees_of_freedom():
    counts = [(1, 40), (0, 25), (9, 40), (2, 31)]
    chi = chi2_contingency([[f, t - f] for f, t in counts], correction=False)
    assert dispersion(counts).index == pytest.approx(chi.statistic / chi.dof)


def test_the_p_value_of_two_rounds_is_the_hypergeometric_tail():
    fires, tries = (9, 1), 40
    law = hypergeom(80, 10, 40)
    # as far from 5:5 as 9:1 or further
    exact = law.cdf(1) + law.sf(8)
    result = dispersion([(f, tries) for f in fires])
    assert abs(result.p_value - exact) <= 3 * math.sqrt(exact * (1 - exact) / result.draws) + 1 / result.draws


def test_the_index_of_tries_until_a_fire_is_a_ratio_of_variances():
    tries = [6, 18, 1, 9]
    p = 4 / 34
    assert rounds_dispersion(fired(*tries)).index == pytest.approx(np.var(tries, ddof=1) / ((1 - p) / p**2))


def test_the_p_value_of_tries_until_a_fire_counts_equally_likely_courses():
    tries = (1, 1, 10)
    courses = [c for c in itertools.product(range(1, 11), repeat=3) if sum(c) == 12]
    exact = sum(np.var(c) >= np.var(tries) - 1e-9 for c in courses) / len(courses)
    result = rounds_dispersion(fired(*tries))
    assert abs(result.p_value - exact) <= 3 * math.sqrt(exact * (1 - exact) / result.draws) + 1 / result.draws


def test_the_p_value_of_capped_rounds_sums_every_course_at_the_estimated_rate():
    cap, p = 4, 3 / 7
    rounds = [*fired(1, 1, 1), Round(tries=cap, fired=False)]
    single = [*((t, 1) for t in range(1, cap + 1)), (cap, 0)]
    result = rounds_dispersion(rounds)
    exact = 0.0
    for course in itertools.product(single, repeat=4):
        tries, fires = np.array(course).T
        rate = fires.sum() / tries.sum()
        scatter = ((fires - rate * tries) ** 2).sum()
        expected = tries.sum() * rate * (1 - rate) * 3 / 4
        if expected > 0 and scatter / expected >= result.index - 1e-9:
            exact += p ** fires.sum() * (1 - p) ** (tries.sum() - fires.sum())
    assert abs(result.p_value - exact) <= 3 * math.sqrt(exact * (1 - exact) / result.draws) + 1 / result.draws


def test_no_p_value_is_smaller_than_the_draws_can_tell():
    result = dispersion([(0, 40)] * 9 + [(35, 40)])
    assert result.p_value == 1 / (result.draws + 1)


def test_compositions_are_drawn_evenly():
    drawn = _compositions(6, (20_000, 3), np.random.default_rng(5))
    assert (drawn.sum(axis=1) == 6).all()
    assert (drawn >= 1).all()
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 10  # 5 choose 2
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000)


def test_clustered_fires_are_noticed_and_explained():
    result = dispersion([(0, 40), (0, 40), (17, 40), (0, 40), (1, 40)])
    assert result.overdispersed
    assert result.index > 5
    assert "depend on each other" in result.sentence
    persistent = rounds_dispersion([*fired(1, 1, 1, 1, 1), *[Round(tries=40, fired=False)] * 2])
    assert persistent.overdispersed


def test_the_incident_shows_no_dependence_and_says_how_little_that_is():
    result = rounds_dispersion(fired(6, 18, 1, 9))
    assert not result.overdispersed
    assert "only gross dependence" in result.sentence


def false_alarms(judge, sample, trials: int) -> float:
    rng = np.random.default_rng(2)
    return float(np.mean([judge(sample(rng)).overdispersed for _ in range(trials)]))


@pytest.mark.parametrize("design", ["fixed", "until a fire", "capped"])
def test_independent_tries_are_seldom_called_overdispersed(design, monkeypatch):
    monkeypatch.setattr("firetower.lab.stats.scatter.NUM_DRAWS", 999)
    trials, p, size = 600, 0.06, 8

    def fixed(rng):
        return [(int(k), 40) for k in rng.binomial(40, p, size)]

    def until(rng):
        return fired(*(int(n) for n in rng.geometric(p, size)))

    def capped(rng):
        return [Round(tries=min(int(n), 40), fired=bool(n <= 40)) for n in rng.geometric(p, size)]

    judge, sample = {
        "fixed": (dispersion, fixed),
        "until a fire": (rounds_dispersion, until),
        "capped": (lambda x: rounds_dispersion(x, cap=40), capped),
    }[design]
    assert false_alarms(judge, sample, trials) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_dependent_tries_are_usually_called_overdispersed():
    """A beta-binomial whose rounds fire at .5% or at 25%: shows that the test above can fail."""

    def sample(rng):
        return [(int(k), 40) for k in rng.binomial(40, rng.choice([0.005, 0.25], 8, p=[0.75, 0.25]))]

    assert false_alarms(dispersion, sample, 100) > 0.7


@pytest.mark.parametrize("counts", [[(0, 40), (0, 30)], [(3, 3), (2, 2)]])
def test_counts_without_contrast_leave_nothing_to_judge(counts):
    result = dispersion(counts)
    assert (result.draws, result.p_value) == (0, 1.0)
    assert "nothing to judge" in result.sentence


@pytest.mark.parametrize("judge", [dispersion, rounds_dispersion])
def test_one_round_cannot_scatter(judge):
    with pytest.raises(StatsError, match="at least two"):
        judge([(1, 3)] if judge is dispersion else fired(3))


def test_the_p_value_is_the_same_every_time():
    assert dispersion([(1, 40), (5, 40)]) == dispersion([(1, 40), (5, 40)])
