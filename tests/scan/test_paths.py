"""What a path may be, and what is said when it is nothing that can be scanned."""

from __future__ import annotations

import os

import pytest

from firetower.core.errors import ScanError
from firetower.scan import Problem, scan


def test_missing_path(tmp_path):
    with pytest.raises(ScanError, match="no such file or folder"):
        scan(tmp_path / "nope.gguf")


def test_empty_folder(tmp_path):
    with pytest.raises(ScanError, match="no model files in this folder"):
        scan(tmp_path)


def test_folder_with_models_in_subfolders_only(tmp_path, write_gguf, weights):
    (tmp_path / "sub").mkdir()
    write_gguf({"a": weights(4, 32)}, name="sub/m.gguf")
    with pytest.raises(ScanError, match="give a file or a subfolder"):
        scan(tmp_path)


def test_text_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ScanError, match="not a GGUF, safetensors or PyTorch file"):
        scan(path)


def test_empty_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    with pytest.raises(ScanError, match="is empty"):
        scan(path)


def test_index_alone(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("{}")
    with pytest.raises(ScanError, match="give its folder"):
        scan(path)


def test_pipe_does_not_block(tmp_path):
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    with pytest.raises(ScanError, match="must be a regular file"):
        scan(path)


def test_link_to_nothing(tmp_path):
    path = tmp_path / "m.gguf"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(ScanError, match="link to nothing"):
        scan(path)


def test_links_as_in_a_hub_cache_are_followed(tmp_path, write_gguf, weights):
    blob = write_gguf({"a.weight": weights(4, 32) * 0}, name="blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(blob)
    (finding,) = scan(folder).bad
    assert finding.problem is Problem.ALL_ZERO


def test_format_is_known_without_a_suffix(write_gguf, weights):
    (report,) = scan(write_gguf({"a.weight": weights(4, 32)}, name="blob")).files
    assert report.format == "gguf"


def test_one_bad_file_does_not_keep_the_others_of_a_folder_from_being_scanned(tmp_path, write_gguf, weights):
    write_gguf({"a.weight": weights(4, 32) * 0}, name="b.gguf")
    (tmp_path / "a.gguf").touch()
    report = scan(tmp_path)
    assert [f.error is None for f in report.files] == [False, True]
    assert len(report.bad) == 1
    assert not report.is_clean


def test_missing_part_of_a_split_gguf(tmp_path, write_gguf, weights):
    write_gguf({"a.weight": weights(4, 32)}, name="m-00001-of-00003.gguf")
    write_gguf({"b.weight": weights(4, 32)}, name="m-00003-of-00003.gguf")
    (finding,) = scan(tmp_path).bad
    assert (finding.problem, "parts 2 of 3" in finding.message) == (Problem.TRUNCATED, True)


def test_training_state_is_named_as_skipped(tmp_path, write_gguf, weights):
    write_gguf({"a.weight": weights(4, 32)})
    (tmp_path / "training_args.bin").write_bytes(b"PK\x03\x04")
    report = scan(tmp_path)
    assert report.is_clean
    assert [p.rsplit("/", 1)[-1] for p in report.skipped] == ["training_args.bin"]


def test_progress_ends_at_the_size_of_all_files(tmp_path, write_gguf, weights):
    write_gguf({"a.weight": weights(64, 32)}, name="a.gguf")
    write_gguf({"b.weight": weights(64, 32)}, name="b.gguf")
    calls = []
    scan(tmp_path, lambda *call: calls.append(call))
    total = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert [c[0] for c in calls] == ["a.gguf", "b.gguf"]
    assert all(done <= whole == total for _, done, whole in calls)
    assert [c[1] for c in calls] == sorted(c[1] for c in calls)
