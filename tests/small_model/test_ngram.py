from __future__ import annotations

import numpy as np
import pytest
from small_model.ngram import KneserNey

END, VOCAB = 0, 12


def text(seed, length=4000):
    rng = np.random.default_rng(seed)
    # each token follows from the two before it, three times in four
    tokens = [1, 2]
    for _ in range(length):
        guess = 1 + (3 * tokens[-1] + tokens[-2]) % (VOCAB - 1)
        tokens.append(int(guess) if rng.random() < 0.75 else int(rng.integers(1, VOCAB)))
        if rng.random() < 0.01:
            tokens.append(END)
    return np.array([*tokens, END], dtype=np.uint16)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_probabilities_of_a_context_sum_to_one(order):
    model = KneserNey(text(1), order=order, vocab_size=VOCAB, end=END)
    for context in np.random.default_rng(2).integers(0, VOCAB, (40, order - 1)):
        p = model.probabilities(np.repeat(context[None], VOCAB, 0), np.arange(VOCAB))
        assert p.sum() == pytest.approx(1.0, abs=1e-12)
        assert (p > 0).all()


def test_it_learns_the_rule_that_needs_two_tokens():
    held_out = text(3)
    nats = {
        n: KneserNey(text(1, 40000), order=n, vocab_size=VOCAB, end=END).nats(held_out).mean() for n in (1, 2, 3, 5)
    }
    assert nats[3] < nats[2] - 0.5 < nats[1]
    # the entropy of the rule itself: 0.75 + 0.25/11 on the guess, 0.25/11 on each other, and the ends
    best = -(0.75 + 0.25 / 11) * np.log(0.75 + 0.25 / 11) - 10 * 0.25 / 11 * np.log(0.25 / 11)
    assert best < nats[3] < best + 0.25
    # two more tokens tell nothing, and smoothing keeps them from hurting much
    assert abs(nats[5] - nats[3]) < 0.1


def test_a_bigram_by_hand():
    # bigrams: 1 2 x3, 1 3 x1, 2 1 x2, 2 0 x1, 0 1 x1, 3 0 x1 (documents: "1 2 1 2 1 3", then "1 2")
    tokens = np.array([1, 2, 1, 2, 1, 3, 0, 1, 2, 0])
    model = KneserNey(tokens, order=2, vocab_size=4, end=0)
    one, two = model.orders
    d1, d2, d3 = two.discounts[1:]
    assert two.counts.tolist() == [1, 3, 1, 1, 2, 1]
    # how many tokens stand before each: 0 after 2 and 3, 1 after 0 and 2, 2 after 1, 3 after 1
    assert one.counts.tolist() == [2, 2, 1, 1]
    e1, e2 = one.discounts[1:3]
    lower = (1 - e1) / 6 + (2 * e1 + 2 * e2) / 6 / 4
    expected = (1 - d1) / 4 + (d1 + d3) / 4 * lower
    assert model.probabilities(np.array([[1]]), np.array([3]))[0] == pytest.approx(expected)
    assert d2 >= 0


def test_nothing_is_learned_over_the_end_of_a_document():
    model = KneserNey(np.array([1, 2, 0, 3, 4, 0] * 50), order=3, vocab_size=5, end=0)
    after = model.probabilities(np.array([[2, 0], [4, 0], [1, 0]]), np.array([3, 3, 3]))
    assert after[0] == after[1] == after[2]


def test_an_order_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="order=6"):
        KneserNey(text(1), order=6, vocab_size=VOCAB, end=END)
