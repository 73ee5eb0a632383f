"""Scale-out over a Ray cluster: every place is an actor on some worker; the driver alone writes the journal.

A worker that is lost loses the try it was making, which is made again; finished tries are in the driver's journal.
Workers take the server's key from their own environment: it is never sent through the cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
from collections.abc import Iterator
from typing import Any

from firetower.core.codec import dumps
from firetower.core.errors import MissingExtraError, ReplayError
from firetower.lab.replay.arms import Arm
from firetower.lab.replay.judge import Result, lost
from firetower.lab.replay.places import Place, ServerPlace
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.schema import record_from_dict
from firetower.lab.replay.settings import CampaignSettings
from firetower.lab.replay.targets import TargetSpec, open_runner

_POLL_S = 0.5
_START_S = 600.0


class Maker:
    """What runs on a worker of the cluster: a model, a callable, or a client of a server.

    Args:
        target: JSON of a `TargetSpec`.
        client: JSON of the options of a `Client` where tries go over HTTP, else empty.
    """

    def __init__(self, target: str, client: str = "") -> None:
        spec = record_from_dict(TargetSpec, json.loads(target), "target")
        if client:
            from firetower.lab.replay.client import Client, parse_url

            self._run = Client(parse_url(spec.text), **json.loads(client)).send
        else:
            self._run = open_runner(spec).run

    def ready(self) -> bool:
        """Answers once it is loaded."""
        return True

    def run(self, request: str) -> str:
        """Make one try: JSON of a `ReplayRequest` to JSON of a `Result`."""
        return dumps(self._run(record_from_dict(ReplayRequest, json.loads(request), "request")))


class RayCluster:
    """A connection to a cluster, for as long as the context lasts.

    Args:
        settings: ``ray`` is its address (``auto``, ``host:port``, ``ray://...``).

    Raises:
        MissingExtraError: ray is not installed. ReplayError: no cluster there.
    """

    def __init__(self, settings: CampaignSettings) -> None:
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise MissingExtraError("--ray", "ray") from None
        self._ray = ray
        self._settings = settings
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(address=settings.ray, log_to_driver=settings.shows_output, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise ReplayError(f"ray={settings.ray}: no cluster answers there: {e}") from e

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def places(self, arm: Arm) -> Iterator[Place]:
        """Actors for an arm, as many as tries at once; a server is one place that actors send to."""
        s = self._settings
        if not s.is_server:
            for _ in range(s.concurrency):
                yield ActorPlace(self._ray, s.target, arm)
            return
        yield _RemoteServerPlace(self._ray, s, arm)


class ActorPlace:
    """One actor, somewhere on the cluster. ``client`` are the options of a client where it sends over HTTP."""

    noun = "worker"
    capacity = 1
    can_restart = True

    def __init__(self, ray: Any, spec: TargetSpec, arm: Arm, *, client: str = "") -> None:
        self._ray = ray
        self._spec = spec
        self._variables = {k: v or "" for k, v in arm.variables.items()}
        self._client = client
        self._actor: Any = None
        self._is_aborted = False

    @property
    def is_gone(self) -> bool:
        """Whether the worker was lost."""
        return self._actor is None

    def start(self) -> None:
        """Start the actor somewhere and wait until its target is loaded.

        Raises:
            ReplayError: the target cannot be loaded there, or no worker is free.
        """
        if self._actor is not None:
            return
        options: dict[str, Any] = {"scheduling_strategy": "SPREAD", "max_restarts": 0, "num_cpus": 1}
        if self._variables:
            options["runtime_env"] = {"env_vars": self._variables}
        actor = self._ray.remote(Maker).options(**options).remote(dumps(self._spec), self._client)
        self._actor = actor
        try:
            self._wait(actor.ready.remote(), _START_S)
        except self._ray.exceptions.RayError as e:
            self.close()
            if not self._is_aborted:
                raise ReplayError(f"ray: no worker can make tries: {_cause(e)}") from e

    def run(self, request: ReplayRequest) -> Result:
        """Make one try on the worker; one that is lost with its worker is a lost try."""
        actor = self._actor
        if actor is None:
            return lost("the worker is not running")
        try:
            answer = self._wait(actor.run.remote(dumps(request)), request.timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            self.close()
            return lost("timed out", seconds=request.timeout_s)
        except self._ray.exceptions.RayError as e:
            self.close()
            return lost("the worker was lost", message=_cause(e))
        return record_from_dict(Result, json.loads(answer), "result")

    def restart(self) -> None:
        """Another actor."""
        self.close()
        self.start()

    def abort(self) -> None:
        """Kill the actor."""
        self._is_aborted = True
        self.close()

    def close(self) -> None:
        """Kill the actor; a try that it was making is lost."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    def _wait(self, ref: Any, timeout_s: float) -> Any:
        return self._ray.get(ref, timeout=timeout_s)


class _RemoteServerPlace(ServerPlace):
    """A server that workers of the cluster send to, as many as tries at once; a lost one is replaced."""

    def __init__(self, ray: Any, settings: CampaignSettings, arm: Arm) -> None:
        super().__init__(settings.make_client(arm), send=self._send_from_worker, **settings.server_options(arm))
        options = json.dumps(settings.client_options())
        spec = TargetSpec(kind=settings.target.kind, text=arm.url or settings.target.text)
        self._senders = [ActorPlace(ray, spec, Arm(name=arm.name), client=options) for _ in range(settings.concurrency)]
        self._idle: queue.SimpleQueue[ActorPlace] = queue.SimpleQueue()
        for sender in self._senders:
            self._idle.put(sender)

    def abort(self) -> None:
        """Kill the senders."""
        super().abort()
        for sender in self._senders:
            sender.abort()

    def close(self) -> None:
        """Kill the senders."""
        for sender in self._senders:
            sender.close()

    def _send_from_worker(self, request: ReplayRequest) -> Result:
        sender = self._idle.get()
        try:
            sender.start()
            return sender.run(request)
        finally:
            self._idle.put(sender)


def _cause(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__
