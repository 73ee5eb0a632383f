"""Where in a request fires start: a survival curve over position, tries that ended clean being censored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from firetower.core.errors import MissingExtraError, StatsError
from firetower.lab.stats.check import check_between, check_whole
from firetower.lab.stats.text import count, percent, share


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far one try came: the token position of its fire, or where it ended clean (``fired`` false)."""

    at: int
    fired: bool = True

    def __post_init__(self) -> None:
        check_whole("position", self.at, 0)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The curve just after one position at which something fired.

    Attributes:
        position: token position.
        at_risk: tries that came at least this far without a fire.
        fires: at this position.
        surviving: estimated share of tries without a fire up to and including here.
        lower, upper: interval of that share, for this position alone.
    """

    position: int
    at_risk: int
    fires: int
    surviving: float
    lower: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Kaplan-Meier curve of the share of tries without a fire, by position.

    Attributes:
        tries, fires: the counts.
        last: furthest position that any try reached.
        points: one for each position with a fire, ascending.
        median: first position by which more than half of the tries have fired; Inf where fewer ever do.
        median_lower, median_upper: its interval; Inf where the data leave the upper end open.
        confidence: of the intervals, about kept (large-sample, see `ignition_curve`).
    """

    tries: int
    fires: int
    last: int
    points: tuple[CurvePoint, ...]
    median: float
    median_lower: float
    median_upper: float
    confidence: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        seen = f"{count(self.fires, 'fire')} in {count(self.tries, 'try')}"
        if not self.points:
            return f"{seen} up to position {self.last:,}: no ignition to place."
        end = self.points[-1]
        tail = f"share still clean after position {end.position:,}: {share(end.surviving)}"
        if math.isinf(self.median):
            return f"{seen}; fewer than half had fired by the furthest position, {self.last:,}; {tail}."
        upper = "open" if math.isinf(self.median_upper) else f"{self.median_upper:,.0f}"
        return (
            f"{seen}; half had fired by position {self.median:,.0f} ({percent(self.confidence)} "
            f"{self.median_lower:,.0f} to {upper}); {tail}."
        )


def ignition_curve(positions: Sequence[Position], *, confidence: float = 0.95) -> Curve:
    """Kaplan-Meier curve of ignition over position, its median, and intervals.

    Curve, standard errors (Greenwood) and median are statsmodels'; the intervals are on the log-log scale, as R's
    survfit makes them with conf.type="log-log", the median's by Brookmeyer and Crowley (Biometrics 38, 1982).
    They are large-sample intervals. Where the curve reaches 0 its standard error is undefined: the lower end
    is 0 there and the upper end that of the point before.

    A try that ended clean must have ended for a reason unrelated to a coming fire (its last token, a limit).

    Args:
        positions: one for each try.
        confidence: of each interval.

    Raises:
        StatsError: no try, or a confidence outside 0 to 1.
        MissingExtraError: statsmodels is not installed.
    """
    confidence = check_between("confidence", confidence)
    if not positions:
        raise StatsError("positions=: must hold at least one, such as 88443 or 90000+")
    fires, last = sum(p.fired for p in positions), max(p.at for p in positions)
    if not fires:
        points: tuple[CurvePoint, ...] = ()
        median, limits = math.inf, (math.inf, math.inf)
    else:
        fit = _fit(positions)
        points = _points(fit, confidence)
        median = float(fit.quantile(0.5))
        median = math.inf if math.isnan(median) else median
        limits = _median_limits(points)
    return Curve(
        tries=len(positions),
        fires=fires,
        last=last,
        points=points,
        median=median,
        median_lower=limits[0],
        median_upper=limits[1],
        confidence=confidence,
    )


def _fit(positions: Sequence[Position]) -> Any:
    try:
        # pandas comes with it and takes a second: only who asks for a curve pays
        from statsmodels.duration.survfunc import SurvfuncRight
    except ImportError:
        raise MissingExtraError("an ignition curve", "lab") from None
    return SurvfuncRight([p.at for p in positions], [int(p.fired) for p in positions])


def _points(fit: Any, confidence: float) -> tuple[CurvePoint, ...]:
    surviving, error = np.asarray(fit.surv_prob), np.asarray(fit.surv_prob_se)
    z = norm.ppf((1 + confidence) / 2)
    points: list[CurvePoint] = []
    columns = zip(fit.surv_times, fit.n_risk, fit.n_events, surviving, error, strict=True)
    for position, at_risk, fires, share_left, std_error in columns:
        if share_left > 0:
            spread = z * std_error / (share_left * abs(math.log(share_left)))
            lower, upper = share_left ** math.exp(spread), share_left ** math.exp(-spread)
        else:
            lower, upper = 0.0, points[-1].upper if points else 1.0
        points.append(
            CurvePoint(
                position=int(position),
                at_risk=int(at_risk),
                fires=int(fires),
                surviving=float(share_left),
                lower=float(lower),
                upper=float(upper),
            )
        )
    return tuple(points)


def _median_limits(points: Sequence[CurvePoint]) -> tuple[float, float]:
    """Positions that the curve's interval does not exclude as the median."""
    lower = next((float(p.position) for p in points if p.lower <= 0.5), math.inf)
    upper = next((float(p.position) for p in points if p.upper < 0.5), math.inf)
    return lower, upper
