"""What a count of fires says and does not say. Pure functions; each result is a frozen record with a ``sentence``."""

import importlib.util

from firetower.core.errors import MissingExtraError

if importlib.util.find_spec("scipy") is None:
    raise MissingExtraError("statistics", "lab")

from firetower.lab.stats.anytime import anytime_p_value, anytime_rate
from firetower.lab.stats.binomial import Rate, rate
from firetower.lab.stats.clean import (
    CleanNeeded,
    CleanSoFar,
    FixedSupport,
    clean_needed,
    clean_so_far,
    fixed_support,
)
from firetower.lab.stats.comparison import Comparison, compare
from firetower.lab.stats.planning import Plan, plan, power_at
from firetower.lab.stats.rounds import Round, rounds_rate
from firetower.lab.stats.scatter import Dispersion, dispersion, rounds_dispersion
from firetower.lab.stats.survival import Curve, CurvePoint, Position, ignition_curve
from firetower.lab.stats.watching import WatchedComparison, compare_watching

__all__ = [
    "CleanNeeded",
    "CleanSoFar",
    "Comparison",
    "Curve",
    "CurvePoint",
    "Dispersion",
    "FixedSupport",
    "Plan",
    "Position",
    "Rate",
    "Round",
    "WatchedComparison",
    "anytime_p_value",
    "anytime_rate",
    "clean_needed",
    "clean_so_far",
    "compare",
    "compare_watching",
    "dispersion",
    "fixed_support",
    "ignition_curve",
    "plan",
    "power_at",
    "rate",
    "rounds_dispersion",
    "rounds_rate",
]
