"""Foreign families stay silent, keep their tokens and say what did not run; planted faults are found in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.core.records import Phase

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_head": 4, "n_layer": 3}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"query_pre_attn_scalar": 8, **SLIDING}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", EXPERTS | SLIDING),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {"mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS},
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 8}),
}
LEAVES = ("opt", "mamba")


def build(name: str) -> Any:
    import transformers

    model_class, config_class, extra = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**SMALL | extra)).eval()
    model.generation_config.eos_token_id = None
    return model


def ragged() -> tuple[Tensor, dict[str, Any]]:
    ids = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :2] = 0, 0
    return ids, {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_prompts_are_silent_and_covered(name: str, mode: str) -> None:
    model = build(name)
    ids, options = ragged()
    bare = model.generate(ids, **options, **MODES[mode])
    with firetower.attach(model, store=False, on_fire="isolate") as watch:
        assert torch.equal(model.generate(ids, **options, **MODES[mode]), bare)
        assert watch.fires == []
        assert watch.status()["last_failure"] is None
        # a state space model without attention counts no tokens in its cache
        if name != "mamba":
            assert watch.last.phase is Phase.DECODE
            assert watch.coverage()[0] == watch.coverage()[1]
        if name != "mamba" and mode != "beams":
            assert watch._last.frame.positions[:, -1].tolist() == [7, 10, 12]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in LEAVES])
def test_a_value_written_in_a_layer_is_placed(name: str) -> None:
    model = build(name)
    path, layers = next((p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    layer = layers[1]
    original = layer.forward

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        x = out if isinstance(out, Tensor) else out[0]
        if x.shape[1] == 1:
            x[2, 0, 7] = float("inf")
        return out

    layer.forward = poisoned
    ids, options = ragged()
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model.generate(ids, **options)
    fire = watch.fires[0]
    assert (fire.origin.stage, fire.origin.layer, fire.origin.module) == ("output", 1, f"{path}.1")
    assert (fire.first.sequence, fire.first.column, fire.first.position) == (2, 7, 9)
    assert [f.count for f in watch.fires] == [4]


def test_mlp_with_other_names_has_its_output_watched() -> None:
    model = build("gpt2")
    model.transformer.h[1].mlp.c_proj.weight.data[3, 5] = float("nan")
    ids, options = ragged()
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model.generate(ids, **options)
    assert (watch.fires[0].origin.stage, watch.fires[0].origin.layer) == ("down", 1)
    assert "mlp.c_proj.weight" in watch.fires[0].notes[0]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_keys_in_a_window_shorter_than_the_prompt(static: bool) -> None:
    """The window keeps the prompt's last tokens: their numbers count from the end, and no pad hides them."""
    model = build("mistral")
    model.model.layers[1].self_attn.v_proj.bias = nn.Parameter(torch.zeros(16))
    ids, options = ragged()
    mask = options["attention_mask"]
    original = model.model.layers[1].self_attn.v_proj.forward

    def poisoned(x: Tensor) -> Tensor:
        out = original(x).clone()
        if x.shape[1] == 9:
            out[0, 8, 3] = float("nan")
        return out

    model.model.layers[1].self_attn.v_proj.forward = poisoned
    options["max_new_tokens"] = 1
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model.generate(ids, **options, **(MODES["static"] if static else {}))
    fire = watch.fires[0]
    assert mask[0, 2] == 0
    assert (fire.origin.stage, fire.first.sequence, fire.first.token, fire.first.position) == ("kv", 0, 8, 3)


def test_a_mixer_beside_attention_is_watched_with_its_states() -> None:
    model = build("falcon_h1")
    model.model.layers[1].mamba.A_log.data[1] = float("nan")
    ids, options = ragged()
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model.generate(ids, **options)
    fire = watch.fires[0]
    assert (fire.origin.stage, fire.origin.module) == ("recurrent_state", "model.layers.1.mamba")
    assert "mamba.A_log" in fire.notes[0]


def test_an_encoder_has_no_cache_to_miss() -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    with firetower.attach(model, store=False) as watch:
        model(torch.randn(2, 3, 16, 16))
        assert watch.last.not_covered == ()


