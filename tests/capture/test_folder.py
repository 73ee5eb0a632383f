"""The folder of one capture: round trips, modes, tampering, links, full disks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.capture import Output, RawTensor, Request, read_capture, verify, write_capture
from firetower.capture.folder import capture_parts, digest_of, read_tensor_table
from firetower.capture.schema import dump_document, from_documents, parse_document, to_documents
from firetower.core.errors import CaptureError


def through_documents(capture):
    """A capture to bytes and back, without a disk."""
    raw = {name: dump_document(data) for name, data in to_documents(capture).items()}
    return from_documents({name: parse_document(r, name) for name, r in raw.items()})


def test_a_capture_comes_back_as_it_was(capture, http_capture, tmp_path):
    for name, original in (("a", capture), ("b", http_capture)):
        folder = write_capture(original, tmp_path / name)
        assert read_capture(folder) == original
        assert verify(folder).problems == ()


def test_the_folder_is_private_and_holds_the_documented_files(capture, tmp_path):
    os.umask(0)
    folder = write_capture(capture, tmp_path / "new" / "c")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json", "capture.json", "request.json", "content.json", "fire.json", "tensors.safetensors",
    }  # fmt: skip
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["c"]


def test_private_content_is_in_two_files_only(capture, http_capture, tmp_path):
    for name, original in (("a", capture), ("b", http_capture)):
        folder = write_capture(original, tmp_path / name)
        open_text = "".join((folder / n).read_text() for n in ("capture.json", "manifest.json"))
        if (folder / "fire.json").exists():
            open_text += (folder / "fire.json").read_text()
        assert "private" not in open_text
        assert "777001" not in open_text
    # the ids do come back
    assert read_capture(tmp_path / "a").fire.token_ids == (777001, 777002)


def test_the_request_file_is_the_body_as_it_came(http_capture, tmp_path):
    folder = write_capture(http_capture, tmp_path / "c")
    body = json.loads((folder / "request.json").read_text())
    assert list(body) == ["model", "messages", "tools", "temperature", "max_tokens", "seed", "user"]
    assert body["messages"][0]["content"] == "private system words"


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def same(a, b) -> bool:
    """Equality that tells NaN payloads and -0.0 apart."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(
    body=st.dictionaries(st.text(st.characters(codec=None), max_size=6), _JSON, max_size=5),
    rows=st.none() | st.lists(st.lists(st.integers(-1, 2**40), max_size=5).map(tuple), max_size=3).map(tuple),
    text=st.text(st.characters(codec=None), max_size=20),
)
@settings(max_examples=150, deadline=None)
def test_every_body_round_trips(body, rows, text):
    from firetower.capture import Capture

    original = Capture(
        id="x",
        created_at="2026-11-30T00:00:00Z",
        request=Request(kind="other", body=body),
        prompt_token_ids=rows,
        outputs=(Output(text=text),),
    )
    back = through_documents(original)
    assert same(dict(back.request.body), body)
    assert back.prompt_token_ids == rows
    assert back.outputs == original.outputs


def test_numbers_of_a_body_keep_their_bits(capture):
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    body = {"a": odd, "b": -math.inf, "c": 10**30, "d": -0.0}
    back = through_documents(dataclasses.replace(capture, request=Request(kind="call", body=body), tensors={}))
    assert same(dict(back.request.body), body)


def test_a_body_that_only_looks_like_an_encoded_nan_is_refused_when_written(capture, tmp_path):
    body = {"x": {"nonfinite": "nan", "bits": "zz"}}
    with pytest.raises(CaptureError, match="bits"):
        write_capture(dataclasses.replace(capture, request=Request(kind="call", body=body)), tmp_path / "c")
    assert list(tmp_path.iterdir()) == [tmp_path / "firetower-data"] or list(tmp_path.iterdir()) == []


def test_equal_captures_have_equal_digests_and_any_change_shows(capture, tmp_path):
    a, b = write_capture(capture, tmp_path / "a"), write_capture(capture, tmp_path / "b")
    assert digest_of(a) == digest_of(b)
    c = write_capture(dataclasses.replace(capture, seeds={"torch": 8}), tmp_path / "c")
    assert digest_of(c) != digest_of(a)


