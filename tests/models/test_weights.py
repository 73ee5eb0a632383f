"""Random weights repeat; checksums see every flipped bit."""

from __future__ import annotations

import random

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.models.hybrid import HybridModel
from firetower.models.weights import assemble, content_hashes, empty_weights, random_weights, shapes_of


def test_a_seed_makes_the_same_model(tiny_config):
    one, two, other = (content_hashes(random_weights(tiny_config, torch.float32, seed=s)) for s in (1, 1, 2))
    assert one == two
    assert set(one) == set(shapes_of(tiny_config))
    differ = {name for name in one if one[name] != other[name]}
    assert {name for name in one if not name.endswith(("norm", "dt_bias"))} == differ


def test_a_random_model_runs_and_is_finite(tiny_config, driver, tokens):
    model = HybridModel(tiny_config, random_weights(tiny_config, torch.float32, seed=3))
    run = driver(model)
    assert run.prefill({0: tokens(100)}).isfinite().all()
    assert run.step([(0, tokens(8))])[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_models_run_on_the_cpu(tiny_config, driver, tokens, dtype):
    text = tokens(105)
    answers = []
    for kind in (torch.float32, dtype):
        wide = random_weights(tiny_config, dtype, seed=3)
        tensors = {name: x.to(kind) if x.dtype is dtype else x for name, x in wide.named_tensors()}
        run = driver(HybridModel(tiny_config, assemble(tiny_config, tensors)))
        answers.append(torch.cat([run.prefill({0: text[:100]}), run.step([(0, text[100:])])[0]]).float())
    share = (answers[1] - answers[0]).norm() / answers[0].norm()
    assert 0 < share < {torch.float16: 0.01, torch.bfloat16: 0.05}[dtype], share


def test_every_flipped_bit_changes_its_checksum(tiny_config):
    weights, draw = random_weights(tiny_config, torch.bfloat16, seed=3), random.Random(4)
    before = content_hashes(weights)
    for name, x in weights.named_tensors():
        for _ in range(3):
            raw = (x if x.is_contiguous() else x.t()).reshape(-1).view(torch.uint8)
            at, bit = draw.randrange(raw.numel()), 1 << draw.randrange(8)
            raw[at] ^= bit
            after = content_hashes(weights)
            assert {n for n in after if after[n] != before[n]} == {name}
            raw[at] ^= bit
    assert content_hashes(weights) == before


def test_two_values_that_change_places_change_the_checksum(tiny_config):
    weights = random_weights(tiny_config, torch.bfloat16, seed=3)
    before = content_hashes(weights)["embedding"]
    weights.embedding[[3, 4]] = weights.embedding[[4, 3]]
    assert content_hashes(weights)["embedding"] != before


def test_weights_that_do_not_fit(tiny_config, saved):
    tensors = empty_weights(tiny_config, torch.float32, "cpu")
    tensors["layers.2.moe.router"] = torch.zeros(3, 3)
    with pytest.raises(ConfigError, match=r"layers\.2\.moe\.router: \[3, 3\]: must be \[8, 64\]"):
        assemble(tiny_config, tensors)
    del tensors["layers.2.moe.router"]
    with pytest.raises(ConfigError, match=r"layers\.2\.moe\.router: missing"):
        assemble(tiny_config, tensors)
    other = saved("qwen3_5_moe", num_layers=2, layer_types=["full_attention"] * 2).load()
    with pytest.raises(ConfigError, match=r"layers\.0\.mixer: AttentionWeights"):
        HybridModel(tiny_config, other.weights)
    wide = saved("qwen3_5_moe", moe_intermediate_size=16).load()
    with pytest.raises(ConfigError, match=r"layers\.0\.moe\.gate_up_proj"):
        HybridModel(tiny_config, wide.weights)


def test_a_panel_that_is_too_small(saved, driver, tokens):
    run = driver(saved().load())
    with pytest.raises(ConfigError, match="panel: 7 words"):
        run.prefill({0: tokens(3)}, panel=torch.zeros(7, dtype=torch.int64))
