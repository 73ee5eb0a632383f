"""Where sequences are cut: the rule in Python, and the kernel's copy of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firetower.ops.attention.cases import SMALL_SPLITS
from firetower.ops.attention.splits import Splits

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("firetower.ops.attention.kernels")

RULES = [kernels.SPLITS, SMALL_SPLITS, Splits(base_tokens=16, num_base=4, per_octave=1)]


@given(st.sampled_from(RULES), st.integers(0, 2**22))
def test_every_position_is_in_the_split_that_holds_it(rule, position):
    begin, size = rule.bounds(rule.index(position))
    assert begin <= position < begin + size


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_splits_are_adjacent_and_counted(rule):
    end = 0
    for i in range(200):
        begin, size = rule.bounds(i)
        assert begin == end
        end = begin + size
        assert rule.count(end) == i + 1
        assert rule.count(end + 1) == i + 2
    assert rule.count(0) == 0


def test_every_split_holds_whole_tiles():
    """Else a tile would be cut by a split and its bits depend on where."""
    for i in range(400):
        begin, size = kernels.SPLITS.bounds(i)
        assert begin % kernels._BLOCK_N == size % kernels._BLOCK_N == 0


@triton.jit
def rule_fwd_kernel(p_position, p_out, BASE: tl.constexpr, NUM: tl.constexpr, PER: tl.constexpr):  # noqa: N803
    count = kernels._split_count(tl.load(p_position + tl.program_id(0)), BASE, NUM, PER)
    begin, size = kernels._split_bounds(tl.maximum(count - 1, 0), BASE, NUM, PER)
    tl.store(p_out + tl.program_id(0) * 3, count)
    tl.store(p_out + tl.program_id(0) * 3 + 1, begin)
    tl.store(p_out + tl.program_id(0) * 3 + 2, size)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kernels_rule_is_the_same(rule, device):
    tokens = [0, 1, 31, 32, 33, 64, 65, 8191, 8192, 8193, 8449, 16384, 16385, 131072, 131073, 2**20, 2**20 + 1]
    out = torch.zeros(len(tokens), 3, dtype=torch.int32, device=device)
    positions = torch.tensor(tokens, dtype=torch.int32, device=device)
    rule_fwd_kernel[(len(tokens),)](positions, out, BASE=rule.base_tokens, NUM=rule.num_base, PER=rule.per_octave)
    assert out.tolist() == [[rule.count(t), *rule.bounds(max(0, rule.count(t) - 1))] for t in tokens]
