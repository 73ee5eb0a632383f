"""What stays valid however often one looks and whenever one stops: mixture martingales.

With k fires in n tries, M(p) = ∫ L(p') dBeta(a, b)(p') / L(p), L(p) = p^k (1-p)^(n-k), is a martingale that starts
at 1 when p is the true rate, whatever the stopping rule. Ville's inequality: it ever reaches 1/alpha with
probability alpha at most. The rates where it has not are the interval (H. Robbins, Statistical methods related to the
law of the iterated logarithm, Ann. Math. Statist. 41, 1970; the beta-binomial mixture as in S. R. Howard,
A. Ramdas, J. McAuliffe, J. Sekhon, Time-uniform, nonparametric, nonasymptotic confidence sequences, Ann. Statist. 49,
2021). For two arms the martingales are multiplied; the least product over all rates that two equal arms may share is a
valid e-process (L. Wasserman, A. Ramdas, S. Balakrishnan, Universal inference, PNAS 117, 2020).
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import betaln, xlog1py, xlogy

from firetower.lab.stats.binomial import Rate
from firetower.lab.stats.check import check_between, check_count

PRIOR = 0.5
"""a = b of the mixing Beta, fixed before any data: Jeffreys', within a constant of the best for rare fires too."""


def anytime_rate(fires: int, tries: int, *, confidence: float = 0.95) -> Rate:
    """Rate with an interval that holds at every look at once, for any way of stopping.

    Wider than the exact interval at a planned n: that is what looking costs.

    Raises:
        StatsError: counts that cannot be, or a confidence outside 0 to 1.
    """
    fires, tries = check_count(fires, tries)
    confidence = check_between("confidence", confidence)
    return Rate(
        fires=fires,
        tries=tries,
        rate=fires / tries,
        lower=_lower_limit(fires, tries, confidence),
        upper=1 - _lower_limit(tries - fires, tries, confidence),
        confidence=confidence,
        method="anytime-valid interval, for any way of stopping",
    )


def log_mixture(fires: int, tries: int) -> float:
    """Logarithm of the likelihood averaged over the mixing Beta."""
    return float(betaln(fires + PRIOR, tries - fires + PRIOR) - betaln(PRIOR, PRIOR))


def log_likelihood(fires: int, tries: int, p: float) -> float:
    """Logarithm of p^fires (1-p)^(tries-fires); 0 log 0 is 0."""
    return float(xlogy(fires, p) + xlog1py(tries - fires, -p))


def anytime_p_value(fires_a: int, tries_a: int, fires_b: int, tries_b: int) -> float:
    """p-value of "both arms have one rate" that holds at every look.

    1 over the e-process, at most 1. Arms may be interleaved in any order, also one that depends on what was seen.

    Raises:
        StatsError: counts that cannot be.
    """
    return min(1.0, math.exp(-log_e_value(fires_a, tries_a, fires_b, tries_b)))


def log_e_value(fires_a: int, tries_a: int, fires_b: int, tries_b: int) -> float:
    """Logarithm of the evidence against "both arms have one rate"; positive speaks against it."""
    a, b = check_count(fires_a, tries_a), check_count(fires_b, tries_b)
    fires, tries = a[0] + b[0], a[1] + b[1]
    return log_mixture(*a) + log_mixture(*b) - log_likelihood(fires, tries, fires / tries)


def _lower_limit(fires: int, tries: int, confidence: float) -> float:
    """Lowest rate that the martingale has not excluded."""
    if not fires:
        return 0.0
    barrier = log_mixture(fires, tries) + math.log1p(-confidence)
    root = brentq(lambda p: barrier - log_likelihood(fires, tries, p), 1e-300, fires / tries, xtol=1e-15, rtol=1e-12)
    return float(root)
