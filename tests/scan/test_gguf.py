"""GGUF files: what is named, and what a header may not claim."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from firetower.core.errors import ScanError
from firetower.core.records import Kind
from firetower.scan import Problem, Severity, scan
from firetower.scan.gguf import block_location, read_header
from firetower.scan.source import HeaderError, Source


@pytest.fixture
def model(write_gguf, weights):
    return write_gguf(
        {
            "blk.11.ffn_down.weight": weights(64, 96),
            "blk.12.ffn_down.weight": weights(64, 96),
            "blk.12.ffn_up.weight": weights(96, 64),
        },
        quant="Q4_1",
    )


def patched(path, offset, raw):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(raw)] = raw
    copy = path.with_name("patched.gguf")
    copy.write_bytes(data)
    return copy


def problems(path):
    return [(f.problem, f.tensor) for f in scan(path).bad]


def test_header_agrees_with_the_package(model):
    with Source(model) as source:
        header = read_header(source)
    reader = GGUFReader(model)
    assert [i.name for i in header.infos] == [t.name for t in reader.tensors]
    assert [header.data_start + i.offset for i in header.infos] == [t.data_offset for t in reader.tensors]
    assert [i.shape for i in header.infos] == [tuple(reversed(t.shape.tolist())) for t in reader.tensors]


def test_clean_model_is_silent(model):
    (report,) = scan(model).files
    assert (report.num_tensors, report.num_checked, report.findings) == (3, 3, ())


def test_nan_block_scale_is_named(model):
    offset, num_bytes = block_location(model, "blk.12.ffn_down.weight", 37, 2)
    assert num_bytes == 20
    (finding,) = scan(patched(model, offset, b"\x00\x7e")).findings
    assert finding.tensor == "blk.12.ffn_down.weight"
    assert (finding.row, finding.block) == (37, 2)
    assert (finding.column_start, finding.column_stop) == (64, 96)
    assert (finding.offset_bytes, finding.num_bytes) == (offset, 2)
    assert (finding.bits, finding.dtype, finding.field, finding.kind) == (
        "7e00",
        "float16",
        "scale",
        Kind.NAN,
    )


def test_inf_min_is_told_from_nan_scale(model):
    offset, _ = block_location(model, "blk.12.ffn_down.weight", 0, 0)
    (finding,) = scan(patched(model, offset + 2, b"\x00\xfc")).findings
    assert (finding.field, finding.kind, finding.bits) == ("min", Kind.NEG_INF, "fc00")
    assert finding.offset_bytes == offset + 2


@pytest.mark.parametrize("quant", ["Q8_0", "F16", "F32"])
def test_expert_of_a_stacked_tensor_is_named(quant, write_gguf, weights):
    path = write_gguf({"blk.3.ffn_down_exps.weight": weights(8, 16, 64)}, quant=quant)
    nan = struct.pack("<f", np.nan) if quant == "F32" else b"\x00\x7e"
    block = 1 if quant == "Q8_0" else 33
    offset, _ = block_location(path, "blk.3.ffn_down_exps.weight", 5 * 16 + 3, block)
    (finding,) = scan(patched(path, offset, nan)).findings
    assert (finding.expert, finding.row) == (5, 3)
    assert (finding.column_start, finding.offset_bytes) == (32 if quant == "Q8_0" else 33, offset)


def test_one_zero_expert_among_many(write_gguf, weights):
    experts = weights(8, 16, 64)
    experts[6] = 0
    (finding,) = scan(write_gguf({"blk.3.ffn_up_exps.weight": experts}, quant="Q8_0")).bad
    assert (finding.problem, finding.expert) == (Problem.ALL_ZERO, 6)


def test_many_bad_blocks_are_capped_and_counted(model):
    data = bytearray(model.read_bytes())
    for row in range(39):
        offset, _ = block_location(model, "blk.12.ffn_up.weight", row, 1)
        data[offset : offset + 2] = b"\xff\x7f"
    model.write_bytes(data)
    findings = scan(model).findings
    assert len(findings) == 8
    assert [f.num_more for f in findings] == [0] * 7 + [31]


def test_big_endian_file(tmp_path, weights):
    from gguf import GGUFEndian

    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    values = weights(4, 32)
    values[2, 5] = np.inf
    writer.add_tensor("a.weight", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (finding,) = scan(path).findings
    assert (finding.row, finding.column_start, finding.bits) == (2, 5, "7f800000")


def test_truncated_file_names_the_first_incomplete_tensor_and_scans_the_rest(model):
    offset, _ = block_location(model, "blk.11.ffn_down.weight", 1, 1)
    cut, _ = block_location(model, "blk.12.ffn_down.weight", 10, 0)
    damaged = patched(model, offset, b"\x00\x7e")
    damaged.write_bytes(damaged.read_bytes()[:cut])
    assert problems(damaged) == [
        (Problem.TRUNCATED, "blk.12.ffn_down.weight"),
        (Problem.NONFINITE, "blk.11.ffn_down.weight"),
    ]
    assert scan(damaged).files[0].num_checked == 1


def test_bytes_after_the_last_tensor(model):
    size = model.stat().st_size
    model.write_bytes(model.read_bytes() + b"x" * 100)
    (finding,) = scan(model).bad
    assert (finding.problem, finding.offset_bytes, finding.num_bytes) == (Problem.OVERLONG, size, 100)


def table_line(path, name):
    """Offsets in the file of a tensor's dimensions, type and data offset."""
    at = path.read_bytes().index(name.encode()) + len(name) + 4
    return at, at + 16, at + 20


