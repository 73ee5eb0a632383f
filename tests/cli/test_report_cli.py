"""``firetower report`` and ``firetower incident``: as a user runs them, through `main`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from firetower.cli.main import main

DATA = Path(__file__).parents[1] / "lab" / "data"
FIRST = {"dtype": "float16", "bits": "7e00", "row": 1, "column": 10, "shape": [5, 1024]}


def line(**fields: Any) -> str:
    base: dict[str, Any] = {
        "id": "fire-1",
        "created_at": "2026-11-30T21:44:15Z",
        "model": "SmolLM2",
        "origin": {"stage": "down", "layer": 12},
        "first": FIRST,
        "token_ids": [777001, 777002],
    }
    return json.dumps(base | fields) + "\n"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The usual store, with three fires."""
    path = tmp_path / "data" / "fires.sqlite"
    monkeypatch.setenv("FIRETOWER_STORE", str(path))
    source = tmp_path / "in.jsonl"
    source.write_text(line() + line(id="fire-2", origin={"stage": "swiglu", "layer": 3}) + line(id="fire-3"))
    assert main(["fires", "import", str(source)]) == 0
    capsys.readouterr()
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_fire_to_a_file(store, tmp_path, capsys):
    target = tmp_path / "fire.html"
    code, out, err = run(capsys, "report", "fire-1", "-o", str(target))
    assert (code, out) == (0, "")
    assert f"Wrote {target}" in err
    page = target.read_text(encoding="ascii")
    assert page.startswith("<!doctype html>")
    assert "NaN first at layer 12 down" in page
    assert "777001" not in page
    assert target.stat().st_mode & 0o777 == 0o600


def test_no_overwrite_without_force(store, tmp_path, capsys):
    target = tmp_path / "fire.html"
    target.write_text("mine")
    code, _, err = run(capsys, "report", "fire-1", "-o", str(target))
    assert code == 1
    assert "--force" in err
    assert target.read_text() == "mine"
    assert run(capsys, "report", "fire-1", "-o", str(target), "--force")[0] == 0
    assert "doctype" in target.read_text()


def test_a_fire_to_the_terminal(store, capsys):
    code, out, err = run(capsys, "report", "fire-1")
    assert code == 0
    assert out.startswith("NaN first at layer 12 down\n")
    assert "made for this report from what is stored of the fire" in out
    assert "777001" not in out
    assert err.strip() == "next: firetower report fire-1 -o report.html"


def test_content_only_when_asked_for(store, capsys):
    assert "777001 777002" in run(capsys, "report", "fire-1", "--with-content")[1]
    plain = json.loads(run(capsys, "report", "fire-1", "--json")[1])
    assert plain["fire"]["token_ids"] is None
    assert json.loads(run(capsys, "report", "fire-1", "--json", "--with-content")[1])["fire"]["token_ids"] == [
        777001,
        777002,
    ]


def test_all_fires(store, tmp_path, capsys):
    code, out, _ = run(capsys, "report")
    assert code == 0
    assert out.startswith("3 fires\n")
    target = tmp_path / "all.html"
    assert run(capsys, "report", "-o", str(target))[0] == 0
    page = target.read_text()
    assert all(f"fire-{n}" in page for n in (1, 2, 3))
    assert json.loads(run(capsys, "report", "--json")[1])["num_fires"] == 3


def test_a_store_that_is_not_there_is_empty_and_not_made(tmp_path, capsys):
    missing = tmp_path / "none.sqlite"
    code, out, _ = run(capsys, "report", "--store", str(missing))
    assert (code, out.strip()) == (0, "0 fires")
    assert not missing.exists()
    code, _, err = run(capsys, "report", "fire-1", "--store", str(missing))
    assert code == 1
    assert "does not exist yet" in err


def test_an_unknown_fire(store, capsys):
    code, _, err = run(capsys, "report", "nope")
    assert code == 1
    assert "no such fire" in err


def test_an_incident_file(tmp_path, capsys):
    source = str(DATA / "hybrid-moe-offload.json")
    code, out, _ = run(capsys, "report", source)
    assert code == 0
    assert "No single cause is proven." in out
    target = tmp_path / "i.html"
    assert run(capsys, "report", source, "-o", str(target))[0] == 0
    assert "Incident: 21 fires" in target.read_text()
    assert json.loads(run(capsys, "report", source, "--json")[1])["num_traced"] == 13


