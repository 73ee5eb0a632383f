from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from firetower.core.errors import ConfigError
from firetower.ops import moe
from firetower.ops.moe import cases
from firetower.ops.moe.reference import route_reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

# the interpreter computes with NumPy, which warns where a sigmoid saturates or a NaN passes
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

INF, NAN = float("inf"), float("nan")
RULES = [
    moe.RoutingRule(top_k=4, scoring=scoring, renormalise=renormalise, routed_scaling_factor=factor)
    for scoring in moe.weights.SCORINGS
    for renormalise, factor in ((True, 1.0), (False, 2.5))
]


def rule_id(rule: moe.RoutingRule) -> str:
    return f"{rule.scoring}-{'renormalised' if rule.renormalise else 'raw'}"


def is_valid(ids: torch.Tensor, num_experts: int) -> bool:
    """In range, and distinct in every row."""
    distinct = all(len(set(row)) == len(row) for row in ids.tolist())
    return distinct and bool(((ids >= 0) & (ids < num_experts)).all())


@pytest.mark.parametrize("num_experts", [4, 15, 33, 256])
@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_weights_and_ids_are_the_references(rule, num_experts, backend, device, assert_close):
    bias = cases.normal((num_experts,), 5, device=device) if rule.scoring == "sigmoid" and num_experts % 2 else None
    logits = cases.normal((5, num_experts), 1, device=device, scale=3.0)
    weights, ids = moe.route(logits, rule, selection_bias=bias)
    truth, truth_ids = route_reference(logits.double(), bias, rule)
    assert torch.equal(ids.cpu(), truth_ids.cpu())
    assert weights.dtype == torch.float32
    assert_close("weights", truth, weights, 1e-6)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 1000])
def test_many_tokens(num_tokens, assert_close):
    logits = cases.normal((num_tokens, 31), 2)
    for rule in RULES:
        weights, ids = moe.route(logits, rule)
        truth, truth_ids = route_reference(logits.double(), None, rule)
        assert torch.equal(ids, truth_ids)
        assert_close(rule_id(rule), truth, weights, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_other_types(dtype, assert_close):
    logits = cases.normal((9, 16), 2).to(dtype)
    weights, ids = moe.route(logits, RULES[0])
    truth, truth_ids = route_reference(logits.double(), None, RULES[0])
    assert torch.equal(ids, truth_ids)
    assert_close(str(dtype), truth, weights, 1e-14 if dtype == torch.float64 else 1e-6)


def test_a_view_with_a_column_more_is_read_in_place(backend, device):
    all_logits = cases.normal((3, 17), 4, device=device)
    expected = moe.route(all_logits[:, :16].contiguous(), RULES[0])
    assert all(torch.equal(a, b) for a, b in zip(moe.route(all_logits[:, :16], RULES[0]), expected, strict=True))


def faulty_renormalised(logits: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """As reported: the chosen scores divided by their plain sum."""
    scores = torch.sigmoid(logits)
    chosen = scores.gather(-1, (scores + bias).topk(top_k).indices)
    return chosen / chosen.sum(-1, keepdim=True)


@pytest.mark.parametrize("num_experts", [15, 16, 32])
def test_drill_h1_scores_that_underflow_are_not_divided_by_zero(num_experts, backend, device, assert_close):
    """Row 1 at -110 and lower: every sigmoid is 0 in fp32; row 2 at -20 is faint but not 0."""
    logits = cases.normal((3, num_experts), 3, device=device)
    logits[1] = -110.0 - torch.arange(num_experts, device=device) * 0.25
    logits[2] = -20.0
    bias = torch.zeros(num_experts, device=device)
    bias[2:6] = 12.0
    faulty = faulty_renormalised(logits, bias, 4)
    assert faulty.isnan().all(-1).tolist() == [False, True, False]
    rule = moe.RoutingRule(top_k=4, scoring="sigmoid")
    weights, ids = moe.route(logits, rule, selection_bias=bias)
    assert ids[1].tolist() == [2, 3, 4, 5]
    truth = torch.softmax(logits[1, 2:6].double(), -1)
    assert_close("the quotient that underflowed", truth, weights[1], 2e-5)
    assert weights[2].tolist() == pytest.approx([0.25] * 4)
    assert_close("the other rows", faulty[[0, 2]], weights[[0, 2]], 1e-6)


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_rows_of_minus_inf_share_equally(rule, backend, device):
    logits = torch.full((2, 16), -INF, device=device)
    weights, ids = moe.route(logits, rule)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    raw = 1 / 16 if rule.scoring == "softmax" else 0.0
    expected = (0.25 if rule.renormalise else raw) * rule.routed_scaling_factor
    assert weights.tolist() == [[expected] * 4] * 2


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_an_expert_at_minus_inf_gets_no_weight(rule, backend, device):
    logits = torch.full((1, 8), -INF, device=device)
    logits[0, 5], logits[0, 2] = 1.0, 0.0
    weights, ids = moe.route(logits, rule)
    assert ids.tolist() == [[5, 2, 0, 1]]
    assert torch.isfinite(weights).all()
    assert weights[0, 2:].tolist() == [0.0, 0.0]


def test_ties_go_to_the_lowest_index(backend, device):
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, 2.0, 1.0]], device=device)
    assert moe.route(logits, moe.RoutingRule(top_k=7))[1].tolist() == [[1, 3, 5, 6, 0, 2, 4]]
    sigmoid = moe.RoutingRule(top_k=4, scoring="sigmoid")
    bias = torch.zeros(7, device=device)
    # all of these sigmoids are exactly 1 in fp32
    assert moe.route(logits + 40, sigmoid, selection_bias=bias)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_nan_burns_its_row_and_no_other(rule, bad, backend, device, same_bits):
    logits = cases.normal((4, 15), 6, device=device)
    clean = moe.route(logits, rule)
    logits[2, 7] = bad
    row_ids = torch.tensor([0, 1, 2, -1], device=device)
    panel = new_panel(1, 4, device)
    weights, ids = moe.route(logits, rule, mark=Mark(panel=panel, slot=0, num_signals=1, num_rows=4, row_ids=row_ids))
    is_burned = bad != bad or rule.scoring == "softmax"
    assert weights[2].isnan().all() == is_burned
    assert is_valid(ids, 15)
    others = [0, 1, 3]
    assert same_bits(weights[others], clean[0][others])
    assert torch.equal(ids[others], clean[1][others])
    expected = new_panel(1, 4, device)
    mark_rows(weights, Mark(panel=expected, slot=0, num_signals=1, num_rows=4, row_ids=row_ids))
    assert torch.equal(panel, expected)
    assert (panel[2 + 2] == 0) == is_burned


