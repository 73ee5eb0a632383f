"""Everything a campaign is asked to do, in one record, and which of it makes two campaigns the same one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from firetower.core.codec import dumps
from firetower.core.errors import ReplayError
from firetower.lab.replay.arms import REMOVED, Arm
from firetower.lab.replay.client import Client, parse_url
from firetower.lab.replay.records import Isolation, SeedMode
from firetower.lab.replay.request import Edits
from firetower.lab.replay.targets import TargetKind, TargetSpec

MAX_TRIES = 1_000_000
MAX_CONCURRENCY = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    """What is replayed how often, where and how; see docs/reference/replay.md.

    Attributes:
        target: where. tries: of each arm. arms: at least one. edits: of every request.
        seed_mode: see `SeedMode`. seed: of the order and of fresh seeds.
        isolation: None takes what suits the target. concurrency: requests at once.
        confidence: of every figure. exclude_rate: to hold clean tries against.
        watching: an early stop is allowed. stop_after_fires: while watching, fires that end it.
        counts_errors: a 5xx or a broken answer is a fire. max_attempts: for a try that is lost.
        timeout_s, idle_s: for an answer. recover_wait_s, restart_wait_s: for a place to be well again.
        restart_command: of a server. ca_file: certificates to trust. reads_all: do not end a burned answer.
        ray: address of a cluster, or None. shows_output: of targets in child processes.

    Raises:
        ReplayError: values that cannot be, or do not go together.
    """

    target: TargetSpec
    tries: int
    arms: tuple[Arm, ...]
    edits: Edits = dataclasses.field(default_factory=Edits)
    seed_mode: SeedMode = SeedMode.CAPTURED
    seed: int = 0
    isolation: Isolation | None = None
    concurrency: int = 1
    confidence: float = 0.95
    exclude_rate: float | None = None
    watching: bool = False
    stop_after_fires: int | None = None
    counts_errors: bool = False
    max_attempts: int = 3
    timeout_s: float = 3600.0
    idle_s: float = 600.0
    recover_wait_s: float = 30.0
    restart_wait_s: float = 600.0
    restart_command: str | None = None
    ca_file: str | None = None
    reads_all: bool = False
    ray: str | None = None
    shows_output: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("tries", self.tries, MAX_TRIES),
            ("concurrency", self.concurrency, MAX_CONCURRENCY),
            ("max_attempts", self.max_attempts, MAX_TRIES),
        ):
            if not 1 <= value <= most:
                raise ReplayError(f"{name}={value}: must be between 1 and {most:,}")
        for name, seconds in (("timeout", self.timeout_s), ("idle_timeout", self.idle_s)):
            if not 0 < seconds < 1e7:
                raise ReplayError(f"{name}={seconds:g}: must be a number of seconds above 0")
        if self.stop_after_fires is not None and not self.watching:
            raise ReplayError("stop_after_fires: stopping early needs --watch, else the exact interval does not hold")
        if len({a.name for a in self.arms}) != len(self.arms):
            raise ReplayError("arms: two have one name")
        self._check_target()

    @property
    def how_isolated(self) -> Isolation:
        """What separates tries: as asked, else none for a server and a fresh process after a fire elsewhere."""
        if self.isolation is not None:
            return self.isolation
        return Isolation.NONE if self.is_server else Isolation.RESTART

    @property
    def is_server(self) -> bool:
        """Whether tries go over HTTP."""
        return self.target.kind is TargetKind.SERVER

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits: equal for settings whose tries may be put together in one campaign."""
        return hashlib.sha256(dumps(self.identity()).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """What must be the same to go on with a campaign; waits, retries and concurrency may change."""
        return {
            "target": {"kind": self.target.kind, "text": self.target.text, **self._model_options()},
            "tries": self.tries,
            "arms": [{"name": a.name, "settings": _shown(a.settings)} for a in self.arms],
            "edits": self.shown_edits(),
            "seed_mode": self.seed_mode,
            "seed": self.seed,
            "isolation": self.how_isolated,
            "confidence": self.confidence,
            "watching": self.watching,
            "stop_after_fires": self.stop_after_fires,
            "counts_errors": self.counts_errors,
        }

    def shown_edits(self) -> dict[str, Any]:
        """The edits as the campaign's file has them."""
        e = self.edits
        plain = {"max_tokens": e.max_tokens, "model": e.model, "strip_images": e.strip_images or None}
        named = {f"set.{k}": v for k, v in _shown(e.fields).items()}
        return {k: v for k, v in plain.items() if v is not None} | named

    def client_options(self) -> dict[str, Any]:
        """How answers are read, as keyword arguments of a `Client`."""
        return {"ca_file": self.ca_file, "cuts": not self.reads_all, "counts_errors": self.counts_errors}

    def make_client(self, arm: Arm) -> Client:
        """The client of an arm's server."""
        return Client(parse_url(arm.url or self.target.text), **self.client_options())

    def server_options(self, arm: Arm) -> dict[str, Any]:
        """Keyword arguments of an arm's `ServerPlace`; one try at a time where each gets a server of its own."""
        return {
            "capacity": 1 if self.how_isolated is Isolation.PROCESS else self.concurrency,
            "restart_command": self.restart_command,
            "variables": arm.variables,
            "restart_wait_s": self.restart_wait_s,
        }

    def _model_options(self) -> dict[str, str]:
        t = self.target
        is_model = t.kind is TargetKind.MODEL
        return {"device": t.device, "dtype": t.dtype, "level": t.level} if is_model else {}

    def _check_target(self) -> None:
        how = self.how_isolated
        if self.restart_command is not None and not self.is_server:
            raise ReplayError("restart_command: is for servers; models and callables are restarted without one")
        if self.is_server and how is not Isolation.NONE and self.restart_command is None:
            raise ReplayError(f"isolate_tries={how}: a server needs --restart-command for that; without it: none")
        if not self.is_server and how is Isolation.NONE and self.concurrency > 1 and self.ray is None:
            raise ReplayError(
                f"concurrency={self.concurrency}: one process makes one try at a time; use --isolate-tries restart"
            )
        for arm in self.arms:
            if arm.url is not None:
                parse_url(arm.url)
                if not self.is_server:
                    raise ReplayError(f"arm={arm.name}: a url needs a server as --target")
            if arm.variables and how is not Isolation.PROCESS and (self.is_server or how is Isolation.NONE):
                way = "--isolate-tries process --restart-command" if self.is_server else "--isolate-tries process"
                raise ReplayError(f"arm={arm.name}: env.* needs processes of its own: {way}")


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A removed field is null in files."""
    return {k: None if v is REMOVED else v for k, v in settings.items()}
