"""`causal_conv1d_window`: what is accepted counts, what is rejected or burned does not, pads and slots, sensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.causal_conv1d import cases, causal_conv1d_window, new_conv_state, reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

# Triton's interpreter computes with NumPy, which warns where a GPU gives Inf or NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")

CHANNELS, TAPS, MAX_WINDOW = 6, 4, 8


def state_after(past: Tensor, num_slots: int) -> Tensor:
    """A state whose slot i has committed ``past[i]`` [P, channels], nothing pending."""
    state = new_conv_state(
        num_slots, past.shape[2], kernel_size=past.shape[1] + 1, max_window=MAX_WINDOW, dtype=past.dtype,
        device=past.device,
    )  # fmt: skip
    state[: len(past), :, : past.shape[1]] = past.transpose(1, 2)
    return state


def ints(*numbers: int, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("is_ping_pong", [False, True], ids=["in place", "ping-pong"])
@pytest.mark.parametrize("taps", [2, 4, 8])
def test_a_stream_of_windows_is_the_accepted_tokens(backend, is_ping_pong, taps, device, assert_close):
    """Random windows and acceptances of three requests, against the plain convolution of what was accepted."""
    rng = random.Random(taps)
    weight, bias = cases.parameters(CHANNELS, taps, 1, device=device)
    past = cases.normal((3, taps - 1, CHANNELS), 2, device=device)
    state = state_after(past, 6)
    accepted, pending = [0, 0, 0], None
    for step in range(9):
        num_tokens = rng.choice([1, 2, 3, 5, 8])
        x = cases.normal((3, num_tokens, CHANNELS), 100 + step, device=device)
        if pending is not None:
            past = torch.stack([torch.cat((past[r], pending[r, : accepted[r]]))[-(taps - 1) :] for r in range(3)])
        read, written = (0, 0) if not is_ping_pong else (0, 3) if step % 2 == 0 else (3, 0)
        y = backend.window(
            x, weight, state, ints(read, read + 1, read + 2, device=device), ints(*accepted, device=device), bias=bias,
            state_ids_out=ints(written, written + 1, written + 2, device=device),
        )  # fmt: skip
        truth = torch.stack([reference.convolve(x[r], weight, bias, past[r])[0] for r in range(3)])
        assert_close(f"step {step}", truth, y, cases.RTOL[torch.float32])
        assert torch.equal(state[written : written + 3, :, : taps - 1].transpose(1, 2), past)
        pending, accepted = x, [rng.randint(0, num_tokens) for _ in range(3)]


def test_equals_prefill_bit_for_bit(backend, device):
    weight, bias = cases.parameters(CHANNELS, TAPS, 3, device=device)
    x = cases.normal((8, CHANNELS), 4, device=device)
    whole = backend.prefill(x, weight, cases.cu_seqlens((8,), device), bias=bias)
    for num_tokens in range(1, 9):
        state = state_after(torch.zeros(1, TAPS - 1, CHANNELS, device=device), 1)
        accepted, parts = 0, []
        for part in x.split(num_tokens):
            y = backend.window(
                part[None], weight, state, ints(0, device=device), ints(accepted, device=device), bias=bias
            )
            parts.append(y[0])
            accepted = len(part)
        assert torch.equal(torch.cat(parts), whole)


def test_equals_transformers_one_token_at_a_time(assert_close):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    update = getattr(modeling, "torch_causal_conv1d_update", None) or getattr(modeling, "causal_conv1d_update", None)
    if update is None:
        pytest.skip("this transformers has no causal_conv1d_update of its own")
    weight, bias = cases.parameters(CHANNELS, TAPS, 5)
    past = cases.normal((2, TAPS - 1, CHANNELS), 6)
    state, theirs = state_after(past, 2), past.transpose(1, 2).contiguous()
    for step in range(4):
        x = cases.normal((2, 1, CHANNELS), 7 + step)
        expected = update(x.transpose(1, 2), theirs, weight, bias, "silu").transpose(1, 2)
        y = causal_conv1d_window(
            x, weight, bias, conv_state=state, state_ids=torch.tensor([0, 1]),
            num_accepted=torch.tensor([min(step, 1)] * 2),
        )  # fmt: skip
        assert_close(f"step {step}", expected, y, cases.RTOL[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types(backend, dtype, device, kernel_dtypes, assert_close):
    if dtype not in kernel_dtypes:
        pytest.skip("the interpreter is trusted in float32 and float16 only")
    weight, bias = cases.parameters(CHANNELS, TAPS, 8, dtype, device)
    past, x = cases.normal((2, TAPS - 1, CHANNELS), 9, dtype, device), cases.normal((2, 5, CHANNELS), 10, dtype, device)
    state = state_after(past, 2)
    y = backend.window(x, weight, state, ints(0, 1, device=device), ints(0, 0, device=device), bias=bias)
    truth = torch.stack([reference.convolve(x[r], weight, bias, past[r])[0] for r in range(2)])
    assert_close(str(dtype), truth, y, cases.RTOL[dtype])
    assert torch.equal(state[:, :, TAPS - 1 : TAPS + 4].transpose(1, 2), x)


def test_rejected_drafts_leave_nothing_drills_q1_q2(backend, device):
    """Window of 4, 2 accepted: the next answers are those of the 2. Faulty forms keep the state of 4, or start from
    the state before any."""
    weight, bias = cases.parameters(CHANNELS, TAPS, 11, device=device)
    past = cases.normal((1, TAPS - 1, CHANNELS), 12, device=device)
    drafts, later = cases.normal((2, 1, 4, CHANNELS), 13, device=device)
    ids = ints(0, device=device)

    def answers(accepted: int) -> Tensor:
        state = state_after(past, 1)
        backend.window(drafts, weight, state, ids, ints(0, device=device), bias=bias)
        return backend.window(later, weight, state, ids, ints(accepted, device=device), bias=bias)

    truth = backend.prefill(
        torch.cat((past[0], drafts[0, :2], later[0])), weight, cases.cu_seqlens((TAPS - 1 + 6,), device), bias=bias
    )[-4:]
    assert torch.equal(answers(2)[0], truth)
    for faulty in (4, 0):
        wrong = answers(faulty)[0]
        assert not torch.equal(wrong[:3], truth[:3])
        assert torch.equal(wrong[3], truth[3]), "wrong for K - 1 tokens, then healed: no NaN ever shows"

    state = state_after(past, 1)
    drafts[0, 2:] = math.nan
    backend.window(drafts, weight, state, ids, ints(0, device=device), bias=bias)
    assert torch.equal(backend.window(later, weight, state, ids, ints(2, device=device), bias=bias)[0], truth)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_burned_step_does_not_touch_the_clean_state(backend, bad, device, same_bits):
    """In place, the step is dropped by accepting nothing; with two slots, it is simply run again."""
    weight, _ = cases.parameters(CHANNELS, TAPS, 14, device=device)
    past = cases.normal((1, TAPS - 1, CHANNELS), 15, device=device)
    first, second, third = cases.normal((3, 1, 3, CHANNELS), 16, device=device)
    burned = second.clone()
    burned[0, 0] = bad
    zero, one, two = (ints(n, device=device) for n in (0, 1, 2))

    state = state_after(past, 1)
    backend.window(first, weight, state, zero, zero)
    backend.window(second, weight, state, zero, two)
    expected = backend.window(third, weight, state, zero, one)

    state = state_after(past, 1)
    backend.window(first, weight, state, zero, zero)
    y = backend.window(burned, weight, state, zero, two)
    assert not y.isfinite().all()
    assert state[0, :, : TAPS - 1].isfinite().all()
    backend.window(second, weight, state, zero, zero)
    assert torch.equal(backend.window(third, weight, state, zero, one), expected)

    state = state_after(past, 2)
    backend.window(first, weight, state, zero, zero)
    before = state[0].clone()
    backend.window(burned, weight, state, zero, two, state_ids_out=one)
    assert same_bits(state[0], before)
    again = [backend.window(second, weight, state, zero, two, state_ids_out=one) for _ in range(2)]
    assert torch.equal(again[0], again[1])
    assert torch.equal(backend.window(third, weight, state, one, one, state_ids_out=zero), expected)


def test_accepting_more_than_ran_is_nan_not_old_tokens(backend, device, same_bits):
    """The columns after a window are NaN: a count that is off by one is loud, whatever ran in the slot before."""
    weight, _ = cases.parameters(CHANNELS, TAPS, 17, device=device)
    state = state_after(cases.normal((1, TAPS - 1, CHANNELS), 18, device=device), 1)
    ids = ints(0, device=device)
    for num_tokens in (8, 2):
        backend.window(
            cases.normal((1, num_tokens, CHANNELS), 19, device=device), weight, state, ids, ints(0, device=device)
        )
    before = state.clone()
    x = cases.normal((1, 1, CHANNELS), 20, device=device)
    dry = ints(-1, device=device)
    assert backend.window(x, weight, state, ids, ints(2, device=device), state_ids_out=dry).isfinite().all()
    assert backend.window(x, weight, state, ids, ints(3, device=device), state_ids_out=dry).isnan().all()
    assert same_bits(state, before), "a negative slot out writes nothing"
    for accepted in (-1, MAX_WINDOW + 1, 1 << 30):
        assert backend.window(x, weight, state, ids, ints(accepted, device=device)).isnan().all()
        assert same_bits(state, before), "and what cannot be right writes nothing"


def test_pad_rows_and_slots_beyond_the_pool(backend, device, same_bits):
    weight, bias = cases.parameters(CHANNELS, TAPS, 21, device=device)
    past = cases.normal((3, TAPS - 1, CHANNELS), 22, device=device)
    state = state_after(past, 4)
    before = state.clone()
    x = cases.normal((4, 2, CHANNELS), 23, device=device)
    x[0], x[3] = math.nan, 1.0
    ids, zeros = ints(-1, 2, -5, 4, device=device), ints(0, 0, 77, 0, device=device)
    y = backend.window(x, weight, state, ids, zeros, bias=bias)
    assert torch.equal(y[[0, 2]], torch.zeros(2, 2, CHANNELS, device=device))
    assert y[3].isnan().all()
    assert torch.equal(y[1], backend.window(x[1:2], weight, before.clone(), ids[1:2], zeros[1:2], bias=bias)[0])
    for slot in (0, 1, 3):
        assert same_bits(state[slot], before[slot])


def test_a_shorter_window_is_padded_at_its_end(backend, device):
    weight, _ = cases.parameters(CHANNELS, TAPS, 24, device=device)
    past = cases.normal((1, TAPS - 1, CHANNELS), 25, device=device)
    x = cases.normal((1, 4, CHANNELS), 26, device=device)
    x[0, 2:] = math.nan
    ids, zero = ints(0, device=device), ints(0, device=device)
    padded, short = state_after(past, 1), state_after(past, 1)
    y = backend.window(x, weight, padded, ids, zero)
    assert torch.equal(y[:, :2], backend.window(x[:, :2], weight, short, ids, zero))
    later = cases.normal((1, 3, CHANNELS), 27, device=device)
    two = ints(2, device=device)
    assert torch.equal(backend.window(later, weight, padded, ids, two), backend.window(later, weight, short, ids, two))


def test_what_is_not_read_cannot_matter_drill_c1(backend, device, same_bits):
    weight, bias = cases.parameters(CHANNELS, TAPS, 28, device=device)
    x = cases.normal((2, 2, CHANNELS), 29, device=device)
    past = cases.normal((2, TAPS - 1, CHANNELS), 30, device=device)
    results = []
    for filling in (1e30, -3.0, math.nan):
        state = torch.full((3, CHANNELS, TAPS - 1 + MAX_WINDOW), filling, device=device)
        state[0, :, 1:4], state[2, :, 3:6] = past[0].T, past[1].T
        y = backend.window(
            x, weight, state, ints(0, 2, device=device), ints(1, 3, device=device), bias=bias, fill=filling
        )
        assert same_bits(state[1], torch.full_like(state[1], filling))
        results.append((y, state[[0, 2]]))
    for y, state in results[1:]:
        assert same_bits(y, results[0][0])
        assert same_bits(state, results[0][1])


def test_row_bits_do_not_depend_on_batch_or_window(backend, device):
    channels = 37
    weight, bias = cases.parameters(channels, TAPS, 31, device=device)
    past = cases.normal((17, TAPS - 1, channels), 32, device=device)
    x = cases.normal((17, 8, channels), 33, device=device)
    ids, zeros = torch.arange(17, device=device), torch.zeros(17, dtype=torch.int64, device=device)
    together = backend.window(x, weight, state_after(past, 17), ids, zeros, bias=bias)
    for rows, num_tokens in (([0], 8), ([16], 1), ([3, 1], 2), ([5, 9, 2], 3), (list(range(17)), 5), ([7], 7)):
        y = backend.window(x[rows][:, :num_tokens], weight, state_after(past, 17), ids[rows], zeros[rows], bias=bias)
        assert torch.equal(y, together[rows][:, :num_tokens])


def test_sensors_change_no_bit_and_say_what_mark_rows_says(backend, device, kernel_dtypes, same_bits):
    ids, accepted = ints(2, -1, 0, 1, device=device), ints(1, 0, 0, 0, device=device)
    request_ids = ints(0, -1, 2, 1, device=device)
    for dtype in kernel_dtypes:
        weight, _ = cases.parameters(CHANNELS, TAPS, 34, dtype, device)
        start = state_after(cases.normal((3, TAPS - 1, CHANNELS), 35, dtype, device), 3)
        start[2, :, TAPS - 1] = 1.0
        start[0, 4, 1], start[1, 2, 0] = math.nan, math.inf
        x = cases.normal((4, 3, CHANNELS), 36, dtype, device)
        x[0, 1, 5], x[1, 0, 0], x[3, 2, 2] = math.nan, math.inf, -math.inf
        for row_ids, state_row_ids in ((request_ids.repeat_interleave(3), request_ids), (None, None)):
            panel, expected = new_panel(2, 3, device), new_panel(2, 3, device)
            signal = {"num_signals": 2, "num_rows": 3}
            mark = Mark(panel=panel, slot=1, row_ids=row_ids, **signal)
            mark_state = Mark(panel=panel, slot=0, row_ids=state_row_ids, **signal)
            outs = []
            for sensors in ({"mark": mark, "mark_state": mark_state, "fill": 5.0}, {}):
                state = start.clone()
                outs.append((backend.window(x, weight, state, ids, accepted, **sensors), state))
            y, state = outs[0]
            committed = state[[2, 0, 0, 1], :, : TAPS - 1].transpose(1, 2).reshape(4, -1).clone()
            committed[1] = 0
            mark_rows(committed, Mark(panel=expected, slot=0, row_ids=state_row_ids, **signal))
            mark_rows(y, Mark(panel=expected, slot=1, row_ids=row_ids, **signal))
            assert torch.equal(panel, expected)
            assert same_bits(y, outs[1][0])
            assert same_bits(state, outs[1][1])


def test_the_state_sensor_tells_ignition_from_persistence_drill_e1(backend, device):
    """A bad input fires the answer alone; once it is accepted, the state's sensor fires first."""
    weight, _ = cases.parameters(CHANNELS, TAPS, 37, device=device)
    state = state_after(cases.normal((1, TAPS - 1, CHANNELS), 38, device=device), 1)
    x = cases.normal((1, 1, CHANNELS), 39, device=device)
    ids = ints(0, device=device)

    def fired(inputs: Tensor, accepted: int) -> list[bool]:
        panel = new_panel(2, 1, device)
        marks = [Mark(panel=panel, slot=s, num_signals=2, num_rows=1, row_ids=ids) for s in (0, 1)]
        backend.window(inputs, weight, state, ids, ints(accepted, device=device), mark_state=marks[0], mark=marks[1])
        return [panel[slot].item() < 1 << 62 for slot in (0, 1)]

    bad = x.clone()
    bad[0, 0, 2] = math.nan
    assert fired(bad, 0) == [False, True]
    assert fired(x, 1) == [True, True]


def test_no_requests_and_refusals():
    state = new_conv_state(2, 3, kernel_size=4, max_window=2, dtype=torch.float32)
    weight, none = torch.ones(3, 4), torch.empty(0, dtype=torch.int32)
    given = {"conv_state": state, "state_ids": none, "num_accepted": none}
    assert causal_conv1d_window(torch.empty(0, 2, 3), weight, **given).shape == (0, 2, 3)
    with pytest.raises(ConfigError, match="window=3: must be from 1 to the 2 pending"):
        causal_conv1d_window(torch.empty(0, 3, 3), weight, **given)
    with pytest.raises(ConfigError, match=r"state_ids: torch.int32 \[0\]: must be contiguous int32 or int64 \[1\]"):
        causal_conv1d_window(torch.ones(1, 2, 3), weight, **given)
    with pytest.raises(ConfigError, match="with 3 dimensions"):
        causal_conv1d_window(torch.ones(1, 3), weight, **given)
