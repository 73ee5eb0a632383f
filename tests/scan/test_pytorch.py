"""PyTorch files: structure by torch, data by the scan, nothing run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile

import pytest

from firetower.core.errors import MissingExtraError, ScanError
from firetower.scan import Problem, scan

torch = pytest.importorskip("torch")


@pytest.fixture
def matrix():
    return lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.fixture
def save(tmp_path):
    def write(value, name="m.pt", **options):
        torch.save(value, tmp_path / name, **options)
        return tmp_path / name

    return write


def test_clean_file_is_silent(save, matrix):
    (report,) = scan(save({"a.weight": matrix(8, 32), "steps": torch.tensor(3), "name": "x"})).files
    assert (report.format, report.num_tensors, report.num_checked, report.findings) == ("pytorch", 2, 1, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_nan_is_placed_down_to_the_byte(dtype, save, matrix):
    values = matrix(8, 32).to(dtype)
    values[5, 7] = torch.nan
    path = save({"model": {"layers": [{"w": matrix(4, 32)}, {"w": values}]}}, "m.pth")
    (finding,) = scan(path).bad
    assert (finding.tensor, finding.row, finding.column_start) == ("model.layers.1.w", 5, 7)
    raw = path.read_bytes()[finding.offset_bytes : finding.offset_bytes + finding.num_bytes]
    assert raw[::-1].hex() == finding.bits
    assert raw == values[5:6, 7:8].contiguous().view(torch.uint8).numpy().tobytes()


def test_slice_of_a_storage_and_tied_weights(save, matrix):
    whole = matrix(8, 32)
    whole[6, 3] = torch.inf
    report = scan(save({"part": whole[4:], "tied": whole[4:]}))
    (finding,) = report.bad
    assert (report.files[0].num_tensors, report.files[0].num_checked) == (2, 2)
    assert (finding.tensor, finding.row, finding.column_start) == ("part", 2, 3)


def test_transposed_tensor_has_an_offset_but_no_row(save, matrix):
    values = matrix(8, 32)
    values[5, 7] = torch.nan
    path = save({"w": values.t()})
    (finding,) = scan(path).bad
    assert (finding.row, finding.column_start) == (None, None)
    assert path.read_bytes()[finding.offset_bytes : finding.offset_bytes + 4][::-1].hex() == finding.bits


def test_sparse_values_are_read(save):
    values = torch.eye(4)
    values[2, 2] = torch.nan
    (finding,) = scan(save({"s": values.to_sparse()})).bad
    assert finding.tensor == "s.values"


def test_file_of_old_format(save, matrix):
    values = matrix(8, 32)
    values[5, 7] = torch.nan
    (finding,) = scan(save({"w": values}, _use_new_zipfile_serialization=False)).bad
    assert (finding.tensor, finding.row, finding.column_start, finding.offset_bytes) == ("w", 5, 7, None)


class Payload:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_the_pickle_is_not_run(is_zip, save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save({"w": Payload()}, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ScanError, match="weights_only") as error:
        scan(path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


class Bomb:
    def __reduce__(self):
        return bytearray, (1 << 40,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickle_that_asks_for_memory_is_refused(is_zip, save):
    with pytest.raises(ScanError, match="bytearray"):
        scan(save({"w": Bomb()}, _use_new_zipfile_serialization=is_zip))


def test_containers_that_hold_themselves(save, matrix):
    loop = [matrix(4, 32)]
    loop.append(loop)
    deep = []
    for _ in range(400):
        deep = [deep, deep]
    assert scan(save({"loop": loop, "deep": deep})).is_clean


def test_truncated_archive(save, matrix):
    path = save({"w": matrix(64, 64)})
    path.write_bytes(path.read_bytes()[:-4000])
    (finding,) = scan(path).bad
    assert finding.problem is Problem.TRUNCATED


def test_record_shorter_than_its_tensor(save, matrix, tmp_path):
    path = save({"w": matrix(64, 64)})
    short = tmp_path / "short.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(short, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:100] if info.filename.endswith("/data/0") else data)
    (finding,) = scan(short).bad
    assert (finding.problem, finding.tensor) == (Problem.HEADER, "w")


def test_pickle_that_is_no_checkpoint(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(pickle.dumps([1, 2, 3]))
    with pytest.raises(ScanError, match="weights_only"):
        scan(path)


def test_bin_file_that_is_something_else(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(b"firmware")
    with pytest.raises(ScanError, match=r"not a file of torch\.save"):
        scan(path)


def test_without_torch_the_extra_is_named(save, matrix):
    path = save({"w": matrix(4, 32)})
    code = "import sys; sys.modules['torch'] = None; from firetower.scan import scan; scan(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert f"{MissingExtraError.__name__}: path={path}: a PyTorch file" in done.stderr
    assert "firetower[torch]" in done.stderr
