"""config.json to `HybridConfig`, and what is refused of it."""

from __future__ import annotations

import json

import pytest

from firetower.core.errors import ConfigError
from firetower.models.config import FULL, LINEAR, read_config


@pytest.fixture
def content(saved):
    return json.loads((saved().folder / "config.json").read_text())


def test_the_sizes_of_the_file(saved):
    config = read_config(saved("qwen3_next").folder)
    host = saved("qwen3_next").host.config
    assert config.family == "qwen3_next"
    assert config.layer_types == tuple(host.layer_types)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.num_experts, config.top_k) == (host.num_experts, host.num_experts_per_tok)
    assert config.conv_dim == 2 * config.key_dim + config.value_dim == 256
    assert config.eos_token_ids == (2,)
    assert config.linear_layers == (0, 1, 2)
    assert config.full_layers == (3,)


def test_a_file_a_folder_and_its_content_read_the_same(saved, content):
    folder = saved().folder
    assert (
        read_config(folder) == read_config(folder / "config.json") == read_config(str(folder)) == read_config(content)
    )


def test_a_model_that_also_sees(content):
    wrapped = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {**content, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        "vision_config": {"depth": 27},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    }
    del wrapped["text_config"]["tie_word_embeddings"]
    config = read_config(wrapped)
    assert config.tie_word_embeddings
    assert config.hidden_size == content["hidden_size"]


def test_keys_of_older_files(content):
    """Qwen3-Next as published: an interval, and the parameters of RoPE beside each other."""
    old = {k: v for k, v in content.items() if k not in ("layer_types", "rope_parameters", "dtype")}
    old |= {
        "model_type": "qwen3_next", "full_attention_interval": 2, "rope_theta": 10000000, "partial_rotary_factor": 0.5,
        "rope_scaling": None, "torch_dtype": "bfloat16", "norm_topk_prob": True, "eos_token_id": [3, 4],
        "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip
    config = read_config(old)
    assert config.layer_types == (LINEAR, FULL, LINEAR, FULL)
    assert dict(config.rope_parameters) == {"rope_theta": 10000000, "partial_rotary_factor": 0.5}
    assert config.eos_token_ids == (3, 4)


BAD = {
    "unknown key": ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "bias": ({"attention_bias": True}, "attention_bias=True"),
    "dense layers": ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    "no output gate": ({"attn_output_gate": False}, "attn_output_gate=False"),
    "state type": ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config="),
    "scaled positions, old form": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling="),
    "other family": ({"model_type": "llama"}, "model_type='llama'"),
    "division left out": ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    "zero size": ({"hidden_size": 0}, "hidden_size=0"),
    "size of another kind": ({"num_experts": "8"}, "num_experts='8'"),
    "missing size": ({"head_dim": None}, "head_dim=None"),
    "kinds of layer": ({"layer_types": ["linear_attention", "sliding"] * 2}, "layer_types="),
    "number of layers": ({"layer_types": ["linear_attention"]}, "layer_types="),
    "heads": ({"num_attention_heads": 3}, "num_heads=3"),
    "value heads": ({"linear_num_value_heads": 3}, "num_v_heads=3"),
    "experts a token": ({"num_experts_per_tok": 99}, "top_k=99"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
    "no theta": ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    "end token": ({"eos_token_id": "x"}, "eos_token_id='x'"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(content, change, message):
    with pytest.raises(ConfigError, match=message):
        read_config({**content, **change})


def test_an_unknown_key_beside_the_text_part(content):
    with pytest.raises(ConfigError, match="audio_config="):
        read_config({"model_type": "qwen3_5_moe", "text_config": content, "audio_config": {}})
    with pytest.raises(ConfigError, match="text_config=3"):
        read_config({"model_type": "qwen3_5_moe", "text_config": 3})


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="must be a JSON object, is list"):
        read_config(file)
