"""The folder of captures: merging, quota, rate, pruning, several processes, and killed ones."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firetower.capture import (
    AddOutcome,
    CaptureFolder,
    CaptureLimits,
    RawTensor,
    read_capture,
    verify,
)
from firetower.capture.folder import read_seen
from firetower.capture.store import captures_path
from firetower.core.errors import CaptureError, ConfigError
from firetower.core.records import Signal


def at_layer(capture, layer, number=0):
    """The same capture with another origin and id."""
    fire = dataclasses.replace(
        capture.fire, id=f"fire-{layer}-{number}", origin=Signal(stage="down", layer=layer), token_ids=None
    )
    return dataclasses.replace(capture, id=fire.id, fire=fire)


@pytest.fixture
def folder(tmp_path: Path) -> CaptureFolder:
    return CaptureFolder(tmp_path / "captures")


def age(stored, seconds):
    """Make a stored capture look that much older."""
    for path in stored.path.iterdir():
        status = path.stat()
        os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def test_the_usual_folder_is_in_the_data_folder(own_data_folder):
    assert captures_path() == own_data_folder / "captures"
    assert CaptureFolder().captures() == []
    assert not captures_path().exists()


def test_a_capture_is_kept_and_found_by_the_fires_id(folder, capture):
    result = folder.add(capture)
    assert result.outcome is AddOutcome.KEPT
    assert verify(result.path).is_sound
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.find(capture.fire.id[:10]).id == capture.id
    assert read_capture(folder.find(capture.id).path) == capture


def test_fires_at_one_origin_merge_with_a_count(folder, capture):
    first = folder.add(capture)
    for i in range(3):
        result = folder.add(at_layer(capture, 12, i))
        # another module path: another origin
        assert result.outcome is (AddOutcome.MERGED if i else AddOutcome.KEPT)
    again = folder.add(dataclasses.replace(capture, id="another-id"))
    assert (again.outcome, again.path) == (AddOutcome.MERGED, first.path)
    assert read_seen(first.path).count == 2
    assert verify(first.path).is_sound
    assert len(folder.captures()) == 2
    assert stat.S_IMODE((first.path / "seen.json").stat().st_mode) == 0o600


def test_more_than_one_capture_an_origin_on_request(tmp_path, capture):
    folder = CaptureFolder(tmp_path / "c", CaptureLimits(per_origin=2))
    outcomes = [folder.add(at_layer(capture, 3, i)).outcome for i in range(4)]
    assert outcomes == [AddOutcome.KEPT, AddOutcome.KEPT, AddOutcome.MERGED, AddOutcome.MERGED]
    # the same fire handed in twice is one capture
    assert folder.add(at_layer(capture, 3, 0)).outcome is AddOutcome.MERGED


def test_the_rate_is_limited_and_the_window_moves_on(tmp_path, capture):
    folder = CaptureFolder(tmp_path / "c", CaptureLimits(max_per_window=2, window_s=60))
    outcomes = [folder.add(at_layer(capture, i)).outcome for i in range(3)]
    assert outcomes == [AddOutcome.KEPT, AddOutcome.KEPT, AddOutcome.REFUSED]
    assert folder.num_refused == 1
    # merging goes on whatever the rate
    assert folder.add(at_layer(capture, 0, 9)).outcome is AddOutcome.MERGED
    age(folder.captures()[0], 61)
    assert folder.add(at_layer(capture, 2)).outcome is AddOutcome.KEPT


def test_over_the_quota_tensors_go_first_and_that_is_said(tmp_path, capture):
    big = {"state": RawTensor(dtype="uint8", shape=(1 << 16,), data=bytes(1 << 16))}
    folder = CaptureFolder(tmp_path / "c", CaptureLimits(max_bytes=1 << 15))
    result = folder.add(dataclasses.replace(at_layer(capture, 0), tensors=big))
    assert result.outcome is AddOutcome.KEPT
    kept = read_capture(result.path)
    assert kept.tensors == {}
    assert "over the quota" in kept.left_out[0]
    assert kept.left_out[0] == result.reason
    assert verify(result.path).is_sound


def test_over_the_quota_nothing_is_written_and_old_evidence_stays(tmp_path, capture):
    folder = CaptureFolder(tmp_path / "c", CaptureLimits(max_bytes=6000))
    results = [folder.add(at_layer(capture, i)) for i in range(6)]
    outcomes = [r.outcome for r in results]
    assert outcomes[0] is AddOutcome.KEPT
    assert outcomes[-1] is AddOutcome.REFUSED
    assert "firetower capture prune" in results[-1].reason
    assert sum(s.num_bytes for s in folder.captures()) <= 6000
    assert folder.captures()[-1].id == "fire-0-0"
    assert sorted(p.name for p in folder.path.iterdir() if p.name != ".lock") == sorted(
        s.path.name for s in folder.captures()
    )


def test_prune_by_age_number_and_size(folder, capture):
    for i in range(5):
        folder.add(at_layer(capture, i))
        age(folder.find(f"fire-{i}-"), (5 - i) * 1000)
    assert [s.id for s in folder.captures()] == [f"fire-{i}-0" for i in (4, 3, 2, 1, 0)]
    assert [s.id for s in folder.prune(older_than_s=4500, dry_run=True)] == ["fire-0-0"]
    assert len(folder.captures()) == 5
    assert [s.id for s in folder.prune(older_than_s=4500)] == ["fire-0-0"]
    # seen again: now the youngest
    folder.add(at_layer(capture, 1, 7))
    assert [s.id for s in folder.prune(keep=3)] == ["fire-2-0"]
    size = max(s.num_bytes for s in folder.captures())
    assert [s.id for s in folder.prune(max_bytes=2 * size)] == ["fire-3-0"]
    assert [s.id for s in folder.prune(max_bytes=0)] == ["fire-4-0", "fire-1-0"]
    assert folder.prune(keep=0) == []
    with pytest.raises(ConfigError, match="at least one limit"):
        folder.prune()
    with pytest.raises(ConfigError, match="keep=-1"):
        folder.prune(keep=-1)


def test_prune_leaves_strangers_and_links_alone(folder, capture, tmp_path):
    folder.add(capture)
    outside = tmp_path / "outside+x"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (folder.path / "link+x").symlink_to(outside)
    (folder.path / "notes").mkdir()
    (folder.path / "other+y").mkdir()
    (folder.path / "a file+z").write_text("")
    folder.prune(keep=0)
    assert (outside / "manifest.json").exists()
    assert {p.name for p in folder.path.iterdir()} == {".lock", "link+x", "notes", "other+y", "a file+z"}


def test_ids_that_fit_none_or_several_are_errors(folder, capture):
    folder.add(at_layer(capture, 1))
    folder.add(at_layer(capture, 11))
    assert folder.find("fire-1-0").id == "fire-1-0"
    with pytest.raises(CaptureError, match="fits 2 captures"):
        folder.find("fire-1")
    with pytest.raises(CaptureError, match="neither a folder nor an id"):
        folder.find("nothing")


def test_add_safely_never_raises(tmp_path, capture, caplog):
    (tmp_path / "file").write_text("")
    folder = CaptureFolder(tmp_path / "file" / "c")
    for _ in range(3):
        result = folder.add_safely(capture)
        assert result.outcome is AddOutcome.FAILED
    assert folder.num_failed == 3
    assert "choose another folder" in (folder.last_error or "")
    assert len(caplog.records) == 1
    with pytest.raises(CaptureError):
        folder.add(capture)


def test_the_remains_of_a_killed_process_are_swept_when_old(folder, capture):
    folder.add(capture)
    for name, seconds in ((".partial-old", 7200), (".partial-new", 0)):
        partial = folder.path / name
        partial.mkdir()
        os.utime(partial, (time.time() - seconds,) * 2)
    assert len(folder.captures()) == 1
    folder.add(at_layer(capture, 1))
    assert not (folder.path / ".partial-old").exists()
    assert (folder.path / ".partial-new").exists()


WRITER = """
import dataclasses, json, sys
from firetower.capture import CaptureFolder, CaptureLimits, RawTensor, freeze_call
from firetower.core.codec import fire_from_dict
from firetower.core.records import Signal
fire = fire_from_dict(json.loads(sys.argv[2]))
folder = CaptureFolder(sys.argv[1], CaptureLimits(max_per_window=10**6))
first, num, size = map(int, sys.argv[3:6])
tensors = {"t": RawTensor(dtype="uint8", shape=(size,), data=bytes(size))}
print("ready", flush=True)
sys.stdin.readline()
for i in range(first, first + num):
    one = dataclasses.replace(fire, id=f"{fire.id}-{first}-{i}", origin=Signal(stage="down", layer=i % 7))
    folder.add(freeze_call(one, prompt_token_ids=[1], tensors=tensors))
"""


def start_writer(path, capture, first, num, size=10):
    from firetower.core.codec import dumps

    argv = [sys.executable, "-c", WRITER, str(path), dumps(capture.fire), str(first), str(num), str(size)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_processes_share_a_folder_and_lose_no_count(tmp_path, capture):
    path = tmp_path / "c"
    writers = [start_writer(path, capture, first, 35) for first in (0, 700, 1400)]
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    stored = CaptureFolder(path).captures()
    assert len(stored) == 7
    assert sum(read_seen(s.path).count for s in stored) == 105
    assert all(verify(s.path).is_sound for s in stored)


def test_a_process_killed_while_it_writes_leaves_only_whole_captures(tmp_path, capture):
    path = tmp_path / "c"
    for delay_s in (0.0, 0.01, 0.03):
        writer = start_writer(path, capture, 0, 500, size=4 << 20)
        assert writer.stdout.readline() == b"ready\n"
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert all(verify(s.path).is_sound for s in CaptureFolder(path).captures())
    # the lock of the dead is not held
    assert CaptureFolder(path).add(at_layer(capture, 99)).outcome is not AddOutcome.FAILED


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="max_bytes=-1"):
        CaptureLimits(max_bytes=-1)