def test_a_fire_in_a_file(tmp_path, capsys):
    source = tmp_path / "fire.json"
    source.write_text(line())
    assert run(capsys, "report", str(source))[1].startswith("NaN first at layer 12 down")


@pytest.mark.parametrize("content", ["", "[1]", '{"colour": 1}', "\x00"])
def test_a_file_that_is_none_of_them(tmp_path, capsys, content):
    source = tmp_path / "x.json"
    source.write_text(content)
    code, out, err = run(capsys, "report", str(source))
    assert (code, out) == (1, "")
    assert err.startswith("firetower: ")
    assert err.count("\n") == 1


def test_json_and_a_file_at_once_is_an_error(store, capsys):
    code, _, err = run(capsys, "report", "--json", "-o", "x.html")
    assert code == 1
    assert "leave one of them out" in err


def test_a_thousand_fires_in_five_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FIRETOWER_STORE", str(tmp_path / "many.sqlite"))
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(id=f"fire-{n}", origin={"stage": "down", "layer": n % 40}) for n in range(1000)))
    assert main(["fires", "import", str(source)]) == 0
    start = time.perf_counter()
    assert main(["report", "-o", str(tmp_path / "all.html")]) == 0
    assert time.perf_counter() - start < 5
    assert (tmp_path / "all.html").stat().st_size <= 2_000_000


def test_it_works_without_torch_and_statistics_are_not_asked_of_a_plain_fire(store, tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'scipy', 'statsmodels'): sys.modules[name] = None\n"
        "from firetower.cli.main import main\n"
        f"sys.exit(main(['report', '-o', {str(tmp_path / 'x.html')!r}]) or main(['report', 'fire-1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_incident_show_and_store(store, tmp_path, capsys):
    source = str(DATA / "hybrid-moe-offload.json")
    code, out, err = run(capsys, "incident", "show", source)
    assert code == 0
    assert "11 of 13 traced began in routed expert rows" in " ".join(out.split())
    assert "24 clean tries against the point rate .118, 90 against" in " ".join(out.split())
    assert "next: firetower report" in err
    code, out, err = run(capsys, "incident", "store", source)
    assert code == 0
    assert len(out.split()) == 2
    assert "E: not stored, the first bad value of attention is not known" in err
    assert run(capsys, "incident", "store", source)[1].strip() == ""


def test_incident_read_then_show(tmp_path, capsys):
    target = tmp_path / "incident.json"
    arguments = ["--patterns", str(DATA / "llama-like.toml"), "--what", "three fires", "-o", str(target)]
    code, out, err = run(capsys, "incident", "read", str(DATA / "llama-like.log"), *arguments)
    assert (code, out) == (0, "")
    assert "3 fires in 10 lines" in err
    code, out, _ = run(capsys, "incident", "show", str(target))
    assert code == 0
    assert out.startswith("three fires\n")
    code, out, _ = run(
        capsys, "incident", "read", str(DATA / "llama-like.log"), "--patterns", str(DATA / "llama-like.toml")
    )
    assert json.loads(out)["fires_total"] == 3


def test_incident_across(store, capsys):
    code, out, _ = run(capsys, "incident", "across", "fire-1", "fire-3")
    assert code == 0
    assert "- layer: 12 (2) [invariant" in out
    code, out, _ = run(capsys, "incident", "across", "--json")
    assert json.loads(out)["num_fires"] == 3


def test_incident_errors_are_one_line(tmp_path, capsys):
    for argv in (
        ("incident", "show", "no.json"),
        ("incident", "read", "no.log", "--patterns", str(DATA / "llama-like.toml")),
        ("incident", "read", str(DATA / "llama-like.log"), "--patterns", "no.toml"),
        ("incident", "across", "--store", str(tmp_path / "no.sqlite")),
    ):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (1, ""), argv
        assert err.count("\n") == 1


def test_a_closed_pipe_is_quiet(store):
    command = f"{sys.executable} -m firetower.cli.main report | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "3 fires\n"
    assert "Traceback" not in done.stderr
