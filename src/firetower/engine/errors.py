"""Errors of requests: what was refused, and what ended while it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firetower.core.errors import ConfigError, FiretowerError

if TYPE_CHECKING:
    from firetower.core.records import Fire


class RequestError(ConfigError):
    """A request that the engine does not take: the message names the value, the rule and the way out."""


class QueueFullError(FiretowerError):
    """The queue has no room for another request; try again once some have ended."""


class CancelledError(FiretowerError):
    """The request was cancelled, or the engine was closed, before it ended."""


class DeviceMemoryError(FiretowerError):
    """The device had no memory for this request, also after caches were released."""


class SamplingError(FiretowerError):
    """A row that no token can be chosen for: everything masked, or a parameter out of its range."""


class BurnedError(FiretowerError, ArithmeticError):
    """A request that ended because a bad value stood in its own rows; no other request was touched.

    Attributes:
        fire: the stored incident: where first, and with which bits.
        request: id of the request.
        is_retriable: whether the same request may do well when it is sent again: True after a single fire, False where
            the value came back when the work was done again, or where the breaker is open.
    """

    def __init__(self, message: str, *, fire: Fire, request: str, is_retriable: bool) -> None:
        super().__init__(message)
        self.fire = fire
        self.request = request
        self.is_retriable = is_retriable
