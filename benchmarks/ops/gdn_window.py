"""`gated_delta_rule_window` on CUDA at the shapes of Q36: correct first, then times beside FLA's recurrent kernel."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator

import torch
from ops.common import bandwidth_line, copy_bandwidth, graph_ms, guarded, ratio_line, relative_error
from torch import Tensor

from firetower.ops.gated_delta_rule import (
    WindowState,
    commit_window,
    gated_delta_rule_window,
    new_window_state,
    window_kernels,
)
from firetower.ops.gated_delta_rule.reference import window_reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

K_HEADS, V_HEADS, DIM = 16, 32, 128
WINDOW, ACCEPTED = 5, 4
FIGURES = ((1, 1.3), (64, 1.0), (256, 1.0))
"""Rows, and the share of the peer's time that must be reached."""

OUT_RTOL, STATE_RTOL = 3e-3, 2e-6
"""Half an ulp of bfloat16 and some; fp32 sums of 128 products over a few tokens."""

TRIALS = ((16, 168), (32, 208), (32, 248))
"""Columns and registers that are timed beside the chosen ones."""


def run(report: Report, quick: bool) -> None:
    """Every check and figure; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: few repeats and replays, to compile every kernel.
    """
    checks: dict[str, Callable[[], str]] = {
        "error": check_error,
        "poisoned": check_poison,
        "repeats": lambda: check_repeats(3 if quick else 50),
        "rows": check_rows,
        "cuts": check_cuts,
        "burned": check_burned,
        "words": check_words,
        "decay": lambda: check_decay(10 if quick else 125),
    }
    for name, check in checks.items():
        guarded(report, f"gdn_window_{name}", lambda check=check, name=name: report(f"gdn_window_{name} {check()}"))
    guarded(report, "gdn_window times", lambda: report_times(report, 3 if quick else 20))
    if not quick:
        guarded(report, "gdn_window trials", lambda: report_trials(report))


def make_tokens(rows: int, tokens: int, seed: int = 0) -> Tokens:
    """q, k, v bf16; gates as Hugging Face initialises them, mostly small."""
    draw = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=draw, device="cuda")

    q, k, v = (normal(heads, DIM).bfloat16() for heads in (K_HEADS, K_HEADS, V_HEADS))
    return q, k, v, -normal(V_HEADS).abs() * 0.3, normal(V_HEADS).sigmoid()


def make_state(rows: int) -> WindowState:
    """Random states in both halves, sides in turn."""
    state = new_window_state(rows, K_HEADS, V_HEADS, DIM, DIM, device="cuda")
    state.state.normal_(generator=torch.Generator(device="cuda").manual_seed(1))
    state.side.copy_(torch.arange(rows, device="cuda") % 2)
    return state


def slots_of(rows: int) -> Tensor:
    """Row n in slot n."""
    return torch.arange(rows, dtype=torch.int32, device="cuda")


def step(state: WindowState, tokens: Tokens, slots: Tensor, accepted: int | Tensor, **keywords: object) -> Tensor:
    """One window through the public call."""
    if isinstance(accepted, int):
        accepted = torch.full_like(slots, accepted)
    return gated_delta_rule_window(*tokens, state, state_slots=slots, num_accepted=accepted, **keywords)  # type: ignore[arg-type]


def cut(tokens: Tokens, begin: int, end: int) -> Tokens:
    """Tokens from one to another."""
    q, k, v, g, beta = (x[:, begin:end] for x in tokens)
    return q, k, v, g, beta


def rows_of(tokens: Tokens, rows: list[int]) -> Tokens:
    """Some rows."""
    q, k, v, g, beta = (x[rows] for x in tokens)
    return q, k, v, g, beta


def written(state: WindowState, slots: Tensor) -> Tensor:
    """[N, Hv, Dk, Dv]: what the last step committed."""
    rows = slots.long()
    return state.state[1 - state.side[rows].long(), rows]


def same(*pairs: tuple[Tensor, Tensor]) -> bool:
    """Whether all pairs have the same bits."""
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def ready(rows: int) -> tuple[WindowState, Tokens, Tensor]:
    """A state with a window pending, the next window's tokens, the slots."""
    tokens, state, slots = make_tokens(rows, 2 * WINDOW), make_state(rows), slots_of(rows)
    step(state, cut(tokens, 0, WINDOW), slots, 0)
    commit_window(state, slots)
    return state, cut(tokens, WINDOW, 2 * WINDOW), slots


