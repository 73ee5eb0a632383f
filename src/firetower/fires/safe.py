"""The store as inference sees it: it may fail, and inference goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from firetower.core.records import Fire
from firetower.fires.fork import pause_on_fork
from firetower.fires.store import Store
from firetower.fires.text import visible

T = TypeVar("T")

_logger = logging.getLogger("firetower.fires")


class SafeStore:
    """Adds fires and never raises: a failure is counted, logged once and kept as status.

    The store is opened at the first fire, and again after a failure. After a failed write the next ones do
    not wait for locks until one succeeds: a stuck lock stalls one step, not each.

    Args:
        store: an open store, its path, or None for the default path.
        timeout_s: longest wait for another process's lock; the step waits with it.

    Attributes:
        failures: fires or counts that could not be written.
        last_error: what the last of them said, in one line; None while all went well.
    """

    def __init__(self, store: Store | Path | str | None = None, *, timeout_s: float = 5.0) -> None:
        self._is_given = isinstance(store, Store)
        self._store = store if isinstance(store, Store) else None
        self._path = None if isinstance(store, Store) else store
        self._timeout_s = self._next_timeout_s = store.timeout_s if isinstance(store, Store) else timeout_s
        self._lock = threading.Lock()
        self.failures = 0
        self.last_error: str | None = None
        pause_on_fork(self, calls_others=True)

    def add(self, fire: Fire) -> Fire | None:
        """Store a fire; None, and one more failure, when that did not work."""
        return self._try(lambda store: store.add(fire))

    def bump(self, fire_id: str, by: int = 1) -> int | None:
        """Count a fire into a stored one; None, and one more failure, when that did not work."""
        return self._try(lambda store: store.bump(fire_id, by))

    def close(self) -> None:
        """Close the store; the next fire opens it again if it was given as a path."""
        with self._lock:
            if self._store is not None:
                self._store.close()
            if not self._is_given:
                self._store = None

    def pause(self) -> None:
        """Keep every thread out, for a fork."""
        self._lock.acquire()

    def resume(self) -> None:
        """End a `pause`."""
        self._lock.release()

    def _try(self, action: Callable[[Store], T]) -> T | None:
        with self._lock:
            try:
                result = action(self._open())
                self._wait(self._timeout_s)
            except Exception as e:  # noqa: BLE001 - the promise of this class: whatever it is, inference goes on
                self._note(e)
                self._wait(0)
                return None
            return result

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store(self._path, timeout_s=self._next_timeout_s)
        return self._store

    def _wait(self, timeout_s: float) -> None:
        self._next_timeout_s = timeout_s
        if self._store is not None and self._store.timeout_s != timeout_s:
            self._store.set_timeout(timeout_s)

    def _note(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = visible(f"{error}" or type(error).__name__)
        if self.failures == 1:
            _logger.warning(
                "fires are not kept: %s (inference goes on; later failures are only counted)", self.last_error
            )


def keep_fire(fire: Fire, target: Store | str | Path | Literal[False] | None) -> list[str]:
    """Store one fire; a store that fails is a note, since the finding is worth more than its copy.

    Args:
        fire: the incident.
        target: the default store (None), a path, a `Store`, or False for nowhere.

    Returns:
        What to tell the user, empty when all went well.
    """
    if target is False:
        return []
    store = SafeStore(target)
    try:
        return [] if store.add(fire) is not None else [f"the fire was not stored: {store.last_error}"]
    finally:
        store.close()
