"""Safetensors files, single and sharded."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from firetower.core.formats import FORMATS, classify
from firetower.core.records import Kind
from firetower.scan import Problem, Severity, scan


def write(path, tensors, header_edit=None, tail=b""):
    """Write a file by hand: tensors is name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if header_edit:
        header_edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + tail)
    return path


@pytest.fixture
def model(tmp_path, weights):
    path = tmp_path / "model.safetensors"
    save_file(
        {"layers.0.down_proj.weight": weights(16, 32), "layers.1.down_proj.weight": weights(16, 32)}, path
    )
    return path


def found(path):
    return [(f.problem, f.tensor) for f in scan(path).bad]


def test_clean_file_is_silent(model):
    (report,) = scan(model).files
    assert (report.format, report.num_tensors, report.num_checked, report.findings) == (
        "safetensors",
        2,
        2,
        (),
    )


def test_nan_run_is_one_finding_with_its_columns(tmp_path, weights):
    values = weights(16, 32)
    values[7, 4:9] = np.nan
    values[8, 0] = -np.inf
    path = tmp_path / "m.safetensors"
    save_file({"down_proj.weight": values}, path)
    run, single = scan(path).findings
    data_start = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert (run.row, run.column_start, run.column_stop, run.count) == (7, 4, 9, 5)
    assert run.offset_bytes == data_start + 4 * (7 * 32 + 4)
    assert (single.row, single.column_start, single.kind) == (8, 0, Kind.NEG_INF)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("F8_E8M0", "float8_e8m0fnu"),
    ],
)
def test_every_pattern_of_the_8_bit_types(dtype, name, tmp_path):
    path = write(tmp_path / "m.safetensors", {"w": (dtype, [256, 1], bytes(range(256)))})
    bad = {int(f.bits, 16): f.kind for f in scan(path).bad if f.problem is Problem.NONFINITE}
    assert sum(f.count for f in scan(path).bad if f.problem is Problem.NONFINITE) == len(
        [b for b in range(256) if classify(b, name)]
    )
    assert bad == {b: classify(b, name) for b in range(256) if classify(b, name)}


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_pattern_of_the_16_bit_types(dtype, tmp_path):
    name = {"F16": "float16", "BF16": "bfloat16"}[dtype]
    raw = np.arange(65536, dtype="<u2").tobytes()
    path = write(tmp_path / "m.safetensors", {"w": (dtype, [65536, 1], raw)})
    listed = [f for f in scan(path).bad if f.problem is Problem.NONFINITE]
    total = sum(f.count for f in listed) + sum(f.num_more for f in listed)
    assert total == sum(classify(b, name) is not None for b in range(65536))
    assert listed[0].row == FORMATS[name].infinity


def test_complex_parts_are_both_read(tmp_path):
    raw = np.ones(16, dtype="<f4")
    raw[5] = np.nan
    path = write(tmp_path / "m.safetensors", {"w": ("C64", [2, 4], raw.tobytes())})
    (finding,) = scan(path).bad
    assert (finding.row, finding.column_start, finding.dtype) == (0, 2, "float32")


@pytest.mark.parametrize(
    ("name", "dtype", "raw"),
    [
        ("a.weight_scale_inv", "F32", struct.pack("<4f", 0.1, 0.2, float("nan"), 0.1)),
        ("a.weight_scale", "F8_E4M3", bytes([0x38, 0x38, 0x7F, 0x38])),
        ("a.scales", "F16", np.array([1, 1, np.nan, 1], dtype="<f2").tobytes()),
    ],
)
def test_nan_of_a_scale_tensor_is_called_scale(name, dtype, raw, tmp_path):
    path = write(tmp_path / "m.safetensors", {name: (dtype, [2, 2], raw)})
    (finding,) = scan(path).bad
    assert (finding.field, finding.row, finding.column_start) == ("scale", 1, 0)


def test_uint8_scales_beside_mxfp4_blocks_are_e8m0(tmp_path):
    tensors = {
        "experts.down_proj_blocks": ("U8", [2, 4, 16], b"\x11" * 128),
        "experts.down_proj_scales": ("U8", [2, 4], b"\x78" * 6 + b"\xff\x78"),
        "lonely_scales": ("U8", [2], b"\xff\xff"),
    }
    (finding,) = scan(write(tmp_path / "m.safetensors", tensors)).bad
    assert finding.tensor == "experts.down_proj_scales"
    assert (finding.expert, finding.column_start, finding.bits) == (1, 2, "ff")


def test_zero_scale_is_bad_though_it_is_one_number(tmp_path):
    path = write(tmp_path / "m.safetensors", {"a.weight_scale": ("F32", [], b"\0" * 4)})
    assert found(path) == [(Problem.ALL_ZERO, "a.weight_scale")]


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.3.mlp.experts.17.down_proj.weight", 17),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
    ],
)
def test_expert_of_a_name(name, expert, tmp_path, weights):
    values = weights(4, 32)
    values[2, 1] = np.nan
    save_file({name: values}, tmp_path / "m.safetensors")
    (finding,) = scan(tmp_path / "m.safetensors").bad
    assert (finding.expert, finding.row) == (expert, 2)


