"""What the block's sensors say: the words of `mark_rows` on what was stored, and no bit changed by saying it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.records import Kind
from firetower.core.words import CLEAN, NOT_RUN
from firetower.ops import moe
from firetower.ops.moe import cases
from firetower.sensors.marks import Mark, mark_rows, new_panel
from firetower.sensors.panel import PanelReading, decode_panel

# the interpreter computes with NumPy, which warns where a sigmoid saturates or a NaN passes
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = float("nan")
SHAPE = cases.SHAPES["small"]
RULE = moe.RoutingRule(top_k=SHAPE.top_k)
STAGES = tuple(field.name for field in dataclasses.fields(moe.MoeMarks))
NUM_ROWS = 8


def all_marks(device: str) -> tuple[torch.Tensor, moe.MoeMarks]:
    panel = new_panel(len(STAGES), NUM_ROWS, device)

    def mark(slot: int) -> Mark:
        return Mark(panel=panel, slot=slot, num_signals=len(STAGES), num_rows=NUM_ROWS)

    return panel, moe.MoeMarks(**{stage: mark(slot) for slot, stage in enumerate(STAGES)})


def read(panel: torch.Tensor) -> PanelReading:
    return decode_panel(panel.tolist(), len(STAGES), NUM_ROWS)


def row_of(reading: PanelReading, stage: str) -> tuple[int, int]:
    """(row, column) of a stage's first bad value."""
    [found] = [f for f in reading.first if STAGES[f.slot] == stage]
    assert found.shape is not None
    return divmod(found.flat_index, found.shape[1])


def example(device: str, num_tokens: int = 5, dtype: torch.dtype = torch.float32):
    x, weights = cases.normal((num_tokens, SHAPE.hidden), 1, dtype, device), cases.weights(SHAPE, 2, dtype, device)
    row_ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    return x, weights, row_ids


@pytest.mark.parametrize("bad", [False, True], ids=["clean", "a NaN and a bad pad"])
def test_marks_change_no_bit(bad, backend, device, same_bits):
    x, weights, row_ids = example(device)
    row_ids[3] = -1
    if bad:
        x[1, 4], x[3, 0] = NAN, float("inf")
    off = moe.moe(x, weights, RULE, row_ids=row_ids)
    panel, marks = all_marks(device)
    assert same_bits(moe.moe(x, weights, RULE, row_ids=row_ids, marks=marks), off)
    reading = read(panel)
    assert all(reading.ran)
    assert [STAGES[f.slot] for f in reading.first] == (list(STAGES) if bad else [])
    # the pad reaches the router, whose rows are tokens; no expert ever sees it, and its output is 0
    assert [STAGES[f.slot] for f in reading.first_pads] == (["logits", "router"] if bad else [])
    assert [b.sequence for b in reading.burned] == ([1] if bad else [])


def test_one_mark_at_a_time(device, backend, same_bits):
    x, weights, row_ids = example(device, 3)
    x[1, 4] = NAN
    off = moe.moe(x, weights, RULE, row_ids=row_ids)
    for stage in ("gate", "routed"):
        panel, marks = all_marks(device)
        only = moe.MoeMarks(**{stage: getattr(marks, stage)})
        assert same_bits(moe.moe(x, weights, RULE, row_ids=row_ids, marks=only), off)
        assert [s for s, ran in zip(STAGES, read(panel).ran, strict=True) if ran] == [stage]


@pytest.mark.parametrize("block_m", [16, 64])
def test_words_are_those_of_mark_rows_on_what_was_stored(block_m, backend, device, kernel_dtypes):
    """Bad values in several tokens, one of them a pad, and in one expert's weights; ids beyond the panel's rows."""
    for dtype in kernel_dtypes if block_m == 16 else kernel_dtypes[:1]:
        x, weights, _ = example(device, 6, dtype)
        row_ids = torch.tensor([3, -1, NUM_ROWS - 1, 0, 5, -1], dtype=torch.int32, device=device)
        x[1, 0], x[2, 9], x[5, 3] = NAN, float("inf"), NAN
        ids = cases.random_ids(6, SHAPE, 4, device)
        weights.down_proj[int(ids[3, 1]), 11, 2] = NAN
        plan = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True, row_ids=row_ids)
        panel, marks = all_marks(device)
        act = torch.zeros(plan.num_pairs, SHAPE.inner, dtype=dtype, device=device)
        rows = torch.zeros(plan.num_pairs, SHAPE.hidden, dtype=dtype, device=device)
        moe.gate_up(x, weights.gate_up_proj, plan, shared=weights.shared, marks=marks, out=act)
        moe.down(act, weights.down_proj, plan, shared=weights.shared, marks=marks, out=rows)
        shares = torch.full((6, SHAPE.top_k), 0.5, device=device)
        out = moe.combine(rows, shares, ids, plan, row_ids=row_ids, marks=marks)
        expected, expected_marks = all_marks(device)
        for stage, x_stored, stage_rows in (
            ("swiglu", act, plan.row_ids),
            ("down", rows, plan.row_ids),
            ("output", out, row_ids),
        ):
            mark_rows(x_stored, dataclasses.replace(getattr(expected_marks, stage), row_ids=stage_rows))
        compared = [STAGES.index(stage) for stage in ("swiglu", "down", "output")]
        shapes = panel.numel() - 1 - len(STAGES)
        for slot in compared:
            for at in (slot, len(STAGES) + slot, shapes + slot):
                assert panel[at] == expected[at], (dtype, STAGES[slot], at)
        # the gate is never stored: its first bad value stands where the product's does
        assert row_of(read(panel), "gate") == row_of(read(panel), "swiglu")


