"""``firetower trace``: arguments, output, exit codes and the stored fire; llama.cpp itself is played."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firetower.attach.llama import LlamaTrace, runtime, worker
from firetower.attach.llama.runtime import LlamaOptions
from firetower.cli.main import main
from firetower.core.errors import TraceError
from firetower.core.records import (
    BadValue,
    Fire,
    Kind,
    Outcome,
    Phase,
    Signal,
    TensorSummary,
    new_fire_id,
    utc_now,
)
from firetower.fires.store import Store

CLEAN = LlamaTrace(
    fire=None,
    text="Paris.",
    prompt_ids=(1, 2, 3),
    token_ids=(4, 5),
    level="filtered",
    num_steps=3,
    num_checked=1276,
    num_integer=0,
    not_covered={},
    num_callback_errors=0,
    first_callback_error=None,
    prefill_s=0.1,
    decode_tokens_per_s=61.52,
    raw_prompt=False,
    runtime="llama-cpp-python 0.3.36",
)


def burnt() -> LlamaTrace:
    weight = TensorSummary(
        name="blk.12.ffn_down.weight (row 77)",
        shape=(1536,),
        dtype="q4_1",
        num_nan=32,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=0.7,
        zero_frac=0.0,
        headroom=None,
    )
    fire = Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="trace",
        runtime="llama-cpp-python 0.3.36",
        model="model.gguf",
        device="x86_64",
        phase=Phase.PREFILL,
        step=0,
        origin=Signal(stage="down", layer=12, module="blk.12.ffn_down", op="MUL_MAT"),
        first=BadValue(
            flat_index=77, row=0, column=77, bits=0x7FD6E000, dtype="float32", kind=Kind.NAN, position=0
        ),
        outcome=Outcome.RECORDED,
        weights=(weight,),
        notes=("the weight itself is non-finite: blk.12.ffn_down.weight row 77",),
        token_ids=(1, 2, 3),
    )
    return dataclasses.replace(CLEAN, fire=fire, text="", token_ids=(), decode_tokens_per_s=None, num_steps=1)


Play = Callable[[LlamaTrace], dict[str, Any]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Make the child answer with a given trace; returns what it was asked."""

    def set_up(result: LlamaTrace) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def fake(path: Path, *, on_piece: Any, **arguments: Any) -> LlamaTrace:
            asked.update(arguments, path=path)
            if on_piece is not None and result.text:
                on_piece(result.text)
            return result

        monkeypatch.setattr(worker, "trace_in_child", fake)
        monkeypatch.setattr(runtime, "require_llama_cpp", lambda: None)
        return asked

    return set_up


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_clean_run_prints_the_text_and_says_what_was_checked(
    play: Play, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(CLEAN)
    assert main(["trace", str(model)]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert (
        "clean: 1,276 tensors checked in 3 steps at level filtered, 61.5 tokens/s (llama-cpp-python 0.3.36)"
        in err
    )
    assert not list(Store().iterate())


def test_a_fire_is_shown_stored_and_exits_3(
    play: Play, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = burnt()
    assert result.fire is not None
    play(result)
    assert main(["trace", str(model)]) == 3
    out, err = capsys.readouterr()
    for part in (
        "NaN first at layer 12 down (blk.12.ffn_down)",
        "MUL_MAT",
        "row 0, column 77",
        "7fd6e000",
        "itself",
    ):
        assert part in out
    assert "burnt: 1,276 tensors checked in 1 step at level filtered (" in err
    assert f"next: firetower fires show {result.fire.id}" in err
    assert f"firetower scan {model}" in err
    assert "firetower bits 7fd6e000 --dtype float32" in err
    assert Store().get(result.fire.id) == result.fire


def test_the_store_can_be_another_or_none(
    play: Play, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = burnt()
    play(result)
    assert main(["trace", str(model), "--no-store"]) == 3
    assert "fires show" not in capsys.readouterr().err
    other = tmp_path / "other.sqlite"
    assert main(["trace", str(model), "--store", str(other)]) == 3
    assert f"--store {other}" in capsys.readouterr().err
    assert [f.id for f in Store(other).iterate()] == [result.fire.id if result.fire else ""]
    assert not list(Store().iterate())


def test_a_store_that_fails_does_not_hide_the_fire(
    play: Play, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(burnt())
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"not a store" * 1000)
    assert main(["trace", str(model), "--store", str(broken)]) == 3
    out, err = capsys.readouterr()
    assert "NaN first at layer 12 down" in out
    assert "the fire is not stored: " in err
    assert "fires show" not in err


@pytest.mark.parametrize("with_content", [False, True], ids=["private", "with-content"])
def test_json_has_it_all_and_token_ids_on_request_only(
    play: Play, model: Path, capsys: pytest.CaptureFixture[str], with_content: bool
) -> None:
    play(burnt())
    assert main(["trace", str(model), "--json", *(["--with-content"] if with_content else [])]) == 3
    data = json.loads(capsys.readouterr().out)
    assert (data["fire"]["first"]["bits"], data["stored"], data["num_checked"]) == (0x7FD6E000, True, 1276)
    assert data["fire"]["token_ids"] == ([1, 2, 3] if with_content else None)
    assert ("prompt_ids" in data, "token_ids" in data) == (with_content, with_content)


def test_what_was_not_looked_at_is_said(play: Play, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(dataclasses.replace(CLEAN, not_covered={"q8_0": 4, "q4_0": 1}, raw_prompt=True))
    assert main(["trace", str(model)]) == 0
    err = capsys.readouterr().err
    assert "not covered: 5 tensors of a type that cannot be checked (1 q4_0, 4 q8_0)" in err
    assert "no chat template that llama.cpp knows" in err
    play(dataclasses.replace(CLEAN, num_checked=0))
    assert main(["trace", str(model)]) == 0
    assert "nothing was checked" in capsys.readouterr().err


def test_firetowers_own_failure_is_never_called_clean(
    play: Play, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(dataclasses.replace(CLEAN, num_callback_errors=2, first_callback_error="ValueError: x"))
    assert main(["trace", str(model)]) == 1
    err = capsys.readouterr().err
    assert "incomplete: 1,276 tensors" in err
    assert "failed on 2 tensors, which were not checked: ValueError: x" in err


def test_options_reach_the_trace(play: Play, model: Path) -> None:
    asked = play(CLEAN)
    options = ["--threads", "3", "--ubatch", "8", "--gpu-layers", "2", "--no-repack", "--flash-attn", "off"]
    rest = ["-p", "hello", "-n", "5", "--level", "full", "--no-rerun", "--raw", "--debug"]
    assert main(["trace", str(model), "--runtime", "llama", *options, *rest]) == 0
    assert asked == {
        "path": model,
        "prompt": "hello",
        "max_tokens": 5,
        "level": "full",
        "rerun": False,
        "raw": True,
        "options": LlamaOptions(
            num_threads=3, ubatch_size=8, num_gpu_layers=2, repack=False, flash_attention="off", debug=True
        ),
    }


def test_control_characters_of_the_model_do_not_reach_the_terminal(
    play: Play, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(dataclasses.replace(CLEAN, text="a\x1b[2Jb\nc"))
    main(["trace", str(model)])
    assert capsys.readouterr().out == "a\\x1b[2Jb\nc\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"", "not a GGUF file"), (b"PK\x03\x04", "not a GGUF file (starts with b'PK")],
    ids=["missing", "empty", "zip"],
)
def test_a_wrong_file_is_one_clear_line(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    play(CLEAN)
    path = tmp_path / "wrong.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"firetower: model={path}: {message}")
    assert err.count("\n") == 1


def test_a_folder_is_refused(play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(CLEAN)
    assert main(["trace", str(tmp_path)]) == 1
    assert "not a file; give the .gguf itself" in capsys.readouterr().err


def test_without_the_extra_the_error_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["trace", str(model)]) == 1
    assert "pip install 'firetower[llama]'" in capsys.readouterr().err


def test_a_crash_is_a_user_error(
    play: Play, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*args: Any, **kwargs: Any) -> LlamaTrace:
        raise TraceError("llama.cpp crashed with SIGABRT; see --debug")

    play(CLEAN)
    monkeypatch.setattr(worker, "trace_in_child", crash)
    assert main(["trace", str(model)]) == 1
    assert capsys.readouterr().err == "firetower: llama.cpp crashed with SIGABRT; see --debug\n"


@pytest.mark.parametrize("arguments", [["--runtime", "vllm"], ["-n", "0"], ["--level", "all"], ["-n", "x"]])
def test_usage_errors_exit_2(model: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["trace", str(model), *arguments])
    assert e.value.code == 2
