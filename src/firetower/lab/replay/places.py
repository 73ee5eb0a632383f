"""Where tries run: a server that others started, a child process of ours, or this process itself."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

from firetower.core.codec import dumps
from firetower.core.errors import RecordError, ReplayError
from firetower.lab.replay.client import Client
from firetower.lab.replay.judge import Result, lost
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.schema import record_from_dict
from firetower.lab.replay.targets import Runner, TargetSpec, open_runner

Variables = Mapping[str, str | None]
"""Environment variables to set; None unsets one."""

_POLL_S = 0.5
_GRACE_S = 5.0


class Place(Protocol):
    """One process in which tries run. Every method may block; `abort` may be called from another thread.

    Attributes:
        noun: ``server``, ``worker``: for its name in the journal.
        capacity: tries at once.
        can_restart: whether `restart` gives a process that nothing is left of.
    """

    noun: str
    capacity: int
    can_restart: bool

    @property
    def is_gone(self) -> bool:
        """Whether the process died, so that only `restart` brings it back."""
        ...

    def start(self) -> None:
        """Make sure that it runs.

        Raises:
            ReplayError: it cannot be started, and will not be however often one tries.
        """
        ...

    def run(self, request: ReplayRequest) -> Result:
        """Make one try; whatever goes wrong is a lost try."""
        ...

    def restart(self) -> None:
        """End the process and start it anew. Raises as `start`."""
        ...

    def abort(self) -> None:
        """End what is under way, soon."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class ServerPlace:
    """A server that runs by itself; it can be restarted where the user gave a command for that.

    Args:
        send: sends one request.
        client: to ask whether it is up.
        capacity: requests at once.
        restart_command: run by the shell, with ``variables`` set.
        restart_wait_s: for the server to be up again.
    """

    noun = "server"

    def __init__(
        self,
        client: Client,
        *,
        capacity: int,
        send: Callable[[ReplayRequest], Result] | None = None,
        restart_command: str | None = None,
        variables: Variables | None = None,
        restart_wait_s: float = 600.0,
    ) -> None:
        self.capacity = capacity
        self.can_restart = restart_command is not None
        self._client = client
        self._send = send or client.send
        self._command = restart_command
        self._variables = variables or {}
        self._wait_s = restart_wait_s
        self._stopped = threading.Event()

    @property
    def is_gone(self) -> bool:
        """Never: others may bring it back."""
        return False

    def start(self) -> None:
        """Nothing: it runs, or the canary will say that it does not."""

    def run(self, request: ReplayRequest) -> Result:
        """Send one request."""
        return self._send(request)

    def restart(self) -> None:
        """Run the restart command and wait until the server answers again.

        Raises:
            ReplayError: the command fails, or the server does not come up.
        """
        assert self._command is not None
        done = subprocess.run(
            self._command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env=_environment(self._variables),
            check=False,
        )
        if done.returncode:
            raise ReplayError(f"restart_command: ended with {done.returncode}; it must restart the server and return")
        self._wait_until_up()

    def abort(self) -> None:
        """Break the answers that are under way."""
        self._stopped.set()
        self._client.abort()

    def close(self) -> None:
        """Nothing is held."""

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline and not self._stopped.is_set():
            answer = self._client.get("/v1/models")
            if answer is not None and answer[0] < 500:
                return
            self._stopped.wait(_POLL_S)
        if not self._stopped.is_set():
            raise ReplayError(f"restart_command: the server is not up after {self._wait_s:g} s; see --restart-wait")


class LocalPlace:
    """This process: nothing separates one try from the next, and nothing ends one that hangs."""

    noun = "this process"
    capacity = 1
    can_restart = False

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._runner: Runner | None = None

    @property
    def is_gone(self) -> bool:
        """Never, as long as anybody can ask."""
        return False

    def start(self) -> None:
        """Load the model or import the callable, once."""
        if self._runner is None:
            self._runner = open_runner(self._spec)

    def run(self, request: ReplayRequest) -> Result:
        """Make one try here."""
        assert self._runner is not None
        return self._runner.run(request)

    def restart(self) -> None:
        """This process cannot restart itself; never called, see ``can_restart``."""
        raise ReplayError("this process cannot be restarted; use --isolate-tries restart")

    def abort(self) -> None:
        """A call in this thread cannot be ended from outside."""

    def close(self) -> None:
        """Let go of the model."""
        if self._runner is not None:
            self._runner.close()


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
            env=_environment(self._variables),
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


def _environment(variables: Variables) -> dict[str, str]:
    environment = dict(os.environ)
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
