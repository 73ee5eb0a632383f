"""Packing and unpacking: equal bytes, and archives from people who mean harm."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import tarfile
import time

import pytest

from firetower.capture import pack, read_capture, unpack, verify, write_capture
from firetower.capture.folder import digest_of
from firetower.core.errors import CaptureError


@pytest.fixture
def packed(capture, tmp_path):
    """A packed capture."""
    pack(write_capture(capture, tmp_path / "source"), tmp_path / "good.tar.gz")
    return tmp_path / "good.tar.gz"


def test_a_packed_capture_comes_back_as_it_was(capture, packed, tmp_path):
    os.umask(0)
    report = unpack(packed, tmp_path / "back")
    assert read_capture(tmp_path / "back") == capture
    assert report.digest == digest_of(tmp_path / "source")
    assert stat.S_IMODE((tmp_path / "back").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "back").iterdir()} == {0o600}
    assert stat.S_IMODE(packed.stat().st_mode) == 0o600


def test_equal_captures_pack_to_equal_bytes(capture, packed, tmp_path, monkeypatch):
    other = write_capture(capture, tmp_path / "elsewhere" / "other-name")
    os.utime(other / "capture.json", (1, 1))
    monkeypatch.setattr(time, "time", lambda: 12345.0)
    pack(other, tmp_path / "again.tar.gz")
    assert (tmp_path / "again.tar.gz").read_bytes() == packed.read_bytes()


def test_ordinary_tools_read_it_and_it_names_no_user(packed, tmp_path):
    with tarfile.open(packed) as archive:
        members = archive.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode) for m in members} == {(0, 0, "", "", 0, 0o600)}
    assert all(m.isreg() and m.name.startswith("capture/") for m in members)
    raw = packed.read_bytes()
    assert raw[4:8] == bytes(4)
    assert str(tmp_path).encode() not in gzip.decompress(raw)


def test_nothing_is_overwritten_without_force(packed, tmp_path):
    with pytest.raises(CaptureError, match="--force"):
        pack(tmp_path / "source", packed)
    assert pack(tmp_path / "source", packed, force=True) == packed.stat().st_size
    (tmp_path / "folder").mkdir()
    with pytest.raises(CaptureError, match="exists"):
        pack(tmp_path / "source", tmp_path / "folder", force=True)
    with pytest.raises(CaptureError, match="exists"):
        unpack(packed, tmp_path / "folder")


def test_a_capture_that_is_not_sound_is_not_packed(tmp_path, packed):
    (tmp_path / "source" / "content.json").write_text("{}")
    with pytest.raises(CaptureError, match="not packed"):
        pack(tmp_path / "source", tmp_path / "bad.tar.gz")
    assert not (tmp_path / "bad.tar.gz").exists()


def rebuilt(packed, change):
    """The archive with its members changed: ``change`` gets [(TarInfo, content)]."""
    with tarfile.open(packed) as archive:
        members = [(m, archive.extractfile(m).read()) for m in archive.getmembers()]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as out:
        for info, content in change(members):
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    path = packed.with_name("bad.tar.gz")
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


def named(name, **fields):
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


MALICIOUS = {
    "parent": named("capture/../../evil"),
    "absolute": named("/tmp/evil"),
    "other name": named("capture/run.py"),
    "deeper": named("capture/sub/capture.json"),
    "other root": named("evil/capture.json"),
    "symlink": named("capture/seen.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": named("capture/seen.json", type=tarfile.LNKTYPE, linkname="capture/fire.json"),
    "folder": named("capture/seen.json", type=tarfile.DIRTYPE),
    "device": named("capture/seen.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipe": named("capture/seen.json", type=tarfile.FIFOTYPE),
    "twice": named("capture/capture.json"),
    "long name": named("capture/" + "x" * 300),
}


@pytest.mark.parametrize("name", MALICIOUS)
@pytest.mark.parametrize("place", [0, -1])
def test_a_member_that_is_no_file_of_a_capture_is_refused(packed, tmp_path, name, place):
    before = {p.name for p in tmp_path.iterdir()} | {"bad.tar.gz"}

    def change(members):
        members.insert(len(members) if place else 0, (MALICIOUS[name], b""))
        return members

    with pytest.raises(CaptureError, match="is there twice" if name == "twice" else "is no file of a capture"):
        unpack(rebuilt(packed, change), tmp_path / "back")
    assert {p.name for p in tmp_path.iterdir()} == before


def test_an_archive_with_changed_content_is_refused(packed, tmp_path):
    def change(members):
        return [(m, c.replace(b"torch", b"tarch") if m.name.endswith("capture.json") else c) for m, c in members]

    with pytest.raises(CaptureError, match="SHA-256"):
        unpack(rebuilt(packed, change), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_bomb_is_stopped_at_its_header(packed, tmp_path, monkeypatch):
    monkeypatch.setattr("firetower.capture.archive.MAX_JSON_BYTES", 1 << 16)

    def change(members):
        return [(named("capture/content.json"), bytes(1 << 24)), *members]

    with pytest.raises(CaptureError, match="at most 65,536"):
        unpack(rebuilt(packed, change), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_pax_header_that_claims_gigabytes_is_not_read_into_memory(packed, tmp_path):
    info = named("capture/x", type=tarfile.XHDTYPE, size=1 << 32)
    bad = tmp_path / "pax.tar.gz"
    bad.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 16)))
    with pytest.raises(CaptureError, match="no file of a capture"):
        unpack(bad, tmp_path / "back")


def test_damaged_archives_give_one_line(packed, tmp_path):
    raw = packed.read_bytes()
    rng = random.Random(0)
    for i in range(60):
        data = bytearray(raw)
        if i % 3 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(10, len(data))] ^= 1 << rng.randrange(8)
        bad = tmp_path / "bad.tar.gz"
        bad.write_bytes(data)
        target = tmp_path / f"back{i}"
        problem = ""
        try:
            unpack(bad, target)
        except CaptureError as e:
            problem = str(e)
        assert "\n" not in problem
        assert target.exists() is not bool(problem)
        if target.exists():
            assert verify(target).is_sound
    for content in (b"", b"no gzip", gzip.compress(b""), gzip.compress(bytes(1024)), gzip.compress(b"x" * 1024)):
        bad.write_bytes(content)
        with pytest.raises(CaptureError):
            unpack(bad, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(CaptureError, match="No such file"):
        unpack(tmp_path / "none.tar.gz", tmp_path / "back")


def test_large_tensors_are_streamed(capture, tmp_path):
    import dataclasses
    import tracemalloc

    from firetower.capture import RawTensor

    data = random.Random(0).randbytes(1 << 20) * 24
    big = {"big": RawTensor(dtype="uint8", shape=(len(data),), data=data)}
    source = write_capture(dataclasses.replace(capture, tensors=big), tmp_path / "big")
    tracemalloc.start()
    try:
        pack(source, tmp_path / "big.tar.gz")
        unpack(tmp_path / "big.tar.gz", tmp_path / "big-back")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20
    assert read_capture(tmp_path / "big-back").tensors == big


def test_the_manifest_of_a_stranger_is_held_against_the_files(packed, tmp_path):
    def change(members):
        result = []
        for info, content in members:
            if info.name.endswith("manifest.json"):
                manifest = json.loads(content)
                manifest["files"] = manifest["files"][:-1]
                content = json.dumps(manifest).encode()
            result.append((info, content))
        return result

    with pytest.raises(CaptureError, match="not in the manifest"):
        unpack(rebuilt(packed, change), tmp_path / "back")
