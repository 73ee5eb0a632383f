"""The dense projection: both backends against the reference, row by row the same bits, marks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.linear import cases, linear, reference, torch_path
from firetower.ops.registry import REGISTRY
from firetower.sensors.marks import Mark, mark_rows, new_panel

kernels = pytest.importorskip("firetower.ops.linear.kernels")

NAN, INF = float("nan"), float("inf")
BACKENDS = {"torch": torch_path.linear, "triton": kernels.linear}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaNs in the interpreter


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return request.param


def run(backend, x, w, b=None, mark=None):
    out = torch.full((x.shape[0], w.shape[0]), NAN, dtype=x.dtype, device=x.device)
    BACKENDS[backend](x, w, b, out, mark)
    return out


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65])
def test_matches_the_reference(backend, shape, num_rows, device, kernel_dtypes, assert_close):
    for dtype in kernel_dtypes if backend == "triton" else (*kernel_dtypes, torch.bfloat16):
        x, w, b = cases.make(num_rows, shape, dtype, device)
        assert_close(f"{dtype} with bias", reference.linear(x, w, b), run(backend, x, w, b), cases.RTOL[dtype])
        assert_close(f"{dtype}", reference.linear(x, w), run(backend, x, w), cases.RTOL[dtype])


def test_wide_tile_and_long_input(device, kernel_dtypes, assert_close):
    dtype = kernel_dtypes[-1]
    shape = (kernels._WIDE_FROM, 48)
    assert kernels.tiles_for(shape[0], dtype) is kernels._WIDE
    x, w, b = cases.make(3, shape, dtype, device)
    assert_close("wide", reference.linear(x, w, b), run("triton", x, w, b), cases.RTOL[dtype])


@pytest.mark.parametrize("num_rows", [1000, 4097])
def test_many_rows(num_rows, assert_close):
    x, w, b = cases.make(num_rows, (37, 100), torch.float32, "cpu")
    assert_close("many", reference.linear(x, w, b), linear(x, w, b), cases.RTOL[torch.float32])


def test_float64_stays_float64(assert_close):
    x, w, b = cases.make(5, (37, 100), torch.float64, "cpu")
    assert_close("float64", reference.linear(x, w, b), linear(x, w, b), cases.RTOL[torch.float64])


@pytest.mark.parametrize("shape", [(37, 100), (64, 640), (130, 65)], ids=str)
def test_a_rows_bits_depend_on_nothing_else(backend, shape, device, kernel_dtypes):
    """Alone, in batches, at any place, beside NaN rows: equal bits."""
    for dtype in kernel_dtypes:
        x, w, b = cases.make(65, shape, dtype, device)
        whole = run(backend, x, w, b)
        for size in (1, 2, 3, 5, 8, 16, 33):
            assert torch.equal(run(backend, x[:size], w, b), whole[:size]), size
        x_bad = x.clone()
        x_bad[1::2] = NAN
        assert torch.equal(run(backend, x_bad, w, b)[::2], whole[::2])
        if backend == "triton" and device == "cpu":
            continue  # NumPy's product in the interpreter depends on a row's place
        for row in (3, 63, 64):
            assert torch.equal(run(backend, x[row : row + 1].clone(), w, b)[0], whole[row])
        order = torch.randperm(65, generator=torch.Generator().manual_seed(1)).to(device)
        assert torch.equal(run(backend, x[order], w, b), whole[order])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.integers(0, 999))
def test_row_invariance_on_the_cpu_for_any_shape(num_rows, n, k, seed):
    x, w, b = cases.make(num_rows, (n, k), torch.float32, "cpu", seed)
    whole = linear(x, w, b)
    row = seed % num_rows
    assert torch.equal(linear(x[row], w, b), whole[row])
    assert torch.equal(linear(x[row:], w, b), whole[row:])


def test_plain_library_call_is_not_row_invariant_so_the_test_can_fail():
    """The faulty form: on this CPU's library at least one shape changes bits with the number of rows."""
    x, w, _ = cases.make(64, (512, 256), torch.float32, "cpu")
    whole = torch.nn.functional.linear(x, w)
    if all(torch.equal(torch.nn.functional.linear(x[:t], w), whole[:t]) for t in (1, 2, 3, 5)):
        pytest.skip("this CPU's library happens to be row-invariant")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_values_stay_in_their_row_and_column(backend, bad, device):
    x, w, b = cases.make(6, (37, 100), torch.float32, device)
    clean = run(backend, x, w, b)
    x[3, 2] = bad
    got = run(backend, x, w, b)
    assert not got[3].isfinite().any()
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(got[keep], clean[keep])
    x[3, 2] = 0
    w[5, 7] = bad
    got = run(backend, x, w, b)
    assert not got[:, 5].isfinite().any()
    assert got[:, [c for c in range(37) if c != 5]].isfinite().all()


