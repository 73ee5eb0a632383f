"""Slots and pages: sizes, clearing, snapshots, and steps that are run again."""

from __future__ import annotations

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.models.state import (
    bytes_of,
    clear_pages,
    clear_slots,
    commit,
    new_state,
    pages_clean,
    restore,
    slots_clean,
    snapshot,
)

SIZES = {"num_pages": 5, "num_slots": 3}


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_are_known_beforehand(tiny_config, dtype, kv_dtype):
    state = new_state(tiny_config, **SIZES, dtype=dtype, kv_dtype=kv_dtype)
    said = bytes_of(tiny_config, **SIZES, dtype=dtype, kv_dtype=kv_dtype)
    scales = 0 if state.page_scales is None else state.page_scales.nbytes
    assert said.pages == state.pages.nbytes + scales
    assert said.recurrent == sum(x.nbytes for x in state.slots.values()) + state.side.nbytes
    assert said.conv == state.conv_storage.nbytes
    assert said.total == said.pages + said.recurrent + said.conv


def test_layers_are_views_of_one_storage(tiny_config):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    assert (len(state.kv), len(state.recurrent), len(state.conv)) == (1, 3, 3)
    assert all(w.side is state.side for w in state.recurrent)
    state.recurrent[1].state.fill_(2.0)
    state.conv[2].fill_(3.0)
    state.kv[0].value.fill_(4.0)
    assert (state.slots["state"][1] == 2).all()
    assert (state.slots["state"][[0, 2]] == 0).all()
    assert (state.conv_storage[2] == 3).all()
    assert (state.pages[0, 1] == 4).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 0}, "num_pages=0"),
        ({"num_slots": -1}, "num_slots=-1"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64"),
        ({"kv_dtype": torch.float16}, r"kv_dtype=torch\.float16"),
    ],
)
def test_what_is_refused(tiny_config, change, message):
    for make in (new_state, bytes_of):
        with pytest.raises(ConfigError, match=message):
            make(tiny_config, **{**SIZES, "dtype": torch.float32, **change})


def spoil(state):
    """NaN, negative zeros and garbage in every word of the state."""
    for x in (state.conv_storage, *state.slots.values()):
        x.fill_(float("nan") if x.is_floating_point() else 9)
    state.side.fill_(1)
    state.pages.view(torch.uint8).fill_(0xFF)
    if state.page_scales is not None:
        state.page_scales.fill_(float("nan"))


def test_an_empty_state_is_clean(tiny_config):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    assert slots_clean(state, torch.arange(3)).all()
    assert pages_clean(state, torch.arange(5)).all()


