"""Random numbers that depend on (seed, position, token) alone: Philox 4x32-10 in PyTorch integers.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The kernel computes the same words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFF_FFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox 4x32.

    Args:
        counter: four int64 tensors of 32-bit words, broadcastable.
        key: two int64 tensors of 32-bit words, broadcastable to the counter.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # the low 64 bits of a product are exact even where int64 wraps
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> 32 & _LOW) ^ c1 ^ k0, (product0 >> 32 & _LOW) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """One 32-bit word a token: word ``v % 4`` of counter ``(v // 4, position low, position high, 0)`` under the seed.

    Args:
        seeds: int64 [N]. positions: int64 [N].
        vocab: V.

    Returns:
        int64 [N, V] in [0, 2**32).
    """
    block = torch.arange(-(-vocab // 4), device=seeds.device)[None]
    seed, position = seeds[:, None], positions[:, None]
    counter = (block, position & _LOW, position >> 32 & _LOW, torch.zeros_like(block))
    words = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
    return torch.stack(words, -1).flatten(1)[:, :vocab]


def exponentials(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Exponential variates fp32 ``[N, V]``, all in [2**-33, 23]: ``-log(1 - u)``, ``u = (word + 1/2) / 2**32``.

    The smallest decide who wins, so they are the finest: ``u`` itself has its full precision near 0, and where
    ``1 - u`` is small it is built from the inverted word.
    """
    words = random_words(seeds, positions, vocab)
    u = (words.float() + 0.5) * 2.0**-32
    rest = ((_LOW - words).float() + 0.5) * 2.0**-32
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return torch.where(u < 1 / 32, series, -torch.log(rest))
