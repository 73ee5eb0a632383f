"""Activations of a decode step that wait for their layer's end: found all the same, never vouched for blindly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import firetower
from firetower.attach.late import MAX_HELD_TOKENS
from firetower.core.records import Status
from firetower.drills import hosts

LAYER = 1
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*")


@pytest.fixture
def model() -> Any:
    return hosts.small_llama()


def decode(model: Any, cache: Any) -> None:
    with torch.no_grad():
        model(input_ids=torch.full((1, 1), 7), past_key_values=cache, use_cache=True)


def warmed(model: Any, num_tokens: int = 1) -> Any:
    """A cache behind a prompt and a token: from here on the signals of a step wait."""
    with torch.no_grad():
        out = model(input_ids=torch.arange(5, 12)[None], use_cache=True)
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    for _ in range(num_tokens):
        decode(model, cache)
    return cache


def status_of(watch: Any, stage: str, layer: int = LAYER) -> Any:
    return next(s for s in watch.last.signals if s.signal.stage == stage and s.signal.layer == layer)


def held_in(watch: Any, module: Any) -> list[int]:
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(len(watch._hooks.step.late.held)))
    return seen


def test_a_decode_step_holds_a_layer_and_lets_it_go(model):
    with firetower.attach(model, store=False) as watch:
        seen = held_in(watch, model.model.layers[LAYER].mlp)
        decode(model, warmed(model))
        # the short prompt was checked in the hooks; then query, attention, gate, up, swiglu and down wait
        assert seen == [0, 6, 6]
        assert watch._hooks.step.late.held == []
        assert watch.coverage()[0] == watch.coverage()[1]


@pytest.mark.parametrize("stage", ["query", "gate", "up", "down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_bad_value_is_the_origin(model, stage, value):
    layer = model.model.layers[LAYER]
    mlp = layer.mlp
    at = {"query": layer.self_attn.q_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    with firetower.attach(model, store=False, on_fire="record") as watch:
        cache = warmed(model)
        with torch.no_grad():
            at[stage].weight[3] = value
        decode(model, cache)
        [fire] = watch.fires
    assert (fire.origin.layer, fire.origin.stage, fire.first.column) == (LAYER, stage, 3)
    assert fire.inputs, "what the origin's module was given belongs to the evidence"


def test_findings_stand_in_the_order_of_the_hooks(model):
    with firetower.attach(model, store=False, on_fire="record") as watch:
        cache = warmed(model)
        with torch.no_grad():
            model.model.layers[LAYER].self_attn.k_proj.weight[2, 0] = math.nan
        decode(model, cache)
        bad = [(s.signal.layer, s.signal.stage) for s in watch.last.signals if s.status is Status.BAD]
    stages = ["kv", "attention", "gate", "up", "swiglu", "down", "output"]
    assert bad[: len(stages)] == [(LAYER, s) for s in stages]
    assert bad[len(stages)] == (LAYER + 1, "input")


def test_a_value_that_is_hidden_again_is_still_found(model):
    down = model.model.layers[LAYER].mlp.down_proj
    native, bad = down.forward, []
    down.forward = lambda x: native(torch.nan_to_num(x, posinf=0.0))
    with firetower.attach(model, store=False, on_fire="record") as watch:
        cache = warmed(model)
        gate = model.model.layers[LAYER].mlp.act_fn
        gate.register_forward_hook(lambda _m, _i, out: out.index_fill(-1, torch.tensor([4]), math.inf) if bad else out)
        bad.append(True)
        decode(model, cache)
        assert [(f.origin.layer, f.origin.stage, f.first.column) for f in watch.fires] == [(LAYER, "swiglu", 4)]


def test_what_is_written_to_again_is_not_vouched_for(model):
    mlp = model.model.layers[LAYER].mlp
    writes: list[bool] = []
    mlp.up_proj.register_forward_hook(lambda _m, _i, out: out.mul_(1.0) if writes else None)
    with firetower.attach(model, store=False) as watch:
        # ours runs before theirs
        mlp.up_proj._forward_hooks.move_to_end(next(iter(mlp.up_proj._forward_hooks)))
        cache = warmed(model)
        writes.append(True)
        decode(model, cache)
        assert status_of(watch, "up").status is Status.NOT_COVERED
        assert "written to again" in status_of(watch, "up").reason
        assert status_of(watch, "gate").status is Status.CLEAN
        decode(model, cache)
        assert status_of(watch, "up").status is Status.CLEAN


def test_a_model_that_works_in_place_never_waits_and_stays_covered(model):
    mlp = model.model.layers[LAYER].mlp
    mlp.up_proj.register_forward_hook(lambda _m, _i, out: out.mul_(1.0))
    with firetower.attach(model, store=False) as watch:
        mlp.up_proj._forward_hooks.move_to_end(next(iter(mlp.up_proj._forward_hooks)))
        cache = warmed(model, 0)
        for _ in range(3):
            decode(model, cache)
            assert watch.coverage()[0] == watch.coverage()[1]


def test_a_value_written_after_the_hook_is_not_blamed_on_its_signal(model):
    """The next signal that sees it is the origin; the one that was written to is not covered."""
    mlp = model.model.layers[LAYER].mlp
    writes: list[bool] = []
    mlp.down_proj.register_forward_hook(lambda _m, _i, out: out.fill_(math.nan) if writes else None)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        mlp.down_proj._forward_hooks.move_to_end(next(iter(mlp.down_proj._forward_hooks)))
        cache = warmed(model)
        writes.append(True)
        decode(model, cache)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "output")]
        assert status_of(watch, "down").status is Status.NOT_COVERED


def test_inference_mode_and_long_steps_do_not_wait(model):
    with firetower.attach(model, store=False) as watch:
        seen = held_in(watch, model.model.layers[LAYER].mlp)
        cache = warmed(model)
        seen.clear()
        with torch.inference_mode():
            model(input_ids=torch.full((1, 1), 7), use_cache=True)
        with torch.no_grad():
            model(input_ids=torch.full((1, MAX_HELD_TOKENS + 1), 7), past_key_values=cache, use_cache=True)
        assert seen == [0, 0]


def test_a_step_that_fails_midway_is_checked_to_where_it_came(model):
    layer = model.model.layers[LAYER]
    with firetower.attach(model, store=False, on_fire="record") as watch:
        cache = warmed(model)
        with torch.no_grad():
            layer.mlp.gate_proj.weight[3] = math.nan
        layer.mlp.down_proj.forward = lambda x: x.reshape(3, 3, 3, 3, 3)
        with pytest.raises(RuntimeError, match="invalid for input"):
            decode(model, cache)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "gate")]
