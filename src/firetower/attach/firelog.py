"""Where a watch puts its fires: in memory always, in the store where there is one; repeats of one origin are merged."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Literal

from firetower.core.records import Fire
from firetower.fires.fork import pause_on_fork
from firetower.fires.safe import SafeStore
from firetower.fires.store import Store


class FireLog:
    """Fires of one watch. A store that fails is counted and never stops inference.

    Args:
        store: the default store (None), a path, a `Store`, or False for memory only.
    """

    def __init__(self, store: Store | str | Path | Literal[False] | None) -> None:
        self.fires: list[Fire] = []
        self.store = None if store is False else SafeStore(store)
        self._unwritten: dict[str, int] = {}
        # never held while the store writes: a fork waits for this lock and for the store's
        self._lock = threading.Lock()
        pause_on_fork(self)

    def record(self, fire: Fire) -> Fire:
        """Store a fire, or count it where its origin is known; returns it with the id it is stored under."""
        with self._lock:
            known = next((i for i, f in enumerate(self.fires) if f.merge_key == fire.merge_key), None)
            if known is None:
                self.fires.append(fire)
            else:
                fire = dataclasses.replace(fire, id=self.fires[known].id, count=self._count(known))
        if known is not None:
            self._flush_at_powers_of_two(fire.count)
        elif self.store is not None:
            self.store.add(fire)
        return fire

    def repeat(self, fire_id: str | None) -> None:
        """A fire goes on in the next step of the same sequences; the last one where it is not known which."""
        with self._lock:
            if not self.fires:
                return
            count = self._count(next((i for i, f in enumerate(self.fires) if f.id == fire_id), -1))
        self._flush_at_powers_of_two(count)

    def flush(self) -> None:
        """Write counts that are still only in memory."""
        with self._lock:
            pending, self._unwritten = self._unwritten, {}
        for fire_id, by in pending.items():
            if self.store is not None:
                self.store.bump(fire_id, by)

    def close(self) -> None:
        """Write what is left and let the store go."""
        self.flush()
        if self.store is not None:
            self.store.close()

    def pause(self) -> None:
        """Keep every thread out, for a fork."""
        self._lock.acquire()

    def resume(self) -> None:
        """End a `pause`."""
        self._lock.release()

    def _count(self, index: int) -> int:
        fire = self.fires[index]
        self.fires[index] = dataclasses.replace(fire, count=fire.count + 1)
        self._unwritten[fire.id] = self._unwritten.get(fire.id, 0) + 1
        return fire.count + 1

    def _flush_at_powers_of_two(self, count: int) -> None:
        # a burned sequence repeats every step: this keeps the disk out of the decode loop
        if count & (count - 1) == 0:
            self.flush()
