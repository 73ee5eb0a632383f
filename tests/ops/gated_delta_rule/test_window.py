"""The window step: what is committed and when, what a burned or rejected window leaves, and bits of rows alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.core.words import CLEAN, NOT_RUN, unpack_word
from firetower.ops.gated_delta_rule import (
    WindowState,
    commit_window,
    gated_delta_rule,
    gated_delta_rule_window,
    load_state,
    new_window_state,
    read_state,
)
from firetower.ops.gated_delta_rule.cases import RTOL, make_inputs
from firetower.ops.gated_delta_rule.reference import gated_delta_rule_reference, window_reference
from firetower.ops.gated_delta_rule.window_torch import window
from firetower.sensors.marks import Mark, mark_rows, new_panel

HEADS = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 32}
FIELDS = tuple(f.name for f in dataclasses.fields(WindowState))


def new_state(num_slots=6, heads=None, seed=0, **kwargs):
    sizes = heads or HEADS
    state = new_window_state(num_slots, *sizes.values(), **{"dtype": torch.float32, **kwargs})
    generator = torch.Generator().manual_seed(seed)
    load_state(state, torch.arange(num_slots), torch.randn(state.state.shape[1:], generator=generator))
    return state


def make_window(seed, rows, tokens, heads=None, **kwargs):
    return make_inputs(seed, batch=rows, length=tokens, **(heads or HEADS), **kwargs).tokens


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(tokens, state, slots, accepted, **kwargs):
    """The PyTorch path past the registry, into NaN."""
    out = torch.full_like(tokens[2], float("nan"))
    settings = {"use_l2norm": True, "scale": tokens[1].shape[-1] ** -0.5, "mark": None, "state_mark": None}
    window(*tokens, state, state_slots=slots, num_accepted=accepted, out=out, **{**settings, **kwargs})
    return out


def snapshot(state):
    return {name: getattr(state, name).clone() for name in FIELDS}


def clean_half(copy, slots):
    sides = copy["side"][slots].long()
    return [copy[name][sides, slots] for name in FIELDS if name != "side"]


def joined(first, second):
    return [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]


def test_steps_equal_the_recurrence_over_what_was_accepted():
    state, slots = new_state(state_dtype=torch.float64), ints(4, 0, 2)
    starts = state.state[0, slots.long()].clone()
    history = [[torch.zeros(1, 0, *t.shape[2:]) for t in make_window(0, 1, 1)] for _ in slots]
    accepted = ((0, 0, 0), (5, 2, 0), (1, 0, 1), (8, 3, 7), (0, 3, 1), (8, 8, 4))
    previous = None
    for step, (length, count) in enumerate(zip((5, 1, 8, 3, 8, 2), accepted, strict=True)):
        tokens = make_window(step, 3, length)
        out = run(tokens, state, slots, ints(*count))
        commit_window(state, slots)
        for n in range(3):
            if previous is not None:
                history[n] = joined(history[n], [t[n : n + 1, : count[n]] for t in previous])
            through = joined(history[n], [t[n : n + 1] for t in tokens])
            expected, _ = gated_delta_rule_reference(*through, initial_state=starts[n : n + 1])
            assert torch.allclose(out[n].double(), expected[0, -length:], rtol=0, atol=1e-5)
            _, committed = gated_delta_rule_reference(*history[n], initial_state=starts[n : n + 1])
            side = int(state.side[slots[n]])
            # pending tokens are kept as they were computed, in the state's type
            assert torch.allclose(state.state[side, slots[n]], committed[0], rtol=0, atol=1e-12)
        previous = tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_equals_the_reference(assert_close, dtype):
    ours, exact = new_state(dtype=dtype), new_state(dtype=dtype, state_dtype=torch.float64)
    slots = ints(3, -1, 5, 0)
    for step, length in enumerate((4, 8, 1, 5)):
        tokens = make_window(step, 4, length, dtype=dtype)
        count = ints(*torch.randint(0, 9, (4,)).tolist())
        out = run(tokens, ours, slots, count)
        expected = window_reference(*tokens, exact, state_slots=slots, num_accepted=count)
        assert_close("out", expected, out, RTOL[dtype] if dtype is not torch.float32 else 1e-6)
        commit_window(ours, slots)
        commit_window(exact, slots)
        for name in FIELDS:
            assert_close(name, getattr(exact, name), getattr(ours, name), 1e-6)


def test_a_prefill_hands_its_state_to_windows(assert_close):
    x = make_inputs(1, batch=2, length=40, **HEADS)
    _, prompt = gated_delta_rule(*x.tokens, initial_state=x.initial_state)
    state = new_window_state(3, *HEADS.values(), dtype=torch.float32)
    load_state(state, ints(2, 1), prompt)
    tokens = make_window(2, 2, 3)
    out = gated_delta_rule_window(*tokens, state, state_slots=ints(2, 1), num_accepted=ints(0, 0))
    expected, _ = gated_delta_rule_reference(*joined(x.tokens, tokens), initial_state=x.initial_state)
    assert_close("out", expected[:, 40:], out, 1e-6)


def test_windows_hand_their_state_to_a_prompt_that_goes_on(assert_close):
    state, slots = new_state(), ints(5, 2)
    start = state.state[0, slots.long()].clone()
    tokens = make_window(3, 2, 6)
    run(tokens, state, slots, ints(0, 0))
    commit_window(state, slots)
    before = snapshot(state)
    read = read_state(state, slots, ints(4, 1))
    for n, count in enumerate((4, 1)):
        row = [t[n : n + 1, :count] for t in tokens]
        _, expected = gated_delta_rule_reference(*row, initial_state=start[n : n + 1])
        assert_close("state", expected, read[n : n + 1], 1e-6)
    assert all(torch.equal(before[name], getattr(state, name)) for name in FIELDS)


def test_an_uncommitted_step_can_be_made_again_bit_for_bit():
    state, slots = new_state(), ints(1, 3)
    run(make_window(0, 2, 4), state, slots, ints(0, 0))
    commit_window(state, slots)
    before = snapshot(state)
    tokens = make_window(1, 2, 6)
    burned = [t.clone() for t in tokens]
    burned[1][0, 2] = float("nan")
    run(burned, state, slots, ints(3, 4))
    commit_window(state, slots, burned=torch.tensor([True, False]))
    assert state.side[slots.long()].tolist() == [int(before["side"][1]), 1 - int(before["side"][3])]
    for a, b in zip(clean_half(before, torch.tensor([1])), clean_half(snapshot(state), torch.tensor([1])), strict=True):
        assert torch.equal(a, b)
    assert all(t.isfinite().all() for t in clean_half(snapshot(state), torch.tensor([1, 3])))
    # the burned row once more, with sound inputs, as if nothing had been
    again = run([t[:1] for t in tokens], state, slots[:1], ints(3))
    fresh = new_state()
    run(make_window(0, 2, 4), fresh, slots, ints(0, 0))
    commit_window(fresh, slots)
    assert torch.equal(again, run(tokens, fresh, slots, ints(3, 4))[:1])


def test_a_step_writes_the_other_half_alone():
    state, slots = new_state(), ints(5, 0)
    before = snapshot(state)
    run(make_window(3, 2, 8), state, slots, ints(0, 0))
    after = snapshot(state)
    halves = (clean_half(copy, torch.arange(6)) for copy in (before, after))
    assert all(torch.equal(a, b) for a, b in zip(*halves, strict=True))
    untouched = torch.tensor([1, 2, 3, 4])
    assert all(torch.equal(before[n][:, untouched], after[n][:, untouched]) for n in FIELDS if n != "side")
    assert torch.equal(before["side"], after["side"])


def test_rejected_drafts_leave_nothing():
    tokens, other = make_window(4, 1, 8), make_window(5, 1, 8)
    drafts = joined([t[:, :3] for t in tokens], [t[:, 3:] for t in other])
    results = []
    for first in (tokens, drafts):
        state = new_state()
        run(first, state, ints(2), ints(0))
        commit_window(state, ints(2))
        out = run(make_window(6, 1, 4), state, ints(2), ints(3))
        commit_window(state, ints(2))
        results.append((out, state.state[int(state.side[2]), 2]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("num_rows", [2, 3, 17, 256])
@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_a_row_has_the_bits_that_it_has_alone(num_rows, num_tokens):
    slots = torch.randperm(num_rows).to(torch.int32)
    counts = torch.randint(0, 9, (num_rows,), dtype=torch.int32)
    tokens, together = make_window(7, num_rows, num_tokens), new_state(num_rows)
    run(make_window(8, num_rows, 8), together, slots, torch.zeros_like(counts))
    commit_window(together, slots)
    alone = WindowState(**snapshot(together))
    out = run(tokens, together, slots, counts)
    for n in sorted({0, 1, num_rows // 2, num_rows - 1}):
        one = run([t[n : n + 1] for t in tokens], alone, slots[n : n + 1], counts[n : n + 1])
        assert torch.equal(one[0], out[n])
        other = 1 - int(together.side[slots[n]])
        assert torch.equal(alone.state[other, slots[n]], together.state[other, slots[n]])


def test_heads_of_a_real_model_have_the_same_bits_alone():
    heads = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    tokens, together, alone = make_window(9, 3, 5, heads), new_state(3, heads), new_state(3, heads)
    out = run(tokens, together, ints(2, 0, 1), ints(0, 0, 0))
    assert torch.equal(run([t[1:2] for t in tokens], alone, ints(0), ints(0))[0], out[1])


@pytest.mark.parametrize("length", [1, 3])
def test_a_window_has_the_bits_of_shorter_ones(length):
    tokens = make_window(10, 2, 8 - 8 % length)
    long, short, slots = new_state(), new_state(), ints(4, 1)
    whole = run(tokens, long, slots, ints(0, 0))
    count = ints(0, 0)
    for at in range(0, tokens[0].shape[1], length):
        part = run([t[:, at : at + length] for t in tokens], short, slots, count)
        commit_window(short, slots)
        count = ints(length, length)
        assert torch.equal(part, whole[:, at : at + length])


def test_pads_write_nothing_and_read_zero():
    state = new_state()
    before = snapshot(state)
    out = run(make_window(11, 3, 4), state, ints(-1, -7, -1), ints(8, 0, 3))
    commit_window(state, ints(-1, -7, -1))
    assert (out == 0).all()
    assert all(torch.equal(before[name], getattr(state, name)) for name in FIELDS)


def test_bad_values_in_a_pad_or_in_stale_pending_tokens_reach_nobody():
    state, slots = new_state(), ints(0, -1)
    for name in ("pending_k", "pending_v", "pending_g", "pending_beta"):
        getattr(state, name).fill_(float("nan"))
    tokens = [t.clone() for t in make_window(12, 2, 4)]
    for t in tokens:
        t[1] = float("nan")
    out = run(tokens, state, slots, ints(5, 5))
    assert out.isfinite().all()
    assert state.state.isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_the_panel_names_row_and_token(name):
    tokens = dict(zip(("q", "k", "v", "g", "beta"), (t.clone() for t in make_window(13, 3, 4)), strict=True))
    tokens[name][(1, 2) + (0,) * (tokens[name].ndim - 2)] = float("nan")
    slots, rows = ints(2, 4, -1), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1])

    def marks(panel):
        return (
            Mark(panel=panel, slot=0, num_signals=2, num_rows=3, row_ids=rows),
            Mark(panel=panel, slot=1, num_signals=2, num_rows=3, row_ids=torch.tensor([0, 1, -1])),
        )

    panel, expected = new_panel(2, 3), new_panel(2, 3)
    mark, state_mark = marks(panel)
    state, silent = new_state(), new_state()
    out = run(list(tokens.values()), state, slots, ints(0, 0, 0), mark=mark, state_mark=state_mark)
    assert unpack_word(int(panel[0])).flat_index // (2 * 32) == 1 * 4 + 2
    # the state as written was clean: it holds what came before this window
    assert int(panel[1]) == CLEAN
    assert panel[4:7].tolist()[0] == NOT_RUN
    mark, state_mark = marks(expected)
    mark_rows(out.flatten(0, 1).flatten(1), mark)
    mark_rows(torch.zeros(3, state.state[0, 0].numel()), state_mark)
    assert torch.equal(panel, expected)
    without = run(list(tokens.values()), silent, slots, ints(0, 0, 0))
    assert torch.equal(out.view(torch.int32), without.view(torch.int32))
    # once accepted, the token burns the state that is written
    commit_window(state, slots)
    panel = new_panel(2, 3)
    run(make_window(14, 3, 1), state, slots, ints(2, 4, 0), mark=marks(panel)[0], state_mark=marks(panel)[1])
    burned = int(panel[1]) != CLEAN
    assert burned == (name != "q")
    if burned:
        assert unpack_word(int(panel[1])).flat_index // state.state[0, 0].numel() == 1


def test_a_cleared_slot_forgets_a_nan():
    state = new_state()
    state.state[:, 3] = float("nan")
    load_state(state, ints(3))
    assert run(make_window(15, 1, 2), state, ints(3), ints(8)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 9}, "window of 9 tokens: must be from 1 to 8"),
        ({"state_slots": ints(0)}, "state_slots: .* must be"),
        ({"heads": {**HEADS, "head_k_dim": 32}}, "state: made for .* must be"),
        ({"dtype": torch.float16}, "v: torch.float16: must be torch.float32"),
    ],
    ids=["length", "slots", "heads", "dtype"],
)
def test_what_does_not_fit_is_refused(change, message):
    tokens = make_window(16, 2, change.get("tokens", 2), change.get("heads"), dtype=change.get("dtype", torch.float32))
    with pytest.raises(ConfigError, match=message):
        gated_delta_rule_window(
            *tokens, new_state(), state_slots=change.get("state_slots", ints(0, 1)), num_accepted=ints(0, 0)
        )


def test_a_state_of_the_wrong_shape_is_refused():
    with pytest.raises(ConfigError, match="max_window=9: must be from 1 to 8"):
        new_window_state(1, 1, 1, 8, 8, max_window=9)
    with pytest.raises(ConfigError, match="value heads a multiple of key heads"):
        new_window_state(1, 2, 3, 8, 8)
    with pytest.raises(ConfigError, match=r"pending_k: .* must be contiguous"):
        dataclasses.replace(new_state(), pending_k=torch.zeros(2, 6, 8, 1, 15))
