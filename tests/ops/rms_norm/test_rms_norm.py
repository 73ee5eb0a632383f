"""`rms_norm`: against float64 truth and transformers, on every backend; degenerate rows, rows apart, sensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.activation import silu
from firetower.ops.rms_norm import add_rms_norm, cases, reference, rms_norm, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

EPS = 1e-6
BACKENDS = ("torch", "triton")

# Triton's interpreter computes with NumPy, which warns where a GPU gives Inf or NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")


def backend_of(name: str) -> Callable[..., None]:
    if name == "torch":
        return torch_path.rms_norm
    kernels = pytest.importorskip("firetower.ops.rms_norm.kernels")
    return kernels.rms_norm


def run(
    backend: str,
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    zero_centred: bool = False,
    mark: Mark | None = None,
    mark_input: Mark | None = None,
    fill: float = math.nan,
) -> tuple[Tensor, Tensor | None]:
    """One backend into outputs filled beforehand."""
    y = torch.full(x.shape, fill, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.full(x.shape, fill, dtype=residual.dtype, device=x.device)
    backend_of(backend)(
        x, weight, residual, gate, y, total, eps=EPS, is_zero_centred=zero_centred, mark=mark, mark_input=mark_input
    )
    return y, total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", cases.SHAPES.values(), ids=cases.SHAPES)
@pytest.mark.parametrize("zero_centred", [False, True], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("form", ["alone", "residual", "gate"])
def test_backends_against_float64(backend, shape, zero_centred, form, device, kernel_dtypes, assert_close):
    for dtype in kernel_dtypes:
        x, residual, weight, gate = cases.inputs(shape, 1, dtype, device)
        args = {"residual": residual} if form == "residual" else {"gate": gate} if form == "gate" else {}
        y, total = run(backend, x, weight, zero_centred=zero_centred, **args)
        if form == "residual":
            assert torch.equal(total, reference.add(x, residual))
        truth = reference.rms_norm(
            x if total is None else total, weight, eps=EPS, is_zero_centred=zero_centred, gate=args.get("gate")
        )
        assert y.isfinite().all()
        assert_close(f"{backend} {form} {dtype}", truth, y, cases.RTOL[dtype])


@pytest.mark.parametrize("num_tokens", cases.NUM_TOKENS)
def test_lengths(num_tokens, device, assert_close):
    x, residual, weight, _ = cases.inputs((num_tokens, 96), 2, torch.bfloat16, device)
    y, total = add_rms_norm(x, residual, weight, eps=EPS, is_zero_centred=True)
    rows = slice(None) if num_tokens < 100 else slice(num_tokens - 20, None)
    truth = reference.rms_norm(total[rows], weight, eps=EPS, is_zero_centred=True)
    assert_close(f"T={num_tokens}", truth, y[rows], cases.RTOL[torch.bfloat16])
    assert y.isfinite().all()


@pytest.mark.parametrize("name", ["Qwen3NextRMSNorm", "Qwen3NextRMSNormGated"])
@pytest.mark.parametrize("width", [128, 2048])
def test_equals_transformers(name, width, assert_close):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = getattr(modeling, name)(width, eps=EPS)
    x, _, weight, gate = cases.inputs((7, width), 3, torch.float32)
    norm.weight.data.copy_(weight)
    is_gated = name.endswith("Gated")
    theirs = norm(x, gate) if is_gated else norm(x)
    ours = rms_norm(x, weight, eps=EPS, is_zero_centred=not is_gated, gate=gate if is_gated else None)
    assert_close(name, theirs.detach(), ours, cases.RTOL[torch.float32])


def test_equals_transformers_qwen3_5(assert_close):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x, _, weight, gate = cases.inputs((5, 128), 4, torch.float32)
    for norm, is_gated in ((modeling.Qwen3_5RMSNorm(128), False), (modeling.Qwen3_5RMSNormGated(128), True)):
        norm.weight.data.copy_(weight)
        theirs = norm(x, gate) if is_gated else norm(x)
        ours = rms_norm(x, weight, is_zero_centred=not is_gated, gate=gate if is_gated else None)
        assert_close(type(norm).__name__, theirs.detach(), ours, cases.RTOL[torch.float32])


def test_float64_goes_through_the_torch_path(assert_close):
    x, residual, weight, _ = cases.inputs((4, 33), 5, torch.float64)
    y, total = add_rms_norm(x, residual, weight)
    assert_close("float64", reference.rms_norm(total, weight, eps=EPS), y, cases.RTOL[torch.float64])
    huge = rms_norm(torch.full((1, 8), 1e300, dtype=torch.float64), torch.ones(8))
    assert_close("float64, huge", torch.ones(1, 8), huge, 1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_residual_of_its_own_type(backend, device, assert_close):
    x, residual, weight, _ = cases.inputs((3, 40), 6, torch.float16, device)
    y, total = run(backend, x, weight, residual=residual.float())
    assert total.dtype is torch.float32
    assert torch.equal(total, x.float() + residual.float())
    assert_close("fp32 residual", reference.rms_norm(total, weight, eps=EPS), y, cases.RTOL[torch.float16])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_in_place(backend, device):
    wide = cases.normal((5, 3, 2 * 24), 7, device=device)
    x, gate = wide.chunk(2, dim=-1)
    weight = cases.normal((24,), 8, device=device)
    expected, _ = run(backend, x.contiguous(), weight, gate=gate.contiguous())
    y, _ = run(backend, x, weight, gate=gate)
    assert torch.equal(y, expected)
    sliced = cases.normal((5, 100), 7, device=device)[:, 4:76].view(5, 3, 24)
    y, _ = run(backend, sliced, weight)
    assert torch.equal(y, run(backend, sliced.contiguous(), weight)[0])

    x, residual = x.contiguous(), gate.contiguous()
    expected, expected_total = run(backend, x, weight, residual=residual)
    backend_of(backend)(
        x, weight, residual, None, x, residual, eps=EPS, is_zero_centred=False, mark=None, mark_input=None
    )
    assert torch.equal(x, expected)
    assert torch.equal(residual, expected_total)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e19, 2e19, 1e30, 3e38, 1e-20, 1e-30])
def test_rows_whose_squares_leave_float32(backend, size, device, assert_close):
    x = cases.normal((3, 40), 9, device=device)
    x[1] = (x[1] / x[1].abs().max()) * size
    weight = torch.ones(40, device=device)
    y, _ = run(backend, x, weight)
    for row in range(3):
        assert_close(f"row {row}", reference.rms_norm(x, weight, eps=EPS)[row], y[row], 1e-6)
    alone, _ = run(backend, x[:1], weight)
    assert torch.equal(y[:1], alone), "a neighbour that overflows does not change a row's bits"


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_numbers_of_a_huge_row_are_kept(backend, device):
    """Scaling in one step would push them below float32."""
    x = torch.full((1, 64), 3e38, device=device)
    x[0, 5] = 1e19
    y, _ = run(backend, x, torch.ones(64, device=device))
    assert y[0, 5].item() == pytest.approx(1e19 / 3e38 * math.sqrt(64 / 63), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_give_zeros(backend, device, kernel_dtypes):
    for dtype in kernel_dtypes:
        x = torch.zeros(2, 9, dtype=dtype, device=device)
        x[1] = 1
        y, _ = run(backend, x, torch.ones(9, dtype=dtype, device=device))
        assert torch.equal(y[0], torch.zeros_like(y[0]))
        assert y[1].isfinite().all()


def test_an_epsilon_that_the_type_loses_is_kept_drill_h3():
    """Faulty form: eps rounded to fp16 is 0, rsqrt(0) is Inf, 0 * Inf is NaN."""
    x = torch.zeros(1, 64, dtype=torch.float16)
    faulty = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + torch.tensor(1e-8).half())
    assert faulty.isnan().all()
    assert torch.equal(rms_norm(x, torch.ones(64), eps=1e-8), x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_burns_its_row_alone_drill_a2(backend, bad, device, kernel_dtypes):
    """The textbook form turns an Inf into one NaN and zeros, which pass for healthy."""
    textbook = torch.ones(1, 64)
    textbook[0, 3] = math.inf
    textbook = textbook * torch.rsqrt((textbook * textbook).mean(-1, keepdim=True) + EPS)
    assert int(textbook.isnan().sum()) == 1
    assert int((textbook == 0).sum()) == 63

    for seed in range(3):
        for dtype in kernel_dtypes:
            x, residual, weight, _ = cases.inputs((6, 65), seed, dtype, device)
            row, column = 5 * seed % 6, 13 * seed % 65
            residual[row, column] = bad
            panel = new_panel(2, 6, device)
            ids = torch.arange(6, device=device)
            marks = [Mark(panel=panel, slot=s, num_signals=2, num_rows=6, row_ids=ids) for s in (0, 1)]
            y, total = run(backend, x, weight, residual=residual, mark=marks[1], mark_input=marks[0])
            assert y[row].isnan().all()
            others = [r for r in range(6) if r != row]
            assert y[others].isfinite().all()
            assert torch.equal(y[others], run(backend, x[others], weight, residual=residual[others])[0])
            assert panel[0].item() >> 32 == row * 65 + column, "the residual's sensor names the element"
            assert panel[4 + row].item() == column, "the row's first bad signal is the residual"
            assert total[row].isnan().sum() + total[row].isinf().sum() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_at_the_add_is_told_as_inf(backend, device):
    x = torch.full((2, 8), 100.0, dtype=torch.float16, device=device)
    residual = torch.zeros_like(x)
    x[1, 6], residual[1, 6] = 60000, 60000
    panel = new_panel(1, 2, device)
    mark = Mark(panel=panel, slot=0, num_signals=1, num_rows=2, row_ids=torch.arange(2, device=device))
    y, total = run(backend, x, torch.ones(8, device=device), residual=residual, mark_input=mark)
    assert total[1, 6].item() == math.inf
    assert panel[0].item() == (14 << 32) | 0x7C00
    assert y[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_extremes(backend, device):
    x = torch.ones(1, 8, device=device)
    gate = torch.tensor([[-1e30, -200.0, -89.0, 0.0, 89.0, 1e30, math.nan, 1.0]], device=device)
    y, _ = run(backend, x, torch.ones(8, device=device), gate=gate)
    assert y[0, 6].isnan()
    assert y[0, [0, 1, 2, 3, 4, 5, 7]].isfinite().all()
    assert y[0, :2].abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [5, 63, 128, 200])
def test_row_bits_do_not_depend_on_the_batch(backend, width, device):
    x, residual, weight, gate = cases.inputs((33, width), 10, torch.float32, device)
    together, _ = run(backend, x, weight, gate=gate)
    summed, _ = run(backend, x, weight, residual=residual)
    for rows in ([0], [32], [1, 2], [5, 31, 7], list(range(8)), list(range(9, 26))):
        assert torch.equal(run(backend, x[rows], weight, gate=gate[rows])[0], together[rows])
        assert torch.equal(run(backend, x[rows], weight, residual=residual[rows])[0], summed[rows])


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 101])
def test_the_sum_of_a_cuda_device_without_triton(width, device):
    x = cases.normal((9, width), 14, torch.float64, device)
    torch.testing.assert_close(torch_path.fold(x), x.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
    x = x.float()
    assert torch.equal(torch_path.fold(x)[3:5], torch_path.fold(x[3:5]))


def test_silu_bits_depend_on_the_element_alone():
    x = cases.normal((70000,), 11) * 4
    whole = silu(x)
    for start, stop in ((0, 1), (3, 66), (100, 1100), (16383, 16385), (1, 70000), (69999, 70000)):
        assert torch.equal(silu(x[start:stop]), whole[start:stop])
    assert silu(x[:0]).shape == (0,)
    torch.testing.assert_close(whole, torch.nn.functional.silu(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sensors_change_no_bit_and_say_what_mark_rows_says(backend, device, kernel_dtypes):
    ids = torch.tensor([0, 1, -1, 3, 2, -1, 5], dtype=torch.int32, device=device)
    for dtype in kernel_dtypes:
        x, residual, weight, _ = cases.inputs((7, 21), 12, dtype, device)
        for row, column, bad in ((2, 4, math.inf), (4, 20, math.nan), (5, 0, math.nan), (6, 6, -math.inf)):
            x[row, column] = bad
        for row_ids in (ids, None):
            panel, expected = new_panel(3, 8, device), new_panel(3, 8, device)
            mark, mark_in = (Mark(panel=panel, slot=s, num_signals=3, num_rows=8, row_ids=row_ids) for s in (2, 1))
            y, total = run(backend, x, weight, residual=residual, mark=mark, mark_input=mark_in)
            for slot, stored in ((1, total), (2, y)):
                mark_rows(stored, Mark(panel=expected, slot=slot, num_signals=3, num_rows=8, row_ids=row_ids))
            assert torch.equal(panel, expected)
            off = run(backend, x, weight, residual=residual, fill=7.0)
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((y, total), off, strict=True)
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_input_of_a_plain_norm_can_be_marked(backend, device):
    x = cases.normal((3, 5), 13, device=device)
    panel = new_panel(1, 3, device)
    mark = Mark(panel=panel, slot=0, num_signals=1, num_rows=3)
    run(backend, x, torch.ones(5, device=device), mark_input=mark)
    expected = new_panel(1, 3, device)
    mark_rows(x, Mark(panel=expected, slot=0, num_signals=1, num_rows=3))
    assert torch.equal(panel, expected)


def test_no_rows():
    y, total = add_rms_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8))
    assert y.shape == total.shape == (0, 8)


@settings(max_examples=25, deadline=None)
@given(
    scale=st.floats(min_value=1e-37, max_value=3e38),
    width=st.integers(min_value=1, max_value=70),
    seed=st.integers(min_value=0, max_value=2**31),
)
def test_any_finite_row_gives_a_finite_answer(scale, width, seed):
    x = torch.rand(2, width, generator=cases.generator(seed)) * scale
    assert rms_norm(x, torch.ones(width)).isfinite().all()
    assert rms_norm(x, torch.ones(width)).abs().max() <= math.sqrt(width) * 1.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps=0.0: must be from"),
        ({"eps": math.nan}, "eps=nan: must be from"),
        ({"weight": torch.ones(7)}, r"weight: torch.float32 \[7\]: must be"),
        ({"hidden_states": torch.ones(2, 8, dtype=torch.int32)}, "must be float"),
        ({"hidden_states": torch.ones(8, 2).T}, "call .contiguous"),
        ({"hidden_states": torch.ones(2, 0)}, "width=0: must be from 1"),
        ({"gate": torch.ones(2, 4)}, r"gate: torch.float32 \[2, 4\]: must be"),
        ({"out": torch.ones(2, 8, dtype=torch.float16)}, "out: torch.float16"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else None,
)
def test_refusals(change, message):
    args = {"hidden_states": torch.ones(2, 8), "weight": torch.ones(8), **change}
    with pytest.raises(ConfigError, match=message):
        rms_norm(args.pop("hidden_states"), args.pop("weight"), **args)
    if "gate" in change:
        with pytest.raises(ConfigError, match="residual"):
            add_rms_norm(torch.ones(2, 8), torch.ones(2, 4), torch.ones(8))
