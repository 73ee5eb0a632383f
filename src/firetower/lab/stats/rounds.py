"""Rounds of tries until the first fire: inverse sampling, with or without a cap on the tries of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta

from firetower.core.errors import StatsError
from firetower.lab.stats.anytime import anytime_rate
from firetower.lab.stats.binomial import Rate
from firetower.lab.stats.check import check_between, check_whole

MAX_CELLS = 2_000_000
"""Outcomes (fires, tries) that are enumerated exactly; 200 rounds of 40 tries are 1.6 million."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: ``tries`` made, the last of which fired, or none (``fired`` false: censored)."""

    tries: int
    fired: bool = True

    def __post_init__(self) -> None:
        check_whole("tries", self.tries, 1)


def rounds_rate(rounds: Sequence[Round], *, cap: int | None = None, confidence: float = 0.95) -> Rate:
    """Rate of fires from rounds that each stop at their first fire.

    When every round fired and none had a cap, the number of tries n for r fires is negative binomial, and
    the exact interval inverts its two tails: P(N <= n) = P(Bin(n, p) >= r) gives the lower limit, the same
    as Clopper and Pearson's, and P(N >= n) = P(Bin(n-1, p) <= r-1) the upper one, which is tighter.

    When rounds had a cap, outcomes are ordered by fires / tries. A higher true rate never makes fewer fires
    or more tries in any round, so the tails of that order are monotone in the rate and can be inverted;
    their probabilities are summed over every outcome (fires, tries) of the design.

    Args:
        rounds: at least one; their number is taken as planned.
        cap: tries at which a round was given up. Default: the longest round without a fire. A shorter round
            without a fire is taken as one that was broken off for a reason of its own, at that length.
        confidence: of the two-sided interval, at least kept.

    Returns:
        The rate with its interval. Beyond `MAX_CELLS` outcomes the interval is the anytime-valid one,
        wider but valid for any way of stopping, and ``method`` says so.

    Raises:
        StatsError: no round, a round longer than the cap, a confidence outside 0 to 1.
    """
    confidence = check_between("confidence", confidence)
    cap = round_cap(rounds, cap)
    fires, tries = sum(r.fired for r in rounds), sum(r.tries for r in rounds)
    if cap is None:
        lower, upper = _inverse_limits(fires, tries, confidence)
        method = "exact interval for tries until a fire"
    else:
        caps = [cap if r.fired else r.tries for r in rounds]
        if (len(caps) + 1) * (sum(caps) + 1) > MAX_CELLS:
            return anytime_rate(fires, tries, confidence=confidence)
        lower, upper = _capped_limits(fires, tries, caps, confidence)
        method = f"exact interval for rounds that stop at a fire or at {cap} tries"
    return Rate(
        fires=fires,
        tries=tries,
        rate=fires / tries,
        lower=lower,
        upper=upper,
        confidence=confidence,
        method=method,
    )


def round_cap(rounds: Sequence[Round], cap: int | None = None) -> int | None:
    """The cap of the design, given or read off the rounds; None where every round fired and none is given.

    Raises:
        StatsError: no round, or a round longer than the cap.
    """
    if not rounds:
        raise StatsError("rounds=: must hold at least one round, such as 6 or 40+")
    if cap is None:
        censored = [r.tries for r in rounds if not r.fired]
        if not censored:
            return None
        cap, source = max(censored), "the longest round without a fire"
    else:
        cap, source = check_whole("cap", cap, 1), "the cap"
    if (longest := max(r.tries for r in rounds)) > cap:
        raise StatsError(f"rounds={longest}: must not exceed {source}, {cap}; give the planned --cap")
    return cap


def _inverse_limits(fires: int, tries: int, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    lower = float(beta.ppf(tail, fires, tries - fires + 1))
    # every try fired: no rate is too high for that
    upper = float(beta.isf(tail, fires, tries - fires)) if tries > fires else 1.0
    return lower, upper


def _capped_limits(fires: int, tries: int, caps: Sequence[int], confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    num_fires, num_tries = np.ogrid[: len(caps) + 1, : sum(caps) + 1]
    # fires / tries compared crosswise: in whole numbers a tie is a tie
    at_least = num_fires * tries >= fires * num_tries
    at_most = num_fires * tries <= fires * num_tries

    def excess(outcomes: NDArray[np.bool_]) -> Callable[[float], float]:
        return lambda p: float(outcome_probabilities(p, caps)[outcomes].sum()) - tail

    ends = (1e-12, 1 - 1e-12)
    lower = float(brentq(excess(at_least), *ends, xtol=1e-12)) if fires else 0.0
    upper = float(brentq(excess(at_most), *ends, xtol=1e-12)) if fires < tries else 1.0
    return lower, upper


def outcome_probabilities(p: float, caps: Sequence[int]) -> NDArray[np.float64]:
    """Probability of every outcome of capped rounds at rate ``p``.

    Args:
        p: true rate, above 0 and below 1.
        caps: tries at which each round is given up.

    Returns:
        float64 of shape [len(caps) + 1, sum(caps) + 1], indexed by fires and by tries. Made by multiplying
        the rounds' generating functions on the unit circle, so each entry is off by about 1e-16.
    """
    num_rounds, length = len(caps), sum(caps) + 1
    fire_roots = np.exp(-2j * np.pi * np.arange(num_rounds + 1) / (num_rounds + 1))[:, None]
    product = np.ones((num_rounds + 1, length // 2 + 1), dtype=np.complex128)
    for cap, repeats in Counter(caps).items():
        fired, clean = np.zeros(length), np.zeros(length)
        fired[1 : cap + 1] = p * (1 - p) ** np.arange(cap)
        clean[cap] = (1 - p) ** cap
        product *= (np.fft.rfft(clean) + fire_roots * np.fft.rfft(fired)) ** repeats
    return np.fft.irfft2(product, s=(num_rounds + 1, length))
