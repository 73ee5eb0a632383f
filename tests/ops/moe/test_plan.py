from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from firetower.core.errors import ConfigError
from firetower.ops import moe
from firetower.ops.moe import cases, planning

SHAPE = cases.Shape(hidden=8, num_experts=7, top_k=3, inner=8, shared_inner=8)
FIELDS = ("pair_ids", "block_experts", "expert_offsets", "totals")


def pads(num_tokens: int, device: str = "cpu") -> torch.Tensor:
    """Row ids with a pad in every third place, the first included."""
    ids = torch.arange(num_tokens, dtype=torch.int32)
    return torch.where(ids % 3 == 0, -1, ids).to(device)


def planned(ids: torch.Tensor, num_experts: int, backend: str, monkeypatch: pytest.MonkeyPatch, **options) -> moe.Plan:
    monkeypatch.setenv("FIRETOWER_OPS", f"moe.plan={backend}")
    monkeypatch.setattr(moe.REGISTRY, "_choices", {})
    return moe.plan(ids, num_experts, **options)


@pytest.mark.parametrize("num_tokens", [1, 17, 65])
@pytest.mark.parametrize("has_pads", [False, True], ids=["all real", "pads"])
@pytest.mark.parametrize("block_m", [1, 16])
def test_every_row_is_planned_once(num_tokens, has_pads, block_m, backend, device):
    ids = cases.random_ids(num_tokens, SHAPE, num_tokens, device)
    row_ids = pads(num_tokens, device) if has_pads else None
    plan = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True, row_ids=row_ids)
    assert moe.audit(plan, ids, row_ids).is_clean
    is_real = torch.ones(num_tokens, dtype=torch.bool) if row_ids is None else (row_ids >= 0).cpu()
    expected = is_real.int().repeat_interleave(plan.num_slots)
    assert torch.equal(moe.count_writes(plan).cpu(), expected)
    assert int(plan.totals[2]) == int(expected.sum())
    if row_ids is not None:
        assert torch.equal(plan.row_ids, row_ids.repeat_interleave(plan.num_slots))


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("has_shared", [False, True])
def test_the_kernel_makes_the_same_plan(num_tokens, has_shared, device, monkeypatch):
    """300 tokens take more than one chunk."""
    ids = cases.random_ids(num_tokens, SHAPE, 3, device)
    row_ids = pads(num_tokens, device) if num_tokens != 3 else None
    options = {"block_m": 16, "has_shared": has_shared, "row_ids": row_ids}
    want = planned(ids, SHAPE.num_experts, "torch", monkeypatch, **options)
    got = planned(ids, SHAPE.num_experts, "triton", monkeypatch, **options)
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert row_ids is None or torch.equal(got.row_ids, want.row_ids)


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_that_repeat_or_are_out_of_range(data, monkeypatch):
    """Repeated ids of a token are both planned; ids outside the experts nowhere. Both backends agree."""
    num_experts, top_k = data.draw(st.integers(3, 6)), 3
    row = st.lists(st.integers(-2, num_experts + 1), min_size=top_k, max_size=top_k)
    ids = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=9)), dtype=torch.int64)
    row_ids = torch.tensor(data.draw(st.lists(st.integers(-1, 4), min_size=len(ids), max_size=len(ids))))
    options = {
        "block_m": data.draw(st.sampled_from([1, 4, 16])),
        "has_shared": data.draw(st.booleans()),
        "row_ids": row_ids,
    }
    want = planned(ids, num_experts, "torch", monkeypatch, **options)
    got = planned(ids, num_experts, "triton", monkeypatch, **options)
    assert moe.audit(want, ids, row_ids).is_clean
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(want, field)), field


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_capacity_holds_any_routing(data):
    num_experts, block_m = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 2, 16, 64]))
    top_k = data.draw(st.integers(1, num_experts))
    tokens = data.draw(st.integers(1, 40))
    # few experts by preference: the worst is many experts with one row more than a block
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)])
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    needed = int(((counts + block_m - 1) // block_m).sum()) + -(-tokens // block_m)
    assert needed <= moe.capacity_in_blocks(tokens, top_k, num_experts, has_shared=True, block_m=block_m)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 9), (5, 41), (64, 276), (512, 528)])
def test_the_capacity_of_a_window_is_near_what_random_routing_needs(tokens, blocks):
    assert moe.capacity_in_blocks(tokens, 8, 256, has_shared=True, block_m=16) == blocks


def test_the_row_map_gives_token_slot_and_expert(backend, device):
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32, device=device)
    row_ids = torch.tensor([0, -1, 1], device=device)
    plan = moe.plan(ids, 3, block_m=16, has_shared=True, row_ids=row_ids)
    assert moe.row_map(plan).tolist() == [
        [0, 0, 2], [0, 1, 0], [0, 2, 3],
        [1, 0, -1], [1, 1, -1], [1, 2, -1],
        [2, 0, 0], [2, 1, 1], [2, 2, 3],
    ]  # fmt: skip


