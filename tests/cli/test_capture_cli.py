"""``firetower capture``: as a user runs it, through `main`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from firetower.capture import (
    CaptureFolder,
    Environment,
    ModelInfo,
    Output,
    RawTensor,
    freeze_call,
    freeze_request,
    read_capture,
)
from firetower.cli.main import main
from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal

WORDS = "private words of a user"


@pytest.fixture
def fire() -> Fire:
    return Fire(
        id="20261130-214415-3f9a2c41d7",
        created_at="2026-11-30T21:44:15.123Z",
        source="attach",
        runtime="transformers 5.24",
        model="SmolLM2",
        device="x86_64",
        phase=Phase.DECODE,
        step=3,
        origin=Signal(stage="down", layer=12, module="model.layers.12.mlp.down_proj"),
        first=BadValue(flat_index=10, row=0, column=10, bits=0x7FC00000, dtype="float32", kind=Kind.NAN),
        outcome=Outcome.RAISED,
        token_ids=(777001,),
    )


@pytest.fixture
def stored(fire: Fire, own_data_folder: Path) -> Path:
    """The captures folder with a call and a chat request in it; returns the folder of the call."""
    call = freeze_call(
        fire,
        prompt_token_ids=[101, 102, 103],
        sampling={"max_new_tokens": 8},
        seeds={"torch": 3},
        engine_settings={"level": "layers"},
        model=ModelInfo(name="SmolLM2", vocabulary_size=5000, special_ids=(0, 1)),
        environment=Environment(device="test cpu", python="3.11", versions={"torch": "2.13"}),
        outputs=[Output(text=WORDS, token_ids=(5, 6))],
        tensors={"state": RawTensor(dtype="float32", shape=(2, 2), data=bytes(16))},
    )
    chat = freeze_request(
        {"model": "q\x1b[31m", "messages": [{"role": "user", "content": WORDS}], "api_key": "x" * 20},
        headers={"Authorization": "Bearer abcdefgh12345678"},
        findings=[{"kind": "empty output", "severity": "fire", "reason": "no text in any field"}],
        environment=Environment(device="test cpu"),
    )
    folder = CaptureFolder()
    folder.add(chat)
    path = folder.add(call).path
    os.utime(path / "manifest.json", (4e9, 4e9))  # the newest
    folder.add(call)
    return path


def _run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    code = main(["capture", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_looking_where_nothing_is_makes_nothing(capsys, own_data_folder):
    code, out, err = _run(capsys, "list")
    assert (code, out) == (0, "")
    assert err.startswith("no captures in ")
    assert _run(capsys, "list", "--json")[1] == "[]\n"
    assert _run(capsys, "prune", "--keep", "0")[0] == 0
    for verb in (("show", "x"), ("verify", "x"), ("pack", "x", "-o", "y"), ("redact", "x", "-o", "y")):
        code, out, err = _run(capsys, *verb)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert "neither a folder nor an id" in err
    assert not own_data_folder.exists()


def test_list_is_a_table_newest_first(capsys, stored, fire):
    code, out, err = _run(capsys, "list")
    assert code == 0
    lines = out.splitlines()
    assert lines[3].split()[0] == fire.id
    assert "NaN at layer 12 down" in lines[3]
    assert " 2 " in lines[3]
    assert "empty output" in lines[4]
    assert "\x1b" not in out
    assert err == f"next: firetower capture show {fire.id}\n"
    code, out, err = _run(capsys, "list", "--limit", "1")
    assert "1 of 2 captures" in err
    rows = json.loads(_run(capsys, "list", "--json")[1])
    assert [(r["count"], r["num_prompt_tokens"]) for r in rows] == [(2, 3), (1, None)]


def test_an_unreadable_capture_does_not_hide_the_others(capsys, stored):
    (stored / "capture.json").write_text("{}")
    code, out, _ = _run(capsys, "list")
    assert code == 0
    assert "unreadable" in out
    assert "empty output" in out


def test_show_says_what_is_in_it_and_what_is_not_without_content(capsys, stored, fire):
    code, out, err = _run(capsys, "show", fire.id)
    assert code == 0
    for part in (
        "Capture of NaN first at layer 12 down (7fc00000 float32)",
        "2 times",
        "3 prompt tokens",
        "sampling max_new_tokens=8",
        "seeds torch=3",
        "choice 0: 23 characters, 2 tokens",
        "state: 2x2 float32",
        "torch 2.13",
        "level = layers",
        "files not hashed",
    ):
        assert part in out, part
    assert WORDS not in out
    assert "101" not in out
    assert f"firetower capture redact {fire.id} -o {fire.id}-redacted" in err
    assert WORDS in _run(capsys, "show", stored, "--with-content")[1]
    code, out, err = _run(capsys, "show", CaptureFolder().captures()[1].id)
    assert "header authorization" in out
    assert "body.api_key" in out
    assert "cannot be sent" not in out
    assert "firetower capture redact" not in err
    assert "\x1b" not in out


def test_show_json_leaves_content_out_unless_asked(capsys, stored):
    plain = _run(capsys, "show", stored, "--json")[1]
    assert set(json.loads(plain)) == {"capture.json", "fire.json"}
    assert WORDS not in plain
    full = json.loads(_run(capsys, "show", stored, "--json", "--with-content")[1])
    assert full["content.json"]["outputs"][0]["text"] == WORDS


def test_verify_answers_with_its_exit_code(capsys, stored):
    code, out, _ = _run(capsys, "verify", stored, CaptureFolder().captures()[1].id)
    assert code == 0
    assert out.count("sound") == 2
    (stored / "request.json").write_text("{}")
    code, out, _ = _run(capsys, "verify", stored)
    assert code == 3
    assert ": 1 problem, " in out
    assert "request.json: has 2 bytes" in out
    code, out, _ = _run(capsys, "verify", stored, "--json")
    assert code == 3
    assert json.loads(out)[0]["problems"]
    assert _run(capsys, "verify", stored.parent)[0] == 1


def test_pack_then_unpack(capsys, stored, tmp_path):
    code, out, err = _run(capsys, "pack", stored, "-o", tmp_path / "c.tar.gz")
    assert (code, out) == (0, "")
    assert "word for word" in err
    assert f"Wrote {tmp_path / 'c.tar.gz'}" in err
    assert _run(capsys, "pack", stored, "-o", tmp_path / "c.tar.gz")[0] == 1
    assert _run(capsys, "pack", stored, "-o", tmp_path / "c.tar.gz", "--force")[0] == 0
    code, out, err = _run(capsys, "unpack", tmp_path / "c.tar.gz", "-o", tmp_path / "back")
    assert code == 0
    assert "sound, digest " in out
    assert read_capture(tmp_path / "back") == read_capture(stored)
    (tmp_path / "bad.tar.gz").write_bytes(b"nothing")
    code, _, err = _run(capsys, "unpack", tmp_path / "bad.tar.gz", "-o", tmp_path / "other")
    assert code == 1
    assert err.count("\n") == 1


def test_redact_says_that_nobody_measured_yet(capsys, stored, tmp_path):
    target = tmp_path / "redacted"
    code, out, err = _run(capsys, "redact", stored, "-o", target, "--seed", "4")
    assert code == 0
    assert out == "3 token ids replaced; still fires: not measured\n"
    assert f"firetower replay {target}" in err
    page = _run(capsys, "show", target)[1]
    assert "still fires: not measured" in page
    assert "3 token ids replaced by random ones below 5,000" in page
    assert "dropped outputs, tensors" in page
    assert "word for word" not in _run(capsys, "pack", target, "-o", tmp_path / "r.tar.gz")[2]
    result = read_capture(target)
    assert result.prompt_token_ids != ((101, 102, 103),)
    assert result.redaction.seed == 4
    assert json.loads(_run(capsys, "redact", stored, "-o", tmp_path / "j", "--json")[1])["still_fires"] is None
    code, _, err = _run(capsys, "redact", CaptureFolder().captures()[1].id, "-o", tmp_path / "k")
    assert (code, err.count("\n")) == (1, 1)
    assert "no prompt token ids" in err
    options = ("--vocabulary-size", "10", "--special-ids", "0,1,2,3", "--keep-special")
    assert _run(capsys, "redact", stored, "-o", tmp_path / "l", *options)[0] == 0
    assert all(4 <= i < 10 for i in read_capture(tmp_path / "l").prompt_token_ids[0])


def test_prune_removes_and_says_what(capsys, stored, fire):
    code, out, err = _run(capsys, "prune", "--keep", "1", "--dry-run")
    assert code == 0
    assert "would remove 1 capture," in err
    assert len(CaptureFolder().captures()) == 2
    code, out, err = _run(capsys, "prune", "--keep", "1", "--json")
    assert len(json.loads(out)["captures"]) == 1
    assert "removed 1 capture," in err
    assert _run(capsys, "prune")[0] == 1
    assert _run(capsys, "prune", "--max-bytes", "0K")[0] == 0
    assert CaptureFolder().captures() == []


def test_another_folder_of_captures(capsys, stored, tmp_path):
    assert _run(capsys, "list", "--captures", tmp_path / "none")[1] == ""
    assert json.loads(_run(capsys, "list", "--captures", stored.parent, "--json")[1])


@pytest.mark.parametrize("option", [("--limit", "-1"), ("--limit", "x")])
def test_wrong_usage_exits_with_2(capsys, option):
    with pytest.raises(SystemExit) as e:
        main(["capture", "list", *option])
    assert e.value.code == 2
