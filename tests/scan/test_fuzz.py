"""2,000 damaged files of each format (200 in a plain run): findings or one-line errors, in bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

COUNTS = [pytest.param(200, id="200"), pytest.param(2000, id="2000", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.parametrize("count", COUNTS),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def fuzz(path, header_bytes, count):
    program = Path(__file__).with_name("fuzz.py")
    done = subprocess.run(
        [sys.executable, str(program), str(path), str(header_bytes), str(count), str(count)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert sum(result["tally"].values()) == count
    assert result["odd"] == []
    assert result["slowest_s"] < 10
    assert result["peak_bytes"] < 1 << 30
    return result["tally"]


def test_gguf(count, write_gguf, weights):
    tensors = {f"blk.{i}.ffn_down.weight": weights(8, 64) for i in range(6)}
    path = write_gguf(tensors, quant="Q4_1", vocabulary=20)
    tally = fuzz(path, header_bytes=path.stat().st_size - 6 * 8 * 40, count=count)
    assert tally["findings"] > count / 2


def test_safetensors(count, tmp_path, weights):
    path = tmp_path / "m.safetensors"
    save_file({f"layers.{i}.weight": weights(8, 32) for i in range(6)}, path, metadata={"format": "pt"})
    tally = fuzz(path, header_bytes=path.stat().st_size - 6 * 8 * 32 * 4, count=count)
    assert tally["findings"] > count / 2


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_pytorch(count, is_zip, tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "m.pt"
    value = {f"layers.{i}.weight": torch.randn(8, 32) for i in range(4)}
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    tally = fuzz(path, header_bytes=path.stat().st_size, count=count)
    assert tally.get("findings", 0) + tally["error"] > count / 3
