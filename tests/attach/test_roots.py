"""Which calls are steps: interrupted ones, calls past a wrapper, others' hooks that raise, detaching inside a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import firetower
from firetower.core.errors import AttachError
from firetower.drills import hosts


class Adapter(nn.Module):
    """Hands everything on to a language model, as adapter libraries do; ``generate`` runs past its own forward."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.generate(*args, **kwargs)


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_the_watch_goes_on_after_ctrl_c(level: Any) -> None:
    model: Any = hosts.small_llama(num_layers=2)
    ids = torch.tensor([[5, 6, 7]])
    with firetower.attach(model, store=False, on_fire="record", level=level) as watch:
        model.model.layers[1].forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids)
        del model.model.layers[1].forward
        model(input_ids=ids)
        assert watch.last.is_clean
        assert watch.coverage()[0] > 15
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
        model(input_ids=ids)
        assert len(watch.fires) == 1
    assert _get_current_dispatch_mode_stack() == []


def test_ctrl_c_inside_generate_leaves_no_mode_behind() -> None:
    model: Any = hosts.small_llama(num_layers=2)
    with firetower.attach(model, store=False, level="ops"):
        model.model.layers[1].forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_detaching_inside_a_call_keeps_what_was_found(level: Any) -> None:
    model: Any = hosts.small_llama(num_layers=2)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    watch = firetower.attach(model, store=False, on_fire="record", level=level)
    original = model.model.layers[1].forward

    def detach(*args: Any, **kwargs: Any) -> Any:
        watch.detach()
        return original(*args, **kwargs)

    model.model.layers[1].forward = detach
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert len(watch.fires) == 1
    assert _get_current_dispatch_mode_stack() == []


def test_a_hook_that_raises_before_ours_makes_no_step() -> None:
    model = nn.Linear(3, 3)

    def refuse(*args: Any) -> None:
        raise ValueError("not now")

    with firetower.attach(model, store=False) as watch:
        handle = model.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(ValueError, match="not now"):
            model(torch.randn(2, 3))
        # a step that never began is no clean step
        assert watch.last is None
        handle.remove()
        model(torch.randn(2, 3))
        assert watch.coverage() == (1, 1)


def test_generate_past_a_wrapper_has_steps_and_isolates() -> None:
    base: Any = hosts.small_llama()
    model = Adapter(base)
    ids = torch.randint(5, 90, (3, 4), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 3}
    bare = model.generate(input_ids=ids, **options)
    layer = base.model.layers[1]
    original = layer.forward

    def poisoned(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        if out.shape[1] == 1:
            out = out.clone()
            out[2, 0, 3] = float("nan")
        return out

    layer.forward = poisoned
    with firetower.attach(model, store=False, on_fire="isolate") as watch:
        out = model.generate(input_ids=ids, **options)
    assert torch.equal(out[:2], bare[:2])
    assert out[2].tolist() == [*bare[2, :5].tolist(), 3, 3, 3]
    assert (watch.fires[0].first.sequence, watch.fires[0].first.position) == (2, 4)
    assert watch.fires[0].count == 3


def test_a_scripted_module_is_a_clear_error() -> None:
    with pytest.raises(AttachError, match="before scripting"):
        firetower.attach(torch.jit.script(nn.Linear(3, 3)))
