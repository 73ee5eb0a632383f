"""Cache rows checked at a step's end: found all the same, in the order of the hooks, never vouched for blindly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import firetower
from firetower.core.records import Status
from firetower.drills import hosts

LAYER = 1
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*")


@pytest.fixture
def model() -> Any:
    return hosts.small_llama()


def step(model: Any, cache: Any = None) -> Any:
    """A prompt, or one token after it."""
    ids = torch.full((1, 1), 7) if cache else torch.arange(5, 12)[None]
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True)


def cache_of(out: Any) -> Any:
    return out.past_key_values if hasattr(out, "past_key_values") else out.cache


def kv_of(watch: Any, layer: int = LAYER) -> Any:
    return next(s for s in watch.last.signals if s.signal.stage == "kv" and s.signal.layer == layer)


def spoil_after_attention(model: Any, change: Any) -> None:
    """Change the newest row of the layer's cache once attention has read it: its output stays clean."""
    attention = model.model.layers[LAYER].self_attn
    native = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = native(*args, **kwargs)
        cache = next(kwargs[n] for n in ("past_key_values", "cache") if kwargs.get(n) is not None)
        change(cache.layers[LAYER])
        return out

    attention.forward = forward


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("length", [7, 1], ids=["prefill", "decode"])
def test_a_bad_row_that_no_other_signal_shows_is_found(model, which, length):
    cache = cache_of(step(model)) if length == 1 else None

    def change(layer: Any) -> None:
        getattr(layer, which)[0, 1, -1, 3] = math.nan

    spoil_after_attention(model, change)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        step(model, cache)
        [fire] = watch.fires
    assert (fire.origin.layer, fire.origin.stage) == (LAYER, "kv")
    assert (fire.first.sequence, fire.first.token, fire.first.column) == (0, length - 1, 3)


def test_it_comes_before_what_it_burns(model):
    """A NaN among the rows burns the attention of the same layer: the rows were hooked first and are the origin."""
    with torch.no_grad():
        model.model.layers[LAYER].self_attn.v_proj.weight[2, 0] = math.nan
    with firetower.attach(model, store=False, on_fire="record") as watch:
        step(model)
        [fire] = watch.fires
        bad = [s.signal.stage for s in watch.last.signals if s.status is Status.BAD]
    assert (fire.origin.layer, fire.origin.stage, fire.first.column) == (LAYER, "kv", 2)
    assert bad[:2] == ["kv", "attention"]
    assert fire.inputs, "what the origin's module was given belongs to the evidence"


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_cache_that_is_written_to_again_is_not_vouched_for(model, which):
    mlp = model.model.layers[LAYER].mlp
    native, caches = mlp.forward, []

    def forward(x: Any) -> Any:
        if caches:
            getattr(caches[0].layers[LAYER], which).mul_(1.0)
        return native(x)

    mlp.forward = forward
    with firetower.attach(model, store=False) as watch:
        cache = cache_of(step(model))
        assert watch.coverage()[0] == watch.coverage()[1]
        caches.append(cache)
        step(model, cache)
        assert kv_of(watch).status is Status.NOT_COVERED
        assert "written to again" in kv_of(watch).reason
        assert kv_of(watch, 0).status is Status.CLEAN
        # from then on the rows are checked in the hook
        step(model, cache)
        assert kv_of(watch).status is Status.CLEAN


def test_bad_rows_are_found_although_they_are_written_to_again(model):
    mlp = model.model.layers[LAYER].mlp
    native, caches = mlp.forward, []

    def forward(x: Any) -> Any:
        if caches:
            caches[0].layers[LAYER].keys.mul_(1.0)
        return native(x)

    mlp.forward = forward

    def change(layer: Any) -> None:
        caches[:] = [type("Cache", (), {"layers": {LAYER: layer}})]
        layer.keys[0, 0, -1, 0] = math.inf

    spoil_after_attention(model, change)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        step(model)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "kv")]


def test_in_inference_mode_rows_are_checked_at_once(model):
    """Inference tensors count no versions: nothing would tell that they were written to."""
    seen = []

    def change(layer: Any) -> None:
        layer.values[0, 0, -1, 0] = math.nan

    spoil_after_attention(model, change)
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.inference_mode():
        model.model.layers[LAYER].mlp.register_forward_hook(lambda *_: seen.append(len(watch._hooks.step.late.items)))
        model(input_ids=torch.arange(5, 12)[None], use_cache=True)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "kv")]
    assert seen == [0]


def test_rows_wait_outside_it(model):
    seen = []
    with firetower.attach(model, store=False) as watch:
        model.model.layers[LAYER].mlp.register_forward_hook(lambda *_: seen.append(len(watch._hooks.step.late.items)))
        step(model)
        assert seen == [LAYER + 1]
        assert watch._hooks.step.late.items == []


def test_a_step_that_breaks_off_still_tells_its_rows(model):
    def change(layer: Any) -> None:
        layer.values[0, 0, -1, 0] = math.nan

    spoil_after_attention(model, change)
    model.model.layers[LAYER].mlp.forward = lambda x: x.reshape(3, 3, 3, 3, 3)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        with pytest.raises(RuntimeError, match="invalid for input"):
            step(model)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "kv")]


def test_a_check_that_fails_at_the_end_hides_no_other_fire(model, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ValueError("broken sensor")

    monkeypatch.setattr("firetower.attach.late.written_rows", broken)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        step(model)
        assert watch.failures == 1
        assert "broken sensor" in watch.last_failure
        assert {kv_of(watch, i).status for i in range(len(model.model.layers))} == {Status.NOT_COVERED}
        assert kv_of(watch).reason == "its check failed: ValueError"
        with torch.no_grad():
            model.model.layers[LAYER].mlp.up_proj.weight[2, 0] = math.nan
        step(model)
        assert [(f.origin.layer, f.origin.stage) for f in watch.fires] == [(LAYER, "up")]
