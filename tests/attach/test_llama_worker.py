"""The tracing child process: results and errors cross it whole, and its death is a clear error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from firetower.attach.llama import LlamaTrace, worker
from firetower.attach.llama.runtime import LlamaOptions
from firetower.attach.llama.worker import serve, trace_from_dict, trace_in_child
from firetower.core.codec import dumps
from firetower.core.errors import FiretowerError, MissingExtraError, TraceError
from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal

FIRE = Fire(
    id="20261130-000000-0000000000",
    created_at="2026-11-30T00:00:00.000Z",
    source="trace",
    runtime="llama-cpp-python 0.0",
    model="m.gguf",
    device="x86_64",
    phase=Phase.PREFILL,
    step=0,
    origin=Signal(stage="down", layer=12, module="blk.12.ffn_down", op="MUL_MAT"),
    first=BadValue(flat_index=7, row=0, column=7, bits=0x7FD6E000, dtype="float32", kind=Kind.NAN),
    outcome=Outcome.RECORDED,
    token_ids=(1, 2),
)
RESULT = LlamaTrace(
    fire=FIRE,
    text="é",
    prompt_ids=(1,),
    token_ids=(2,),
    level="filtered",
    num_steps=2,
    num_checked=92,
    num_integer=0,
    not_covered={"q8_0": 3},
    num_callback_errors=0,
    first_callback_error=None,
    prefill_s=0.5,
    decode_tokens_per_s=None,
    raw_prompt=True,
    runtime="llama-cpp-python 0.0",
)


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_trace_crosses_the_pipe_whole() -> None:
    assert trace_from_dict(json.loads(dumps(RESULT))) == RESULT


def test_pieces_come_as_they_are_made_then_the_result() -> None:
    lines = [dumps({"piece": "a"}), dumps({"piece": "é"}), dumps({"result": RESULT})]
    pieces: list[str] = []
    text = "\n".join(lines)
    code = f"import sys; sys.stdin.read(); sys.stdout.reconfigure(encoding='utf-8'); print({text!r})"
    assert trace_in_child("m.gguf", on_piece=pieces.append, command=child(code)) == RESULT
    assert pieces == ["a", "é"]


def test_the_child_gets_the_whole_job() -> None:
    code = (
        "import json, sys; job = json.load(sys.stdin); "
        "print(json.dumps({'error': 'TraceError', 'message': json.dumps(job, sort_keys=True)}))"
    )
    with pytest.raises(TraceError) as e:
        trace_in_child(
            "m.gguf", options=LlamaOptions(num_threads=3), command=child(code), prompt="é", rerun=False
        )
    job = json.loads(str(e.value))
    assert (job["model_path"], job["arguments"]) == ("m.gguf", {"prompt": "é", "rerun": False})
    assert LlamaOptions(**job["options"]) == LlamaOptions(num_threads=3)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", r"llama\.cpp crashed with SIGABRT; see --debug"),
        (
            "import os; os.write(2, b'ggml.c:1: GGML_ASSERT(x > 0) failed\\n'); os.abort()",
            r"crashed with SIGABRT: ggml\.c:1: GGML_ASSERT\(x > 0\) failed; see --debug",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            r"SIGILL; this build of llama\.cpp uses instructions that this machine lacks; try --no-repack",
        ),
        ("raise SystemExit(5)", r"ended with code 5"),
    ],
    ids=["abort", "assertion", "illegal-instruction", "exit"],
)
def test_a_dead_child_is_one_clear_line(code: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as e:
        trace_in_child("m.gguf", command=child(code))
    assert "\n" not in str(e.value)


def test_an_error_keeps_its_class() -> None:
    for error in (TraceError("model=x: refused"), MissingExtraError("trace", "llama")):
        line = json.dumps({"error": type(error).__name__, "message": str(error)})
        with pytest.raises(type(error)) as e:
            trace_in_child("m.gguf", command=child(f"print({line!r})"))
        assert str(e.value) == str(error)


def test_an_error_without_a_class_here_is_still_for_the_user() -> None:
    with pytest.raises(FiretowerError, match="odd"):
        trace_in_child("m.gguf", command=child("""print('{"error": "Nope", "message": "odd"}')"""))


def test_serve_answers_with_pieces_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(path: str, *, options: LlamaOptions, on_piece: Any, prompt: str) -> LlamaTrace:
        on_piece(prompt)
        return RESULT

    events: list[Any] = []
    monkeypatch.setattr(worker, "trace", fake)
    serve({"model_path": "m", "options": {}, "arguments": {"prompt": "hello"}}, events.append)
    assert events == [{"piece": "hello"}, {"result": RESULT}]


def test_the_real_child_reports_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no such thing")
    with pytest.raises(TraceError, match=r"m\.gguf: not a GGUF file \(starts with b'no s'\)"):
        trace_in_child(path, prompt="x")
