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
window_kernels = pytest.importorskip("firetower.ops.attention.window_kernels")

RULES = [
    *(plan.splits for plan in kernels.PLANS.values()),
    SMALL_SPLITS,
    Splits(unit_tokens=16, units_per_split=3, max_units=5),
]


@given(st.sampled_from(RULES), st.integers(1, 2**22), st.integers(1, 600))
def test_programs_cover_a_sequence_in_whole_parts(rule, tokens, programs):
    share, part = rule.shares(tokens, programs)
    assert share * programs >= tokens
    assert part in (rule.unit_tokens, rule.split_tokens)
    assert share % part == 0
    assert part == rule.split_tokens or share <= rule.max_units * rule.unit_tokens


@given(st.sampled_from(RULES), st.integers(1, 2**22), st.integers(1, 600), st.integers(0, 2**22))
def test_no_sequence_has_more_parts_than_there_is_room_for(rule, limit, programs, less):
    tokens = max(1, limit - less)
    _, part = rule.shares(tokens, programs)
    assert -(-tokens // part) <= rule.max_parts(limit, programs)


def test_every_unit_holds_whole_tiles():
    """Else a tile would be cut by a unit and its bits depend on where."""
    for plan in kernels.PLANS.values():
        assert plan.splits.unit_tokens % plan.block_n == 0


@triton.jit
def rule_fwd_kernel(p_tokens, p_out, programs, UNIT: tl.constexpr, PER: tl.constexpr, MOST: tl.constexpr):  # noqa: N803
    share, part = window_kernels.shares(tl.load(p_tokens + tl.program_id(0)), programs, UNIT, PER, MOST)
    tl.store(p_out + tl.program_id(0) * 2, share)
    tl.store(p_out + tl.program_id(0) * 2 + 1, part)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kernels_rule_is_the_same(rule, device):
    tokens = [0, 1, 31, 32, 33, 64, 65, 8191, 8192, 8193, 16385, 131072, 131073, 2**20, 2**20 + 1]
    positions = torch.tensor(tokens, dtype=torch.int32, device=device)
    for programs in (1, 2, 7, 132):
        out = torch.zeros(len(tokens), 2, dtype=torch.int32, device=device)
        sizes = {"UNIT": rule.unit_tokens, "PER": rule.units_per_split, "MOST": rule.max_units}
        rule_fwd_kernel[(len(tokens),)](positions, out, programs, **sizes)
        assert out.tolist() == [list(rule.shares(t, programs)) for t in tokens]