def test_overflow_of_the_stored_type_shows(backend, device):
    x, w, _ = cases.make(2, (37, 100), torch.float16, device)
    x[1], w[4] = 300.0, 300.0
    got = run(backend, x, w)
    assert got[1, 4] == INF
    assert got[0].isfinite().all()


@pytest.mark.parametrize("shape", [(37, 100), (64, 640)], ids=["whole", "split"])
def test_marks_what_is_stored_and_changes_no_bit(backend, shape, device, kernel_dtypes):
    for dtype in kernel_dtypes:
        x, w, b = cases.make(9, shape, dtype, device)
        x[2, 1], x[5, 0], x[7, 3] = NAN, INF, NAN
        ids = torch.tensor([0, 1, 2, -1, 3, -1, 4, 6, 5], dtype=torch.int32, device=device)
        for row_ids in (None, ids):
            words = [new_panel(3, 8, device) for _ in range(2)]
            kwargs = {"slot": 1, "num_signals": 3, "num_rows": 8, "row_ids": row_ids}
            off = run(backend, x, w, b)
            on = run(backend, x, w, b, Mark(panel=words[0], **kwargs))
            assert torch.equal(on.view(torch.uint8), off.view(torch.uint8))
            mark_rows(on, Mark(panel=words[1], **kwargs))
            assert torch.equal(words[0], words[1])


def test_clean_signal_is_marked_clean(backend, device):
    x, w, b = cases.make(3, (37, 100), torch.float32, device)
    panel, expected = new_panel(1, 3, device), new_panel(1, 3, device)
    out = run(backend, x, w, b, Mark(panel=panel, slot=0, num_signals=1, num_rows=3))
    mark_rows(out, Mark(panel=expected, slot=0, num_signals=1, num_rows=3))
    assert torch.equal(panel, expected)


def test_every_part_is_written_before_it_is_read(device, kernel_dtypes):
    """Two fillings of output and workspace give the same bits, and so do repeats."""
    dtype, shape = kernel_dtypes[-1], (64, 640)
    x, w, b = cases.make(5, shape, dtype, device)
    split = kernels.split_for(*shape, kernels.tiles_for(shape[0], dtype))
    assert split == 2
    results = []
    for fill in (NAN, 3.0, NAN):
        out = torch.full((5, 64), fill, dtype=dtype, device=device)
        workspace = torch.full((split, 5, 64), fill, device=device)
        kernels.linear(x, w, b, out, None, workspace=workspace)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_split_follows_from_the_weight_alone():
    for n, k in ((512, 2048), (2048, 4096), (12288, 2048), (9216, 2048), (248320, 2048)):
        tiles = kernels.tiles_for(n, torch.bfloat16)
        split = kernels.split_for(n, k, tiles)
        blocks = -(-k // tiles.block_k)
        assert 1 <= split <= max(1, blocks // 2)
        # no part is empty
        assert -(-blocks // split) * (split - 1) < blocks


def test_shapes_of_any_rank_and_no_rows(device):
    x, w, b = cases.make(6, (37, 100), torch.float32, device)
    flat = linear(x, w, b)
    assert torch.equal(linear(x.view(2, 3, 100), w, b), flat.view(2, 3, 37))
    assert linear(x[:0], w, b).shape == (0, 37)
    out = torch.empty(6, 37, device=device)
    assert linear(x, w, b, out=out) is out
    assert torch.equal(out, flat)


def test_rows_with_a_stride(backend, device):
    x, w, b = cases.make(6, (37, 100), torch.float32, device)
    wide = torch.full((6, 150), NAN, device=device)
    wide[:, 20:120] = x
    assert torch.equal(run(backend, wide[:, 20:120], w, b), run(backend, x, w, b))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 5)}, r"weight=\(3, 5\): must be \[N, K\]"),
        ({"weight": torch.zeros(4, 3).t()}, "K must be contiguous"),
        ({"weight": torch.zeros(3, 4).half()}, "weight of torch.float16"),
        ({"bias": torch.zeros(4)}, r"bias=\(4,\): must be \[3\]"),
        ({"hidden_states": torch.zeros(2, 4, dtype=torch.int32)}, "must be float"),
        ({"out": torch.zeros(2, 4)}, r"out=\(2, 4\)"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    arguments = {"hidden_states": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": None, **change}
    with pytest.raises(ConfigError, match=message):
        linear(**arguments)


def test_both_backends_are_registered_in_order():
    assert REGISTRY.backends("linear") == ("triton", "torch")
