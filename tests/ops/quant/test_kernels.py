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


@pytest.fixture(autouse=True)
def one_tile(monkeypatch):
    """The interpreter is slow: all rows in one program, but where a test asks for more."""
    monkeypatch.setattr(kernels, "_ROWS", 32)


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
def test_bits_depend_neither_on_the_tile_nor_on_the_width_of_loads(device, monkeypatch, kind):
    columns = blocks_of(kind, 8)
    raw, x = cases.random_raw(9, columns, kind, 3, device), cases.inputs(1, columns, 4, device=device)
    quantised = quantize_q8_1(x)
    expected = linear(x, raw, kind), linear_q8_1(quantised, raw, kind)
    monkeypatch.setattr(kernels, "_ROWS", 8)
    for width in (8, 4) if kind.name == "Q6_K" else (16,):
        monkeypatch.setattr(kernels, "_SKEW_WIDTH", width)
        assert torch.equal(linear_q8_1(quantised, raw, kind), expected[1])
    assert torch.equal(linear(x, raw, kind), expected[0])
    # four bytes on: words as wide as before are not aligned any more
    room = torch.zeros(raw.numel() + 4, dtype=torch.uint8, device=device)
    moved = room[4:].view_as(raw).copy_(raw)
    assert torch.equal(linear_q8_1(quantised, moved, kind), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", cases.ALL[1:5], ids=lambda k: k.name)
def test_what_a_split_activation_keeps(device, dtype, kind):
    """Three bytes and a step of a power of two: all of a bf16 down to 2**-14 of the largest, 21 bits of an fp32."""
    columns = 256
    x = cases.inputs(3, columns, 5, dtype, device)
    x[0, 3], x[0, 40] = 60000.0, 2.0**-14
    x[1, :32], x[1, 32:64], x[1, 64:96] = 0.0, -3e4, 2.0**-24
    x[2, 5] = -0.0
    parts, step, total = kernels.split(x, kind)
    runs = parts.view(3, 3, -1, 16).cpu().long()
    value = (runs[:, 2] << 16) + ((runs[:, 1] & 255) << 8) + (runs[:, 0] & 255)
    # lane by lane: where a lane's runs stand among those of all
    if kind.name == "Q6_K":
        runs_of_lanes = [[8 * half + 2 * slot + odd for slot in range(4)] for half in range(2) for odd in range(2)]
    else:
        num = 2 if kind.block_elements == 32 else 4
        runs_of_lanes = [[num * lane + slot for slot in range(num)] for lane in range(columns // 16 // num)]
    stored = [run for slot in zip(*runs_of_lanes, strict=True) for run in slot]
    order = [stored.index(run) for run in range(columns // 16)]
    back = value[:, order].reshape(3, -1, 32).double() * step.cpu().double()[..., None]
    given = x.cpu().double().view(3, -1, 32)
    largest = given.abs().amax(-1, keepdim=True)
    assert ((back - given).abs() <= largest * 2.0**-22).all()
    if dtype is torch.bfloat16:
        near = given.abs() >= largest * 2.0**-14
        assert torch.equal(back[near], given[near])
    assert torch.allclose(total.cpu().double(), back.sum(-1), rtol=1e-7, atol=0)


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
