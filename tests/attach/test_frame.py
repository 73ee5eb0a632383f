"""What a call says of its rows, however it is made; and that nothing of it stays alive after the step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.core.records import Phase
from firetower.drills import hosts


class Scaled(nn.Module):
    """One linear layer over [B, T, F] that may be told which rows are real."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.a(x)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(0))


def test_arguments_by_position_are_read_like_named_ones() -> None:
    model: Any = hosts.small_llama()
    ids = ids_of(2, 4)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with firetower.attach(model, store=False) as watch:
        model(ids, mask)
        frame = watch._last.frame
    assert frame.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert frame.pad.tolist() == [[True, True, False, False], [False] * 4]


def test_a_mask_that_is_added_to_scores_tells_no_pads() -> None:
    """Its zeros stand for what may be seen: taken for pads they would hide every bad value."""
    model = Scaled()
    model.a.weight.data[1, 0] = float("nan")
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -1e9)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(torch.randn(3, 3, 4), attention_mask=mask)
    assert watch.fires[0].first.is_pad is False
    assert (watch.fires[0].first.sequence, watch.fires[0].first.token) == (0, 0)


def test_encoder_pads_do_not_hide_the_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model: Any = T5ForConditionalGeneration(config).eval()
    ids = ids_of(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    model.decoder.block[0].layer[2].DenseReluDense.wi.weight.data[1, 1] = float("nan")
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :3])
    first = watch.fires[0].first
    assert (first.sequence, first.token, first.position) == (0, 0, 0)
    model.encoder.block[0].layer[1].DenseReluDense.wi.weight.data[1, 1] = float("nan")
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :3])
    first = watch.fires[0].first
    assert watch.fires[0].origin.module.startswith("encoder")
    # tokens 0 and 1 of the first sequence are pads of the encoder
    assert (first.sequence, first.token, first.position) == (0, 2, 0)


def test_an_image_has_no_phase_and_no_position() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 5)).eval()
    model[1].running_var[1] = float("nan")
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(torch.randn(2, 3, 8, 8))
    fire = watch.fires[0]
    assert (fire.origin.module, fire.phase, fire.first.sequence, fire.first.position) == ("1", Phase.UNKNOWN, 0, None)
    assert "1.running_var" in fire.notes[0]


@pytest.mark.parametrize("level", ["logits", "layers"])
def test_no_tensor_of_a_step_outlives_it(level: Any) -> None:
    model: Any = hosts.small_llama()
    with firetower.attach(model, store=False, on_fire="record", level=level) as watch, torch.no_grad():
        cache = model(inputs_embeds=torch.randn(1, 3, 128), use_cache=True).cache
        embeds = torch.randn(1, 1, 128)
        out = model(inputs_embeds=embeds, cache=cache)
        references = [weakref.ref(x) for x in (cache, cache.layers[0].keys, embeds, out.logits)]
        del cache, embeds, out
        gc.collect()
        assert [r() for r in references] == [None] * 4
        assert watch.last.phase is Phase.DECODE


def test_no_tensor_of_a_stray_step_stays() -> None:
    model: Any = hosts.small_llama()
    with firetower.attach(model, store=False), torch.no_grad():
        x = torch.randn(1, 3, 128)
        places = model.model.rotary_emb(x, torch.arange(3)[None])
        out = weakref.ref(model.model.layers[0](x, position_embeddings=places))
        gc.collect()
        assert out() is None


def test_a_permanent_fire_stays_one_fire_of_few_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    model.a.weight.data[0, 0] = float("nan")
    written: list[int] = []
    with firetower.attach(model, on_fire="record") as watch, torch.no_grad():
        bump = watch._log.store.bump
        monkeypatch.setattr(watch._log.store, "bump", lambda i, by: (written.append(by), bump(i, by)))
        for _ in range(1000):
            model(torch.randn(1, 2, 4))
        assert [f.count for f in watch.fires] == [1000]
        assert len(written) < 12
        assert watch.status()["failures"] == 0
    with firetower.Store() as store:
        assert store.get(watch.fires[0].id).count == 1000
