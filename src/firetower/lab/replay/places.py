"""Where tries run: a server that others started, or this process itself; `child` has processes of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from firetower.core.errors import ReplayError
from firetower.lab.replay.client import Client
from firetower.lab.replay.judge import Result
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.targets import Runner, TargetSpec, open_runner

Variables = Mapping[str, str | None]
"""Environment variables to set; None unsets one."""

_POLL_S = 0.5


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
            env=environment_with(self._variables),
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


def environment_with(variables: Variables) -> dict[str, str]:
    """This process's environment with some variables set or unset."""
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
