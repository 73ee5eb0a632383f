"""A child process of ours that makes tries, and what is known of it when it dies."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from firetower.core.codec import dumps
from firetower.core.errors import RecordError, ReplayError
from firetower.lab.replay.judge import Result, lost
from firetower.lab.replay.places import Variables, environment_with
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.schema import record_from_dict
from firetower.lab.replay.targets import TargetSpec

_GRACE_S = 5.0


class ChildPlace:
    """A child process of ours that holds a model or a callable; a crash or a hang ends the child only.

    Args:
        spec: what it holds.
        variables: of its environment.
        shows_output: let the target's own output through to stderr.
    """

    noun = "worker"
    capacity = 1
    can_restart = True

    def __init__(self, spec: TargetSpec, variables: Variables | None = None, *, shows_output: bool = False) -> None:
        self._spec = spec
        self._variables = variables or {}
        self._shows_output = shows_output
        self._child: subprocess.Popen[str] | None = None
        self._talk: IO[bytes] | None = None
        self._is_aborted = False

    @property
    def is_gone(self) -> bool:
        """Whether there is no child, or it died."""
        return self._child is None or self._child.poll() is not None

    def start(self) -> None:
        """Start the child and wait until the target is loaded."""
        if not self.is_gone:
            return
        self.close()
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
        self._child = subprocess.Popen(
            (sys.executable, "-m", "firetower.lab.replay.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._shows_output else self._talk,
            encoding="utf-8",
            env=environment_with(self._variables),
            # Ctrl-C is for the campaign: it ends its children itself, after writing the journal
            start_new_session=True,
        )
        answer = self._ask(dumps(self._spec), None)
        if isinstance(answer, dict) and "error" in answer:
            self.close()
            raise ReplayError(answer["error"])
        if answer is None:
            reason = f"{self._epitaph()} while it loaded; {self._last_words()}"
            self.close()
            if not self._is_aborted:
                raise ReplayError(f"target={self._spec.text}: the worker {reason}")

    def run(self, request: ReplayRequest) -> Result:
        """Make one try; a child that dies or takes too long loses it and stays dead until it is restarted."""
        started = time.monotonic()
        if self.is_gone:
            return lost("the worker is not running")
        answer = self._ask(dumps(request), request.timeout_s)
        seconds = time.monotonic() - started
        if answer is None:
            reason = "timed out" if seconds >= request.timeout_s else f"the worker {self._epitaph()}"
            return lost(reason, seconds=seconds, message=self._last_words())
        try:
            return record_from_dict(Result, answer, "result")
        except RecordError as e:
            return lost("the worker's answer cannot be read", seconds=seconds, message=str(e))

    def restart(self) -> None:
        """A new child."""
        self.close()
        self.start()

    def abort(self) -> None:
        """Kill the child."""
        self._is_aborted = True
        if self._child is not None and self._child.poll() is None:
            self._child.kill()

    def close(self) -> None:
        """End the child: kindly, so that it writes its fires, then not."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(0 if self._is_aborted else _GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def _ask(self, line: str, timeout_s: float | None) -> dict[str, Any] | None:
        """Write one line, read one; None where the child died or the time is over."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except (BrokenPipeError, ValueError):
            return None
        with selectors.DefaultSelector() as selector:
            # one answer is one line, flushed at once: when the pipe has something, the line is there or coming
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                child.kill()
                child.wait()
                return None
            text = child.stdout.readline()
        try:
            answer = json.loads(text)
        except ValueError:
            child.wait()
            return None
        return answer if isinstance(answer, dict) else None

    def _epitaph(self) -> str:
        """How the child ended."""
        code = None if self._child is None else self._child.poll()
        if code is None or code >= 0:
            return f"ended with code {code}"
        return f"died of {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"

    def _last_words(self) -> str:
        """The last line that the child wrote to stderr."""
        if self._talk is None:
            return ""
        self._talk.seek(0)
        lines = self._talk.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:400] if lines else ""
