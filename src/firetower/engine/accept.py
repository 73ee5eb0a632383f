"""How many tokens of each window stand: exact, whatever the drafts were.

Random numbers are counted by (seed, position), so the token that belongs at a position does not depend on how it was
computed. A draft is right if it is that token, greedy or sampled alike; the answer has the tokens that it would have
without drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def count_accepted(fed: Ints, sampled: Ints, num_real: Ints) -> Ints:
    """Tokens of each window that stand: the certain one and the drafts up to the first wrong one.

    Args:
        fed: int64 [N, W]: what the window ran: one certain token, then drafts.
        sampled: int64 [N, W]: the token chosen behind each; -1 where none could be.
        num_real: int64 [N]: tokens of each window, at least 1; those beyond are pads.

    Returns:
        int64 [N], from 1 to ``num_real``. So many of the row's tokens in ``sampled`` belong to the answer.
    """
    num_tokens = fed.shape[1]
    if num_tokens == 1:
        return np.ones(fed.shape[0], dtype=np.int64)
    is_draft = np.arange(1, num_tokens) < num_real[:, None]
    is_right = (fed[:, 1:] == sampled[:, :-1]) & is_draft
    return np.asarray(1 + np.cumprod(is_right, axis=1).sum(axis=1), dtype=np.int64)
