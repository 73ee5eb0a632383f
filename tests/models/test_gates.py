"""Decay and strength: against the formula in float64, at the edges of the types, row by row, and as a kernel."""

from __future__ import annotations

import pytest
import torch

from firetower.models.gates import gates, gates_torch
from firetower.sensors.marks import Mark, new_panel
from firetower.sensors.panel import decode_panel

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")  # NumPy's, in the interpreter

HEADS = 5


def make(rows, dtype=torch.float32, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    both = (torch.randn(rows, 2 * HEADS + 3, generator=generator) * scale).to(dtype)
    rate = -torch.rand(HEADS, generator=generator) * 16
    return both[:, 1 : 1 + HEADS], both[:, 1 + HEADS : 1 + 2 * HEADS], rate, torch.randn(HEADS, generator=generator)


def reference(b, a, rate, bias):
    g = rate.double() * torch.nn.functional.softplus(a.double() + bias.double(), threshold=1e4)
    return g, b.double().sigmoid()


def run_triton(b, a, rate, bias, mark=None):
    from firetower.models.gates_kernels import gates as run

    g, beta = torch.empty(a.shape), torch.empty(a.shape)
    run(b, a, rate, bias, g, beta, mark)
    return g, beta


def run_torch(b, a, rate, bias, mark=None):
    g, beta = torch.empty(a.shape), torch.empty(a.shape)
    gates_torch(b, a, rate, bias, g, beta, mark)
    return g, beta


BACKENDS = {"torch": run_torch, "triton": run_triton}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter runs where there is no GPU; test_gpu.py has the kernel")
    return BACKENDS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 8, 21])
def test_against_float64(backend, rows, dtype):
    args = make(rows, dtype)
    for name, want, have in zip(("g", "beta"), reference(*args), backend(*args), strict=True):
        # a few roundings of float32 for each of exp, log and the products
        torch.testing.assert_close(have.double(), want, rtol=2e-6, atol=1e-12, msg=name)


def test_small_decays_keep_their_digits(backend):
    """softplus(-30) is 9e-14: 1 + exp(-30) alone would round it to 0."""
    a = torch.full((1, HEADS), -30.0)
    g, _ = backend(a, a, -torch.ones(HEADS), torch.zeros(HEADS))
    torch.testing.assert_close(g, torch.full((1, HEADS), -9.3576229e-14), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("x", "g", "beta"),
    [(1e38, -1e38, 1.0), (-1e38, 0.0, 0.0), (float("inf"), -float("inf"), 1.0), (-float("inf"), 0.0, 0.0)],
)
def test_edges(backend, x, g, beta):
    full = torch.full((2, HEADS), x)
    got_g, got_beta = backend(full, full, -torch.ones(HEADS), torch.zeros(HEADS))
    torch.testing.assert_close(got_g, torch.full((2, HEADS), g), rtol=1e-6, atol=0)
    torch.testing.assert_close(got_beta, torch.full((2, HEADS), beta))


def test_a_nan_stays_in_its_head_and_inf_is_legal(backend):
    b, a, rate, bias = (x.clone() for x in make(6))
    a[4, 3], a[2, 1], b[0, 0] = float("nan"), float("inf"), float("nan")
    panel = new_panel(2, 16)
    ids = torch.tensor([3, 4, 5, 6, 7, -1], dtype=torch.int32)
    g, beta = backend(b, a, rate, bias, Mark(panel=panel, slot=1, num_signals=2, num_rows=16, row_ids=ids,
                                             neg_inf_legal=True))  # fmt: skip
    assert g.isnan().nonzero().tolist() == [[4, 3]]
    assert beta.isnan().nonzero().tolist() == [[0, 0]]
    reading = decode_panel(panel.tolist(), 2, 16)
    assert [(f.slot, f.flat_index, f.shape) for f in reading.first] == [(1, 4 * HEADS + 3, (6, HEADS))]
    assert [(r.sequence, r.offset) for r in reading.burned] == [(7, 3)]


def test_backends_agree():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    args = make(33, scale=20.0)
    for have, want in zip(run_triton(*args), run_torch(*args), strict=True):
        torch.testing.assert_close(have, want, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 7, 64])
def test_a_row_alone_has_the_same_bits(rows):
    b, a, rate, bias = make(rows)
    together = gates(b, a, rate, bias)
    for i in range(rows):
        one = gates(b[i : i + 1], a[i : i + 1], rate, bias)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(together, one, strict=True))