def test_two_tensors_at_one_place_overlap(model):
    line = table_line(model, "blk.12.ffn_down.weight")
    found = problems(patched(model, line[2], struct.pack("<Q", 0)))
    assert (Problem.OVERLAP, "blk.12.ffn_down.weight") in found


def test_gap_before_a_tensor(model):
    line = table_line(model, "blk.12.ffn_up.weight")
    (offset,) = struct.unpack_from("<Q", model.read_bytes(), line[2])
    found = problems(patched(model, line[2], struct.pack("<Q", offset + 64)))
    assert (Problem.HEADER, "blk.12.ffn_up.weight") in found


@pytest.mark.parametrize(
    ("field", "raw", "words"),
    [
        (0, struct.pack("<Q", 97), "multiple of 32"),
        (0, struct.pack("<Q", 0), "at least 1"),
        (0, struct.pack("<Q", 1 << 62), "a real size"),
        (1, struct.pack("<I", 4), "unknown to the installed gguf"),
        (1, struct.pack("<I", 999), "unknown to the installed gguf"),
        (2, struct.pack("<Q", 7), "multiple of the alignment"),
    ],
    ids=["ragged-row", "zero-dim", "huge-dim", "removed-type", "no-type", "misaligned"],
)
def test_table_line_that_cannot_be_true(model, field, raw, words):
    line = table_line(model, "blk.12.ffn_down.weight")
    findings = scan(patched(model, line[field], raw)).bad
    assert any(words in f.message and f.tensor == "blk.12.ffn_down.weight" for f in findings)


@pytest.mark.parametrize(
    ("offset", "raw", "words"),
    [
        (4, struct.pack("<I", 1), "version=1"),
        (8, struct.pack("<Q", 1 << 60), "tensor count"),
        (16, struct.pack("<Q", 1 << 60), "metadata count"),
        (24, struct.pack("<Q", 1 << 63), "name of"),
    ],
    ids=["version", "tensors", "metadata", "key"],
)
def test_counts_that_would_allocate_are_refused(model, offset, raw, words):
    (finding,) = scan(patched(model, offset, raw)).bad
    assert finding.problem is Problem.HEADER
    assert words in finding.message


def test_duplicate_tensor_name(model):
    data = model.read_bytes().replace(b"blk.11.ffn_down.weight", b"blk.12.ffn_down.weight")
    model.write_bytes(data)
    assert (Problem.DUPLICATE, "blk.12.ffn_down.weight") in problems(model)


def test_duplicate_metadata_key(model):
    data = model.read_bytes().replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens")
    model.write_bytes(data)
    assert [p for p, _ in problems(model)] == [Problem.DUPLICATE]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<!doctype html>", "web page"),
        (b"\0" * 64, "unfinished"),
    ],
    ids=["lfs", "html", "zeros"],
)
def test_what_is_often_in_place_of_a_model_is_recognised(tmp_path, head, words):
    path = tmp_path / "model.gguf"
    path.write_bytes(head * 4)
    (finding,) = scan(path).bad
    assert words in finding.message


def test_control_characters_of_a_name_are_escaped(write_gguf, weights):
    path = write_gguf({"a\x1b[31m\nweight": weights(4, 32) * np.nan})
    assert {f.tensor for f in scan(path).bad} == {"a\\x1b[31m\\nweight"}


def test_integers_are_not_floats(write_gguf):
    path = write_gguf({"ids": (np.full((4, 8), 0x7FC00000, dtype=np.int32), GGMLQuantizationType.I32)})
    (report,) = scan(path).files
    assert (report.findings, report.num_tensors, report.num_checked) == ((), 1, 0)


def test_zero_bias_is_a_note_and_zero_matrix_is_bad(write_gguf, weights):
    path = write_gguf({"a.bias": weights(64) * 0, "a.weight": weights(4, 32) * 0})
    report = scan(path)
    assert [(f.tensor, f.severity) for f in report.findings] == [
        ("a.bias", Severity.NOTE),
        ("a.weight", Severity.BAD),
    ]


@pytest.mark.parametrize(
    ("name", "row", "block"),
    [
        ("nope", 0, 0),
        ("blk.12.ffn_up.weight", 96, 0),
        ("blk.12.ffn_up.weight", 0, 2),
        ("blk.12.ffn_up.weight", -1, 0),
    ],
)
def test_block_location_refuses_what_is_not_there(model, name, row, block):
    with pytest.raises(ScanError, match=r"nope|must be below"):
        block_location(model, name, row, block)


def test_not_gguf_cannot_be_parsed(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGU")
    with Source(path) as source, pytest.raises(HeaderError, match="magic"):
        read_header(source)