def test_a_nan_in_the_bias_burns_every_row(backend, device):
    bias = torch.zeros(8, device=device)
    bias[3] = NAN
    rule = moe.RoutingRule(top_k=2, scoring="sigmoid")
    weights, ids = moe.route(cases.normal((3, 8), 1, device=device), rule, selection_bias=bias)
    assert weights.isnan().all()
    assert is_valid(ids, 8)


@pytest.mark.parametrize("num_experts", [5, 15, 17, 100])
def test_drill_g4_lanes_past_the_last_expert_do_not_set_the_maximum(num_experts, backend, device):
    """Scores of -300: a lane read as 0 past the end would be the maximum, and every real share would underflow to 0."""
    logits = torch.full((2, num_experts), -300.0, device=device)
    padded = torch.nn.functional.pad(logits, (0, 3))
    assert torch.softmax(padded, -1)[:, :num_experts].sum() == 0
    weights, ids = moe.route(logits, moe.RoutingRule(top_k=4, renormalise=False))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.flatten().tolist() == pytest.approx([1 / num_experts] * 8)


@given(
    values=st.lists(
        st.one_of(st.floats(-200, 200, width=32), st.sampled_from([-INF, -110.0, 0.0, -0.0, 88.0])),
        min_size=6,
        max_size=6,
    ),
    top_k=st.integers(1, 6),
    scoring=st.sampled_from(moe.weights.SCORINGS),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_gets_finite_weights_that_sum_to_one(values, top_k, scoring, backend):
    logits = torch.tensor([values])
    weights, ids = moe.route(logits, moe.RoutingRule(top_k=top_k, scoring=scoring))
    assert is_valid(ids, 6)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    order = sorted(range(6), key=lambda e: (-logits[0, e].item(), e))
    assert ids[0].tolist() == order[:top_k]


def test_each_row_alone_has_the_same_bits(backend, device, same_bits):
    logits = cases.normal((5, 31), 8, device=device, scale=4.0)
    for rule in RULES:
        weights, ids = moe.route(logits, rule)
        for t in range(5):
            alone, alone_ids = moe.route(logits[t : t + 1].clone(), rule)
            assert same_bits(alone, weights[t : t + 1])
            assert torch.equal(alone_ids, ids[t : t + 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 17}, "top_k=17: must be from 1 to num_experts=16"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_k": 2, "scoring": "tanh"}, "scoring='tanh': must be one of softmax, sigmoid"),
    ],
)
def test_rules_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        moe.route(torch.zeros(1, 16), moe.RoutingRule(**arguments))


def test_a_bias_needs_sigmoid_scores():
    with pytest.raises(ConfigError, match="needs scoring='sigmoid'"):
        moe.route(torch.zeros(1, 4), moe.RoutingRule(top_k=1), selection_bias=torch.zeros(4))


def test_logits_must_be_float_rows():
    with pytest.raises(ConfigError, match="router_logits"):
        moe.route(torch.zeros(4, 4, dtype=torch.int32), moe.RoutingRule(top_k=1))
    with pytest.raises(ConfigError, match="router_logits"):
        moe.route(torch.zeros(4, 5).T, moe.RoutingRule(top_k=1))


def test_no_token_is_no_work(backend):
    weights, ids = moe.route(torch.zeros(0, 8), moe.RoutingRule(top_k=2))
    assert weights.shape == ids.shape == (0, 2)