def test_every_tower_of_a_model_without_a_head_is_watched() -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text, vision = sizes | {"vocab_size": 96, "eos_token_id": 2}, sizes | {"image_size": 16, "patch_size": 8}
    model: Any = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
    for tower in (model.text_model, model.vision_model):
        weight = tower.encoder.layers[1].mlp.fc1.weight
        kept = weight.data[3, 0].clone()
        weight.data[3, 0] = float("nan")
        with firetower.attach(model, store=False, on_fire="record") as watch:
            model(input_ids=torch.ones(2, 5, dtype=torch.long), pixel_values=torch.randn(2, 3, 16, 16))
        assert watch.fires[0].origin.module.endswith("encoder.layers.1.mlp.fc1")
        weight.data[3, 0] = kept


def test_a_layer_used_twice_is_watched_once() -> None:
    model = build("mistral")
    model.model.layers[2] = model.model.layers[1]
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True)
        assert watch.last.is_clean
        assert {s.signal.layer for s in watch.last.signals} == {0, 1, None}


class Heads(nn.Module):
    """Burns after its last leaf, in code that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) - 1e9).log()


def test_the_output_of_a_model_of_unknown_shape_is_watched() -> None:
    with firetower.attach(Heads(), store=False, on_fire="record") as watch:
        watch.model(torch.randn(2, 4))
    assert (watch.fires[0].origin.module, watch.fires[0].origin.stage) == ("", "Heads")


def test_fused_attention_is_covered_on_its_fast_path() -> None:
    """Nested tensors go through the encoder there; they are read padded with zeros, rows as they were."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    pads = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        with pytest.warns(UserWarning, match="nested tensors"):
            model(torch.randn(2, 5, 8), src_key_padding_mask=pads)
        assert watch.coverage() == (17, 17)
        assert (watch.fires, watch.status()["failures"]) == ([], 0)
        # a value's weight: a query's would be answered with zeros
        model.layers[1].self_attn.in_proj_weight.data[16, 0] = float("nan")
        model(torch.randn(2, 5, 8), src_key_padding_mask=pads)
    fire = watch.fires[0]
    assert fire.origin.module == "layers.1.self_attn"
    assert "in_proj_weight" in fire.notes[0]


def test_a_recurrent_net_has_its_states_watched() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.LSTM(4, 6, num_layers=2, batch_first=True))
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(torch.ones(3, 5, dtype=torch.long))
        assert watch.coverage() == (3, 3)
        model[1].bias_ih_l1.data[0] = float("nan")
        model(torch.ones(3, 5, dtype=torch.long))
    assert (watch.fires[0].origin.module, watch.fires[0].first.token) == ("1", 0)


class Passes(nn.Module):
    """A leaf that hands on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_conjugated_and_sparse_tensors_are_read() -> None:
    x = torch.randn(2, 3, 2)
    with firetower.attach(Passes(), store=False, on_fire="record") as watch:
        watch.model(torch.view_as_complex(x).conj())
        watch.model(torch.eye(3).to_sparse())
        assert (watch.fires, watch.status()["failures"]) == ([], 0)
        x[1, 1, 1] = float("nan")
        watch.model(torch.view_as_complex(x).conj())
        assert (watch.fires[0].first.sequence, watch.fires[0].first.column) == (1, 1)


def test_what_cannot_be_checked_is_not_covered() -> None:
    with firetower.attach(nn.Linear(3, 3).to("meta"), store=False) as watch:
        watch.model(torch.randn(2, 3, device="meta"))
        assert watch.coverage() == (0, 1)
        assert "meta" in str(watch.last.not_covered[0].reason)
    with firetower.attach(nn.Linear(3, 3), store=False) as watch:
        # nothing can be read from inside a vectorised call
        torch.func.vmap(watch.model)(torch.randn(4, 3))
        assert watch.coverage() == (0, 1)
        assert "check failed" in str(watch.last.not_covered[0].reason)
        watch.model(torch.randn(4, 3))
        assert watch.coverage() == (1, 1)
