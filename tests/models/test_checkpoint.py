"""Reading safetensors: shards, both layouts of experts, prefixes; and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from firetower.core.errors import ConfigError
from firetower.models.checkpoint import read_weights
from firetower.models.config import read_config
from firetower.models.weights import content_hashes

INDEX = "model.safetensors.index.json"


def load(folder, **options):
    return read_weights(folder, read_config(folder), **options)


def rewritten(saved_model, folder, change):
    """A copy of a model's folder in which ``change`` edited the tensors, by their names."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(saved_model.folder / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    shutil.copy(saved_model.folder / "config.json", folder)
    return folder


def same(a, b):
    return content_hashes(a) == content_hashes(b)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_shards_hold_the_same_model(saved, saver, tmp_path, family):
    sharded = saver(family, tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert same(load(sharded.folder), load(saved(family).folder))


def test_progress_ends_at_the_whole(saved):
    seen = []
    weights = load(saved().folder, progress=seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert seen[-1].total_bytes == weights.num_bytes
    assert seen[0].tensor == "model.embed_tokens.weight"


def test_fused_experts_and_the_prefix_of_a_model_that_also_sees(saved, tmp_path):
    def change(tensors):
        for name in list(tensors):
            if ".experts." not in name:
                continue
            before, after = name.split(".experts.")
            if not after.startswith("0.gate"):
                continue
            parts = [
                [tensors.pop(f"{before}.experts.{e}.{part}.weight") for e in range(8)]
                for part in ("gate_proj", "up_proj", "down_proj")
            ]
            gate, up, down = (torch.stack(p) for p in parts)
            tensors[f"{before}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
            tensors[f"{before}.experts.down_proj"] = down
        for name in list(tensors):
            if name.startswith("model."):
                tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.visual.blocks.0.weight"] = torch.ones(3)
        tensors["mtp.layers.0.weight"] = torch.ones(3)

    assert same(load(rewritten(saved(), tmp_path / "m", change)), load(saved().folder))


def test_types(saved, tmp_path):
    def to_bf16(tensors):
        tensors.update({name: x.bfloat16() for name, x in tensors.items()})

    folder = rewritten(saved(), tmp_path / "m", to_bf16)
    stored = load(folder)
    assert stored.dtype is torch.bfloat16
    assert stored.norm.dtype is torch.float32
    mixer = stored.layers[0].mixer
    assert {mixer.decay_rate.dtype, mixer.dt_bias.dtype, mixer.norm.dtype} == {torch.float32}
    assert mixer.conv.stride() == (1, mixer.conv.shape[0])
    wide = load(folder, dtype=torch.float32)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.embedding, stored.embedding.float())
    with pytest.raises(ConfigError, match=r"dtype=torch\.float64"):
        load(folder, dtype=torch.float64)


def poison(name, index, value):
    def change(tensors):
        full = next(k for k in tensors if k.endswith(name))
        tensors[full][index] = value

    return change


def drop(name):
    def change(tensors):
        del tensors[next(k for k in tensors if k.endswith(name))]

    return change


def replace(name, make):
    def change(tensors):
        full = next(k for k in tensors if k.endswith(name))
        tensors[full] = make(tensors[full])

    return change


def add(name):
    def change(tensors):
        tensors[name] = torch.zeros(4)

    return change


WRONG = {
    "NaN": (
        poison("layers.1.mlp.experts.3.up_proj.weight", (5, 7), float("nan")),
        r"layers\.1\.mlp\.experts\.3\.up_proj\.weight: is nan at row 5, column 7, bits 7fc00000",
    ),
    "-Inf in a vector": (
        poison("layers.0.linear_attn.dt_bias", (2,), float("-inf")),
        r"dt_bias: is -inf at row 0, column 2, bits ff800000",
    ),
    "NaN in a fused projection": (
        poison("layers.0.linear_attn.in_proj_qkv.weight", (200, 63), float("nan")),
        "row 200, column 63",
    ),
    "decay that overflows": (
        poison("layers.2.linear_attn.A_log", (1,), 200.0),
        r"A_log: its exponential is -inf at row 0, column 1",
    ),
    "missing": (drop("layers.3.self_attn.k_norm.weight"), r"tensor=layers\.3\.self_attn\.k_norm\.weight: is missing"),
    "missing expert": (drop("layers.2.mlp.experts.7.down_proj.weight"), r"experts\.7\.down_proj\.weight: is missing"),
    "shape": (
        replace("layers.3.self_attn.o_proj.weight", lambda x: x.T.contiguous()),
        r"o_proj\.weight: has the shape \[128, 64\]: must be \[64, 128\]",
    ),
    "integer type": (replace("norm.weight", lambda x: x.to(torch.int32)), r"is stored as I32: must be one of F32"),
    "8-bit type": (
        replace("layers.0.mlp.gate.weight", lambda x: x.to(torch.float8_e4m3fn)),
        r"mlp\.gate\.weight: is stored as F8_E4M3",
    ),
    "unknown": (add("model.layers.3.self_attn.q_proj.bias"), r"q_proj\.bias: and 0 more are not known"),
    "another layer": (add("model.layers.9.input_layernorm.weight"), r"layers\.9\.input_layernorm\.weight: and 0 more"),
    "twice": (add("language_model.model.layers.3.self_attn.q_norm.weight"), "is there twice"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_tensor_is_named(saved, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        load(rewritten(saved(), tmp_path / "m", change))


def test_a_number_that_the_type_cannot_hold(saved, tmp_path):
    folder = rewritten(saved(), tmp_path / "m", poison("layers.3.self_attn.v_proj.weight", (1, 2), 70000.0))
    with pytest.raises(ConfigError, match=r"v_proj\.weight: is inf at row 1, column 2, bits 7c00 as torch\.float16"):
        load(folder, dtype=torch.float16)
    assert load(folder, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_sums_that_overflow_are_no_fault(saved, tmp_path):
    def change(tensors):
        name = next(k for k in tensors if k.endswith("layers.3.self_attn.o_proj.weight"))
        tensors[name][:] = 3e38

    load(rewritten(saved(), tmp_path / "m", change))


@pytest.fixture
def sharded(saver, tmp_path):
    return saver("qwen3_5_moe", tmp_path, shard_bytes=100_000).folder


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name}: is missing; model\.\S+ and \d+ more tensors are in it"):
        load(sharded)


def test_a_shard_that_is_cut_off(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"{shard.name}: cannot be read"):
        load(sharded)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_does_not_fit(sharded):
    name = "model.layers.0.input_layernorm.weight"
    right = json.loads((sharded / INDEX).read_text())["weight_map"][name]
    wrong = next(s.name for s in sorted(sharded.glob("*.safetensors")) if s.name != right)
    edit_index(sharded, lambda index: index["weight_map"].update({name: wrong}))
    with pytest.raises(ConfigError, match=rf"{name}: the index says it is in {wrong}"):
        load(sharded)
    edit_index(sharded, lambda index: index["weight_map"].update({name: "../other.safetensors"}))
    with pytest.raises(ConfigError, match="must be a file in the same folder"):
        load(sharded)
    edit_index(sharded, lambda index: index.pop("weight_map"))
    with pytest.raises(ConfigError, match="has no weight_map"):
        load(sharded)


def test_a_folder_without_weights(saved, tmp_path):
    shutil.copy(saved().folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors: is missing; copy the whole"):
        load(tmp_path)
