"""What the panel says: clean passes, the origin of a bad weight, burned rows by their words."""

from __future__ import annotations

import random

import pytest
import torch

from firetower.core.records import Kind
from firetower.sensors.marks import mark_rows
from firetower.sensors.panel import decode_panel

FAMILIES = ("qwen3_5_moe", "qwen3_next")
ROWS = 32


def read(model, panel, num_rows=ROWS):
    return decode_panel(panel.tolist(), len(model.signals), num_rows)


def two_sequences(driver, model, tokens):
    run = driver(model)
    run.prefill({0: tokens(70, seed=1)})
    run.prefill({1: tokens(5, seed=2)})
    return run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inside_experts", [False, True])
def test_a_window_marks_every_signal_and_is_clean(saved, driver, tokens, family, inside_experts):
    model = saved(family).load(inside_experts=inside_experts)
    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    run.step([(0, tokens(3)), None, (1, tokens(2))], panel=panel)
    reading = read(model, panel)
    assert reading.ran == (True,) * len(model.signals)
    assert reading.is_clean
    assert not reading.first_pads
    assert any(s.stage == "gate" for s in model.signals) == inside_experts


def test_a_prefill_marks_what_it_says(saved, driver, tokens):
    model = saved().load()
    panel = model.new_panel(ROWS)
    driver(model).prefill({0: tokens(20), 1: tokens(3)}, panel=panel, all_logits=False)
    reading = read(model, panel)
    assert tuple(i for i, ran in enumerate(reading.ran) if ran) == model.prefill_signals
    assert reading.is_clean
    missing = {model.signals[i].stage for i in model.window_signals if i not in model.prefill_signals}
    assert missing == {"projection", "attention"}


