"""The counter-based random numbers: published vectors, plain Python, PyTorch and the kernel say the same words."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.ops.sample import cases, exponentials, random_words, reference
from firetower.ops.sample.philox import philox

# Random123, kat_vectors: philox4x32 with 10 rounds
VECTORS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def hexes(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS, ids=["zeros", "ones", "pi"])
def test_published_vectors(counter, key, expected):
    assert reference.philox(hexes(counter), hexes(key)) == hexes(expected)
    words = philox(tuple(torch.tensor(c) for c in hexes(counter)), tuple(torch.tensor(k) for k in hexes(key)))
    assert [int(w) for w in words] == hexes(expected)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**63 - 1), vocab=st.sampled_from([1, 2, 5, 9, 37])
)
def test_words_are_those_of_plain_python(seed, position, vocab):
    found = random_words(torch.tensor([seed]), torch.tensor([position]), vocab)[0].tolist()
    low = 0xFFFFFFFF
    key = (seed & low, seed >> 32 & low)
    expected = [reference.philox((v // 4, position & low, position >> 32 & low, 0), key)[v % 4] for v in range(vocab)]
    assert found == expected


def test_words_of_a_token_do_not_depend_on_batch_or_vocabulary(device):
    seeds, positions = cases.make_keys(7, 1, device)
    together = random_words(seeds, positions, 1000)
    for row in range(7):
        alone = random_words(seeds[row : row + 1], positions[row : row + 1], 63)
        assert torch.equal(alone[0], together[row, :63])


def test_neighbouring_seeds_and_positions_share_no_words():
    seeds, positions = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    words = random_words(seeds.flatten(), positions.flatten(), 64)
    # of 4096 draws from 2**32, 0.002 pairs are expected to be equal
    assert words.unique().numel() == words.numel()


def test_exponentials_are_exponential_and_bounded():
    count = 1 << 16
    e = exponentials(torch.tensor([11]), torch.tensor([3]), count)[0].double()
    assert abs(e.mean() - 1) < 5 / math.sqrt(count)
    assert abs(e.var() - 1) < 5 * math.sqrt(8 / count)
    for at in (0.01, 0.1, 1.0, 3.0):
        share = 1 - math.exp(-at)
        assert abs((e < at).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
    truth = torch.tensor([reference.exponential(11, 3, v) for v in range(200)], dtype=torch.float64)
    assert ((e[:200] - truth).abs() / truth).max() < cases.LEAD_ATOL


@pytest.mark.parametrize("word", [0, 1, 2**27 - 1, 2**27, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1])
def test_no_word_gives_a_variate_that_loses_the_race_for_ever(monkeypatch, word):
    from firetower.ops.sample import philox as module

    monkeypatch.setattr(module, "random_words", lambda *_: torch.tensor([[word]]))
    e = exponentials(torch.tensor([0]), torch.tensor([0]), 1)
    assert 2.0**-34 < e.item() < 23.1
    assert abs(e.item() / -math.log1p(-(word + 0.5) / 2**32) - 1) < cases.LEAD_ATOL