@pytest.mark.parametrize("name", ["capture.json", "request.json", "content.json", "fire.json", "tensors.safetensors"])
def test_one_changed_byte_is_found_by_verify_and_by_reading(capture, tmp_path, name):
    folder = write_capture(capture, tmp_path / "c")
    raw = bytearray((folder / name).read_bytes())
    raw[-2] ^= 1
    (folder / name).write_bytes(raw)
    [problem] = verify(folder).problems
    assert problem.startswith(name)
    with pytest.raises(CaptureError, match="changed or damaged"):
        read_capture(folder)


def test_other_damage_is_named(capture, tmp_path):
    folder = write_capture(capture, tmp_path / "c")
    (folder / "run.py").write_text("print()")
    (folder / "content.json").unlink()
    (folder / "request.json").chmod(0o644)
    problems = " | ".join(verify(folder).problems)
    assert "'run.py': a capture holds no such file" in problems
    assert "content.json" in problems
    assert "request.json: mode 644" in problems


def test_a_file_beside_the_manifest_is_found(capture, tmp_path):
    folder = write_capture(dataclasses.replace(capture, fire=None), tmp_path / "c")
    (folder / "fire.json").write_text("{}")
    (folder / "fire.json").chmod(0o600)
    assert verify(folder).problems == ("fire.json: is not in the manifest",)


def test_links_are_refused_wherever_they_are(capture, tmp_path):
    folder = write_capture(capture, tmp_path / "c")
    outside = tmp_path / "outside.json"
    outside.write_bytes((folder / "content.json").read_bytes())
    (folder / "content.json").unlink()
    (folder / "content.json").symlink_to(outside)
    with pytest.raises(CaptureError, match="symbolic link"):
        read_capture(folder)
    assert any("symbolic link" in p for p in verify(folder).problems)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(CaptureError, match="symbolic link"):
        read_capture(link)


def test_a_pipe_does_not_hang_the_reader(capture, tmp_path):
    folder = write_capture(capture, tmp_path / "c")
    (folder / "content.json").unlink()
    os.mkfifo(folder / "content.json")
    with pytest.raises(CaptureError, match="no regular file"):
        read_capture(folder)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/passwd", "sub/x", "run.py", "manifest.json", "", 5])
def test_a_manifest_cannot_name_other_files(capture, tmp_path, name):
    folder = write_capture(capture, tmp_path / "c")
    (tmp_path / "outside.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"].append({"name": name, "num_bytes": 2, "sha256": "0" * 64})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for reader in (read_capture, verify):
        with pytest.raises(CaptureError, match="holds no such file"):
            reader(folder)


@pytest.mark.parametrize("bad_id", ["", "../up", "a/b", ".hidden", "x" * 129, "a\n", "ä"])
def test_an_id_that_cannot_name_a_folder_is_refused(capture, tmp_path, bad_id):
    with pytest.raises(CaptureError, match="id="):
        write_capture(dataclasses.replace(capture, id=bad_id), tmp_path / "c")


def test_sizes_are_bounded_when_read(capture, tmp_path, monkeypatch):
    folder = write_capture(capture, tmp_path / "c")
    with pytest.raises(CaptureError, match="at most 10"):
        read_capture(folder, max_tensor_bytes=10)
    assert read_capture(folder, with_tensors=False).tensors == {}
    with (folder / "manifest.json").open("a") as file:
        file.write(" " * (1 << 17))
    with pytest.raises(CaptureError, match="are read"):
        read_capture(folder)
    monkeypatch.setattr("firetower.capture.folder.MAX_JSON_BYTES", 100)
    with pytest.raises(CaptureError, match="at most 100"):
        write_capture(capture, tmp_path / "d")


def test_a_newer_schema_and_unknown_fields_are_refused(capture):
    documents = to_documents(capture)

    def changed(**fields):
        return documents | {"capture.json": documents["capture.json"] | fields}

    with pytest.raises(CaptureError, match="newer than this firetower"):
        from_documents(changed(schema=2))
    with pytest.raises(CaptureError, match="'code' is unknown"):
        from_documents(changed(code="import os"))
    with pytest.raises(CaptureError, match=r"seeds\.torch: must be a whole number"):
        from_documents(changed(seeds={"torch": "7"}))
    with pytest.raises(CaptureError, match=r"request\.kind"):
        from_documents(changed(request={"kind": "module:function"}))
    with pytest.raises(CaptureError, match=r"request\.kind: missing"):
        from_documents(changed(request={}))
    with pytest.raises(CaptureError, match="missing; this is no capture"):
        from_documents({})


