"""`firetower scan` as a user meets it: output, exit codes, no traceback."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from firetower.cli.main import main
from firetower.scan.gguf import block_location


@pytest.fixture
def model(tmp_path):
    path, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    for i in (11, 12):
        values = rng.normal(0, 0.02, (64, 96)).astype(np.float32)
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(f"blk.{i}.ffn_down.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def poisoned(model):
    data = bytearray(model.read_bytes())
    for row in range(37, 50):
        offset, _ = block_location(model, "blk.12.ffn_down.weight", row, 2)
        data[offset : offset + 2] = b"\x00\x7e"
    model.write_bytes(data)
    return model


def test_clean_file(model, capsys):
    assert main(["scan", str(model)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith(f"{model}: 2 tensors, 7.9 kB, 0 findings, ")
    assert err == ""


def test_finding_names_tensor_row_block_offset_and_bits(poisoned, capsys):
    assert main(["scan", str(poisoned)]) == 3
    out, err = capsys.readouterr()
    offset, _ = block_location(poisoned, "blk.12.ffn_down.weight", 37, 2)
    line = next(line for line in out.splitlines() if "row 37" in line)
    for part in (
        "non-finite",
        "blk.12.ffn_down.weight",
        "block 2",
        "columns 64-95",
        str(offset),
        "7e00",
        "NaN scale",
    ):
        assert part in line
    assert "and 5 more" in out
    assert "8 findings (and 5 more values)" in out
    assert err == "next: firetower bits 7e00 --dtype float16\n"


def test_json(poisoned, capsys):
    assert main(["scan", "--json", str(poisoned)]) == 3
    document = json.loads(capsys.readouterr().out)
    (file,) = document["reports"][0]["files"]
    assert document["errors"] == []
    assert file["num_tensors"] == 2
    assert file["findings"][0] | {"offset_bytes": 0} == {
        "problem": "non-finite",
        "message": "NaN scale",
        "severity": "bad",
        "tensor": "blk.12.ffn_down.weight",
        "expert": None,
        "row": 37,
        "block": 2,
        "column_start": 64,
        "column_stop": 96,
        "offset_bytes": 0,
        "num_bytes": 2,
        "field": "scale",
        "dtype": "float16",
        "bits": "7e00",
        "kind": "nan",
        "count": 1,
        "num_more": 0,
    }


def test_one_wrong_path_among_good_ones(model, tmp_path, capsys):
    assert main(["scan", str(model), str(tmp_path / "nope")]) == 1
    out, err = capsys.readouterr()
    assert "0 findings" in out
    assert err == f"firetower: path={tmp_path / 'nope'}: no such file or folder\n"


def test_finding_outweighs_error(poisoned, tmp_path):
    assert main(["scan", str(tmp_path / "nope"), str(poisoned)]) == 3


def test_wrong_path_in_json(tmp_path, capsys):
    assert main(["scan", "--json", str(tmp_path / "nope")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["reports"] == []
    assert "no such file" in document["errors"][0]["error"]


def test_without_a_path_is_a_usage_error():
    with pytest.raises(SystemExit, match="2"):
        main(["scan"])


def test_findings_of_several_files_name_the_file(poisoned, model, tmp_path, capsys):
    (tmp_path / "other.gguf").write_bytes(poisoned.read_bytes()[:200])
    assert main(["scan", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert any("other.gguf" in line and "header" in line for line in out.splitlines())


def test_no_bar_where_stderr_is_no_terminal_and_a_bar_where_it_is(model):
    command = [sys.executable, "-m", "firetower.cli.main", "scan", str(model)]
    assert subprocess.run(command, capture_output=True).stderr == b""
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    drawn = os.read(ours, 65536)
    os.close(ours)
    assert done.returncode == 0
    assert b"model.gguf" in drawn
    assert b"\x1b" in drawn


def test_scanning_needs_no_torch(model):
    code = (
        "import sys; sys.modules['torch'] = None; from firetower.cli.main import main; "
        "sys.exit(main(['scan', sys.argv[1]]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)]).returncode == 0


def test_damaged_files_never_show_a_traceback(poisoned, capsys):
    rng = np.random.default_rng(0)
    data = np.frombuffer(poisoned.read_bytes(), dtype=np.uint8)
    for _ in range(100):
        mutant = data.copy()
        mutant[rng.integers(0, 400, 3)] = rng.integers(0, 256, 3)
        poisoned.write_bytes(mutant[: rng.integers(1, len(mutant))].tobytes())
        assert main(["scan", str(poisoned)]) in (0, 1, 3)
        err = capsys.readouterr().err
        assert "internal error" not in err
        assert all(line.startswith(("firetower: ", "next: ")) for line in err.splitlines())
