"""Trace in a child process: a llama.cpp that aborts, traps or is killed ends the child, not the caller.

ggml answers a failed assertion with ``abort()`` and a build for another CPU with an illegal instruction;
neither can be caught in Python. The child reads one job as JSON on stdin and answers with one JSON event a
line on stdout: ``{"piece": text}``, then ``{"result": trace}`` or ``{"error": class name, "message": text}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from firetower.attach.llama import LlamaTrace, trace
from firetower.attach.llama.runtime import LlamaOptions
from firetower.core import errors
from firetower.core.codec import dumps, fire_from_dict
from firetower.core.errors import FiretowerError, TraceError

_TRAPS = {"SIGILL": "this build of llama.cpp uses instructions that this machine lacks; try --no-repack, or "}
_REBUILD = (
    "rebuild it: CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall --no-binary llama-cpp-python "
    "llama-cpp-python"
)


def trace_in_child(
    model_path: Path | str,
    *,
    options: LlamaOptions | None = None,
    on_piece: Callable[[str], None] | None = None,
    command: tuple[str, ...] = (sys.executable, "-m", "firetower.attach.llama.worker"),
    **arguments: Any,
) -> LlamaTrace:
    """`firetower.attach.llama.trace`, in a process of its own.

    Args:
        model_path: as for `trace`; so are ``options``, ``on_piece`` and ``arguments`` (``prompt``,
            ``max_tokens``, ``level``, ``rerun``, ``raw``).
        command: what to run.

    Raises:
        TraceError: also when the child dies; the message names the signal.
        FiretowerError: whatever `trace` raises.
    """
    options = options or LlamaOptions()
    job = {"model_path": str(model_path), "options": dataclasses.asdict(options), "arguments": arguments}
    with tempfile.TemporaryFile() as talk:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.debug else talk,
            encoding="utf-8",
        )
        try:
            result = _converse(child, dumps(job), on_piece)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if result is not None:
            return result
        raise TraceError(_epitaph(child.returncode, talk))


def _converse(
    child: subprocess.Popen[str], job: str, on_piece: Callable[[str], None] | None
) -> LlamaTrace | None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin as stdin:
            stdin.write(job)
    except BrokenPipeError:
        pass  # it died before reading: the exit status tells how
    with child.stdout as stdout:
        for line in stdout:
            event = json.loads(line)
            if "result" in event:
                child.wait()
                return trace_from_dict(event["result"])
            if "error" in event:
                raise _error(event["error"], event["message"])
            if on_piece is not None:
                on_piece(event["piece"])
    child.wait()
    return None


def _error(name: str, message: str) -> FiretowerError:
    kind = getattr(errors, name, FiretowerError)
    error: FiretowerError = kind.__new__(kind, message)  # not every class takes the message alone
    error.args = (message,)
    return error


def _epitaph(code: int, talk: IO[bytes]) -> str:
    talk.seek(0)
    lines = [line.strip() for line in talk.read().decode("utf-8", "replace").splitlines() if line.strip()]
    reason = next(
        (line for line in lines if "ASSERT" in line or "error" in line.lower()), lines[-1] if lines else ""
    )
    because = f": {reason}" if reason else ""
    if code >= 0:
        return f"llama.cpp: the tracing process ended with code {code}{because} (see --debug)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    advice = _TRAPS.get(name, "")
    return f"llama.cpp crashed with {name}{because}; {advice + _REBUILD if advice else 'see --debug'}"


def trace_from_dict(data: Mapping[str, Any]) -> LlamaTrace:
    """Undo ``encode(LlamaTrace)``."""
    fields = dict(data)
    fields["fire"] = None if data["fire"] is None else fire_from_dict(data["fire"])
    fields["prompt_ids"], fields["token_ids"] = tuple(data["prompt_ids"]), tuple(data["token_ids"])
    return LlamaTrace(**fields)


def serve(job: Mapping[str, Any], emit: Callable[[Mapping[str, Any]], None]) -> None:
    """Run one job, giving its events to ``emit``."""
    try:
        result = trace(
            job["model_path"],
            options=LlamaOptions(**job["options"]),
            on_piece=lambda piece: emit({"piece": piece}),
            **job["arguments"],
        )
    except FiretowerError as e:
        emit({"error": type(e).__name__, "message": str(e)})
    else:
        emit({"result": result})


def main() -> None:
    """The child: events go to the real stdout; whatever llama.cpp prints there goes to stderr instead."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:
        os.dup2(2, 1)

        def emit(event: Mapping[str, Any]) -> None:
            events.write(dumps(event) + "\n")
            events.flush()

        try:
            serve(json.load(sys.stdin), emit)
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(130)  # the parent is gone or going, and says so itself


if __name__ == "__main__":
    main()