def test_expert_of_a_fused_parameter(tmp_path, weights):
    values = weights(4, 8, 32)
    values[3, 2, 1] = np.nan
    save_file({"model.layers.3.mlp.experts.gate_up_proj": values}, tmp_path / "m.safetensors")
    (finding,) = scan(tmp_path / "m.safetensors").bad
    assert (finding.expert, finding.row, finding.column_start) == (3, 2, 1)


RAW = np.full(8, 0.5, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("edit", "problem", "words"),
    [
        (lambda h: h["b"].update(data_offsets=[16, 48]), Problem.OVERLAP, "before a ends"),
        (lambda h: h["b"].update(shape=[3, 2]), Problem.HEADER, "takes 24 bytes"),
        (lambda h: h["b"].update(shape=[-2, -4]), Problem.HEADER, "whole numbers"),
        (lambda h: h["b"].update(shape=[1 << 40, 1 << 40]), Problem.HEADER, "more elements"),
        (lambda h: h["b"].update(dtype="F33"), Problem.HEADER, "unknown"),
        (lambda h: h["b"].update(data_offsets=[64, 32]), Problem.HEADER, "start, stop"),
        (lambda h: h["b"].update(data_offsets=[96, 128]), Problem.TRUNCATED, "1 tensors incomplete"),
        (lambda h: h["b"].pop("shape"), Problem.HEADER, "exactly dtype"),
        (lambda h: h.update(__metadata__={"a": 1}), Problem.HEADER, "strings"),
        (lambda h: h.pop("b"), Problem.OVERLONG, "32 bytes after"),
    ],
    ids=[
        "overlap",
        "size",
        "negative",
        "huge",
        "dtype",
        "backwards",
        "past-end",
        "no-shape",
        "metadata",
        "over-long",
    ],
)
def test_header_that_cannot_be_true(edit, problem, words, tmp_path):
    path = write(tmp_path / "m.safetensors", {"a": ("F32", [2, 4], RAW), "b": ("F32", [2, 4], RAW)}, edit)
    assert any(f.problem is problem and words in f.message for f in scan(path).bad)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[" * 5000, "nested too deeply"),
        (b"[" * 2_000_000, "more values"),
        (b'{"a": 1,}', "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": NaN}', "exactly dtype"),
        (b"\xff\xfe{}", "not JSON"),
    ],
    ids=["deep", "deeper", "json", "list", "nan", "utf8"],
)
def test_header_that_cannot_be_parsed(header, words, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert any(words in f.message for f in scan(path).bad)


def test_header_length_beyond_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    (finding,) = scan(path).bad
    assert "cannot be true" in finding.message


def test_thousands_of_tensors_over_the_same_bytes_are_not_all_read(tmp_path):
    raw = np.full(1 << 22, 0.5, dtype="<f4").tobytes()
    entry = {"dtype": "F32", "shape": [1 << 22], "data_offsets": [0, len(raw)]}
    text = json.dumps({f"w{i}": entry for i in range(5000)}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)
    read = []
    report = scan(path, lambda _, done, total: read.append((done, total)))
    assert len(read) < 100
    assert any("over twice the file" in f.message for f in report.bad)
    assert report.files[0].num_more_findings > 3000
    assert report.files[0].num_checked == 2


def test_duplicate_name(tmp_path):
    entry = '{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + RAW)
    assert found(path) == [(Problem.DUPLICATE, "a")]


@pytest.fixture
def sharded(tmp_path, weights):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for i, name in enumerate(names):
        save_file({f"layers.{i}.weight": weights(4, 32)}, tmp_path / name)
    weight_map = {f"layers.{i}.weight": name for i, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1024}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def edit_index(folder, **changes):
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"].update(changes)
    index.write_text(json.dumps(table))


def test_sharded_folder_is_silent(sharded):
    report = scan(sharded)
    assert report.is_clean
    assert [f.format for f in report.files] == ["safetensors", "safetensors", "index"]


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    (finding,) = scan(sharded).bad
    assert (finding.problem, "model-00002" in finding.message) == (Problem.TRUNCATED, True)


def test_index_that_places_a_tensor_where_it_is_not(sharded):
    edit_index(sharded, **{"layers.9.weight": "model-00001-of-00002.safetensors"})
    assert found(sharded) == [(Problem.HEADER, "layers.9.weight")]


def test_tensor_in_two_shards_and_tensor_not_in_the_index(sharded, weights):
    tensors = {"layers.0.weight": weights(4, 32), "layers.1.weight": weights(4, 32), "extra": weights(4, 32)}
    save_file(tensors, sharded / "model-00002-of-00002.safetensors")
    assert [(f.problem, f.tensor, f.severity) for f in scan(sharded).findings] == [
        (Problem.HEADER, "extra", Severity.NOTE),
        (Problem.DUPLICATE, "layers.0.weight", Severity.BAD),
    ]


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", "x\0y"]
)
def test_index_never_leads_outside_the_folder(name, sharded):
    (sharded.parent / "secret.safetensors").write_bytes(b"not a model")
    edit_index(sharded, secret=name)
    (finding,) = scan(sharded).bad
    assert (finding.problem, "points outside" in finding.message) == (Problem.HEADER, True)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{", "[" * 9000])
def test_broken_index(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    (finding,) = scan(sharded).bad
    assert finding.problem is Problem.HEADER