def check_error() -> str:
    """Two windows against float64."""
    rows = 4
    tokens, state, slots = make_tokens(rows, 2 * WINDOW), make_state(rows), slots_of(rows)
    names = ("state", "pending_k", "pending_v", "pending_g", "pending_beta")
    doubled = {name: getattr(state, name).double() for name in names}
    truth = WindowState(**doubled, num_pending=state.num_pending.clone(), side=state.side.clone())
    accepted = torch.zeros_like(slots)
    for begin in (0, WINDOW):
        window = cut(tokens, begin, begin + WINDOW)
        out = step(state, window, slots, accepted)
        doubles = (x.double() for x in window)
        expected = window_reference(*doubles, truth, state_slots=slots, num_accepted=accepted)
        errors = relative_error(expected, out), relative_error(written(truth, slots), written(state, slots))
        assert errors[0] <= OUT_RTOL, f"out {errors[0]:.3g}, allowed {OUT_RTOL}"
        assert errors[1] <= STATE_RTOL, f"state {errors[1]:.3g}, allowed {STATE_RTOL}"
        for x in (state, truth):
            commit_window(x, slots)
        accepted = torch.tensor([4, 0, 2, 5], dtype=torch.int32, device="cuda")
    return f"out={errors[0]:.2e} state={errors[1]:.2e} ok"


def check_poison() -> str:
    """Outputs and the half that is written, filled with two things: the same bits."""
    state, tokens, slots = ready(4)
    results = []
    for fill in (math.nan, 7.0):
        rows = slots.long()
        for name in ("state", "pending_k", "pending_v", "pending_g", "pending_beta"):
            getattr(state, name)[1 - state.side[rows].long(), rows] = fill
        out = torch.full_like(tokens[2], fill)
        step(state, tokens, slots, ACCEPTED, out=out)
        results.append((out, written(state, slots)))
    assert same(*zip(*results, strict=True)), "bits depend on what lay in the outputs"
    assert all(bool(x.isfinite().all()) for x in results[0]), "an element was not written"
    return "ok"


def check_repeats(repeats: int) -> str:
    """The same bits every time."""
    state, tokens, slots = ready(16)
    first, states = step(state, tokens, slots, ACCEPTED), written(state, slots)
    for i in range(repeats):
        again = step(state, tokens, slots, ACCEPTED)
        assert same((first, again), (states, written(state, slots))), f"repeat {i} differs"
    return f"{repeats} ok"


def check_rows() -> str:
    """Rows alone and in parts of the batch have the bits of the batch of 256."""
    state, tokens, slots = ready(256)
    out, states = step(state, tokens, slots, ACCEPTED), written(state, slots)
    for rows in ([0], [255], [17, 3], list(range(64, 128))):
        part = step(state, rows_of(tokens, rows), slots[rows], ACCEPTED)
        assert same((part, out[rows]), (written(state, slots)[rows], states[rows])), f"rows {rows[:3]} differ"
    return "ok"


def check_cuts() -> str:
    """However tokens are cut into windows, outputs and states have the same bits."""
    tokens, slots = make_tokens(2, 8), slots_of(2)
    results = []
    for lengths in ((8,), (1,) * 8, (2, 6), (3, 5), (4, 4), (7, 1)):
        state, done, before, outputs = make_state(2), 0, 0, []
        for length in lengths:
            outputs.append(step(state, cut(tokens, done, done + length), slots, before))
            commit_window(state, slots)
            done, before = done + length, length
        step(state, cut(tokens, 0, 1), slots, before)
        results.append((torch.cat(outputs, dim=1), written(state, slots)))
        assert same(*zip(results[0], results[-1], strict=True)), f"windows of {lengths} differ"
    return "ok"


def check_burned() -> str:
    """A burned step leaves the clean half as it was and is repeated bit for bit."""
    state, tokens, slots = ready(4)
    expected = step(copy.deepcopy(state), tokens, slots, ACCEPTED)
    burned = tokens[1].clone()
    burned[1, 2, 3, 4] = math.nan
    out = step(state, (tokens[0], burned, *tokens[2:]), slots, ACCEPTED)
    assert bool(out[1].isnan().any()), "the NaN was laundered"
    assert same((out[[0, 2, 3]], expected[[0, 2, 3]])), "the NaN reached another row"
    assert same((step(state, tokens, slots, ACCEPTED), expected)), "the repeat differs"
    return "ok"


def marks_of(rows: int) -> tuple[Mark, Mark]:
    """Marks of the outputs and of the states in one panel."""
    panel = new_panel(2, rows, "cuda")
    ids = slots_of(rows)
    out_ids = ids.repeat_interleave(WINDOW)
    return (
        Mark(panel=panel, slot=0, num_signals=2, num_rows=rows, row_ids=out_ids),
        Mark(panel=panel, slot=1, num_signals=2, num_rows=rows, row_ids=ids),
    )


