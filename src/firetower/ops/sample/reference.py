"""The sampler token by token, in Python floats: the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST = 3.4028234663852886e38
_LOW = 0xFFFF_FFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox 4x32-10 of four counter words and two key words, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & _LOW, (k[1] + 0xBB67AE85) & _LOW]
    return c


def exponential(seed: int, position: int, token: int) -> float:
    """The variate of one token."""
    counter = (token // 4, position & _LOW, position >> 32 & _LOW, 0)
    word = philox(counter, (seed & _LOW, seed >> 32 & _LOW))[token % 4]
    return -math.log1p(-(word + 0.5) / 2**32)


def processed(logits: Sequence[float], *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0,
              counts: Sequence[int] | None = None, prompt: Sequence[int] = (), bias: Sequence[float] | None = None,
              allowed: Sequence[bool] | None = None) -> list[float]:  # fmt: skip
    """Scores of one row after penalties, bias and mask; ``prompt`` are token ids."""
    scores = []
    for v, logit in enumerate(logits):
        count = counts[v] if counts is not None else 0
        score = logit
        if count > 0 or v in prompt:
            score = score / repetition if score > 0 else score * repetition
        score -= frequency * count + presence * (count > 0)
        score += bias[v] if bias is not None else 0.0
        banned = logit == -math.inf or (bias is not None and bias[v] == -math.inf)
        if banned or (allowed is not None and not allowed[v]):
            scores.append(-math.inf)
        else:
            scores.append(min(max(score, -_LARGEST), _LARGEST))
    return scores


def kept(scores: Sequence[float], temperature: float, *, top_k: int = 0, top_p: float = 1.0,
         min_p: float = 0.0) -> set[int]:  # fmt: skip
    """Tokens that the filters leave, one after the other, by probabilities in float64."""
    top = max(scores)
    weights = {v: math.exp((s - top) / temperature) for v, s in enumerate(scores) if s > -math.inf}
    if 0 < top_k < len(weights):
        least = sorted((scores[v] for v in weights), reverse=True)[top_k - 1]
        weights = {v: w for v, w in weights.items() if scores[v] >= least}
    if top_p < 1:
        total = math.fsum(weights.values())
        before = {v: math.fsum(w for u, w in weights.items() if scores[u] > scores[v]) for v in weights}
        weights = {v: w for v, w in weights.items() if before[v] < top_p * total or scores[v] == top}
    return {v for v, w in weights.items() if w >= min_p}


def draw(scores: Sequence[float], temperature: float, seed: int, position: int, keep: set[int]) -> int:
    """Winner of the exponential race among the kept tokens; greedy at temperature 0."""
    if temperature == 0:
        return scores.index(max(scores))
    top = max(scores)
    bids = {v: (scores[v] - top) / temperature - math.log(exponential(seed, position, v)) for v in sorted(keep)}
    return max(bids, key=lambda v: bids[v])
