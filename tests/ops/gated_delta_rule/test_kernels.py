"""What the kernels of chunked prefill rest on: operands rounded to TF32, and sums of gates in two exact parts."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from firetower.ops.gated_delta_rule import kernels  # noqa: E402
from firetower.ops.gated_delta_rule.torch_path import segment_sums  # noqa: E402

# numpy's, of values that are not finite
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _where_kernels_run(device):
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for CUDA here: the interpreter is off")


@triton.jit
def operand_kernel(p_x, p_y, SIZE: tl.constexpr, PRECISION: tl.constexpr):  # noqa: N803
    b_i = tl.arange(0, SIZE)
    tl.store(p_y + b_i, kernels.operand(tl.load(p_x + b_i), tl.float32, PRECISION))


def operands(x, precision):
    y = torch.empty_like(x)
    operand_kernel[(1,)](x, y, SIZE=len(x), PRECISION=precision)
    return y


def test_operands_are_the_nearest_of_ten_bits(device):
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device)
    y = operands(x, "tf32")
    mantissa, exponent = torch.frexp(x.double())
    # eleven bits with the leading one; ties go away from zero
    scaled = mantissa * 2.0**11
    nearest = torch.ldexp(torch.trunc(scaled + 0.5 * scaled.sign()) / 2.0**11, exponent)
    assert torch.equal(y.double(), nearest)
    cut = (x.view(torch.int32) & -0x2000).view(torch.float32)
    assert float((y - x).sum().abs()) < 0.1 * float((cut.abs() - x.abs()).sum().abs())
    assert torch.equal(operands(x, "tf32x3"), x)


def test_an_operand_that_is_not_finite_stays_so(device):
    # the device's own NaN has every bit set: a carry would make -0 of it
    x = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000, 0x7F800001, 0, -0x80000000], dtype=torch.int32)
    y = operands(x.view(torch.float32).to(device), "tf32").cpu()
    assert y[[0, 1, 2, 5]].isnan().all()
    assert y[[3, 4]].tolist() == [math.inf, -math.inf]
    assert y[[6, 7]].tolist() == [0.0, 0.0]


def sums_of(g, size=64):
    """float64 [C] sums of gates up to each token, to base e, as the kernel has them in two parts, and the factors."""
    length = len(g)
    num_chunks = -(-length // size)
    sums = torch.full((num_chunks, 1, 2, size), math.nan, device=g.device)
    factors = torch.full((num_chunks, 1, size, 4), math.nan, device=g.device)
    total = torch.full((num_chunks, 1), math.nan, device=g.device)
    kernels.gated_delta_rule_gates_fwd_kernel[(num_chunks, 1)](
        g, torch.ones_like(g), None, None, sums, factors, total, 1.0, length, num_chunks, 1, 1, HV=1, BH=1, C=size,
        OVERLAP=False,
    )  # fmt: skip
    return sums.double().movedim(2, 3).flatten(0, 2), factors[:, 0], total[:, 0]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 600.0])
@pytest.mark.parametrize("resets", [(), (0, 10), (31, 63)], ids=str)
def test_differences_of_the_sums_are_sums_of_their_own(device, scale, resets):
    g = -scale * torch.rand(64, generator=torch.Generator().manual_seed(1))
    g[list(resets)] = torch.tensor([-math.inf, -1e6])[: len(resets)]
    parts, factors, total = sums_of(g.to(device))
    differences = ((parts[:, None] - parts[None, :]).sum(-1) * math.log(2)).cpu()
    expected = segment_sums(g.double())
    counts = expected.isfinite() & (expected > -690)
    error = (differences - expected)[counts].abs()
    # of exponents: an error here is the relative error of a decay
    assert float((error - 2e-7 * expected[counts].abs()).max()) < 2e-7
    forgotten = torch.ones(64, 64, dtype=torch.bool).tril() & ~counts
    assert (differences[forgotten].float().exp() == 0).all()
    assert factors.isfinite().all()
    assert float(total[0]) == pytest.approx(float(g.double().sum().exp()), rel=1e-5, abs=1e-38)


def test_a_difference_of_one_sum_would_lose_small_gates():
    g = torch.full((64,), -0.01)
    g[10] = -690.0
    summed = g.cumsum(0)
    lost = (summed[:, None] - summed[None, :] - segment_sums(g.double()).float())[11:, 11:].tril().abs().max()
    assert float(lost) > 1e-5