def check_words() -> str:
    """Words equal those of `mark_rows`, clean and with damage in tokens and states; marking changes no bit."""
    state, tokens, slots = ready(8)
    for damage in range(3):
        if damage:
            tokens[2][2, 3, 7, 100] = math.inf
            tokens[1][5, 1, 3, 9] = math.nan
        if damage == 2:
            state.state[state.side[6].item(), 6, 31, 127, 127] = math.nan
        off, states_off = step(state, tokens, slots, ACCEPTED), written(state, slots)
        mark, state_mark = marks_of(8)
        on = step(state, tokens, slots, ACCEPTED, mark=mark, state_mark=state_mark)
        assert same((on, off), (written(state, slots), states_off)), "marking changed a bit"
        expected, expected_state = marks_of(8)
        mark_rows(on.flatten(0, 1).flatten(1), expected)
        mark_rows(states_off.flatten(1), expected_state)
        assert torch.equal(mark.panel, expected.panel), f"words: {mark.panel.tolist()}, not {expected.panel.tolist()}"
    return "ok"


def check_decay(windows: int) -> str:
    """g = -1e-3 and beta = 0 for eight tokens a window: the norm falls as it must, within 1e-4."""
    tokens, state, slots = make_tokens(1, 8), make_state(1), slots_of(1)
    tokens[3].fill_(-1e-3)
    tokens[4].zero_()
    before = state.state[state.side[0].item(), 0].double().norm()
    for i in range(windows + 1):
        step(state, tokens, slots, 8 if i else 0)
        commit_window(state, slots)
    ratio = float(state.state[state.side[0].item(), 0].double().norm() / before)
    error = abs(ratio / math.exp(-8e-3 * windows) - 1)
    assert error < 1e-4, f"after {8 * windows} tokens off by {error:.3g}"
    return f"after {8 * windows} tokens off by {error:.1e} ok"


def window_bytes(rows: int) -> int:
    """Bytes that a window must move: the state read and written, tokens, outputs, pending tokens."""
    state = 2 * V_HEADS * DIM * DIM * 4
    new = WINDOW * (2 * K_HEADS * DIM * 2 + 2 * V_HEADS * DIM * 2 + 2 * V_HEADS * 4)
    pending = (WINDOW + ACCEPTED) * (K_HEADS * DIM * 4 + V_HEADS * DIM * 2 + 2 * V_HEADS * 4)
    return rows * (state + new + pending)


def own_ms(rows: int, replays: int, *, is_marked: bool) -> float:
    """Milliseconds of a window with its sensors on or off."""
    state, tokens, slots = ready(rows)
    out, accepted = torch.empty_like(tokens[2]), torch.full_like(slots, ACCEPTED)
    mark, state_mark = marks_of(rows) if is_marked else (None, None)

    def call() -> None:
        step(state, tokens, slots, accepted, out=out, mark=mark, state_mark=state_mark)

    return graph_ms(call, reps=replays, inner=inner_of(rows))


def fla_ms(rows: int, replays: int) -> float:
    """Milliseconds of FLA's recurrent kernel over the window's new tokens alone, fp32 state in and out."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta = make_tokens(rows, WINDOW)
    initial = torch.randn(rows, V_HEADS, DIM, DIM, device="cuda")

    def call() -> None:
        with torch.no_grad():
            fused_recurrent_gated_delta_rule(
                q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True
            )

    return graph_ms(call, reps=replays, inner=inner_of(rows))


def inner_of(rows: int) -> int:
    """Calls in one graph: many where one is shorter than the start of a graph."""
    return 20 if rows == 1 else 2


def report_times(report: Report, replays: int) -> None:
    """Each figure beside its peer, and as a share of the copy bandwidth."""
    copy_bytes_s = copy_bandwidth()
    for rows, bar in FIGURES:
        name = f"gdn_window_{WINDOW}_batch_{rows}"
        on, off = (own_ms(rows, replays, is_marked=is_marked) for is_marked in (True, False))
        report(f"{name}_sensors on={on * 1e3:.2f}us off={off * 1e3:.2f}us ratio={on / off:.3f}")
        if rows > 1:
            report(bandwidth_line(name, window_bytes(rows), on, copy_bytes_s, 0.0, 0.85))
        guarded(
            report,
            f"{name} peer",
            lambda name=name, rows=rows, bar=bar, on=on: report(
                ratio_line(name, on, fla_ms(rows, replays), "fla", bar, "85% of copy bandwidth at 64 and up")
            ),
        )
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _tile(columns: int, registers: int) -> Iterator[None]:
    chosen = window_kernels.COLUMNS, window_kernels.MAX_REGISTERS
    window_kernels.COLUMNS, window_kernels.MAX_REGISTERS = columns, registers
    try:
        yield
    finally:
        window_kernels.COLUMNS, window_kernels.MAX_REGISTERS = chosen


def report_trials(report: Report) -> None:
    """Times of other tiles, to be chosen by hand; one tile serves every number of rows."""
    for columns, registers in TRIALS:
        for rows in (1, 256):
            with _tile(columns, registers):
                time_ms = own_ms(rows, 10, is_marked=True)
            report(f"gdn_window_trial columns={columns} registers={registers} batch={rows} own={time_ms * 1e3:.1f}us")
            torch.cuda.empty_cache()