PLACES = ("shares", "act", "rows")


@pytest.mark.parametrize("place", [*PLACES, "all", "none"])
@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")], ids=str)
def test_what_was_not_checked_where_it_was_stored_is_marked_by_the_sum(place, bad, backend, device, kernel_dtypes):
    """Words of weights, activations and rows against `mark_rows`, behind a weight of 0, a closed gate and a pad."""
    dtype = kernel_dtypes[-1]
    x, weights, _ = example(device, 6, dtype)
    row_ids = torch.tensor([3, -1, NUM_ROWS - 1, 0, 6, 5], dtype=torch.int32, device=device)
    ids = cases.random_ids(6, SHAPE, 4, device)
    ids[5, 0] = SHAPE.num_experts
    plan = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, row_ids=row_ids)
    slots, shares = plan.num_slots, torch.full((6, SHAPE.top_k), 0.5, device=device)
    shares[2, 1] = 0.0
    gate = torch.tensor([0.0, 0.0, 0.0, -200.0, 0.0, 0.0], device=device)
    written = (moe.row_map(plan)[:, 2] >= 0)[:, None]

    act = torch.full((plan.num_pairs, SHAPE.inner), NAN, dtype=dtype, device=device)
    rows = torch.full((plan.num_pairs, SHAPE.hidden), NAN, dtype=dtype, device=device)
    moe.gate_up(x, weights.gate_up_proj, plan, shared=weights.shared, out=act)
    chosen = PLACES if place == "all" else (place,)
    if "act" in chosen:
        act[2 * slots + 1, 3], act[3 * slots + SHAPE.top_k, 0], act[4 * slots, SHAPE.inner - 1] = bad, bad, bad
    moe.down(act, weights.down_proj, plan, shared=weights.shared, out=rows)
    if "rows" in chosen:
        rows[0, SHAPE.hidden - 1], rows[2 * slots + 1, 5], rows[3 * slots + SHAPE.top_k, 7] = bad, bad, bad
    if "shares" in chosen:
        shares[0, 1], shares[1, 0], shares[5, 0] = bad, bad, bad

    panel, marks = all_marks(device)
    late = dataclasses.replace(marks, routed=None)
    given = {"shared_logits": gate, "row_ids": row_ids}
    out = moe.combine(rows, shares, ids, plan, act=act, marks=late, **given)
    expected, wanted = all_marks(device)
    for stage, stored, names in (
        ("router", shares, row_ids),
        ("swiglu", torch.where(written, act, 0), plan.row_ids),
        ("down", torch.where(written, rows, 0), plan.row_ids),
        ("output", out, row_ids),
    ):
        mark_rows(stored, dataclasses.replace(getattr(wanted, stage), row_ids=names))
    off = moe.combine(rows, shares, ids, plan, **given)
    assert torch.equal(out.view(torch.uint8), off.view(torch.uint8))
    assert torch.equal(panel, expected), (panel - expected).nonzero().flatten().tolist()
    assert read(panel).is_clean == (place == "none")


def test_row_words_without_the_stages_that_are_not_stored(backend, device):
    x, weights, row_ids = example(device, 5)
    row_ids[4] = -1
    x[2, 9], x[4, 3] = NAN, NAN
    ids = cases.random_ids(5, SHAPE, 4, device)
    plan = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, row_ids=row_ids)
    panel, marks = all_marks(device)
    act = torch.zeros(plan.num_pairs, SHAPE.inner, device=device)
    only = moe.MoeMarks(swiglu=marks.swiglu)
    moe.gate_up(x, weights.gate_up_proj, plan, shared=weights.shared, marks=only, out=act)
    expected, expected_marks = all_marks(device)
    mark_rows(act, dataclasses.replace(expected_marks.swiglu, row_ids=plan.row_ids))
    assert torch.equal(panel, expected)
    assert [b.sequence for b in read(panel).burned] == [2]