def test_slots_are_cleared_by_assignment(tiny_config):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    spoil(state)
    clear_slots(state, torch.tensor([2, 0], dtype=torch.int32))
    assert slots_clean(state, torch.arange(3)).tolist() == [True, False, True]
    assert state.slots["state"][:, :, 1].isnan().all()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_pages_are_cleared_by_assignment(tiny_config, kv_dtype):
    state = new_state(tiny_config, **SIZES, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    spoil(state)
    clear_pages(state, torch.tensor([4, 1]))
    assert pages_clean(state, torch.arange(5, dtype=torch.int32)).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("name", ["state", "pending_k", "pending_v", "pending_g", "pending_beta", "num_pending"])
@pytest.mark.parametrize("half", [0, 1])
def test_one_word_makes_a_slot_unclean(tiny_config, name, half):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    x = state.slots[name][2, half, 1]
    x.view(-1)[-1] = -0.0 if x.is_floating_point() else 1
    assert slots_clean(state, torch.arange(3)).tolist() == [True, False, True]


@pytest.mark.parametrize(("column", "value"), [(0, -0.0), (2, 1.0), (5, 0.0)])
def test_one_column_makes_a_slot_unclean(tiny_config, column, value):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    state.conv_storage[1, 3, column, 7] = value
    assert slots_clean(state, torch.arange(3)).tolist() == [True, False, True]


def test_a_side_makes_a_slot_unclean(tiny_config):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    commit(state, torch.tensor([1, -1], dtype=torch.int32))
    assert slots_clean(state, torch.arange(3)).tolist() == [True, False, True]


def run_two(saved, driver, tokens):
    run = driver(saved().load())
    run.prefill({0: tokens(70, seed=1)})
    run.prefill({1: tokens(9, seed=2)})
    return run


def test_a_burned_step_can_be_run_again(saved, driver, tokens):
    """Nobody commits the burned row: the same call has the same bits, and so has all that follows."""
    run = run_two(saved, driver, tokens)
    twin = run_two(saved, driver, tokens)
    rows = [(0, tokens(3, seed=3)), (1, tokens(3, seed=4))]
    for r in (run, twin):
        r.step(rows, accept=[2, 3])
    batch = run.batch(rows, 3)
    with torch.inference_mode():
        first = run.model.window(batch, run.state).clone()
        commit(run.state, batch.state_slots, torch.tensor([True, False]))
        for layer in run.state.recurrent:
            other = 1 - int(run.state.side[1])
            layer.state[other, 1] = float("nan")
        again = run.batch([rows[0], None], 3)
        second = run.model.window(again, run.state).clone()
        commit(run.state, again.state_slots)
    assert torch.equal(first[:3], second[:3])
    reference = twin.step(rows)
    assert torch.equal(first.view(2, 3, -1), torch.stack(reference))
    for r in (run, twin):
        r.lengths, r.accepted = [75, 15, 0, 0], [3, 3, 0, 0]
    assert all(map(torch.equal, run.step(rows), twin.step(rows)))


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_a_snapshot_goes_on_where_it_was_taken(saved, driver, tokens, accepted):
    run, new, rest = run_two(saved, driver, tokens), tokens(4, seed=5), tokens(3, seed=6)
    run.step([(0, new)], accept=[accepted])
    kept = snapshot(run.state, 1, accepted)
    assert kept.num_bytes == kept.recurrent.nbytes + kept.conv.nbytes
    reference = run.step([(0, rest)])[0]
    spoiled = run.state.side[1].item()
    for x in (run.state.conv_storage[:, 2:4], *(x[:, :, 1] for x in run.state.slots.values())):
        x.fill_(float("nan") if x.is_floating_point() else 5)
    assert run.state.side[1].item() == spoiled
    restore(run.state, 1, kept)
    run.lengths[0] -= 3
    run.accepted[0] = 0
    again = run.step([(0, rest)])[0]
    torch.testing.assert_close(again, reference, rtol=1e-5, atol=1e-5)
    if accepted == 0:
        assert torch.equal(again, reference)


def test_a_snapshot_moves_to_another_slot_and_prefills_go_on(saved, driver, tokens):
    text = tokens(160)
    model = saved().load()
    one = driver(model)
    reference = [one.prefill({0: text[:128]}), one.prefill({0: text[128:]})][1]
    run = driver(model)
    run.prefill({0: text[:128]})
    restore(run.state, 3, snapshot(run.state, 1))
    run.state.pages[:, :, run.pages(2)] = run.state.pages[:, :, run.pages(0)]
    run.lengths[2] = 128
    assert torch.equal(run.prefill({2: text[128:]}), reference)


def test_slots_and_snapshots_that_do_not_fit(tiny_config, saved):
    state = new_state(tiny_config, **SIZES, dtype=torch.float32)
    with pytest.raises(ConfigError, match="slot=3: must be from 0 to 2"):
        snapshot(state, 3)
    with pytest.raises(ConfigError, match="num_accepted=9"):
        snapshot(state, 0, 9)
    kept = snapshot(state, 0)
    other = new_state(saved("qwen3_5_moe", num_layers=2, layer_types=["linear_attention"] * 2).load().config, **SIZES)
    with pytest.raises(ConfigError, match="another model"):
        restore(other, 0, kept)
