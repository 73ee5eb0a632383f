"""`quant` on CUDA: every format against float64 first, then rows times matrix as a share of the copy bandwidth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ops.common import bandwidth_line, copy_bandwidth, graph_ms, guarded, relative_error
from torch import Tensor

from firetower.ops.quant import KINDS, Activations, Kind, cases, kernels, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
BF16, COLUMNS, ROWS, REPEATS = torch.bfloat16, 2048, 4112, 50
CUT_ROWS = 4100
"""Rows whose last tile is not full."""
BIG = 248_320
L2_BYTES = 50 << 20


def run(report: Report, quick: bool) -> None:
    """Every check and figure; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: without the vocabulary's matrix.
    """
    checks = (truth, tokens_alone, repeats, bad_scales)
    for kind, check in itertools.product(KINDS.values(), checks):
        name = f"{check.__name__} {kind.name}"
        guarded(report, name, lambda c=check, k=kind, n=name: report(f"{n} ok {c(k) or ''}".rstrip()))
    for name in ("Q4_K", "Q6_K"):
        guarded(report, f"sensors {name}", lambda name=name: report(f"sensors {name} ok {sensors(KINDS[name]) or ''}"))
    guarded(report, "activations", lambda: report(f"activations ok {activations() or ''}"))
    copy = copy_bandwidth()
    for name, rows in itertools.product(("Q4_K", "Q6_K"), (12288,) if quick else (12288, BIG)):
        guarded(report, f"figures {name} {rows}", lambda n=name, r=rows: figures(report, KINDS[n], r, copy))
    if not quick:
        for name in ("Q8_0", "Q4_1", "Q5_K", "IQ4_XS"):
            guarded(report, f"figures {name}", lambda n=name: figures(report, KINDS[n], 12288, copy))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _linear(x: Tensor, raw: Tensor, kind: Kind, mark: Mark | None = None, fill: float = math.nan) -> Tensor:
    y = torch.full((len(x), len(raw)), fill, dtype=x.dtype, device="cuda")
    kernels.linear(x, raw, kind, y, mark)
    return y


def _linear_q8_1(x: Activations, raw: Tensor, kind: Kind, mark: Mark | None = None, fill: float = math.nan) -> Tensor:
    y = torch.full((len(x.codes), len(raw)), fill, dtype=BF16, device="cuda")
    kernels.linear_q8_1(x, raw, kind, y, mark)
    return y


def _inputs(kind: Kind, tokens: int = 5, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return cases.inputs(tokens, COLUMNS, 2, BF16, "cuda"), cases.random_raw(rows, COLUMNS, kind, 1, "cuda")


def truth(kind: Kind) -> str:
    """Every row count against float64."""
    return " ".join(f"{rows}: {_errors(kind, rows)}" for rows in (ROWS, CUT_ROWS))


def _errors(kind: Kind, rows: int) -> str:
    """Both kernels against float64, and the quantised one against float64 of the activations as quantised."""
    x, raw = _inputs(kind, rows=rows)
    weights = torch_path.dequantize(raw, kind, torch.float64)
    quantised = kernels.quantize(x, None)
    errors = {
        "fp": (x.double() @ weights.T, _linear(x, raw, kind), cases.RTOL[BF16]),
        "q8_1": (quantised.dequantize(torch.float64) @ weights.T, _linear_q8_1(quantised, raw, kind), cases.RTOL[BF16]),
        "q8_1_to_fp": (x.double() @ weights.T, _linear_q8_1(quantised, raw, kind), cases.Q8_1_RTOL),
    }
    said = []
    for name, (expected, found, rtol) in errors.items():
        error = relative_error(expected, found)
        assert error <= rtol, f"{name}: relative error {error:.3g}, allowed {rtol:.3g}"
        said.append(f"{name}={error:.2g}")
    return " ".join(said)


def tokens_alone(kind: Kind) -> None:
    """A token alone, in windows and in batches: the same bits."""
    x, raw = _inputs(kind, 64)
    together, quantised = _linear(x, raw, kind), _linear_q8_1(kernels.quantize(x, None), raw, kind)
    for part in (slice(0, 1), slice(63, 64), slice(3, 5), slice(1, 9), slice(0, 33)):
        assert _same(_linear(x[part], raw, kind), together[part]), f"tokens {part} have other bits"
        found = _linear_q8_1(kernels.quantize(x[part], None), raw, kind)
        assert _same(found, quantised[part]), f"quantised tokens {part} have other bits"


def repeats(kind: Kind) -> None:
    """Two fillings of the answer and many runs: the same bits."""
    x, raw = _inputs(kind)
    quantised = kernels.quantize(x, None)
    first = _linear(x, raw, kind), _linear_q8_1(quantised, raw, kind)
    for i in range(REPEATS):
        fill = (math.nan, 7.0)[i % 2]
        assert _same(_linear(x, raw, kind, fill=fill), first[0]), f"other bits in run {i}"
        assert _same(_linear_q8_1(quantised, raw, kind, fill=fill), first[1]), f"other quantised bits in run {i}"


def bad_scales(kind: Kind) -> None:
    """A NaN scale is NaN in its weight row for every token, zeros included, and nowhere else."""
    x, raw = _inputs(kind)
    x[2] = 0
    for field in range(cases.fields(kind)):
        bad_raw = raw.clone()
        cases.set_scale(bad_raw, kind, 4111, 3, math.nan, field)
        for found in (_linear(x, bad_raw, kind), _linear_q8_1(kernels.quantize(x, None), bad_raw, kind)):
            bad = ~found.isfinite()
            assert bad[:, 4111].all(), f"field {field} does not show"
            assert int(bad.sum()) == len(x), f"field {field} shows elsewhere"


def _mark(rows: int) -> Mark:
    ids = torch.arange(rows, device="cuda", dtype=torch.int32)
    return Mark(panel=new_panel(1, rows, "cuda"), slot=0, num_signals=1, num_rows=rows, row_ids=ids)


def sensors(kind: Kind) -> None:
    """Words are those of `mark_rows`; on or off, the bits are the same."""
    x, raw = _inputs(kind)
    x[1, 7], x[4, 2047] = math.nan, math.inf
    cases.set_scale(raw, kind, 4000, 1, math.nan)
    quantised = kernels.quantize(x, None)
    for work in (lambda m, f: _linear(x, raw, kind, m, f), lambda m, f: _linear_q8_1(quantised, raw, kind, m, f)):
        mark, expected = _mark(5), _mark(5)
        on, off = work(mark, math.nan), work(None, 3.0)
        mark_rows(on, expected)
        assert torch.equal(mark.panel, expected.panel), "panel words differ from mark_rows"
        assert _same(on, off), "sensors change bits"


def activations() -> None:
    """Quantising has the bits of the torch path, bad and huge blocks included."""
    x = cases.inputs(64, COLUMNS, 3, torch.float32, "cuda")
    x[1, 5], x[2, 40], x[3] = math.nan, math.inf, 3e38
    x[4, :32], x[5] = 2100, 4e-6
    mark, expected = _mark(64), _mark(64)
    found, truth = kernels.quantize(x, mark), torch_path.quantize(x, expected)
    for name in ("codes", "scale", "total"):
        mine, theirs = getattr(found, name), getattr(truth, name)
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)), f"{name} differ"
        assert torch.equal(mine.isnan(), theirs.isnan()), f"{name}: other NaN"
    assert torch.equal(mark.panel >> 32, expected.panel >> 32), "panel words differ from mark_rows"


def figures(report: Report, kind: Kind, rows: int, copy: float) -> None:
    """One token; the weights are copied until they no longer fit the L2 cache, and taken in turn."""
    x = cases.inputs(1, COLUMNS, 2, BF16, "cuda")
    part = cases.random_raw(min(rows, 4096), COLUMNS, kind, 1, "cuda")
    raw = part.repeat(-(-rows // len(part)), 1)[:rows].contiguous()
    copies = [raw.clone() for _ in range(-(-2 * L2_BYTES // raw.numel()))]
    y, mark, quantised = torch.empty(1, rows, dtype=BF16, device="cuda"), _mark(1), kernels.quantize(x, None)

    def ms(work: Callable[[Tensor], object]) -> float:
        turn = itertools.cycle(copies)
        return graph_ms(lambda: work(next(turn)), inner=len(copies))

    name = f"quant_{kind.name}_{rows}x{COLUMNS}"
    on = ms(lambda w: kernels.linear_q8_1(quantised, w, kind, y, mark))
    off = ms(lambda w: kernels.linear_q8_1(quantised, w, kind, y, None))
    report(bandwidth_line(f"{name} q8_1", raw.numel(), on, copy, 0.6, 0.8))
    report(f"{name} sensors on={on * 1e3:.2f}us off={off * 1e3:.2f}us ratio={on / off:.3f}")
    whole = ms(lambda w: kernels.linear_q8_1(kernels.quantize(x, None), w, kind, y, mark))
    report(f"{name} q8_1 with quantising own={whole * 1e3:.1f}us")
    report(bandwidth_line(f"{name} fp", raw.numel(), ms(lambda w: kernels.linear(x, w, kind, y, mark)), copy, 0.6, 0.8))
    if rows <= 12288:
        dense = [torch_path.dequantize(w, kind).to(BF16) for w in copies[:3]]
        turn = itertools.cycle(dense)
        theirs = graph_ms(lambda: F.linear(x, next(turn)), inner=len(dense))
        report(f"{name} the same weights in bf16 by cuBLAS={theirs * 1e3:.1f}us")
