"""What must not stay as it is for long: signs of a fault that leaves every value finite.

They end nothing by themselves: each is a record, for `Engine.warnings` and the status. The one that ends a request is
`Sampling.max_repeats`, which is off where it is 0.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from firetower.core.errors import ConfigError
from firetower.core.records import utc_now

MAX_RECORDS = 256
"""Records that are kept; older ones are counted only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InvariantConfig:
    """When to warn.

    Attributes:
        stuck_drafts: judged drafts in a row, of all requests together, with one and the same verdict; 0 is off.
    """

    stuck_drafts: int = 4096

    def __post_init__(self) -> None:
        if self.stuck_drafts < 0:
            raise ConfigError(f"stuck_drafts={self.stuck_drafts}: must be above 0, or 0 for off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InvariantRecord:
    """One warning.

    Attributes:
        created_at: when. step: of the engine.
        name: ``acceptance`` or ``repeated``. value: what it was stuck at: a share of drafts, or a token.
        length: drafts or tokens for which it was. request: whose; None for all.
        message: the same in words.
    """

    created_at: str
    step: int
    name: str
    value: float
    length: int
    request: str | None
    message: str


class Invariants:
    """Counts stretches, and records those that are too long, each once.

    Attributes:
        records: the latest, oldest first. num_records: all there were.
    """

    def __init__(self, config: InvariantConfig) -> None:
        self._config = config
        self._accepted_in_a_row = 0
        self._rejected_in_a_row = 0
        self.records: deque[InvariantRecord] = deque(maxlen=MAX_RECORDS)
        self.num_records = 0

    def judge(self, num_drafts: int, num_accepted: int, *, step: int) -> None:
        """A window's verdict on its drafts: behind the first that was rejected none was judged."""
        most = self._config.stuck_drafts
        if num_drafts < 1 or not most:
            return
        accepted, rejected = self._accepted_in_a_row, self._rejected_in_a_row
        if num_accepted:
            self._accepted_in_a_row += num_accepted
            self._rejected_in_a_row = 0
        is_long = accepted < most <= self._accepted_in_a_row
        if num_accepted < num_drafts:
            self._rejected_in_a_row += 1
            self._accepted_in_a_row = 0
        if is_long:
            what = "a text that goes in a circle, or a check of drafts that reads the drafts themselves"
            self._stuck(1.0, accepted + num_accepted, what, step)
        elif rejected < most <= self._rejected_in_a_row:
            what = "drafts that are made from, or checked against, another state than their own"
            self._stuck(0.0, self._rejected_in_a_row, what, step)

    def repeated(self, request: str, token: int, length: int, *, step: int) -> None:
        """A request was ended by `Sampling.max_repeats`."""
        self._record(
            "repeated", float(token), length, request, step,
            f"request {request}: token {token} stands {length} times in a row: a fault that no sensor sees, or a stuck "
            "model",
        )  # fmt: skip

    def _stuck(self, share: float, length: int, what: str, step: int) -> None:
        message = f"acceptance is stuck at {share} for {length} drafts: {what}"
        self._record("acceptance", share, length, None, step, message)

    def _record(self, name: str, value: float, length: int, request: str | None, step: int, message: str) -> None:
        self.num_records += 1
        self.records.append(
            InvariantRecord(
                created_at=utc_now(), step=step, name=name, value=value, length=length, request=request, message=message
            )
        )  # fmt: skip
