"""``firetower triage``: as a user runs it, through `main`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from firetower.cli.main import main


@pytest.fixture
def bad_file(tmp_path: Path) -> Path:
    values = np.ones((4, 4), np.float32)
    values[1, 2] = np.inf
    path = tmp_path / "model.safetensors"
    save_file({"w": values}, path)
    return path


def test_a_bad_file(bad_file, capsys):
    assert main(["triage", str(bad_file)]) == 3
    captured = capsys.readouterr()
    first, second, *_ = captured.out.splitlines()
    assert first.startswith("The weights are bad")
    assert second.startswith("  FIRE scan")
    assert captured.err.strip() == "next: firetower bits 7f800000 --dtype float32"


def test_a_sound_file(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.eye(4, dtype=np.float32)}, path)
    assert main(["triage", str(path)]) == 0
    assert "ok   scan" in capsys.readouterr().out


def test_json(bad_file, capsys):
    assert main(["triage", str(bad_file), "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "file"
    assert data["checks"][0]["look"] == "fire"
    assert data["next_command"].startswith("firetower bits")


def test_a_server_that_is_not_there_is_a_user_error(capsys):
    assert main(["triage", "http://127.0.0.1:9", "--timeout", "2"]) == 1
    assert "no answer that can be judged" in capsys.readouterr().out


def test_nothing_there(capsys):
    assert main(["triage", "no/such/thing"]) == 1
    assert capsys.readouterr().err.startswith("firetower: target='no/such/thing': must be a URL")


def test_a_key_is_no_argument(capsys):
    with pytest.raises(SystemExit) as e:
        main(["triage", "http://127.0.0.1:9", "--api-key", "sk-1"])
    assert e.value.code == 2
