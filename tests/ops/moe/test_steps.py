"""The two products and the sum one by one: against float64, into poisoned memory, in every block size."""

from __future__ import annotations

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.ops import moe
from firetower.ops.moe import cases
from firetower.ops.moe.torch_path import gate_up as torch_gate_up
from firetower.ops.registry import REGISTRY, Target

# the interpreter computes with NumPy, which warns where a sigmoid saturates or a NaN passes
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = float("nan")
SHAPE = cases.SHAPES["small"]
BLOCKS = [1, 16, 32, 64, 128]


class Steps:
    """One routing of six tokens, one of them a pad, and what every step gives in float64."""

    def __init__(self, shape: cases.Shape, block_m: int, dtype: torch.dtype, device: str) -> None:
        self.x = cases.normal((6, shape.hidden), 1, dtype, device)
        self.weights = cases.weights(shape, 2, dtype, device)
        self.ids = cases.random_ids(6, shape, 3, device)
        self.row_ids = torch.tensor([0, 1, -1, 2, 3, 4], dtype=torch.int32, device=device)
        has_shared = shape.shared_inner > 0
        self.plan = moe.plan(self.ids, shape.num_experts, block_m=block_m, has_shared=has_shared, row_ids=self.row_ids)
        self.shares = cases.normal((6, shape.top_k), 4, device=device)
        self.gate = cases.normal((6,), 5, device=device)
        self.is_real = (self.plan.row_ids >= 0).cpu()
        self.act, self.rows, self.out = self.truth(shape)

    def truth(self, shape: cases.Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, plan = self.weights, self.plan
        acts, rows = [], []
        for token, slot, expert in moe.row_map(plan).tolist():
            is_shared = slot == shape.top_k
            expert = max(expert, 0)
            up_proj = weights.shared.gate_up_proj if is_shared else weights.gate_up_proj[expert]
            down_proj = weights.shared.down_proj if is_shared else weights.down_proj[expert]
            gate, up = (up_proj.double() @ self.x[token].double()).chunk(2)
            act = torch.nn.functional.silu(gate) * up
            acts.append(torch.nn.functional.pad(act, (0, max(shape.inner, shape.shared_inner) - act.numel())))
            # the product of what was stored
            rows.append(down_proj.double() @ act.to(self.x.dtype).double())
        by_slot = torch.stack(rows).view(6, plan.num_slots, -1)
        out = (by_slot[:, : shape.top_k] * self.shares.double()[:, :, None]).sum(1)
        if plan.has_shared:
            out = out + torch.sigmoid(self.gate.double())[:, None] * by_slot[:, shape.top_k]
        return torch.stack(acts), torch.stack(rows), torch.where((self.row_ids >= 0)[:, None], out, 0)

    def run(self, fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        plan, weights, x = self.plan, self.weights, self.x
        act = torch.full(self.act.shape, fill, dtype=x.dtype, device=x.device)
        rows = torch.full(self.rows.shape, fill, dtype=x.dtype, device=x.device)
        out = torch.full(self.out.shape, fill, dtype=x.dtype, device=x.device)
        moe.gate_up(x, weights.gate_up_proj, plan, shared=weights.shared, out=act)
        moe.down(act, weights.down_proj, plan, shared=weights.shared, out=rows)
        gate = self.gate if plan.has_shared else None
        moe.combine(rows, self.shares, self.ids, plan, shared_logits=gate, row_ids=self.row_ids, out=out)
        return act, rows, out


@pytest.mark.parametrize("block_m", BLOCKS)
def test_steps_are_exact_and_write_every_row_once(block_m, backend, device, kernel_dtypes, assert_close, same_bits):
    """Two poisons, the same bits; rows of the pad token keep the poison; nothing else does."""
    if backend == "triton" and block_m in (1, 32):
        pytest.skip("no kernel has blocks of this size")
    dtypes = kernel_dtypes if block_m == 16 else kernel_dtypes[-1:]
    for dtype in dtypes:
        steps = Steps(SHAPE, block_m, dtype, device)
        first, second = steps.run(NAN), steps.run(3.0)
        real = steps.is_real.to(device)
        for name, truth, a, b in zip(("act", "rows"), (steps.act, steps.rows), first, second, strict=False):
            assert same_bits(a[real], b[real]), name
            assert a[~real].isnan().all(), name
            assert (b[~real] == 3).all(), name
            assert_close(f"{name} {dtype} {block_m}", truth[real], a[real], cases.RTOL[dtype])
        assert same_bits(first[2], second[2])
        assert_close(f"out {dtype} {block_m}", steps.out, first[2], cases.RTOL[dtype])


@pytest.mark.parametrize("shape", ["shared wider", "shared narrower", "no shared"])
def test_columns_past_a_narrower_expert_are_zero(shape, backend, device, assert_close):
    steps = Steps(cases.SHAPES[shape], 16, torch.float32, device)
    act, rows, out = steps.run(NAN)
    real = steps.is_real.to(device)
    assert_close("act", steps.act[real], act[real], 2e-6)
    assert (act[real][steps.act[real] == 0] == 0).all()
    assert_close("rows", steps.rows[real], rows[real], 2e-6)
    assert_close("out", steps.out, out, 2e-6)


def test_l5_an_unwritten_destination_is_seen_by_poisoning(device):
    """A plan that misses one row: the audit names it, and the poison reaches that token's output alone."""
    steps = Steps(SHAPE, 16, torch.float32, device)
    lost = int(steps.plan.pair_ids[0])
    token, slot = divmod(lost, steps.plan.num_slots)
    steps.plan.pair_ids[0] = -1
    expert = SHAPE.num_experts if slot == SHAPE.top_k else int(steps.ids[token, slot])
    assert moe.audit(steps.plan, steps.ids, steps.row_ids).unwritten == ((token, slot, expert),)
    act, _, out = steps.run(NAN)
    assert act.isnan().all(-1).nonzero().flatten().tolist() == sorted(
        {lost, *(~steps.is_real).nonzero().flatten().tolist()}
    )
    assert out.isnan().any(-1).nonzero().flatten().tolist() == [token]


def test_a_row_is_summed_in_the_order_of_its_slots(backend, device):
    """1e8 - 1e8 + 1: another order would lose the 1."""
    plan = moe.plan(torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device), 3, block_m=16)
    rows = torch.tensor([[1e8], [-1e8], [1.0]], device=device)
    ids = torch.tensor([[0, 1, 2]], device=device)
    assert moe.combine(rows, torch.ones(1, 3, device=device), ids, plan).item() == 1.0


def test_a_nan_weight_is_not_lost_behind_an_absent_expert(backend, device):
    ids = torch.tensor([[0, 7], [0, 7]], dtype=torch.int32, device=device)
    plan = moe.plan(ids, 3, block_m=16)
    shares = torch.tensor([[0.5, NAN], [0.5, 0.5]], device=device)
    out = moe.combine(torch.ones(4, 8, device=device), shares, ids, plan)
    assert out.isnan().all(-1).tolist() == [True, False]
    assert out[1].tolist() == [0.5] * 8


def test_the_torch_path_reads_the_plan_on_cuda_without_asking(monkeypatch):
    """On CUDA every block there is room for is computed; the same loop is run here on CPU tensors."""
    steps = Steps(SHAPE, 16, torch.float32, "cpu")
    expected = steps.run(0.0)[0]
    monkeypatch.setattr("firetower.ops.moe.torch_path.reads_on_host", lambda x: False)
    act = torch.zeros_like(expected)
    shared = steps.weights.shared.gate_up_proj
    torch_gate_up(
        steps.x, steps.weights.gate_up_proj, shared, steps.plan, out=act, gate_mark=None, up_mark=None, mark=None
    )
    assert torch.equal(act, expected)


@pytest.mark.parametrize("missing", ["logits", "router", "plan", "gate_up", "down", "combine"])
def test_a_device_that_lacks_one_kernel_falls_back_in_that_one_alone(missing):
    device = Target(
        device="cuda",
        dtype=torch.bfloat16,
        capability=(9, 0),
        has_triton=True,
        missing=frozenset({f"moe.{missing}/triton"}),
    )
    chosen = {part: c for part, c in REGISTRY.table(device, {}).items() if part.startswith("moe.")}
    assert {part: c.backend for part, c in chosen.items()} == {
        part: "torch" if part == f"moe.{missing}" else "triton" for part in chosen
    }
    assert chosen[f"moe.{missing}"].passed_over == (("triton", "the device lacks it"),)


def test_a_block_that_no_kernel_has_is_refused(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_choices", {})
    monkeypatch.setenv("FIRETOWER_OPS", "moe.gate_up=triton")
    steps = Steps(SHAPE, 32, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="block_m=32: must be 16, 64 or 128"):
        moe.gate_up(steps.x, steps.weights.gate_up_proj, steps.plan, shared=steps.weights.shared)


@pytest.mark.parametrize(
    ("phase", "pairs", "pins", "rows"),
    [
        ("window", 8, "", 1),
        ("window", 8 * 4096, "", 1),
        ("prefill", 8 * 4096, "", 32),
        ("window", 8 * 4096, "moe.down=triton", 16),
        ("prefill", 8 * 512, "moe.down=triton", 64),
        ("prefill", 8 * 8192, "moe.down=triton", 128),
    ],
)
def test_rows_of_a_block(phase, pairs, pins, rows, monkeypatch):
    """In a window they do not depend on the number of rows."""
    monkeypatch.setattr(REGISTRY, "_choices", {})
    monkeypatch.setenv("FIRETOWER_OPS", pins)
    assert moe.block_rows(torch.zeros(1, 8), phase, pairs, 256) == rows
