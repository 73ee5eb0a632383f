"""`investigate`: origin op, culprit, laundering, clean second runs, exceptions, and nothing left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.attach import investigate_runs
from firetower.attach.investigate import CLEAN_SECOND_RUN
from firetower.core.codec import fire_from_dict, fire_to_dict
from firetower.core.records import Kind, Phase
from firetower.drills import hosts
from firetower.sensors.ops_events import Cause

NAN, INF = math.nan, math.inf


def look(fn: Any, *args: Any, **kwargs: Any) -> firetower.Investigation:
    return firetower.investigate(fn, *args, firetower_store=False, firetower_verdict=False, **kwargs)


def inputs(batch: int = 2, length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(5, 500, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def overflowing_expert() -> Any:
    """A Qwen3.5-MoE in fp16, the activation product of layer 2's experts beyond 65504."""
    model = hosts.small_qwen35_moe(dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[2].mlp.experts.gate_up_proj.mul_(1500)
    return model


def bad_weight() -> Any:
    model = hosts.small_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.view(torch.int32)[3, 7] = 0x7FD6E000
    return model


def test_activation_overflow_in_an_expert_is_the_product_not_the_norm() -> None:
    found = look(overflowing_expert(), **inputs())
    assert found.burned
    assert found.origin is not None
    assert (found.origin.op, found.origin.module) == ("aten.mul.Tensor", "model.layers.2.mlp.experts")
    assert (found.origin.layer, found.origin.stage, found.origin.first.kind.lstrip("+-")) == (
        2,
        "swiglu",
        "inf",
    )
    assert "transformers/" in found.origin.source
    assert [t.num_nonfinite for t in found.inputs] == [0, 0]
    assert found.output is not None
    assert found.output.num_nonfinite > 0
    assert found.output.headroom is not None
    assert found.first_run.fires[0].origin.layer == 2
    assert found.propagators
    assert not any(e.index <= found.origin.index for e in found.propagators)


def test_generate_with_sampling_repeats_the_same_tokens() -> None:
    model = overflowing_expert()
    found = look(model.generate, **inputs(), max_new_tokens=4, do_sample=True)
    assert found.origin is not None
    assert found.origin.op == "aten.mul.Tensor"
    assert found.error is not None
    assert "probability tensor" in found.error
    assert found.second_run is not None
    assert found.second_run.error == found.error


def test_bad_weight_is_named_with_place_and_bits() -> None:
    found = look(bad_weight().generate, **inputs(), max_new_tokens=2, do_sample=False)
    assert found.origin is not None
    assert found.origin.cause is Cause.WEIGHT
    assert found.culprit == "the weight itself is non-finite: model.layers.1.mlp.down_proj.weight"
    first = found.origin.tensor_first
    assert first is not None
    assert (first.row, first.column, first.bits_hex) == (3, 7, "7fd6e000")
    assert found.weights[0].name == "model.layers.1.mlp.down_proj.weight"
    assert found.weights[0].num_nan == 1
    assert found.origin.module == "model.layers.1.mlp.down_proj"


def test_the_fire_has_phase_step_and_position() -> None:
    model = hosts.small_llama()
    layer = model.model.layers[1]
    calls = {"n": 0}

    def inject(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls["n"] += 1
        if calls["n"] == 3:
            args[0][1, 0, 5] = NAN

    layer.register_forward_pre_hook(inject)
    found = look(model.generate, **inputs(), max_new_tokens=4, do_sample=False)
    assert found.fire is not None
    assert found.origin is not None
    assert found.origin.op == "aten.copy_.default"
    assert "in inject" in found.origin.source
    fire = found.fire
    assert (fire.phase, fire.step) == (Phase.DECODE, 2)
    assert (fire.first.sequence, fire.first.token, fire.first.position, fire.first.column) == (1, 0, 8, 5)
    assert fire.token_ids is not None
    assert fire_from_dict(fire_to_dict(fire)) == fire


def test_a_function_without_modules_is_checked_op_by_op() -> None:
    found = look(lambda x: torch.where(x > 0, x.log(), 0.0).sum(), torch.tensor([-1.0, 1.0]))
    assert found.burned
    assert found.origin is not None
    assert found.origin.op == "aten.log.default"
    assert [e.op for e in found.laundered] == ["aten.where.self"]
    assert found.fire is not None
    assert found.fire.laundered is True
    assert not math.isnan(found.result)


def test_laundering_of_a_callers_value() -> None:
    x = torch.tensor([0.5, NAN, 0.1])
    found = look(lambda scores: scores.argmax(), x)
    assert found.origin is not None
    assert found.culprit == "input given by the caller: scores"
    assert [e.op for e in found.laundered] == ["aten.argmax.default"]


def test_clean_calls_are_clean() -> None:
    model = hosts.small_llama()
    found = look(model.generate, **inputs(), max_new_tokens=2, do_sample=False)
    assert (found.burned, found.origin, found.fire, found.second_run) == (False, None, None, None)
    assert found.result.shape == (2, 9)
    assert str(found).startswith("Not burned: every signal and the result are clean")
    functional = look(lambda x: x * 2, torch.ones(3))
    assert not functional.burned
    assert functional.second_run is not None
    assert functional.second_run.num_checked == 1


def test_legal_neg_inf_in_the_result_is_no_fire() -> None:
    class Bans(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.arange(3) == 1, -INF)

    found = look(Bans(), torch.ones(2, 3))
    assert not found.burned
    assert found.second_run is not None


def test_a_clean_second_run_is_a_finding(tmp_path: Path) -> None:
    flag = tmp_path / "burn once"

    def once(x: Tensor) -> Tensor:
        if flag.exists():
            return x
        flag.touch()
        return x / 0 * 0

    found = look(once, torch.ones(3))
    assert found.burned
    assert found.origin is None
    assert found.culprit == CLEAN_SECOND_RUN
    assert found.fire is not None
    assert found.fire.first.kind is Kind.NAN
    assert any(CLEAN_SECOND_RUN in note for note in found.fire.notes)
    assert "second run, from the same state and random streams, was clean" in str(found)


def test_a_clean_second_run_of_a_model_keeps_the_first_fire(tmp_path: Path) -> None:
    model, flag = hosts.small_llama(), tmp_path / "burn once"

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if flag.exists():
            return output
        flag.touch()
        return output * NAN

    model.model.layers[2].mlp.register_forward_hook(hook)
    found = look(model, **inputs())
    assert (found.burned, found.origin) == (True, None)
    assert found.fire is not None
    assert found.fire.origin.layer == 2
    assert found.fire.source == "investigate"


def test_an_unrelated_exception_is_reported_not_raised() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no such prompt")

    found = look(fails, torch.ones(2))
    assert (found.burned, found.error) == (False, "ValueError: no such prompt")
    assert "ValueError: no such prompt" in str(found)


def test_a_users_own_watch_that_raises_is_handled() -> None:
    model = bad_weight()
    with firetower.attach(model, on_fire="raise", store=False):
        found = look(model, **inputs())
    assert found.origin is not None
    assert found.origin.cause is Cause.WEIGHT
    assert found.error is not None
    assert found.error.startswith("NonFiniteError")


def test_no_hook_is_left_and_the_store_has_the_fire(tmp_path: Path) -> None:
    model, store = bad_weight(), tmp_path / "fires.sqlite"
    names = sorted(model.__dict__)
    found = firetower.investigate(model, **inputs(), firetower_store=store)
    assert sorted(model.__dict__) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert found.fire is not None
    with firetower.Store(store, readonly=True) as opened:
        kept = opened.get(found.fire.id)
    assert kept.origin.op == "aten.mm.default"
    assert kept.weights[0].num_nan == 1


def test_the_default_store_is_used(own_data_folder: Path) -> None:
    found = firetower.investigate(lambda x: x.log(), torch.zeros(2))
    assert found.fire is not None
    with firetower.Store(readonly=True) as opened:
        assert opened.get(found.fire.id).origin.op == "aten.log.default"
    assert str(own_data_folder) in str(opened.path)


def test_a_broken_store_is_a_note(tmp_path: Path) -> None:
    broken = tmp_path / "fires.sqlite"
    broken.write_bytes(b"not a database, long enough to be told from one" * 10)
    found = firetower.investigate(lambda x: x.log(), torch.zeros(2), firetower_store=broken)
    assert found.burned
    assert any("the fire was not stored" in note for note in found.notes)


def test_the_page_reads_top_down() -> None:
    text = str(look(bad_weight(), **inputs()))
    lines = text.splitlines()
    assert lines[0] == "Burned: NaN begins at aten.mm.default in model.layers.1.mlp.down_proj (layer 1 down)"
    labels = [line[2:12].strip() for line in lines[1:]]
    for earlier, later in zip(["line", "place", "culprit", "bad value", "input"], ["place", "culprit", "bad value", "input", "output"], strict=True):  # fmt: skip # noqa: E501
        assert labels.index(earlier) < labels.index(later)
    assert "row 3, column 7 of [128, 352] float32, bits 7fd6e000" in text
    assert text.rstrip().splitlines()[-1].strip().startswith("fire")


@pytest.mark.parametrize("ctx", [torch.no_grad, torch.inference_mode], ids=lambda c: c.__name__)
def test_ambient_modes_hold_in_both_runs(ctx: Any) -> None:
    with ctx(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = look(bad_weight(), **inputs())
    assert found.origin is not None
    assert found.origin.cause is Cause.WEIGHT
    assert found.culprit.endswith("model.layers.1.mlp.down_proj.weight")


def test_not_callable_is_refused() -> None:
    with pytest.raises(firetower.FiretowerError, match="fn_or_model=int"):
        firetower.investigate(3)  # type: ignore[arg-type]


def test_an_inf_that_no_op_minds_is_named_where_a_signal_saw_it() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)
            self.value = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).sigmoid() * self.value(x)

    model = Gated()
    model.gate.register_forward_hook(lambda _m, _a, out: out.index_fill_(1, torch.tensor([2]), INF))
    found = look(model, torch.ones(3, 4))
    assert found.first_run.fires[0].origin.module == "gate"
    assert found.origin is not None
    assert (found.origin.op, found.origin.cause) == ("aten.index_fill_.int_Scalar", Cause.CONSTANT)
    assert found.origin.seen_at == "signal gate"
    assert found.origin.first.column == 2


def test_on_a_device_both_runs_end_before_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    # a device assertion would end the process's use of the device: the same path, forced on the CPU
    monkeypatch.setattr(investigate_runs, "must_stop_early", lambda _modules: True)
    model = overflowing_expert()
    found = look(model.generate, **inputs(), max_new_tokens=4, do_sample=True)
    assert found.origin is not None
    assert found.origin.op == "aten.mul.Tensor"
    assert (found.error, found.result, found.first_run.was_stopped) == (None, None, True)
    assert found.second_run is not None
    assert found.second_run.error is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.gpu
def test_sampling_on_cuda_leaves_the_device_usable() -> None:
    model = bad_weight().cuda()
    given = {n: t.cuda() for n, t in inputs().items()}
    found = look(model.generate, **given, max_new_tokens=4, do_sample=True)
    assert found.culprit == "the weight itself is non-finite: model.layers.1.mlp.down_proj.weight"
    assert torch.ones(3, device="cuda").sum().item() == 3
