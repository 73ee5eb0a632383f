"""Which rows of which cache burned: their poison goes on in every later step and is no new fire."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

from firetower.attach.step import Step


@dataclasses.dataclass(slots=True)
class Burned:
    """Rows of one cache that burned, and the last fire among them."""

    rows: set[int] = dataclasses.field(default_factory=set)
    fire_id: str | None = None


class BurnedRows:
    """Rows burned since their cache was empty, for each cache that is still alive.

    Two requests that take turns have a cache each, and a fire of one is never taken for the other's. Calls whose
    cache cannot be told (tuples, none at all) share one record a thread, which ends where a cache is empty.
    """

    def __init__(self) -> None:
        # by identity: a cache may be a dataclass, which has no hash
        self._by_cache: dict[int, tuple[weakref.ref[Any], Burned]] = {}
        self._unknown = threading.local()

    def of(self, step: Step) -> Burned:
        """What burned before in the cache of a step: nothing, where the cache was empty when it began."""
        cache = _cache(step)
        if cache is None:
            known: Burned = self._unknown.__dict__.setdefault("burned", Burned())
        else:
            known = self._of_cache(cache)
        if _is_first(step):
            known.rows.clear()
        return known

    def note_clean(self, step: Step) -> None:
        """A cache that starts anew has no burned rows left."""
        if (self._by_cache or self._unknown.__dict__) and _is_first(step):
            self._unknown.__dict__.clear()
            self._by_cache.pop(id(_cache(step)), None)

    def _of_cache(self, cache: Any) -> Burned:
        key = id(cache)
        found = self._by_cache.get(key)
        if found is None:
            found = weakref.ref(cache, lambda _: self._by_cache.pop(key, None)), Burned()
            self._by_cache[key] = found
        return found[1]


def _cache(step: Step) -> Any:
    return None if step.call is None or step.call.cache is None else step.call.cache()


def _is_first(step: Step) -> bool:
    return step.call is not None and step.call.num_past == 0
