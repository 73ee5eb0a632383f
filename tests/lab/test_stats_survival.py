from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
from scipy.stats import CensoredData, ecdf

from firetower.core.errors import MissingExtraError, StatsError
from firetower.lab.stats import Position, ignition_curve


def tries(text: str) -> list[Position]:
    return [Position(at=int(x.rstrip("+")), fired=not x.endswith("+")) for x in text.split()]


# E. J. Freireich et al., Blood 21 (1963): weeks in remission under 6-mercaptopurine; the standard example since
REMISSION = tries("6 6 6 7 10 13 16 22 23 6+ 9+ 10+ 11+ 17+ 19+ 20+ 25+ 32+ 32+ 34+ 35+")


def test_the_curve_of_the_standard_example_is_the_published_one():
    curve = ignition_curve(REMISSION)
    assert [p.position for p in curve.points] == [6, 7, 10, 13, 16, 22, 23]
    assert [p.at_risk for p in curve.points] == [21, 17, 15, 12, 11, 7, 6]
    assert [p.fires for p in curve.points] == [3, 1, 1, 1, 1, 1, 1]
    surviving = [round(p.surviving, 3) for p in curve.points]
    assert surviving == [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448]
    # R, survfit with conf.type="log-log"
    assert (round(curve.points[0].lower, 3), round(curve.points[0].upper, 3)) == (0.620, 0.952)
    assert (curve.median, curve.median_lower, curve.median_upper) == (23, 13, math.inf)
    assert curve.sentence.startswith("9 fires in 21 tries; half had fired by position 23 (95% 13 to open)")


def random_tries(rng: np.random.Generator, size: int) -> list[Position]:
    fires, ends = rng.weibull(1.5, size) * 900, rng.uniform(100, 2000, size)
    return [Position(at=int(min(f, e)), fired=bool(f <= e)) for f, e in zip(fires, ends, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_curve_and_intervals_equal_those_of_scipy(seed):
    positions = random_tries(np.random.default_rng(seed), 40)
    curve = ignition_curve(positions)
    peer = ecdf(
        CensoredData(uncensored=[p.at for p in positions if p.fired], right=[p.at for p in positions if not p.fired])
    ).sf
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy leaves the end of a curve at 0 undefined
        band = peer.confidence_interval(method="log-log")
    at = [p.position for p in curve.points]
    np.testing.assert_allclose([p.surviving for p in curve.points], peer.evaluate(at), rtol=1e-9)
    inner = [i for i, p in enumerate(curve.points) if p.surviving > 0]
    for mine, theirs in (("lower", band.low), ("upper", band.high)):
        values = [getattr(curve.points[i], mine) for i in inner]
        np.testing.assert_allclose(values, theirs.evaluate([at[i] for i in inner]), rtol=1e-7)


def test_the_intervals_cover_in_simulation():
    runs, median, probe = 1000, 900 * math.log(2) ** (1 / 1.5), 500
    truth = math.exp(-((probe / 900) ** 1.5))
    rng = np.random.default_rng(1)
    median_hits = point_hits = 0
    for _ in range(runs):
        curve = ignition_curve(random_tries(rng, 60))
        median_hits += curve.median_lower <= median <= curve.median_upper + 1  # positions are whole numbers
        before = [p for p in curve.points if p.position <= probe]
        point_hits += before[-1].lower <= truth <= before[-1].upper
    bound = 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)
    assert median_hits / runs >= bound
    assert point_hits / runs >= bound


def test_where_all_have_fired_the_interval_ends_at_zero_and_keeps_the_last_upper_end():
    curve = ignition_curve(tries("10 20 30"))
    end, before = curve.points[-1], curve.points[-2]
    assert (end.surviving, end.lower, end.upper) == (0, 0, before.upper)
    assert ignition_curve(tries("5 5")).points[0].upper == 1.0


def test_fires_at_the_very_first_position_are_placed():
    curve = ignition_curve(tries("0 0 7+"))
    assert (curve.points[0].position, curve.points[0].at_risk) == (0, 3)
    assert curve.median == 0


def test_a_median_that_nobody_reached_is_infinite_and_said_to_be():
    curve = ignition_curve(tries("88443 90000+ 90000+"))
    assert curve.median == math.inf
    assert "fewer than half had fired by the furthest position, 90,000" in curve.sentence


def test_clean_tries_alone_place_nothing():
    curve = ignition_curve(tries("100+ 200+"))
    assert curve.points == ()
    assert curve.median == math.inf
    assert curve.sentence == "0 fires in 2 tries up to position 200: no ignition to place."


def test_no_try_is_refused():
    with pytest.raises(StatsError, match="positions="):
        ignition_curve([])
    with pytest.raises(StatsError, match="position=-1"):
        Position(at=-1)


def test_without_statsmodels_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels.duration.survfunc", None)
    with pytest.raises(MissingExtraError, match=r"firetower\[lab\]"):
        ignition_curve(REMISSION)
