"""Level ``ops``: the op and its line, weights told from activations, tokens unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.core.errors import NonFiniteError
from firetower.core.records import Kind
from firetower.drills import hosts


def prompt(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(5, 90, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(model: Any, ids: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
                          eos_token_id=None, pad_token_id=0)  # fmt: skip


@pytest.mark.parametrize("host", ["small_llama", "small_qwen35_moe", "small_qwen3_next", "small_qwen4_exp"])
def test_clean_generation_is_silent_and_unchanged(host: str) -> None:
    model = getattr(hosts, host)()
    ids = prompt()
    bare = generate(model, ids)
    with firetower.attach(model, level="ops", store=False) as watch:
        assert torch.equal(generate(model, ids), bare)
        ran, declared = watch.coverage()
        assert ran == declared > 100
        assert watch.status()["failures"] == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Overflow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        product = torch.nn.functional.silu(gate) * up
        return self.norm(product.float())


def test_origin_is_the_product_not_the_norm() -> None:
    gate, up = torch.full((2, 3, 8), 300.0).half(), torch.full((2, 3, 8), 10.0).half()
    up[1, 2, 5] = 260.0
    with firetower.attach(Overflow(), level="ops", store=False) as watch, pytest.raises(NonFiniteError) as caught:
        watch.model(gate, up)
    fire = caught.value.fire
    assert fire.origin.op == "aten.mul.Tensor"
    assert "in forward" in str(fire.origin.source)
    assert (fire.first.row, fire.first.column, fire.first.kind) == (5, 5, Kind.POS_INF)
    assert [t.num_nonfinite for t in fire.inputs] == [0, 0]


def test_weight_is_told_from_activation() -> None:
    model = hosts.small_qwen35_moe()
    model.model.layers[1].mlp.experts.down_proj.data[:, 3, 1] = float("nan")
    with firetower.attach(model, level="ops", store=False, on_fire="record") as watch, torch.no_grad():
        model(input_ids=prompt())
    fire = watch.fires[0]
    assert fire.origin.layer == 1
    assert any("experts.down_proj" in n for n in fire.notes)
    assert fire.weights[0].num_nan > 0


def test_isolate_at_op_level() -> None:
    model = hosts.small_llama()
    ids = prompt(3)
    bare = generate(model, ids)
    row = model.model.layers[1]
    original = row.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        if out.shape[1] == 1:
            out = out.clone()
            out[2, 0, 1] = float("nan")
        return out

    row.forward = forward
    with firetower.attach(model, level="ops", store=False, on_fire="isolate") as watch:
        out = generate(model, ids)
    assert torch.equal(out[:2], bare[:2])
    assert out[2, 7:].tolist() == [0, 0, 0]
    assert watch.fires[0].first.sequence == 2
