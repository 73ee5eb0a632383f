"""Few tokens of a window are routed and planned by one kernel: the answers are those of the two it stands for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.ops import moe
from firetower.ops.moe import cases, planning, torch_path
from firetower.ops.registry import REGISTRY
from firetower.sensors.marks import Mark, new_panel

kernels_route = pytest.importorskip("firetower.ops.moe.kernels_route")

# the interpreter computes with NumPy, which warns where a sigmoid saturates or a NaN passes
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN, INF = float("nan"), float("inf")
FIELDS = ("pair_ids", "block_experts", "expert_offsets", "totals", "row_ids")
RULES = [
    {"is_sigmoid": is_sigmoid, "renormalise": renormalise, "scale": 1.5}
    for is_sigmoid in (False, True)
    for renormalise in (False, True)
]


def both(logits, row_ids, *, top_k, has_shared, bias=None, filling=-7, **rule):
    """(weights, ids, plan) of the one kernel, and of the router's kernel followed by PyTorch's plan."""
    num_tokens, num_experts = logits.shape
    answers = []
    for is_one in (True, False):
        weights = torch.full((num_tokens, top_k), NAN, device=logits.device)
        ids = torch.full((num_tokens, top_k), -3, dtype=torch.int32, device=logits.device)
        plan = planning.new_plan(ids, num_experts, has_shared=has_shared, block_m=16, has_rows=row_ids is not None)
        for name in FIELDS:
            if getattr(plan, name) is not None:
                getattr(plan, name).fill_(filling)
        out = {"weights": weights, "ids": ids}
        if is_one:
            kernels_route.route_plan(logits, bias, row_ids, top_k=top_k, into=plan, **rule, **out)
        else:
            kernels_route.router(logits, bias, top_k=top_k, mark=None, **rule, **out)
            torch_path.plan(ids, row_ids, into=plan)
        answers.append((weights, ids, plan))
    return answers


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
@pytest.mark.parametrize("pads", ["none", "some", "all"])
@pytest.mark.parametrize("has_shared", [False, True])
def test_the_plan_is_that_of_the_parts(num_tokens, pads, has_shared, device, same_bits_of):
    logits = cases.normal((num_tokens, 11), num_tokens, device=device, scale=2.0)
    row_ids = None if pads == "none" else torch.arange(num_tokens, dtype=torch.int32, device=device) % 3 - 1
    if pads == "all":
        row_ids = row_ids * 0 - 1
    one, two = both(logits, row_ids, top_k=3, has_shared=has_shared, **RULES[1])
    same_bits_of(one, two)
    assert moe.audit(one[2], one[1], row_ids).is_clean
    again, _ = both(logits, row_ids, top_k=3, has_shared=has_shared, filling=12345, **RULES[1])
    same_bits_of(again, one)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_experts", [5, 33])
def test_rows_have_the_bits_of_the_router_alone(rule, num_experts, device, same_bits_of):
    """Ties, zeros of both signs, rows of -Inf, a NaN, an Inf, logits far below 0, with and without a bias."""
    logits = cases.normal((9, num_experts), 3, device=device, scale=3.0)
    logits[1], logits[2, 1], logits[3, 2], logits[4] = -INF, NAN, INF, -110.0
    logits[5, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0], device=device)
    logits[6] = 2.0
    biases = (None, cases.normal((num_experts,), 4, device=device)) if rule["is_sigmoid"] else (None,)
    for bias in biases:
        same_bits_of(*both(logits, None, top_k=4, has_shared=True, bias=bias, **rule))


def test_experts_in_several_chunks_of_a_warps_lanes(device, same_bits_of):
    logits = cases.normal((16, 200), 5, device=device)
    logits[3], logits[4] = 0.0, torch.arange(200, device=device).float()
    one, two = both(logits, torch.arange(16, device=device) % 5 - 1, top_k=8, has_shared=True, **RULES[1])
    same_bits_of(one, two)
    assert one[1][3].tolist() == list(range(8))
    assert one[1][4].tolist() == list(range(199, 191, -1))


@pytest.mark.parametrize("shape", ["small", "no shared", "one expert", "shared without a gate"])
def test_the_block_has_the_same_bits_either_way(shape, device, monkeypatch, same_bits):
    monkeypatch.setattr(REGISTRY, "_choices", {})
    parts = ("logits", "router", "plan", "route_plan", "gate_up", "down", "combine")
    monkeypatch.setenv("FIRETOWER_OPS", ",".join(f"moe.{part}=triton" for part in parts))
    size = cases.SHAPES[shape]
    x, weights = cases.normal((5, size.hidden), 1, device=device), cases.weights(size, 2, device=device)
    row_ids = torch.tensor([0, -1, 2, 3, 4], dtype=torch.int32, device=device)
    stages = [field.name for field in dataclasses.fields(moe.MoeMarks)]
    x[2, 3] = NAN
    outs, panels = [], []
    for few in (moe.FEW_TOKENS, 0):
        monkeypatch.setattr(moe, "FEW_TOKENS", few)
        calls = []
        run = kernels_route.moe_route_plan_fwd_kernel.run
        monkeypatch.setattr(
            kernels_route.moe_route_plan_fwd_kernel, "run", lambda *a, r=run, c=calls, **k: (c.append(1), r(*a, **k))
        )
        panel = new_panel(len(stages), 5, device)
        marks = {
            stage: Mark(panel=panel, slot=slot, num_signals=len(stages), num_rows=5)
            for slot, stage in enumerate(stages)
        }
        outs.append(
            moe.moe(x, weights, moe.RoutingRule(top_k=size.top_k), row_ids=row_ids, marks=moe.MoeMarks(**marks))
        )
        panels.append(panel)
        assert len(calls) == (few > 0)
        monkeypatch.setattr(kernels_route.moe_route_plan_fwd_kernel, "run", run)
    assert same_bits(*outs)
    assert torch.equal(*panels)


def test_a_pin_of_one_part_is_kept(device, monkeypatch):
    """Where the plan is pinned to PyTorch, the kernel that also plans does not run."""
    monkeypatch.setattr(REGISTRY, "_choices", {})
    monkeypatch.setenv("FIRETOWER_OPS", "moe.router=triton,moe.route_plan=triton,moe.plan=torch")
    monkeypatch.setattr(kernels_route.moe_route_plan_fwd_kernel, "run", lambda *_, **__: pytest.fail("it ran"))
    size = cases.SHAPES["small"]
    x, weights = cases.normal((2, size.hidden), 1, device=device), cases.weights(size, 2, device=device)
    assert moe.moe(x, weights, moe.RoutingRule(top_k=2)).isfinite().all()


@pytest.fixture
def same_bits_of(same_bits):
    def check(a, b):
        assert torch.equal(a[1], b[1]), "ids"
        assert same_bits(a[0], b[0]), "weights"
        for name in FIELDS:
            left, right = getattr(a[2], name), getattr(b[2], name)
            assert (left is None and right is None) or torch.equal(left, right), name

    return check
