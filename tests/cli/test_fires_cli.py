"""``firetower fires``: as a user runs it, through `main`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from firetower.cli.main import main

FIRST = {"dtype": "float16", "bits": "7e00", "row": 1, "column": 10, "shape": [5, 1024]}


def _line(**fields: Any) -> str:
    base: dict[str, Any] = {
        "id": "fire-1",
        "created_at": "2026-11-30T21:44:15Z",
        "model": "SmolLM2",
        "origin": {"stage": "down", "layer": 12, "module": "model.layers.12.mlp.down_proj"},
        "first": FIRST,
        "token_ids": [777001, 777002],
    }
    return json.dumps(base | fields) + "\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store that the variable names; not there yet."""
    path = tmp_path / "data" / "fires.sqlite"
    monkeypatch.setenv("FIRETOWER_STORE", str(path))
    return path


@pytest.fixture
def filled(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Three fires, ids fire-1 to fire-3, oldest first."""
    source = tmp_path / "in.jsonl"
    inf = FIRST | {"bits": "7c00"}
    source.write_text(
        _line()
        + _line(
            id="fire-2", created_at="2026-11-30T21:45:00Z", first=inf, origin={"stage": "swiglu", "layer": 3}
        )
        + _line(id="fire-3", created_at="2026-11-30T21:46:00Z", model="qwen", origin={"stage": "logits"})
    )
    assert main(["fires", "import", str(source)]) == 0
    capsys.readouterr()
    return path


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["fires", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_looking_at_a_store_that_is_not_there_makes_none(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(capsys, "list") == (0, "", f"no fires in {path}\n")
    assert _run(capsys, "list", "--json")[:2] == (0, "[]\n")
    assert _run(capsys, "prune", "--keep", "1")[0] == 0
    for verb in (("show", "x"), ("rm", "x"), ("export",)):
        code, out, err = _run(capsys, *verb)
        assert (code, out) == (1, "")
        assert "does not exist yet" in err
        assert err.count("\n") == 1
    assert not path.parent.exists()


def test_list_is_a_table_newest_first_with_the_next_command(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "list")
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert code == 0
    assert rows[0] == ["ID", "WHERE", "VALUE", "TIMES", "PHASE", "OUTCOME", "CREATED", "MODEL"]
    assert [row[0] for row in rows[2:]] == ["fire-3", "fire-2", "fire-1"]
    assert " ".join(rows[4]) == (
        "fire-1 layer 12 down NaN 7e00 float16 1 unknown imported 2026-11-30 21:44 SmolLM2"
    )
    assert err == "next: firetower fires show fire-3\n"


@pytest.mark.parametrize(
    ("argv", "ids"),
    [
        (["--model", "smol"], ["fire-2", "fire-1"]),
        (["--layer", "12"], ["fire-1"]),
        (["--stage", "logits"], ["fire-3"]),
        (["--kind", "+inf"], ["fire-2"]),
        (["--source", "attach"], []),
        (["--phase", "unknown", "--outcome", "imported", "--limit", "2"], ["fire-3", "fire-2"]),
        (["--since", "2026-11-30T21:45Z", "--until", "2026-11-30T21:46Z"], ["fire-2"]),
        (["--limit", "0"], ["fire-3", "fire-2", "fire-1"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_filters(filled: Path, capsys: pytest.CaptureFixture[str], argv: list[str], ids: list[str]) -> None:
    code, out, _ = _run(capsys, "list", "--json", *argv)
    assert code == 0
    assert [fire["id"] for fire in json.loads(out)] == ids
    assert "777001" not in out


def test_a_limited_list_says_how_many_there_are(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 of 3 fires, newest first; --limit 0 shows all" in _run(capsys, "list", "--limit", "1")[2]
    assert _run(capsys, "list", "--layer", "99")[2] == f"no fires match in {filled}\n"


def test_show_is_a_page_with_next_commands_that_work(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "show", "fire-1")
    assert code == 0
    assert out.splitlines()[0] == "NaN first at layer 12 down (model.layers.12.mlp.down_proj)"
    assert "row 1, column 10 (flat index 1034)" in out
    assert "777001" not in out
    commands = [line.removeprefix("next:").strip() for line in err.splitlines() if "firetower" in line]
    assert len(commands) == 2
    assert main(commands[0].split()[1:]) == 0


def test_show_json_has_token_ids_only_on_request(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(_run(capsys, "show", "fire-1", "--json")[1])["token_ids"] is None
    assert json.loads(_run(capsys, "show", "fire-1", "--json", "--with-content")[1])["token_ids"] == [
        777001,
        777002,
    ]


def test_export_and_import_round_trip(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_file, other = tmp_path / "out.jsonl", tmp_path / "other.sqlite"
    code, out, err = _run(capsys, "export", "-o", str(out_file), "--with-content")
    assert (code, out, err) == (0, "", f"Wrote 3 fires to {out_file}\n")
    assert out_file.read_text() == _run(capsys, "export", "--with-content")[1]
    code, out, err = _run(capsys, "import", str(out_file), "--store", str(other))
    assert (code, out.split()) == (0, ["fire-1", "fire-2", "fire-3"])
    assert f"{out_file}: 3 imported" in err
    assert f"next: firetower fires show fire-3 --store {other}" in err
    assert _run(capsys, "export", "--with-content", "--store", str(other))[1] == out_file.read_text()
    code, out, err = _run(capsys, "import", str(out_file))
    assert (code, out) == (0, "")
    assert "0 imported, 3 skipped (in the store already)" in err
    code, out, _ = _run(capsys, "import", str(out_file), "--json")
    assert json.loads(out) == [{"file": str(out_file), "imported": [], "num_skipped": 3}]


def test_export_takes_ids_or_filters_and_leaves_content_out(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _run(capsys, "export", "fire-2", "fire-1")
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["fire-2", "fire-1"]
    assert "777001" not in out
    out = _run(capsys, "export", "--kind", "nan")[1]
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["fire-1", "fire-3"]
    code, out, err = _run(capsys, "export", "fire-1", "--layer", "0")
    assert (code, out) == (1, "")
    assert "takes ids or filters, not both" in err


def test_export_overwrites_only_with_force(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("mine")
    code, _, err = _run(capsys, "export", "-o", str(target))
    assert (code, target.read_text()) == (1, "mine")
    assert "exists; use --force to replace it" in err
    assert _run(capsys, "export", "-o", str(target), "--force")[0] == 0
    assert len(target.read_text().splitlines()) == 3


def test_import_is_all_or_nothing_and_names_the_line(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (_line() + _line(id="b", origin={})).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    code, out, err = _run(capsys, "import", "-")
    assert (code, out) == (1, "")
    assert err == "firetower: stdin:2: fire.origin.stage: missing; nothing of this file was imported\n"
    assert json.loads(_run(capsys, "list", "--json")[1]) == []
    code, _, err = _run(capsys, "import", "/no/such/file")
    assert code == 1
    assert "No such file or directory; give a file of JSON Lines, or -" in err


def test_prune_prints_what_went_and_a_dry_run_changes_nothing(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "prune", "--keep", "1", "--dry-run")
    assert code == 0
    assert "fire-1" in out
    assert "fire-2" in out
    assert "fire-3" not in out
    assert err == f"would erase 2 fires in {filled}\n"
    code, out, err = _run(capsys, "prune", "--keep", "1", "--json")
    assert json.loads(out) == {"dry_run": False, "content_only": False, "ids": ["fire-1", "fire-2"]}
    assert err == f"erased 2 fires in {filled}\n"
    assert [fire["id"] for fire in json.loads(_run(capsys, "list", "--json")[1])] == ["fire-3"]
    code, out, err = _run(capsys, "prune")
    assert (code, out) == (1, "")
    assert "needs at least one limit: --older-than, --keep or --max-bytes" in err


def test_content_can_go_while_the_fires_stay(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "rm", "fire-1", "--content-only") == (0, "fire-1\n", "erased token ids of 1 fire\n")
    assert _run(capsys, "prune", "--older-than", "0s", "--content-only", "--json")[0] == 0
    exported = _run(capsys, "export", "--with-content")[1]
    assert [json.loads(line)["token_ids"] for line in exported.splitlines()] == [None] * 3


def test_rm_needs_a_unique_beginning_and_is_all_or_none(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "rm", "fire-1", "fire")
    assert (code, out) == (1, "")
    assert "id=fire: fits several fires (fire-1, fire-2, fire-3); give more of the id" in err
    assert _run(capsys, "rm", "fire-1", "fire-2") == (0, "fire-1\nfire-2\n", "erased 2 fires\n")
    assert json.loads(_run(capsys, "rm", "fire-3", "--json")[1]) == {"content_only": False, "ids": ["fire-3"]}


def test_the_flag_wins_over_the_variable(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.sqlite"
    assert _run(capsys, "list", "--store", str(other))[2] == f"no fires in {other}\n"


@pytest.mark.parametrize("verb", ["list", "show x", "export", "prune --keep 1", "rm x", "import /dev/null"])
def test_an_unusable_store_is_one_line_and_exit_1(
    path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path.parent.mkdir()
    path.write_text("not a store\n" * 99)
    code, out, err = _run(capsys, *verb.split())
    assert (code, out) == (1, "")
    assert err.startswith(f"firetower: store={path}: is not a SQLite file; move it away")
    assert err.count("\n") == 1


def test_hostile_text_never_reaches_the_terminal(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\u202e\x9b31m\udc80"
    source = tmp_path / f"in{evil[:4]}.jsonl"
    source.write_text(
        _line(
            model=evil, notes=[evil], origin={"stage": evil, "module": evil}, extra={evil: evil}, runtime=evil
        )
    )
    for argv in (
        ["import", str(source)],
        ["list"],
        ["list", "--json"],
        ["show", "fire"],
        ["show", "f", "--json"],
    ):
        code, out, err = _run(capsys, *argv)
        assert code == 0
        assert (out + err).replace("\n", "").isprintable(), argv
    source.write_text("{" + json.dumps(evil, ensure_ascii=True)[:-1] + '": 1}')
    code, out, err = _run(capsys, "import", str(source))
    assert code == 1
    assert err.rstrip("\n").isprintable()


def test_list_in_a_pipe_that_closes_early_is_quiet(filled: Path) -> None:
    command = f"{sys.executable} -m firetower.cli.main fires export | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_usage_errors_exit_with_2(path: Path) -> None:
    for argv in (["fires"], ["fires", "list", "--kind", "odd"], ["fires", "prune", "--max-bytes", "5X"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


def test_sizes_take_units(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(_run(capsys, "prune", "--max-bytes", "1G", "--json")[1])["ids"] == []
    assert len(json.loads(_run(capsys, "prune", "--max-bytes", "4K", "--json")[1])["ids"]) == 3


def test_a_fire_of_a_bad_weight_says_to_scan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {"name": "w", "shape": [2], "dtype": "float32", "num_pos_inf": 0, "num_neg_inf": 0}
    weight |= {"absmax": 1.0, "zero_frac": 0.0, "headroom": None}
    source = tmp_path / "in.jsonl"
    source.write_text(
        _line(weights=[weight | {"num_nan": 1}]) + _line(id="b", weights=[weight | {"num_nan": 0}])
    )
    assert main(["fires", "import", str(source)]) == 0
    capsys.readouterr()
    assert "next: firetower scan PATH" in _run(capsys, "show", "fire-1")[2]
    assert "scan" not in _run(capsys, "show", "b")[2]


def test_a_page_is_wrapped_to_a_terminal(filled: Path) -> None:
    import os
    import pty

    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "firetower.cli.main", "fires", "show", "fire-2"]
        environ = os.environ | {"COLUMNS": "60"}
        subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environ, timeout=60, check=True)
        lines = os.read(ours, 1 << 16).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert lines[0] == "+Inf first at layer 3 swiglu"
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("    ") for line in lines)
