"""Whether rounds scatter more than independent tries at one rate would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import random_table

from firetower.core.errors import StatsError
from firetower.lab.stats.check import check_count
from firetower.lab.stats.rounds import Round, round_cap
from firetower.lab.stats.text import count, share

NUM_DRAWS = 9_999
"""Simulated sets of rounds behind each p-value, from a fixed seed: the smallest possible p is 1/10,000."""

MAX_SIMULATED = 20_000_000
"""Rounds times draws that are simulated at most; beyond it fewer draws are made."""

_SEED = 0
_ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class Dispersion:
    """Scatter between rounds against what independent tries give.

    Attributes:
        num_rounds: how many.
        index: observed over expected variance: near 1 when tries are independent, above when fires cluster.
        p_value: probability of at least such an index from independent tries, one-sided.
        draws: simulated sets behind the p-value; 0 where the counts leave nothing to judge.
    """

    num_rounds: int
    index: float
    p_value: float
    draws: int

    @property
    def overdispersed(self) -> bool:
        """Whether the rounds differ more than chance explains (p at most .05)."""
        return self.p_value <= _ALPHA

    @property
    def sentence(self) -> str:
        """The result in words, with what it means for the intervals."""
        rounds = count(self.num_rounds, "round")
        if not self.draws:
            return f"{rounds} with nothing to judge their scatter by: all tries fired, or none did."
        figures = f"dispersion {self.index:.2f}, 1 is expected, p={share(self.p_value)}"
        if self.overdispersed:
            return (
                f"{rounds} scatter more than independent tries would ({figures}): tries within a round depend on each "
                "other, or the rate moves between rounds. Intervals from pooled tries, and numbers of clean tries, "
                "are too small then: count rounds instead of tries, or isolate the tries."
            )
        few = " So few rounds would show only gross dependence." if self.num_rounds < 10 else ""
        return f"{rounds} scatter no more than independent tries would ({figures}).{few}"


def dispersion(counts: Sequence[tuple[int, int]]) -> Dispersion:
    """Dispersion of rounds with a fixed number of tries, from (fires, tries) of each.

    The index is Pearson's chi-square over its degrees of freedom. The p-value is exact given the total of
    fires, up to simulation: tables with the same margins are drawn, so it holds for small counts too.

    Raises:
        StatsError: fewer than two rounds, or counts that cannot be.
    """
    _need_two(len(counts))
    fires, tries = np.array([check_count(*c) for c in counts]).T
    if fires.sum() in (0, tries.sum()):
        return _nothing_to_judge(len(counts))
    law = random_table(tries, [fires.sum(), (tries - fires).sum()])
    tables = law.rvs(size=_draws(len(counts)), random_state=np.random.default_rng(_SEED))
    return _judge(_pearson_index(fires, tries), _pearson_index(tables[:, :, 0], tries), len(counts))


def rounds_dispersion(rounds: Sequence[Round], *, cap: int | None = None) -> Dispersion:
    """Dispersion of rounds that each stop at their first fire, or at a cap.

    The index sums (fired - rate x tries)^2 over rounds and divides by what is expected; without a cap it is the
    variance of tries until a fire over that of a geometric law. Without a cap the p-value is exact given
    the total of tries, up to simulation. With a cap the rounds are simulated at the estimated rate.

    Args:
        rounds: at least two.
        cap: as in `rounds_rate`.

    Raises:
        StatsError: fewer than two rounds, or a round longer than the cap.
    """
    _need_two(len(rounds))
    cap = round_cap(rounds, cap)
    fired, tries = np.array([(r.fired, r.tries) for r in rounds], dtype=np.int64).T
    if fired.sum() in (0, tries.sum()):
        return _nothing_to_judge(len(rounds))
    shape = (_draws(len(rounds)), len(rounds))
    rng = np.random.default_rng(_SEED)
    if cap is None:
        simulated = _compositions(int(tries.sum()), shape, rng)
        simulated_fired = np.ones_like(simulated)
    else:
        caps = np.where(fired, cap, tries)
        waits = rng.geometric(fired.sum() / tries.sum(), size=shape)
        simulated, simulated_fired = np.minimum(waits, caps), (waits <= caps).astype(np.int64)
    return _judge(_rounds_index(fired, tries), _rounds_index(simulated_fired, simulated), len(rounds))


def _judge(index: NDArray[np.float64], simulated: NDArray[np.float64], num_rounds: int) -> Dispersion:
    observed = float(index)
    # the observed set counts as one draw, so that p is never too small; ties are ties but for the last bits
    as_large = int((simulated >= observed - 1e-9 * max(1.0, observed)).sum())
    return Dispersion(
        num_rounds=num_rounds,
        index=observed,
        p_value=(1 + as_large) / (1 + len(simulated)),
        draws=len(simulated),
    )


def _pearson_index(fires: NDArray[np.int64], tries: NDArray[np.int64]) -> NDArray[np.float64]:
    """Pearson's chi-square over degrees of freedom; rounds on the last axis of ``fires``."""
    rate = fires.sum(axis=-1, keepdims=True) / tries.sum()
    squares = (fires - rate * tries) ** 2 / (tries * rate * (1 - rate))
    return np.asarray(squares.sum(axis=-1) / (len(tries) - 1))


def _rounds_index(fired: NDArray[np.int64], tries: NDArray[np.int64]) -> NDArray[np.float64]:
    """Observed over expected sum of (fired - rate x tries)^2; rounds on the last axis."""
    num_rounds = fired.shape[-1]
    num_tries = tries.sum(axis=-1)
    rate = fired.sum(axis=-1) / num_tries
    squares = ((fired - rate[..., None] * tries) ** 2).sum(axis=-1)
    expected = num_tries * rate * (1 - rate) * (num_rounds - 1) / num_rounds
    # a simulated set in which every try fired, or none, has no scatter at all
    return np.asarray(np.divide(squares, expected, out=np.zeros_like(squares), where=expected > 0))


def _compositions(total: int, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.int64]:
    """``shape[0]`` ways, each equally likely, to cut ``total`` tries into ``shape[1]`` rounds of one or more.

    A multinomial whose probabilities are uniform on the simplex is uniform over its outcomes.
    """
    draws, parts = shape
    weights = rng.dirichlet(np.ones(parts), size=draws)
    return np.asarray(1 + rng.multinomial(total - parts, weights))


def _nothing_to_judge(num_rounds: int) -> Dispersion:
    return Dispersion(num_rounds=num_rounds, index=1.0, p_value=1.0, draws=0)


def _draws(num_rounds: int) -> int:
    return max(999, min(NUM_DRAWS, MAX_SIMULATED // num_rounds))


def _need_two(num_rounds: int) -> None:
    if num_rounds < 2:
        raise StatsError(f"rounds={num_rounds}: must be at least two to scatter")
