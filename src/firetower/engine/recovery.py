"""What is done about a burn: fail, retry, or heal; within limits, and until a breaker says that it is no use.

Pure decisions: no device, no clock of its own.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from enum import StrEnum

from firetower.core.errors import ConfigError
from firetower.engine.guard import Burn


class OnFire(StrEnum):
    """What an engine does about a request that burns."""

    FAIL = "fail"
    """End it with a `firetower.engine.errors.BurnedError`."""
    RETRY = "retry"
    """Start again from the prompt; tokens that were handed on are produced again and compared."""
    HEAL = "heal"
    """Go back to the state before the window and run the window again on the reference path."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Limits of recovery.

    Attributes:
        on_fire: what to do.
        max_per_request: recoveries of one request. max_per_minute: of all requests together.
        breaker_fires: fires at one origin within ``breaker_s`` seconds that open the breaker for it; while it is open,
            requests that burn there fail at once. It closes when no fire came for so long, or by `Recovery.reset`.
    """

    on_fire: OnFire = OnFire.FAIL
    max_per_request: int = 3
    max_per_minute: int = 60
    breaker_fires: int = 5
    breaker_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_per_request", "max_per_minute", "breaker_fires"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1; on_fire='fail' recovers nothing")
        if not self.breaker_s > 0:
            raise ConfigError(f"breaker_s={self.breaker_s}: must be above 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do about one burn; ``reason`` says why not what was configured, None where it is that."""

    action: OnFire
    reason: str | None = None
    is_breaker_open: bool = False


class Recovery:
    """Counts fires and recoveries.

    Attributes:
        config: the limits.
        num_recovered: recoveries that were begun.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self.config = config
        self.num_recovered = 0
        self._recent: deque[float] = deque()
        self._fires: dict[str, deque[float]] = {}

    def decide(self, burn: Burn, *, num_recoveries: int, now: float) -> Decision:
        """What to do about a burn, which is counted.

        Args:
            burn: what burned.
            num_recoveries: of its request so far.
            now: seconds of any clock that does not go back.
        """
        origin = f"{burn.signal.name} ({burn.kind})"
        times = self._fires.setdefault(origin, deque())
        times.append(now)
        self._forget(now)
        config = self.config
        if len(times) >= config.breaker_fires:
            reason = f"the breaker is open: {len(times)} fires at {origin} within {config.breaker_s:g} s"
            return Decision(action=OnFire.FAIL, reason=reason, is_breaker_open=True)
        if config.on_fire is OnFire.FAIL:
            return Decision(action=OnFire.FAIL)
        if num_recoveries >= config.max_per_request:
            return Decision(action=OnFire.FAIL, reason=f"{num_recoveries} recoveries of this request are the limit")
        if len(self._recent) >= config.max_per_minute:
            reason = f"{len(self._recent)} recoveries within a minute are the limit"
            return Decision(action=OnFire.FAIL, reason=reason)
        self._recent.append(now)
        self.num_recovered += 1
        return Decision(action=config.on_fire)

    def open_breakers(self, now: float) -> dict[str, int]:
        """Origins whose breaker is open, with their fires within the time that counts."""
        self._forget(now)
        return {origin: len(t) for origin, t in self._fires.items() if len(t) >= self.config.breaker_fires}

    def reset(self) -> None:
        """Close every breaker and forget what was counted, after the cause has been seen to."""
        self._recent.clear()
        self._fires.clear()

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0] <= now - 60.0:
            self._recent.popleft()
        for origin, times in list(self._fires.items()):
            while times and times[0] <= now - self.config.breaker_s:
                times.popleft()
            if not times:
                del self._fires[origin]
