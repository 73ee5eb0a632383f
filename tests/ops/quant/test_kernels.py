"""The Triton kernels against the path in PyTorch: on the CPU by the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from firetower.ops.quant import cases, quantize_q8_1, reference, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

pytest.importorskip("triton")
from firetower.ops.quant import kernels

# the interpreter is NumPy, which warns where a NaN or an Inf is computed with; both are planted here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_kind = pytest.mark.parametrize("kind", cases.ALL, ids=lambda k: k.name)
ROWS = 20


def blocks_of(kind, num: int) -> int:
    """Columns of a row of ``num`` superblocks, or as many small blocks less one."""
    return num * 256 if kind.block_elements == 256 else num * 256 - 32


def linear(x, raw, kind, fill=math.nan, mark=None):
    y = torch.full((len(x), len(raw)), fill, dtype=x.dtype, device=x.device)
    kernels.linear(x, raw, kind, y, mark)
    return y


def linear_q8_1(x, raw, kind, fill=math.nan, mark=None, dtype=torch.float32):
    y = torch.full((len(x.codes), len(raw)), fill, dtype=dtype, device=raw.device)
    kernels.linear_q8_1(x, raw, kind, y, mark)
    return y


def marks(rows: int, device: str) -> tuple[Mark, Mark]:
    ids = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)[:rows]
    made = [Mark(panel=new_panel(3, 4, device), slot=1, num_signals=3, num_rows=4, row_ids=ids) for _ in range(2)]
    return made[0], made[1]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [1, 5])
def test_products_of_activations_as_they_are(device, assert_close, kind, dtype, blocks):
    columns = blocks_of(kind, blocks)
    raw, x = cases.random_raw(ROWS, columns, kind, 1, device), cases.inputs(2, columns, 2, dtype, device)
    assert_close(kind.name, reference.linear(x, raw, kind), linear(x, raw, kind), cases.RTOL[dtype])


@every_kind
@pytest.mark.parametrize("blocks", [1, 5])
def test_products_of_quantised_activations(device, assert_close, kind, blocks):
    columns = blocks_of(kind, blocks)
    raw = cases.random_raw(ROWS, columns, kind, 1, device)
    x = quantize_q8_1(cases.inputs(2, columns, 2, device=device))
    expected = torch.empty(2, ROWS, device=device)
    torch_path.linear_q8_1(x, raw, kind, expected, None)
    assert_close(kind.name, expected, linear_q8_1(x, raw, kind), cases.RTOL[torch.float32])


@every_kind
def test_a_token_has_the_same_bits_alone_and_in_company(device, kind):
    columns = blocks_of(kind, 2)
    raw, x = cases.random_raw(ROWS, columns, kind, 3, device), cases.inputs(3, columns, 4, device=device)
    together, quantised = linear(x, raw, kind), linear_q8_1(quantize_q8_1(x), raw, kind)
    assert torch.equal(linear(x[1:2], raw, kind)[0], together[1])
    assert torch.equal(linear_q8_1(quantize_q8_1(x[1:2]), raw, kind)[0], quantised[1])
    assert torch.equal(linear(x[1:], raw, kind, fill=7.0), together[1:])


@every_kind
def test_a_bad_weight_scale_is_bad_in_its_row_and_nowhere_else(device, kind):
    columns = blocks_of(kind, 2)
    clean, x = cases.random_raw(ROWS, columns, kind, 5, device), cases.inputs(2, columns, 6, device=device)
    x[1] = 0
    for field, value in zip(range(cases.fields(kind)), (math.nan, math.inf), strict=False):
        raw = clean.clone()
        cases.set_scale(raw, kind, 17, 1, value, field)
        for found in (linear(x, raw, kind), linear_q8_1(quantize_q8_1(x), raw, kind)):
            bad = ~found.isfinite()
            assert bad[:, 17].all()
            bad[:, 17] = False
            assert not bad.any()


@pytest.mark.parametrize("kind", cases.ALL[::2], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_marks_equal_those_of_the_answer_and_change_nothing(device, kind, dtype):
    columns = blocks_of(kind, 1)
    raw, x = cases.random_raw(ROWS, columns, kind, 5, device), cases.inputs(4, columns, 6, dtype, device)
    cases.set_scale(raw, kind, 18, 0, math.nan)
    x[1, 3], x[2, 200], x[3, 5] = math.nan, math.inf, math.nan
    quantised = quantize_q8_1(x)
    for run in (
        lambda mark, fill: linear(x, raw, kind, fill, mark),
        lambda mark, fill: linear_q8_1(quantised, raw, kind, fill, mark, dtype),
    ):
        mark, expected = marks(4, device)
        on, off = run(mark, math.nan), run(None, 3.0)
        mark_rows(on, expected)
        assert torch.equal(mark.panel, expected.panel)
        assert same_bits(on, off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantising_has_the_bits_of_the_torch_path(device, dtype):
    x = cases.inputs(4, 96, 1, dtype, device)
    x[0, :32] = 2100
    x[1, 40] = math.nan
    x[1, 70] = -math.inf
    x[2, :32] = 0
    x[3] *= 1e4
    x[3, 64:] = torch.arange(32, device=device) + 0.5
    mark, expected = marks(4, device)
    found, again = kernels.quantize(x, mark), kernels.quantize(x, None)
    truth = torch_path.quantize(x, expected)
    for name in ("codes", "scale", "total"):
        assert torch.equal(getattr(found, name).nan_to_num(7), getattr(truth, name).nan_to_num(7)), name
        assert same_bits(getattr(found, name), getattr(again, name)), name
    assert torch.equal(mark.panel[1] >> 32, expected.panel[1] >> 32)
    assert torch.equal(found.scale.isnan(), truth.scale.isnan())


def test_quantising_the_ends_of_the_format(device):
    x = torch.zeros(7, 32, device=device)
    x[0, 0], x[0, 1:] = 3e38, 1e5
    x[1], x[2, 3], x[3] = -3e38, 1e-40, 4e-6
    x[4] = torch.where(torch.arange(32, device=device) % 2 == 0, 8e6, -8e6)
    x[5] = -0.0
    x[6] = torch.arange(32, device=device) * 1e-5
    found, truth = kernels.quantize(x, None), torch_path.quantize(x, None)
    for name in ("codes", "scale", "total"):
        assert torch.equal(getattr(found, name), getattr(truth, name)), name


@pytest.mark.gpu
@every_kind
def test_large_rows_on_the_device(assert_close, kind):
    raw, x = cases.random_raw(4097, 2048, kind, 1, "cuda"), cases.inputs(5, 2048, 2, torch.bfloat16, "cuda")
    truth = x.double() @ torch_path.dequantize(raw, kind, torch.float64).T
    assert_close(kind.name, truth, linear(x, raw, kind), cases.RTOL[torch.bfloat16])
    found = linear_q8_1(quantize_q8_1(x), raw, kind)
    assert_close("q8_1", truth, found, cases.Q8_1_RTOL)
    assert all(torch.equal(linear(x, raw, kind), linear(x, raw, kind, fill=7.0)) for _ in range(50))
