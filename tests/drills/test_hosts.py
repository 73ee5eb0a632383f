"""Host models: what they are made of, that seeds decide them, and that SmolLM2 is the file's own weights."""

from __future__ import annotations

import hashlib

import pytest
import torch

from firetower.core.errors import FiretowerError
from firetower.drills import hosts

SMALL = {
    "llama": hosts.small_llama,
    "qwen35_moe": hosts.small_qwen35_moe,
    "qwen3_next": hosts.small_qwen3_next,
    "qwen4_exp": hosts.small_qwen4_exp,
}
has_smollm2 = (hosts.cache_folder() / "models" / hosts.SMOLLM2_FILE).is_file()


@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_small_model_runs_finite_and_leaves_global_rng_alone(build):
    before = torch.random.get_rng_state()
    model = build()
    assert torch.equal(before, torch.random.get_rng_state())
    assert not model.training
    logits = model(torch.arange(3, 10)[None]).logits
    assert logits.shape == (1, 7, 512)
    assert logits.isfinite().all()
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 5e6


@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_seed_and_nothing_else_decides_the_weights(build):
    first, same, other = build(seed=3), build(seed=3), build(seed=4)
    state, same_state = first.state_dict(), same.state_dict()
    assert all(torch.equal(state[k], same_state[k]) for k in state)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_half_precision_is_the_cast_of_fp32():
    full, half = hosts.small_qwen35_moe(), hosts.small_qwen35_moe(torch.float16)
    assert torch.equal(full.lm_head.weight.half(), half.lm_head.weight)
    assert all(p.dtype is torch.float16 for p in half.parameters())


def test_hybrid_has_three_delta_nets_to_one_attention():
    kinds = [hasattr(layer, "linear_attn") for layer in hosts.small_qwen35_moe(num_layers=8).model.layers]
    assert kinds == [True, True, True, False] * 2


def test_generate_runs_to_the_length_asked_for():
    out = hosts.small_qwen35_moe().generate(torch.arange(3, 8)[None], max_new_tokens=12, do_sample=False)
    assert out.shape == (1, 17)


def test_missing_file_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRETOWER_CACHE", str(tmp_path))
    with pytest.raises(FiretowerError, match="make models"):
        hosts.smollm2_path()
    with pytest.raises(FiretowerError, match="no such file"):
        hosts.load_smollm2(tmp_path / "absent.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs `make models`")
def test_smollm2_weights_are_those_of_the_file():
    from gguf import GGUFReader, dequantize

    model, tokenizer = hosts.load_smollm2()
    tensors = {t.name: t for t in GGUFReader(hosts.smollm2_path()).tensors}
    # ffn and norm rows keep their order; Transformers permutes q and k for its own rotary layout
    for name, parameter in (
        ("blk.12.ffn_down.weight", model.model.layers[12].mlp.down_proj.weight),
        ("blk.0.attn_v.weight", model.model.layers[0].self_attn.v_proj.weight),
        ("blk.29.ffn_norm.weight", model.model.layers[29].post_attention_layernorm.weight),
        ("token_embd.weight", model.model.embed_tokens.weight),
    ):
        t = tensors[name]
        assert torch.equal(parameter, torch.from_numpy(dequantize(t.data, t.tensor_type).copy())), name
    assert tokenizer.decode(tokenizer("finite").input_ids) == "finite"


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs `make models`")
def test_a_planted_fault_never_reaches_the_kept_weights():
    model, _ = hosts.load_smollm2()
    folder = hosts.cache_folder() / "dequantised"
    file = next(folder.glob("*/model.safetensors"))
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    model.model.layers[3].mlp.up_proj.weight.data.fill_(float("nan"))
    assert hosts.load_smollm2()[0].model.layers[3].mlp.up_proj.weight.isfinite().all()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
