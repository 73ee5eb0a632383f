"""`rms_norm`, `rope` and `causal_conv1d` on CUDA, shapes of Q36: correct first, then times beside PyTorch's own ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from ops.common import bandwidth_line, copy_bandwidth, graph_ms, guarded, ratio_line, relative_error
from torch import Tensor

from firetower.ops.causal_conv1d import cases as conv_cases
from firetower.ops.causal_conv1d import kernels as conv_kernels
from firetower.ops.causal_conv1d import reference as conv_reference
from firetower.ops.causal_conv1d import torch_path as conv_torch
from firetower.ops.rms_norm import cases as norm_cases
from firetower.ops.rms_norm import kernels as norm_kernels
from firetower.ops.rms_norm import reference as norm_reference
from firetower.ops.rope import RopeTable, rope_frequencies, rope_table
from firetower.ops.rope import cases as rope_cases
from firetower.ops.rope import kernels as rope_kernels
from firetower.ops.rope import reference as rope_reference
from firetower.ops.rope import torch_path as rope_torch
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
BF16, EPS = torch.bfloat16, 1e-6
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 16, 2, 256
CHANNELS, TAPS, MAX_WINDOW = 8192, 4, 8
REPEATS = 50


def run(report: Report, quick: bool) -> None:
    """Every check and figure of the three ops; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: leave out the large shapes.
    """
    for section in (norm_checks, rope_checks, conv_checks):
        for name, check in section():
            guarded(report, name, lambda check=check, name=name: report(f"{name} ok {check() or ''}".rstrip()))
    copy = copy_bandwidth()
    for name, figure in (("rms_norm", norm_figures), ("rope", rope_figures), ("causal_conv1d", conv_figures)):
        guarded(report, f"{name} figures", lambda figure=figure: figure(report, quick, copy))


Checks = Iterator[tuple[str, Callable[[], str | None]]]


def _marks(num_rows: int, num_signals: int = 2) -> list[Mark]:
    """Signals of one fresh panel; every row owns its own word."""
    panel = new_panel(num_signals, num_rows, "cuda")
    ids = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    return [
        Mark(panel=panel, slot=s, num_signals=num_signals, num_rows=num_rows, row_ids=ids) for s in range(num_signals)
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _close(truth: Tensor, x: Tensor, rtol: float) -> str:
    error = relative_error(truth.cuda(), x)
    assert error <= rtol, f"relative error {error:.3g}, allowed {rtol:.3g}"
    return f"error={error:.2g}"


def _repeats(work: Callable[[float], tuple[Tensor, ...]]) -> None:
    """Two fillings of the outputs, then many runs: the same bits."""
    first = work(math.nan)
    for i in range(REPEATS):
        again = work(7.0 if i % 2 else math.nan)
        assert all(_same(a, b) for a, b in zip(first, again, strict=True)), f"other bits in run {i}"


def _words_agree(marks: list[Mark], stored: list[Tensor]) -> None:
    """The panel says what `mark_rows` says of the tensors as stored."""
    expected = _marks(marks[0].num_rows, len(marks))
    for mark, x in zip(expected, stored, strict=True):
        mark_rows(x, mark)
    assert torch.equal(marks[0].panel, expected[0].panel), "panel words differ from mark_rows"


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, marks: list[Mark] | None = None, fill: float = math.nan,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.full(x.shape, fill, dtype=x.dtype, device="cuda")
    total = torch.full_like(y, fill)
    norm_kernels.rms_norm(
        x, weight, residual, gate, y, None if residual is None else total, eps=EPS, is_zero_centred=gate is None,
        mark=marks[1] if marks else None, mark_input=marks[0] if marks else None,
    )  # fmt: skip
    return y, total


def norm_checks() -> Checks:
    """Checks of `rms_norm`."""
    x, residual, weight, _ = norm_cases.inputs((257, HIDDEN), 1, BF16, "cuda")

    def truth() -> str:
        y, total = _norm(x, residual, weight)
        assert torch.equal(total, x + residual), "the residual is not the rounded sum"
        return _close(
            norm_reference.rms_norm(total[:8].cpu(), weight.cpu(), eps=EPS, is_zero_centred=True), y[:8],
            norm_cases.RTOL[BF16],
        )  # fmt: skip

    def gated() -> str:
        heads, _, w, gate = norm_cases.inputs((40, 32, 128), 2, BF16, "cuda")
        y, _ = _norm(heads, None, w, gate=gate)
        truth = norm_reference.rms_norm(heads[:2].cpu(), w.cpu(), eps=EPS, gate=gate[:2].cpu())
        assert _same(y[7:8], _norm(heads[7:8], None, w, gate=gate[7:8])[0]), "a row alone has other bits"
        return _close(truth, y[:2], norm_cases.RTOL[BF16])

    def rows_alone() -> None:
        together, _ = _norm(x, residual, weight)
        for rows in (slice(0, 1), slice(256, 257), slice(3, 5), slice(1, 9), slice(0, 256)):
            assert _same(_norm(x[rows], residual[rows], weight)[0], together[rows]), f"rows {rows} have other bits"

    def sensors() -> None:
        bad = residual.clone()
        bad[3, 2047], bad[200, 0], bad[256, 5] = math.nan, math.inf, -math.inf
        marks = _marks(257)
        on, off = _norm(x, bad, weight, marks), _norm(x, bad, weight, fill=3.0)
        assert all(_same(a, b) for a, b in zip(on, off, strict=True)), "sensors change bits"
        assert on[0][[3, 200, 256]].isnan().all(), "a bad row is not NaN throughout"
        assert int(on[0].isnan().any(-1).sum()) == 3, "a bad row reaches others"
        _words_agree(marks, [on[1], on[0]])

    def degenerate() -> str:
        huge = torch.zeros(3, HIDDEN, dtype=BF16, device="cuda")
        huge[0] = norm_cases.normal((HIDDEN,), 3, BF16, "cuda") * 5e37
        y, _ = _norm(huge, None, weight)
        assert not y[1:].any(), "a row of zeros is not zeros"
        expected = norm_reference.rms_norm(huge[:1].cpu(), weight.cpu(), eps=EPS, is_zero_centred=True)
        return _close(expected, y[:1], norm_cases.RTOL[BF16])

    yield "rms_norm_truth", truth
    yield "rms_norm_gated", gated
    yield "rms_norm_rows_alone", rows_alone
    yield "rms_norm_repeats", lambda: _repeats(lambda fill: _norm(x, residual, weight, fill=fill))
    yield "rms_norm_sensors", sensors
    yield "rms_norm_degenerate", degenerate


def _rope(
    q: Tensor, k: Tensor, positions: Tensor, table: RopeTable, marks: list[Mark] | None = None, fill: float = math.nan
) -> tuple[Tensor, Tensor]:
    outs = [torch.full(x.shape, fill, dtype=x.dtype, device="cuda") for x in (q, k)]
    mark_q, mark_k = marks or (None, None)
    rope_kernels.rope(q, k, positions, table, *outs, mark_q=mark_q, mark_k=mark_k)
    return outs[0], outs[1]


def rope_checks() -> Checks:
    """Checks of `rope`."""
    table = rope_table(rope_cases.Q36, head_dim=HEAD_DIM, num_positions=(1 << 20) + 1, device="cuda")
    q, k = rope_cases.inputs(64, HEADS, KV_HEADS, HEAD_DIM, 4, BF16, "cuda")
    positions = torch.randint(0, 1 << 20, (64,), generator=torch.Generator().manual_seed(4)).cuda()
    positions[3], positions[5] = -1, 1 << 20
    frequencies, _ = rope_frequencies(rope_cases.Q36, head_dim=HEAD_DIM)

    def truth() -> str:
        out_q, out_k = _rope(q, k, positions, table)
        assert _same(out_q[3], q[3]), "a pad is changed"
        rows = slice(0, 8)
        errors = [
            _close(
                rope_reference.rope(x[rows].cpu(), positions[rows].cpu(), frequencies), out[rows], rope_cases.RTOL[BF16]
            )
            for x, out in ((q, out_q), (k, out_k))
        ]
        single = _rope(q[rows].float(), k[rows].float(), positions[rows], table)[0]
        expected = rope_reference.rope(q[rows].float().cpu(), positions[rows].cpu(), frequencies)
        return f"{errors[0]} fp32 {_close(expected, single, rope_cases.RTOL[torch.float32])}"

    def in_place() -> None:
        expected = _rope(q, k, positions, table)
        for _ in range(REPEATS):
            own = q.clone(), k.clone()
            rope_kernels.rope(*own, positions, table, *own, mark_q=None, mark_k=None)
            assert all(_same(a, b) for a, b in zip(own, expected, strict=True)), "other bits in place"

    def sensors() -> None:
        bad = q.clone()
        bad[7, 2, 1], bad[9, 15, 255] = math.nan, math.inf
        far = positions.clone()
        far[11] = (1 << 20) + 1
        # both signals in one panel: the row ids of keys are the first of those of queries
        marks = _marks(64 * HEADS)
        on, off = _rope(bad, k, far, table, marks), _rope(bad, k, far, table, fill=3.0)
        assert all(_same(a, b) for a, b in zip(on, off, strict=True)), "sensors change bits"
        assert on[0][11, :, :64].isnan().all(), "a position beyond the table is not NaN"
        _words_agree(marks, [x.view(-1, HEAD_DIM) for x in on])

    yield "rope_truth", truth
    yield "rope_in_place_repeats", in_place
    yield "rope_sensors", sensors


def _state(num_slots: int, seed: int) -> Tensor:
    """A state with all columns filled, channels contiguous."""
    columns = TAPS - 1 + MAX_WINDOW
    return conv_cases.normal((num_slots, columns, CHANNELS), seed, BF16, "cuda").transpose(1, 2)


def _window(
    x: Tensor, weight: Tensor, state: Tensor, ids: Tensor, accepted: Tensor, marks: list[Mark] | None = None,
    fill: float = math.nan, ids_out: Tensor | None = None, module: Any = conv_kernels,
) -> Tensor:  # fmt: skip
    y = torch.full(x.shape, fill, dtype=x.dtype, device="cuda")
    module.window(
        x, weight, None, state, ids, ids if ids_out is None else ids_out, accepted, y, activation="silu",
        mark=marks[1] if marks else None, mark_state=marks[0] if marks else None,
    )  # fmt: skip
    return y


def _prefill(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, state: Tensor | None = None, ids: Tensor | None = None,
    has: Tensor | None = None, marks: list[Mark] | None = None, fill: float = math.nan, module: Any = conv_kernels,
) -> Tensor:  # fmt: skip
    y = torch.full(x.shape, fill, dtype=x.dtype, device="cuda")
    module.prefill(
        x, weight, None, cu_seqlens, state, ids, ids, has, None, None, y, activation="silu",
        mark=marks[1] if marks else None, mark_state=marks[0] if marks else None,
    )  # fmt: skip
    return y


def _conv_weight(seed: int) -> Tensor:
    """[CHANNELS, TAPS], channels contiguous."""
    return conv_cases.parameters(CHANNELS, TAPS, seed, BF16, "cuda")[0].T.contiguous().T


def conv_checks() -> Checks:
    """Checks of `causal_conv1d`."""
    weight = _conv_weight(5)
    lengths = (40, 1, 0, 100, 3)
    x = conv_cases.normal((sum(lengths), CHANNELS), 6, BF16, "cuda")
    cu_seqlens = conv_cases.cu_seqlens(lengths, "cuda")
    ids = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    has = torch.tensor([True, False, True, True, False], device="cuda")
    drafts = conv_cases.normal((64, 5, CHANNELS), 7, BF16, "cuda")
    rows = torch.arange(64, device="cuda", dtype=torch.int32)
    accepted = rows % 6

    def truth() -> str:
        state = _state(8, 8)
        before = state.clone()
        y = _prefill(x, weight, cu_seqlens, state, ids, has)
        expected, past = conv_reference.convolve(x[:40].cpu(), weight.cpu(), None, before[0, :, :3].T.cpu())
        assert torch.equal(state[0, :, :3].T.cpu(), past), "the state after a prefill is another"
        other = before.clone()
        alike = _prefill(x, weight, cu_seqlens, other, ids, has, module=conv_torch)
        assert _same(state, other), "the state is not that of the torch path"
        return f"{_close(expected, y[:40], conv_cases.RTOL[BF16])} torch path {_close(alike, y, conv_cases.RTOL[BF16])}"

    def prefill_repeats() -> None:
        def work(fill: float) -> tuple[Tensor, ...]:
            state = _state(8, 8)
            return _prefill(x, weight, cu_seqlens, state, ids, has, fill=fill), state

        _repeats(work)

    def window_truth() -> str:
        state, other = _state(64, 9), _state(64, 9)
        y = _window(drafts, weight, state, rows, accepted)
        alike = _window(drafts, weight, other, rows, accepted, module=conv_torch)
        assert _same(state, other), "the state is not that of the torch path"
        before = _state(64, 9)[4, :, 4:7].T.cpu()
        expected, _ = conv_reference.convolve(drafts[4].cpu(), weight.cpu(), None, before)
        return f"{_close(expected, y[4], conv_cases.RTOL[BF16])} torch path {_close(alike, y, conv_cases.RTOL[BF16])}"

    def window_rows_alone() -> None:
        together = _window(drafts, weight, _state(64, 9), rows, accepted)
        for part, num_tokens in (([0], 5), ([63], 1), ([5, 9, 2], 3), (list(range(16)), 4)):
            y = _window(drafts[part][:, :num_tokens], weight, _state(64, 9), rows[part], accepted[part])
            assert _same(y, together[part][:, :num_tokens]), f"rows {part} have other bits"
        clean = _state(1, 10)
        clean[:, :, :3] = 0
        one = torch.zeros(1, dtype=torch.int32, device="cuda")
        y = _window(drafts[:1], weight, clean, one, one)
        assert _same(y[0], _prefill(drafts[0], weight, conv_cases.cu_seqlens((5,), "cuda"))), "prefill has other bits"

    def window_repeats() -> None:
        def work(fill: float) -> tuple[Tensor, ...]:
            state = _state(64, 9)
            return _window(drafts, weight, state, rows, accepted, fill=fill), state

        _repeats(work)

    def sensors() -> None:
        bad = drafts.clone()
        bad[3, 4, 8191], bad[9, 0, 0] = math.nan, math.inf
        start = _state(64, 9)
        start[20, 5, int(accepted[20]) + 1] = math.nan
        states = start.clone(), start.clone()
        marks = _marks(64 * 5)
        on = _window(bad, weight, states[0], rows, accepted, marks)
        off = _window(bad, weight, states[1], rows, accepted, fill=3.0)
        assert _same(on, off), "sensors change bits"
        assert _same(*states), "sensors change the state"
        committed = states[0][:, :, : TAPS - 1].transpose(1, 2).reshape(64, -1)
        _words_agree(marks, [committed, on.view(-1, CHANNELS)])

    yield "causal_conv1d_truth", truth
    yield "causal_conv1d_repeats", prefill_repeats
    yield "causal_conv1d_window_truth", window_truth
    yield "causal_conv1d_window_rows_alone", window_rows_alone
    yield "causal_conv1d_window_repeats", window_repeats
    yield "causal_conv1d_window_sensors", sensors


def _on_off(name: str, on: float, off: float, note: str = "") -> str:
    return f"{name} sensors on={on * 1e3:.2f}us off={off * 1e3:.2f}us ratio={on / off:.3f} {note}".rstrip()


def norm_figures(report: Report, quick: bool, copy: float) -> None:
    """The residual added, checked and normed."""
    anchors = {5: "0.93", 256: "0.98", 8192: "1.06"}
    for num_tokens in (5, 256) if quick else (5, 256, 8192):
        x, residual, weight, _ = norm_cases.inputs((num_tokens, HIDDEN), 11, BF16, "cuda")
        y, total, factor = torch.empty_like(x), torch.empty_like(x), 1 + weight
        marks = _marks(num_tokens)

        def own(sensors: list[Mark] | None, args: tuple[Tensor, ...] = (x, weight, residual, y, total)) -> None:
            mark_input, mark = sensors or (None, None)
            norm_kernels.rms_norm(
                *args[:3], None, *args[3:], eps=EPS, is_zero_centred=True, mark=mark, mark_input=mark_input
            )

        def peer(args: tuple[Tensor, ...] = (x, residual, factor)) -> Tensor:
            return F.rms_norm(args[0] + args[1], (HIDDEN,), args[2], EPS)

        inner = 20 if num_tokens < 1000 else 1
        on, off = graph_ms(lambda f=own, m=marks: f(m), inner=inner), graph_ms(lambda f=own: f(None), inner=inner)
        name = f"add_rms_norm_{num_tokens}"
        report(_on_off(name, on, off, f"anchor={anchors[num_tokens]}"))
        report(ratio_line(name, on, graph_ms(peer, inner=inner), "torch", 1.0, "half"))
        if num_tokens == 8192:
            report(bandwidth_line(name, 4 * x.numel() * x.itemsize, on, copy, 0.8, 0.9))


def rope_figures(report: Report, quick: bool, copy: float) -> None:
    """Queries and keys in place; the sensors read the three quarters that are not rotated as well."""
    table = rope_table(rope_cases.Q36, head_dim=HEAD_DIM, num_positions=1 << 18, device="cuda")
    for num_tokens in (5,) if quick else (5, 8192):
        q, k = rope_cases.inputs(num_tokens, HEADS, KV_HEADS, HEAD_DIM, 12, BF16, "cuda")
        positions = torch.arange(num_tokens, device="cuda")
        cos, sin = (torch.cat((t, t), -1).to(BF16)[:, None] for t in rope_torch.cos_sin(positions, table))
        marks = _marks(num_tokens * HEADS)

        def own(sensors: list[Mark] | None, args: tuple[Any, ...] = (q, k, positions, table, q, k)) -> None:
            mark_q, mark_k = sensors or (None, None)
            rope_kernels.rope(*args, mark_q=mark_q, mark_k=mark_k)

        def peer(args: tuple[Tensor, ...] = (q, k, cos, sin)) -> list[Tensor]:
            outs = []
            for x in args[:2]:
                turned, rest = x[..., :64], x[..., 64:]
                half = torch.cat((-turned[..., 32:], turned[..., :32]), -1)
                outs.append(torch.cat((turned * args[2] + half * args[3], rest), -1))
            return outs

        inner = 20 if num_tokens < 1000 else 1
        on, off = graph_ms(lambda f=own, m=marks: f(m), inner=inner), graph_ms(lambda f=own: f(None), inner=inner)
        report(_on_off(f"rope_{num_tokens}", on, off))
        report(ratio_line(f"rope_{num_tokens}", on, graph_ms(peer, inner=inner), "torch", 1.0, "half"))
        if num_tokens == 8192:
            report(bandwidth_line("rope_8192", 2 * (q.numel() + k.numel()) * q.itemsize, on, copy, 0.7, 0.9))


def conv_figures(report: Report, quick: bool, copy: float) -> None:
    """Windows of 5 tokens with 5 accepted before, and a prefill."""
    weight = _conv_weight(13)
    contiguous = weight.contiguous()
    for batch in (1,) if quick else (1, 64):
        x = conv_cases.normal((batch, 5, CHANNELS), 14, BF16, "cuda")
        y, state, theirs = torch.empty_like(x), _state(2 * batch, 15), _state(batch, 15)[:, :, :3].contiguous()
        ids = torch.arange(batch, device="cuda", dtype=torch.int32)
        marks = _marks(batch * 5)

        def own(
            sensors: list[Mark] | None,
            args: tuple[Tensor, ...] = (x, weight, state, ids, ids + batch, torch.full_like(ids, 5), y),
        ) -> None:
            mark_state, mark = sensors or (None, None)
            conv_kernels.window(*args[:2], None, *args[2:], activation="silu", mark=mark, mark_state=mark_state)

        def peer(args: tuple[Tensor, ...] = (x, contiguous, theirs)) -> Tensor:
            both = torch.cat((args[2], args[0].transpose(1, 2)), -1)
            args[2].copy_(both[:, :, -3:])
            return F.silu(F.conv1d(both, args[1][:, None], groups=CHANNELS))

        inner = 20 if batch == 1 else 4
        on, off = graph_ms(lambda f=own, m=marks: f(m), inner=inner), graph_ms(lambda f=own: f(None), inner=inner)
        name = f"causal_conv1d_window_{batch}x5"
        report(_on_off(name, on, off))
        report(ratio_line(name, on, graph_ms(peer, inner=inner), "torch", 1.0, "half"))
        # inputs and 3 columns read; answers, 3 columns, 5 pending and 3 NaN written
        num_bytes = batch * CHANNELS * 2 * (5 + 3 + 5 + 3 + 5 + 3)
        report(bandwidth_line(name, num_bytes, on, copy, 0.7, 0.9))
    if quick:
        return
    x = conv_cases.normal((8192, CHANNELS), 16, BF16, "cuda")
    y, cu_seqlens, marks = torch.empty_like(x), conv_cases.cu_seqlens((8192,), "cuda"), _marks(8192)

    def prefill(sensors: list[Mark] | None) -> None:
        conv_kernels.prefill(
            x, weight, None, cu_seqlens, None, None, None, None, None, None, y, activation="silu",
            mark=sensors[1] if sensors else None, mark_state=None,
        )  # fmt: skip

    def conv1d() -> Tensor:
        return F.silu(F.conv1d(x.T[None], contiguous[:, None], groups=CHANNELS, padding=TAPS - 1))

    on, off = graph_ms(lambda: prefill(marks)), graph_ms(lambda: prefill(None))
    report(_on_off("causal_conv1d_8192", on, off))
    report(ratio_line("causal_conv1d_8192", on, graph_ms(conv1d, reps=5), "torch", 1.0, "half"))
    report(bandwidth_line("causal_conv1d_8192", 2 * x.numel() * x.itemsize, on, copy, 0.8, 0.9))
