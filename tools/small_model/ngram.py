"""The peer: a model of n-grams of tokens, smoothed by interpolated modified Kneser-Ney (Chen and Goodman 1999).

It reads the same training text, by the same tokenizer, as the small model. Discounts are estimated for each order from
the counts of counts, three of them: for n-grams seen once, twice, and more often. Lower orders count distinct left
neighbours, except for contexts that begin a document. Nothing is pruned.
"""

from __future__ import annotations

import numpy as np

BITS = 12
"""Bits of a token in a packed n-gram: 5 tokens of 12 bits fit into 63."""


def _packed(tokens: np.ndarray, n: int) -> np.ndarray:
    """Every n-gram of ``tokens`` in one integer, the oldest token in the highest bits; [len - n + 1]."""
    length = len(tokens) - n + 1
    out = np.zeros(length, dtype=np.int64)
    for i in range(n):
        out = (out << BITS) | tokens[i : i + length].astype(np.int64)
    return out


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of n-grams counted 0 (none), 1, 2, 3 and more times.

    Where the counts of counts give none (a text too small or too regular), 0.5, 1 and 1.5.
    """
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        found = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (found[1:] > 0).all() and (found[1:] < [1, 2, 3]).all():
            return found
    return np.array([0.0, 0.5, 1.0, 1.5])


class _Order:
    """Counts of one order: sorted n-grams, sorted contexts, and what discounting leaves to the order below."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray) -> None:
        self.grams, self.counts = grams, counts
        self.discounts = _discounts(counts)
        self.contexts, first = np.unique(grams >> BITS, return_index=True)
        taken = self.discounts[np.minimum(counts, 3)]
        self.totals = np.add.reduceat(counts, first).astype(np.float64)
        self.left = np.add.reduceat(taken, first) / self.totals

    def discounted(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each n-gram its discounted share, and the weight of the order below (1 for an unseen context)."""
        place = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        counts = np.where(self.grams[place] == grams, self.counts[place], 0)
        at = np.minimum(np.searchsorted(self.contexts, grams >> BITS), len(self.contexts) - 1)
        known = self.contexts[at] == grams >> BITS
        share = (counts - self.discounts[np.minimum(counts, 3)]) / self.totals[at]
        return np.where(known, share, 0.0), np.where(known, self.left[at], 1.0)


class KneserNey:
    """Interpolated modified Kneser-Ney over tokens.

    Args:
        tokens: training tokens of whole documents, each ended by ``end``.
        order: longest n-gram, 1 to 5.
        vocab_size: number of tokens, at most 4,096.
        end: token that ends a document.

    Raises:
        ValueError: order or vocabulary do not fit into 63 bits.
    """

    def __init__(self, tokens: np.ndarray, *, order: int, vocab_size: int, end: int) -> None:
        if not 1 <= order <= 5 or vocab_size > 1 << BITS:
            raise ValueError(f"order={order}, vocab_size={vocab_size}: must be at most 5 and {1 << BITS}")
        self.order, self.vocab_size, self.end = order, vocab_size, end
        self.orders: list[_Order] = []
        higher, counts = np.unique(self._inside(tokens, order), return_counts=True)
        self.orders.insert(0, _Order(higher, counts))
        for n in range(order - 1, 0, -1):
            # continuation counts: in how many n-grams of the next order does this one end
            lower, continued = np.unique(higher & ((1 << (BITS * n)) - 1), return_counts=True)
            if n > 1:
                lower, continued = self._with_beginnings(tokens, n, lower, continued)
            higher = lower
            self.orders.insert(0, _Order(lower, continued))

    def _inside(self, tokens: np.ndarray, n: int) -> np.ndarray:
        """n-grams that hold no end of a document, but in the first place (a beginning) or the last (its end)."""
        grams = _packed(tokens, n)
        crossing = np.zeros(len(grams), dtype=bool)
        for i in range(1, n - 1):
            crossing |= tokens[i : i + len(grams)] == self.end
        return grams[~crossing]

    def _with_beginnings(
        self, tokens: np.ndarray, n: int, lower: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Plain counts for n-grams that begin a document: nothing stands before them to be counted."""
        grams = self._inside(tokens, n)
        begun, plain = np.unique(grams[grams >> (BITS * (n - 1)) == self.end], return_counts=True)
        keep = lower >> (BITS * (n - 1)) != self.end
        grams = np.concatenate((lower[keep], begun))
        order = np.argsort(grams, kind="stable")
        return grams[order], np.concatenate((counts[keep], plain))[order]

    def probabilities(self, contexts: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Probability of each following token.

        Args:
            contexts: [num, order - 1] tokens before, oldest first. What stands before an ``end`` tells nothing: no
                n-gram over the edge of two documents was counted.
            following: [num] tokens.

        Returns:
            [num] float64, each above zero.
        """
        probability = np.full(len(following), 1.0 / self.vocab_size)
        for n in range(1, self.order + 1):
            grams = following.astype(np.int64)
            for i in range(1, n):
                grams = grams | contexts[:, -i].astype(np.int64) << (BITS * i)
            share, left = self.orders[n - 1].discounted(grams)
            probability = share + left * probability
        return probability

    def nats(self, tokens: np.ndarray, block: int = 1 << 20) -> np.ndarray:
        """Surprise of every token of a text of documents, [len]; the first document begins with the text."""
        padded = np.concatenate((np.full(self.order - 1, self.end), tokens)).astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.order)
        parts = [
            -np.log(self.probabilities(windows[i : i + block, :-1], windows[i : i + block, -1]))
            for i in range(0, len(windows), block)
        ]
        return np.concatenate(parts)