def test_the_row_of_a_word_names_token_slot_and_expert(backend, device):
    """One expert's weights go bad: the first bad row is that expert's, and the map says so."""
    x, weights, row_ids = example(device)
    ids = moe.route(moe.logits(x, weights.router), RULE)[1]
    expert = int(ids[2, 1])
    weights.gate_up_proj[expert, 3, 1] = float("inf")
    panel, marks = all_marks(device)
    moe.moe(x, weights, RULE, row_ids=row_ids, marks=marks)
    plan = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, row_ids=row_ids)
    row, column = row_of(read(panel), "gate")
    token, slot, named = moe.row_map(plan)[row].tolist()
    assert named == expert
    assert column == 3
    assert int(ids[token, slot]) == expert
    hit = (ids == expert).any(-1).nonzero().flatten().tolist()
    assert token == hit[0]
    assert [b.sequence for b in read(panel).burned] == hit


def overflowing(device: str, dtype: torch.dtype, token: int, column: int, up: float):
    """Gate 300 everywhere and up 10, in one row and column ``up``: case A1, and B1 to B4 where they meet this op."""
    hidden, inner = 32, 32
    weights = cases.weights(cases.Shape(hidden=hidden, num_experts=2, top_k=1, inner=inner), 3, dtype, device)
    x = torch.zeros(4, hidden, dtype=dtype, device=device)
    x[:, 0], x[token, 1] = 1.0, 1.0
    weights.router.zero_()
    weights.gate_up_proj.zero_()
    weights.gate_up_proj[:, :inner, 0] = 300.0
    weights.gate_up_proj[:, inner:, 0] = 10.0
    weights.gate_up_proj[:, inner + column, 1] = up - 10.0
    return x, weights


@pytest.mark.parametrize(("token", "column"), [(2, 7), (0, 0), (3, 31)])
def test_an_activation_that_overflows_fp16_is_marked_at_swiglu(token, column, backend, device):
    row_ids = torch.arange(4, device=device)
    x, weights = overflowing(device, torch.float16, token, column, up=260.0)
    panel, marks = all_marks(device)
    moe.moe(x, weights, moe.RoutingRule(top_k=1), row_ids=row_ids, marks=marks)
    reading = read(panel)
    assert reading.origin is not None
    assert STAGES[reading.origin.slot] == "swiglu"
    assert reading.origin.kind is Kind.POS_INF
    assert row_of(reading, "swiglu") == (token, column)
    assert [b.sequence for b in reading.burned] == [token]


@pytest.mark.parametrize("up", [218.0, 219.0], ids=["65400 fits", "65700 does not"])
def test_the_edge_of_fp16(up, backend, device):
    x, weights = overflowing(device, torch.float16, 1, 5, up)
    panel, marks = all_marks(device)
    only = moe.MoeMarks(swiglu=marks.swiglu)
    moe.moe(x, weights, moe.RoutingRule(top_k=1), row_ids=torch.arange(4, device=device), marks=only)
    assert (panel[STAGES.index("swiglu")] == CLEAN) == (up == 218.0)


def test_the_refuter_of_an_overflow_is_fp32(backend, device):
    """The same numbers stay finite, and above 65504, where the activation is stored wider."""
    x, weights = overflowing(device, torch.float32, 2, 7, up=260.0)
    panel, marks = all_marks(device)
    moe.moe(x, weights, moe.RoutingRule(top_k=1), row_ids=torch.arange(4, device=device), marks=marks)
    assert read(panel).is_clean
    plan = moe.plan(torch.zeros(4, 1, dtype=torch.int32, device=device), 2, block_m=16)
    act = moe.gate_up(x, weights.gate_up_proj, plan)
    assert act.max() == 78000


def test_drill_h1_the_faulty_router_is_seen_by_the_next_sensor(backend, device):
    """Weights divided 0 by 0 elsewhere and handed in: `routed` is the first signal of that token to go bad."""
    x, weights, row_ids = example(device)
    logits = moe.logits(x, weights.router, weights.shared.gate)
    shares, ids = moe.route(logits[:, : SHAPE.num_experts], RULE)
    shares[3] = 0.0
    shares = shares / shares.sum(-1, keepdim=True)
    panel, marks = all_marks(device)
    gate = logits[:, -1]
    moe.experts(x, shares, ids, weights, shared_logits=gate, row_ids=row_ids, marks=marks)
    reading = read(panel)
    assert reading.origin is not None
    assert STAGES[reading.origin.slot] == "routed"
    assert reading.origin.kind is Kind.NAN
    assert [b.sequence for b in reading.burned] == [3]


def test_nothing_is_marked_where_nothing_ran(backend, device):
    _, weights, _ = example(device)
    panel, marks = all_marks(device)
    moe.moe(torch.zeros(0, SHAPE.hidden, device=device), weights, RULE, marks=marks)
    assert (panel == NOT_RUN).all()


def test_a_plan_without_rows_still_says_that_its_stages_ran(backend, device):
    """All pads: the products have nothing to do, and nothing that they could have found."""
    x, weights, row_ids = example(device)
    panel, marks = all_marks(device)
    moe.moe(x, weights, RULE, row_ids=row_ids * 0 - 1, marks=marks)
    assert all(read(panel).ran)
    assert read(panel).is_clean
