"""Errors that firetower raises on purpose; a room with its own derives them from these.

Messages give ``name=value``, the rule and the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firetower.core.records import Fire


class FiretowerError(Exception):
    """Base of all errors for the user; the CLI prints it in one line and exits with 1."""


class RecordError(FiretowerError, ValueError):
    """A record that cannot be read or written as JSON."""


class ConfigError(FiretowerError, ValueError):
    """An option or environment variable that cannot be understood."""


class BitsError(FiretowerError, ValueError):
    """A bit pattern, or a panel word, that cannot be read as asked."""


class StoreError(FiretowerError):
    """The fires store cannot be opened, read or written; it was left as it was."""


class CaptureError(FiretowerError, ValueError):
    """A capture that cannot be frozen, written, read or trusted."""


class ScanError(FiretowerError):
    """A weight file that cannot be scanned at all."""


class AttachError(FiretowerError):
    """A model that cannot be watched as asked."""


class InvestigateError(FiretowerError):
    """A call that cannot be run twice from the same state."""


class TraceError(FiretowerError):
    """A foreign runtime that cannot be traced."""


class StatsError(FiretowerError, ValueError):
    """Counts or rates that no statistic can be made of."""


class SubjectError(FiretowerError, ValueError):
    """A subject of the lab that is put together wrongly."""


class ReplayError(FiretowerError):
    """A replay that cannot be made as asked, or a campaign that cannot be read or gone on with."""


class MissingExtraError(FiretowerError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'firetower[{extra}]'")


class NonFiniteError(FiretowerError, ArithmeticError):
    """A watched model produced a bad value. ``fire`` says where first.

    Attributes:
        fire: the stored incident, complete with origin and first bad value.
    """

    def __init__(self, fire: Fire, message: str) -> None:
        super().__init__(message)
        self.fire = fire
