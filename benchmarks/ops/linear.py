"""`linear` on CUDA: correct first, then 2048 -> 12288 beside cuBLAS, weights taken in turn so that none stays in L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from ops.common import bandwidth_line, copy_bandwidth, graph_ms, guarded, ratio_line, relative_error
from torch import Tensor

from firetower.ops.linear import cases, kernels, linear
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
BF16, NAN = torch.bfloat16, float("nan")
SHAPES = ((12288, 2048), (2048, 4096), (512, 2048))
"""[N, K]: the widest projection, one whose K is split by 4, one by 8."""

ROWS = (1, 2, 5, 16, 64, 65, 300, 2048)
WEIGHTS = 4
"""Copies of the weight in one graph: 200 MB, where L2 holds 60."""


def run(report: Report, quick: bool) -> None:
    """Every check and figure of `linear`; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: leave out the longer batches.
    """
    for name, check in checks(quick):
        guarded(report, name, lambda check=check, name=name: report(f"{name} ok {check() or ''}".rstrip()))
    copy = copy_bandwidth()
    for num_rows in (1, 5, 64):
        guarded(report, f"linear T={num_rows}", lambda t=num_rows: figure(report, t, copy))


def checks(quick: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, what asserts and may return a remark)."""
    for shape in SHAPES:
        yield f"linear_error {shape}", lambda shape=shape: error(shape)
        yield f"linear_row_bits {shape}", lambda shape=shape: row_bits(shape, ROWS[:6] if quick else ROWS)
        yield f"linear_fillings_repeats {shape}", lambda shape=shape: fillings(shape)
        yield f"linear_sensors {shape}", lambda shape=shape: sensors(shape)


def error(shape: tuple[int, int]) -> str:
    """Against float64, beside cuBLAS."""
    x, w, b = cases.make(64, shape, BF16, "cuda")
    truth = x.double() @ w.double().t() + b.double()
    ours = relative_error(truth, linear(x, w, b))
    peer = relative_error(truth, torch.nn.functional.linear(x, w, b))
    assert ours <= cases.RTOL[BF16], f"{ours:.3g}"
    return f"own={ours:.3g} cublas={peer:.3g}"


def row_bits(shape: tuple[int, int], rows: tuple[int, ...]) -> str:
    """Rows of the longest batch against batches of every length, single rows and another order."""
    x, w, b = cases.make(max(rows), shape, BF16, "cuda")
    whole = linear(x, w, b)
    for num in rows:
        assert torch.equal(linear(x[:num], w, b), whole[:num]), f"the first {num} rows differ"
    for row in (1, 15, 16, 63, 64, max(rows) - 1):
        if row < max(rows):
            assert torch.equal(linear(x[row : row + 1], w, b)[0], whole[row]), f"row {row} alone differs"
    order = torch.randperm(max(rows), device="cuda")
    assert torch.equal(linear(x[order], w, b), whole[order]), "another order differs"
    x[::2] = NAN
    assert torch.equal(linear(x, w, b)[1::2], whole[1::2]), "NaN rows beside it"
    plain = torch.nn.functional.linear
    same = all(torch.equal(plain(x[:n], w)[1::2], plain(x, w)[:n][1::2]) for n in rows)
    return f"cublas_row_invariant={same}"


def fillings(shape: tuple[int, int]) -> None:
    """Two fillings of output and workspace, and 50 repeats, give the same bits."""
    x, w, b = cases.make(5, shape, BF16, "cuda")
    split = kernels.split_for(*shape, kernels.tiles_for(shape[0], BF16))
    first = None
    for i in range(52):
        fill = NAN if i % 2 else 3.0
        out = torch.full((5, shape[0]), fill, dtype=BF16, device="cuda")
        workspace = torch.full((split, 5, shape[0]), fill, device="cuda") if split > 1 else None
        kernels.linear(x, w, b, out, None, workspace=workspace)
        first = out if first is None else first
        assert torch.equal(out, first), f"run {i}"


def _mark(num_rows: int) -> Mark:
    ids = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    return Mark(panel=new_panel(2, num_rows, "cuda"), slot=1, num_signals=2, num_rows=num_rows, row_ids=ids)


def sensors(shape: tuple[int, int]) -> None:
    """On or off the same bits; words as the plain check has them, clean and with NaN rows."""
    for dtype in (BF16, torch.float32):
        x, w, b = cases.make(70, shape, dtype, "cuda")
        for bad in ((), (0, 33, 69)):
            x[list(bad)] = NAN
            mark, expected = _mark(70), _mark(70)
            off, on = linear(x, w, b), linear(x, w, b, mark=mark)
            assert _same(on, off), "on and off differ"
            mark_rows(on, expected)
            assert torch.equal(mark.panel, expected.panel), f"{dtype} words differ"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def figure(report: Report, num_rows: int, copy: float) -> None:
    """Time of one projection, sensors on and off, beside cuBLAS."""
    n, k = cases.Q36_SHAPE
    x = torch.randn(num_rows, k, dtype=BF16, device="cuda")
    weights = [torch.randn(n, k, dtype=BF16, device="cuda") for _ in range(WEIGHTS)]
    outs = [torch.empty(num_rows, n, dtype=BF16, device="cuda") for _ in range(WEIGHTS)]
    mark = _mark(num_rows)
    pairs = list(zip(weights, outs, strict=True))

    def own(mark: Mark | None) -> float:
        return graph_ms(lambda: [linear(x, w, out=y, mark=mark) for w, y in pairs], reps=40) / WEIGHTS

    peer = graph_ms(lambda: [torch.mm(x, w.t(), out=y) for w, y in pairs], reps=40) / WEIGHTS
    on, off = own(mark), own(None)
    name = f"linear_2048_12288_T{num_rows}"
    report(ratio_line(name, on, peer, "cublas", bar=1.1, goal="1.0"))
    report(bandwidth_line(f"{name}_weights", n * k * 2, on, copy, bar=0.0, goal=0.9))
    report(f"{name}_sensors on/off={on / off:.3f}")
