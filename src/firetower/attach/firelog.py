"""Where a watch puts its fires: in memory always, in the store where there is one; repeats of one origin are merged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from firetower.core.records import Fire
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

    def record(self, fire: Fire) -> Fire:
        """Store a fire, or count it where its origin is known; returns it with the id it is stored under."""
        known = next((i for i, f in enumerate(self.fires) if f.merge_key == fire.merge_key), None)
        if known is not None:
            return self._count(known, fire)
        self.fires.append(fire)
        if self.store is not None:
            self.store.add(fire)
        return fire

    def repeat(self) -> None:
        """The last fire goes on in the next step of the same sequences."""
        if self.fires:
            self._count(len(self.fires) - 1, self.fires[-1])

    def flush(self) -> None:
        """Write counts that are still only in memory."""
        pending, self._unwritten = self._unwritten, {}
        for fire_id, by in pending.items():
            if self.store is not None:
                self.store.bump(fire_id, by)

    def close(self) -> None:
        """Write what is left and let the store go."""
        self.flush()
        if self.store is not None:
            self.store.close()

    def _count(self, index: int, fire: Fire) -> Fire:
        old = self.fires[index]
        self.fires[index] = dataclasses.replace(old, count=old.count + 1)
        self._unwritten[old.id] = self._unwritten.get(old.id, 0) + 1
        # a burned sequence repeats every step: writing at powers of two keeps the disk out of the decode loop
        if (old.count + 1) & old.count == 0:
            self.flush()
        return dataclasses.replace(fire, id=old.id, count=old.count + 1)
