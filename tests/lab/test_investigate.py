"""`firetower.investigate` gives a verdict with its refuter, and stores it with the fire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import firetower
from firetower.core.verdict import Verdict
from firetower.drills import hosts


def prompt() -> torch.Tensor:
    return torch.randint(5, 90, (1, 6), generator=torch.Generator().manual_seed(3))


def test_a_bad_weight_is_judged_and_the_verdict_is_stored() -> None:
    model = hosts.small_llama()
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = float("nan")
    found = firetower.investigate(model, input_ids=prompt(), firetower_at_load=model.state_dict())
    assert found.verdict is not None
    assert found.fire is not None
    assert (found.verdict.family, found.verdict.detail, found.verdict.decided) == ("M", "BAD_WEIGHT", True)
    assert "refuter" in str(found)
    with firetower.Store() as store:
        stored = store.get(found.fire.id)
    assert stored.verdict is not None
    assert Verdict.from_mapping(stored.verdict) == found.verdict


def test_a_bad_weight_of_unknown_past_stays_between_file_and_memory() -> None:
    model = hosts.small_llama()
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = float("nan")
    found = firetower.investigate(model, input_ids=prompt(), firetower_store=False)
    assert found.verdict is not None
    assert not found.verdict.decided
    assert {c[0] for c in found.verdict.undecided_between} == {"M", "K"}
    assert "firetower scan" in found.verdict.next_command


def test_an_overflow_is_judged() -> None:
    model = hosts.small_qwen35_moe(dtype=torch.float16)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj *= 400
    found = firetower.investigate(model, input_ids=prompt(), firetower_store=False)
    assert found.verdict is not None
    assert (found.verdict.family, found.verdict.detail) == ("A", "OVERFLOW_ACTIVATION")
    assert found.origin is not None
    assert found.origin.op == "aten.mul.Tensor"


def test_the_model_is_left_as_it_was() -> None:
    model: Any = hosts.small_llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    firetower.investigate(model.generate, prompt(), max_new_tokens=2, do_sample=False, firetower_store=False)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("burns", [True, False])
def test_no_verdict_without_a_fire_or_when_not_wanted(burns: bool) -> None:
    model = hosts.small_llama()
    if burns:
        model.lm_head.weight.data[0, 0] = float("nan")
    found = firetower.investigate(model, input_ids=prompt(), firetower_store=False, firetower_verdict=False)
    assert found.verdict is None
    assert found.burned is burns
