"""A place and what a campaign knows of it, and how a campaign runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum, auto

from firetower.lab.replay.canary import CanaryProbe
from firetower.lab.replay.places import Place
from firetower.lab.replay.records import Isolation


class Condition(Enum):
    """Condition of a seat."""

    NEW = auto()
    OPENING = auto()
    READY = auto()
    SUSPECT = auto()
    """A fire or a lost try there; the canary is due once nothing is under way."""
    STALE = auto()
    """To be restarted before the next try."""
    WAITING = auto()
    """Poisoned or silent, and nobody but its owner can restart it."""
    GONE = auto()
    """Cannot be opened any more; others go on."""


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """A place and what is known of it."""

    place: Place
    probe: CanaryProbe
    condition: Condition = Condition.NEW
    name: str = ""
    in_flight: int = 0
    after: int | None = None
    was_open: bool = False
    num_burned_opens: int = 0
    waits_since: float | None = None
    look_at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a campaign runs.

    Attributes:
        concurrency: requests at once. isolation: see `Isolation`.
        recover_wait_s: how long to wait for a poisoned or silent place that only others can restart.
        stop: asked while watching, after every settled try; True ends the campaign early.
        tick: called about four times a second, and after each event.
        say: told once of each kind of failure, in words that may hold content.
    """

    concurrency: int = 1
    isolation: Isolation = Isolation.NONE
    recover_wait_s: float = 60.0
    stop: Callable[[], bool] | None = None
    tick: Callable[[int], None] = lambda in_flight: None
    say: Callable[[str], None] = lambda text: None