def places(model):
    """(path of a weight, stage and layer where a bad column of it shows in a window, and in a prefill)."""
    found = []
    for i, layer in enumerate(model.weights.layers):
        at = f"layers.{i}"
        is_delta = hasattr(layer.mixer, "conv")
        found.append((f"{at}.input_norm", "projection", None))
        found.append((f"{at}.post_norm", "router", "router"))
        found.append((f"{at}.moe.router", "router", "router"))
        found.append((f"{at}.moe.shared.gate", "router", "router"))
        found.append((f"{at}.moe.shared.gate_up_proj", "swiglu", "swiglu"))
        found.append((f"{at}.moe.shared.down_proj", "down", "down"))
        if is_delta:
            found.append((f"{at}.mixer.in_proj", "projection", None))
            found.append((f"{at}.mixer.conv", "conv", "conv"))
            found.append((f"{at}.mixer.decay_rate", "decay", "decay"))
            found.append((f"{at}.mixer.dt_bias", "decay", "decay"))
            found.append((f"{at}.mixer.norm", "attention", "residual"))
            found.append((f"{at}.mixer.out_proj", "attention", "residual"))
        else:
            found.append((f"{at}.mixer.qkv_proj", "projection", None))
            found.append((f"{at}.mixer.q_norm", "context", "context"))
            found.append((f"{at}.mixer.k_norm", "kv", "kv"))
            found.append((f"{at}.mixer.o_proj", "attention", "residual"))
    found.append(("norm", "logits", "logits"))
    found.append(("lm_head", "logits", "logits"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_nan_in_a_random_weight_shows_at_its_signal(saved, driver, tokens, family, seed):
    model, draw = saved(family).load(), random.Random(f"{family} {seed}")
    tensors = dict(model.weights.named_tensors())
    for path, stage, prefill_stage in draw.sample(places(model), 14):
        weight = tensors[path]
        index = tuple(draw.randrange(n) for n in weight.shape)
        before = weight[index].item()
        run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
        try:
            weight[index] = float("nan")
            run.step([(0, tokens(2)), (1, tokens(2))], panel=panel)
            early = model.new_panel(ROWS)
            driver(model).prefill({0: tokens(20)}, panel=early)
        finally:
            weight[index] = before
        check_origin(model, panel, path, index, stage)
        if prefill_stage is not None:
            check_origin(model, early, path, index, prefill_stage)


def check_origin(model, panel, path, index, stage):
    origin = read(model, panel).origin
    assert origin is not None, path
    signal = model.signals[origin.slot]
    layer = int(path.split(".")[1]) if path.startswith("layers.") else None
    assert (signal.stage, signal.layer) == (stage, layer), path
    assert origin.kind is Kind.NAN
    column = origin.flat_index % origin.shape[-1]
    if path.endswith(("in_proj", "out_proj", "qkv_proj", "o_proj", "router", "lm_head", "mixer.conv", "decay_rate")):
        assert column == index[0], path


def test_a_nan_in_an_expert_shows_only_in_who_chose_it(saved, driver, tokens):
    model = saved().load()
    weights = model.weights.layers[1].moe.down_proj
    chosen = {}

    class Ids:
        def keep(self, signal_index, tensor):
            signal = model.signals[signal_index]
            if (signal.stage, signal.layer) == ("router", 1):
                # of equals the lowest first: the padding token's logits are all 0
                chosen["ids"] = tensor[:, :8].sort(descending=True, stable=True).indices[:, :4]

    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    run.step([(0, tokens(4)), (1, tokens(4, seed=9))], keep=Ids())
    rows = {e: {r for r in range(8) if e in chosen["ids"][r].tolist()} for e in range(8)}
    expert, users = next((e, users) for e, users in rows.items() if 0 < len(users) < 8)
    run = two_sequences(driver, model, tokens)
    before = weights[expert, 3, 5].item()
    try:
        weights[expert, 3, 5] = float("nan")
        run.step([(0, tokens(4)), (1, tokens(4, seed=9))], panel=panel)
    finally:
        weights[expert, 3, 5] = before
    reading = read(model, panel)
    assert model.signals[reading.origin.slot].name == "layer 1 down"
    at_down = {b.sequence for b in reading.burned if b.slot == reading.origin.slot}
    assert at_down == users
    assert {b.offset for b in reading.burned if b.slot == reading.origin.slot} == {3}


def test_burned_states_are_told_by_the_first_row_of_their_sequence(saved, driver, tokens):
    model = saved().load()
    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    run.state.slots["state"][2, :, 2, 1, 4, 9] = float("inf")
    run.step([(0, tokens(3)), (1, tokens(3))], panel=panel)
    reading = read(model, panel)
    assert model.signals[reading.origin.slot].name == "layer 2 recurrent_state"
    assert reading.origin.kind is Kind.POS_INF
    assert [b.sequence for b in reading.burned if b.slot == reading.origin.slot] == [3]
    assert {b.sequence for b in reading.burned} == {3, 4, 5}


def test_a_bad_conv_state_is_told_from_a_bad_input(saved, driver, tokens):
    model = saved().load()
    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    side = int(run.state.side[1])
    run.state.conv_storage[0, 2 * 1 + side, 1, 17] = float("nan")
    run.step([(0, tokens(3)), (1, tokens(3))], panel=panel)
    reading = read(model, panel)
    assert model.signals[reading.origin.slot].name == "layer 0 conv_state"
    assert {b.sequence for b in reading.burned if b.slot == reading.origin.slot} == {0}


def test_a_bad_page_burns_who_reads_it(saved, driver, tokens):
    model = saved().load()
    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    run.state.kv[0].key.view(-1, 2, 32)[run.place(0, 11), 1, 4] = float("nan")
    run.step([(0, tokens(3)), (1, tokens(3))], panel=panel)
    reading = read(model, panel)
    assert model.signals[reading.origin.slot].name == "layer 3 context"
    assert {b.sequence for b in reading.burned} == {0, 1, 2}


def test_a_bad_pad_marks_only_pad_words(saved, driver, tokens):
    model = saved().load()
    run, panel = two_sequences(driver, model, tokens), model.new_panel(ROWS)
    batch = run.batch([None, (0, tokens(2))], 2)
    batch.token_ids[0] = -1
    with torch.inference_mode():
        out = model.window(batch, run.state, panel)
    reading = read(model, panel)
    assert reading.is_clean
    assert not reading.burned
    assert model.signals[reading.first_pads[0].slot].name == "layer 0 input"
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_a_recorder_that_injects_is_the_origin(saved, driver, tokens, seed):
    """A bad value written where a signal is kept, and marked again, is found there and burns its own row alone."""
    model, draw = saved().load(), random.Random(seed)
    clean = two_sequences(driver, model, tokens).step([(0, tokens(3)), (1, tokens(3))])
    for signal_index in draw.sample([i for i in model.kept_signals if model.signals[i].stage != "logits"], 12):
        run, panel, row = two_sequences(driver, model, tokens), model.new_panel(ROWS), draw.randrange(3)

        class Injector:
            def keep(self, index, tensor, signal_index=signal_index, panel=panel, row=row):
                if index != signal_index:
                    return
                per_row = tensor.shape[0] // 6
                ids = torch.arange(6, dtype=torch.int32).repeat_interleave(per_row)
                tensor[row * per_row, draw.randrange(tensor.shape[1])] = float("nan")
                mark_rows(tensor, model.mark(panel, index, ids))

        out = run.step([(0, tokens(3)), (1, tokens(3))], panel=panel, keep=Injector())
        reading = read(model, panel)
        assert reading.origin.slot == signal_index
        assert reading.burned[0].sequence == row
        assert all(b.sequence < 3 for b in reading.burned)
        assert torch.equal(out[1], clean[1])