def test_both_fillings_of_the_memory_give_the_same_plan(backend, device):
    ids, row_ids = cases.random_ids(21, SHAPE, 5, device), pads(21, device)
    plans = []
    for value in (-7, 123456):
        plan = planning.new_plan(ids, SHAPE.num_experts, has_shared=True, block_m=16, has_rows=True)
        for field in (*FIELDS, "row_ids"):
            getattr(plan, field).fill_(value)
        plans.append(moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, row_ids=row_ids, into=plan))
    for field in (*FIELDS, "row_ids"):
        assert torch.equal(getattr(plans[0], field), getattr(plans[1], field)), field


class TestAudit:
    """Each fault that an audit names, put into a plan that was clean."""

    @pytest.fixture
    def ids(self) -> torch.Tensor:
        return cases.random_ids(9, SHAPE, 1)

    @pytest.fixture
    def plan(self, ids: torch.Tensor) -> moe.Plan:
        plan = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True)
        assert moe.audit(plan, ids).is_clean
        return plan

    def row(self, plan: moe.Plan, ids: torch.Tensor, at: int) -> tuple[int, int, int]:
        token, slot = divmod(int(plan.pair_ids[at]), plan.num_slots)
        return token, slot, SHAPE.num_experts if slot == SHAPE.top_k else int(ids[token, slot])

    def test_a_row_that_no_block_writes(self, plan, ids):
        lost = self.row(plan, ids, 16)
        plan.pair_ids[16] = -1
        assert moe.audit(plan, ids) == moe.PlanAudit(unwritten=(lost,))

    def test_a_row_written_twice(self, plan, ids):
        twice = self.row(plan, ids, 0)
        [pad] = (plan.pair_ids[:16] < 0).nonzero()[:1].flatten().tolist()
        plan.pair_ids[pad] = plan.pair_ids[0].clone()
        assert moe.audit(plan, ids) == moe.PlanAudit(doubled=(twice,))

    def test_two_rows_swapped_between_experts(self, plan, ids):
        first, second = self.row(plan, ids, 0), self.row(plan, ids, 16)
        plan.pair_ids[[0, 16]] = plan.pair_ids[[16, 0]]
        found = moe.audit(plan, ids)
        assert set(found.misplaced) == {(*first, second[2]), (*second, first[2])}
        assert not found.unwritten

    def test_a_pad_token_that_was_planned(self, plan, ids):
        row_ids = torch.arange(9)
        row_ids[4] = -1
        assert {row[0] for row in moe.audit(plan, ids, row_ids).pads} == {4}

    def test_a_plan_shorter_than_the_routing_needs(self, ids, backend):
        short = planning.new_plan(ids, SHAPE.num_experts, has_shared=True, block_m=16, has_rows=False, num_blocks=5)
        moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, into=short)
        found = moe.audit(short, ids)
        assert found.rows_short == int(short.totals[1]) - 80 > 0
        assert found.unwritten
        assert not found.doubled

    def test_rows_beyond_the_end(self, plan, ids):
        plan.block_experts[-1] = 2
        assert moe.audit(plan, ids) == moe.PlanAudit(stray=1)


def test_no_token_is_an_empty_plan(backend, device):
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    plan = moe.plan(ids, 4, block_m=16, has_shared=True)
    assert plan.totals.tolist() == [0, 0, 0]
    assert plan.expert_offsets.tolist() == [0] * 6
    assert moe.audit(plan, ids).is_clean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 12}, "block_m=12: must be a power of two"),
        ({"row_ids": torch.zeros(4)}, "row_ids: shape"),
        ({"row_ids": torch.zeros(9)}, "row_ids: dtype"),
        ({"num_experts": 2}, "top_k=3: must be from 1 to num_experts=2"),
    ],
)
def test_what_cannot_be_planned_is_refused(change, message):
    arguments = {"num_experts": 7, "block_m": 16} | change
    with pytest.raises(ConfigError, match=message):
        moe.plan(cases.random_ids(9, SHAPE, 1), **arguments)


def test_a_plan_made_for_other_numbers_is_not_filled():
    plan = moe.plan(cases.random_ids(9, SHAPE, 1), 7, block_m=16)
    with pytest.raises(ConfigError, match="into: made for"):
        moe.plan(cases.random_ids(8, SHAPE, 1), 7, block_m=16, into=plan)


def test_float_ids_are_refused():
    with pytest.raises(ConfigError, match="topk_ids"):
        moe.plan(torch.zeros(3, 2), 4, block_m=16)


def test_a_plan_is_not_compared_by_value():
    """Plans hold tensors: equality of two would be ambiguous."""
    assert dataclasses.fields(moe.Plan)
    assert moe.Plan.__eq__ is object.__eq__
