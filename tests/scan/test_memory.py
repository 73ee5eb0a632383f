"""Files far larger than the memory a scan may take."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGUFWriter

from firetower.scan.gguf import block_location

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CHILD = """
import sys
from firetower.scan import scan
report = scan(sys.argv[1])
finding = report.bad[-1]
# not ru_maxrss, which a child takes over from the process that started it
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, len(report.bad), finding.problem, finding.row, finding.bits)
"""


def peak_of(path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    peak, *rest = done.stdout.split()
    return int(peak), rest


def sparse_gguf(path, num_rows):
    writer = GGUFWriter(path, "llama")
    writer.add_tensor_info("a.weight", (num_rows, 4096), np.dtype(np.float16), num_rows * 8192)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + num_rows * 8192)
        file.seek(block_location(path, "a.weight", 0, 0)[0] + 8192 * (num_rows - 1))
        file.write(b"\x00\x7e")


SIZES = [pytest.param(5 << 28, id="1.25-gib"), pytest.param(6 << 30, id="6-gib", marks=pytest.mark.soak)]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_sparse_gguf(num_bytes, tmp_path):
    path, rows = tmp_path / "big.gguf", num_bytes // 8192
    sparse_gguf(path, rows)
    assert path.stat().st_size > num_bytes
    peak, rest = peak_of(path)
    assert rest == ["1", "non-finite", str(rows - 1), "7e00"]
    assert peak < 256 << 20


@pytest.mark.parametrize("num_bytes", SIZES)
def test_sparse_safetensors(num_bytes, tmp_path):
    path, rows = tmp_path / "big.safetensors", num_bytes // 16384
    entry = {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, rows * 16384]}
    text = json.dumps({"a.weight": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + rows * 16384)
        file.seek(-16384, 2)
        file.write(struct.pack("<I", 0x7FD6E000))
    peak, rest = peak_of(path)
    assert rest == ["1", "non-finite", str(rows - 1), "7fd6e000"]
    assert peak < 256 << 20


@pytest.mark.slow
def test_every_value_bad_takes_no_more_memory(tmp_path):
    path = tmp_path / "nan.safetensors"
    rows = 1 << 15
    entry = {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, rows * 8192]}
    text = json.dumps({"a.weight": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(rows // 256):
            file.write(b"\xc0\x7f\x00\x00" * (256 * 2048))
    peak, rest = peak_of(path)
    assert rest[1] == "non-finite"
    assert peak < 256 << 20


@pytest.mark.slow
def test_pytorch_file_is_not_loaded(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "big.pt"
    big = torch.zeros(1 << 28)
    big[-1] = torch.nan
    torch.save({"a": big, "b": torch.ones(4, 4)}, path)
    assert path.stat().st_size > 1 << 30
    peak, rest = peak_of(path)
    assert rest == ["1", "non-finite", "0", "7fc00000"]
    assert peak < 768 << 20


@pytest.mark.slow
def test_hostile_header_is_bounded(tmp_path, weights):
    path = tmp_path / "many.gguf"
    count = 1 << 18
    line = struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 32, 0, 0)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, count, 0) + line * count)
    peak, _ = peak_of(path)
    assert peak < 512 << 20