_MUTATIONS = st.tuples(st.sampled_from(["capture.json", "content.json", "fire.json", "request.json"]), _JSON)


@given(mutation=_MUTATIONS, key=st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_capture_of_anyone_reads_or_says_what_is_wrong(mutation, key):
    from firetower.core.codec import encode

    documents = to_documents(CAPTURE_OF_ANYONE)
    name, value = mutation
    table = dict(documents[name])
    table[list(table)[key % len(table)]] = encode(value)
    problem = ""
    try:
        from_documents(documents | {name: table})
    except CaptureError as e:
        problem = str(e)
    assert "\n" not in problem


def _capture_of_anyone():
    import importlib.util

    spec = importlib.util.spec_from_file_location("capture_conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_capture()


CAPTURE_OF_ANYONE = _capture_of_anyone()


def test_nothing_is_overwritten(capture, tmp_path):
    folder = write_capture(capture, tmp_path / "c")
    before = digest_of(folder)
    with pytest.raises(CaptureError, match="exists"):
        write_capture(dataclasses.replace(capture, seeds={}), folder)
    assert digest_of(folder) == before


FULL_DISK = """
import resource, sys
from firetower.capture import RawTensor, freeze_call, write_capture
from firetower.core.codec import fire_from_dict
from firetower.core.errors import CaptureError
import json
fire = fire_from_dict(json.loads(sys.argv[2]))
big = RawTensor(dtype="uint8", shape=(1 << 20,), data=bytes(1 << 20))
capture = freeze_call(fire, prompt_token_ids=[1, 2, 3], tensors={"big": big})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
try:
    write_capture(capture, sys.argv[1] + "/c")
except CaptureError as e:
    print(e)
    sys.exit(7)
"""


def test_a_full_disk_leaves_no_half_capture(capture, tmp_path):
    from firetower.core.codec import dumps

    target = tmp_path / "small"
    fire = dumps(capture.fire)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(target), fire], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "not written" in done.stdout
    assert list(target.iterdir()) == []


def test_an_error_of_any_write_leaves_nothing(capture, tmp_path, monkeypatch):
    num_calls = len(capture_parts(capture)) + 2
    real = os.fsync
    for failing in range(num_calls):
        calls = 0

        def fsync(handle, failing=failing):
            nonlocal calls
            calls += 1
            if calls - 1 == failing:
                raise OSError(28, "No space left on device")
            real(handle)

        monkeypatch.setattr("os.fsync", fsync)
        target = tmp_path / f"t{failing}"
        with pytest.raises(CaptureError, match="No space left"):
            write_capture(capture, target / "c")
        left = [p.name for p in target.iterdir()]
        # the very last one, of the parent, comes when the whole capture is in place already
        assert left == (["c"] if failing == num_calls - 1 else [])


def test_tensors_are_listed_without_their_data(capture, tmp_path):
    folder = write_capture(capture, tmp_path / "c")
    [entry] = read_tensor_table(folder)
    assert (entry.name, entry.dtype, entry.shape) == ("layer 12 down", "float16", (1, 2))
    plain = write_capture(dataclasses.replace(capture, tensors={}), tmp_path / "d")
    assert read_tensor_table(plain) == []
    assert RawTensor(dtype="float16", shape=(1, 2), data=b"\x00\x7e\x00\x3c") == capture.tensors["layer 12 down"]


def test_verify_finds_a_secret_that_somebody_put_in(capture, tmp_path):
    request = Request(kind="call", body={"api_key": "sk-abcdefghijklmnopqrstuvwxyz"}, headers={"cookie": "a=b"})
    folder = write_capture(dataclasses.replace(capture, request=request), tmp_path / "c")
    problems = verify(folder).problems
    assert problems == (
        "header cookie: holds a secret that a capture must not have",
        "body.api_key: holds a secret that a capture must not have",
    )
