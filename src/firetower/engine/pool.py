"""The pool of cache pages, and that of state slots: who holds which, counted, so that several may hold one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from firetower.core.errors import ConfigError


class Pool:
    """Things ``0 .. size - 1``, each free, held by one or more, or in quarantine.

    What may hold a bad value goes into quarantine when its last holder lets it go, and comes back by
    `release_quarantined` only, once it has been cleared and found clean. Lowest numbers are given out first, so that
    a run that is repeated gets the same ones.

    Args:
        size: how many there are.
        noun: what they are called in errors: ``page``, ``slot``.
    """

    def __init__(self, size: int, noun: str) -> None:
        if size < 1:
            raise ConfigError(f"num_{noun}s={size}: must be at least 1")
        self.size = size
        self.noun = noun
        self._free = list(range(size))
        self._holders = [0] * size
        self._quarantined: set[int] = set()
        self._suspect: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many `take` can give."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many have at least one holder."""
        return self.size - len(self._free) - len(self._quarantined)

    @property
    def quarantined(self) -> frozenset[int]:
        """Those that wait to be cleared."""
        return frozenset(self._quarantined)

    def holders(self, index: int) -> int:
        """How many hold one."""
        return self._holders[index]

    def take(self, count: int) -> list[int]:
        """Give out ``count``, each with one holder.

        Raises:
            ConfigError: fewer are free; ask `num_free` first.
        """
        if not 0 <= count <= len(self._free):
            raise ConfigError(
                f"count={count}: must be from 0 to the {len(self._free)} {self.noun}s that are free; ask num_free first"
            )
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for index in taken:
            self._holders[index] = 1
        return taken

    def share(self, indices: Iterable[int]) -> None:
        """One more holder for each of them, all of which must be held."""
        for index in indices:
            self._check_held(index)
            self._holders[index] += 1

    def give_back(self, indices: Sequence[int], *, is_burned: bool = False) -> list[int]:
        """One holder less for each.

        Args:
            indices: held ones.
            is_burned: whether a bad value may stand in them: they go into quarantine once no holder is left, whoever
                the last one is.

        Returns:
            Those that went into quarantine.
        """
        out = []
        for index in indices:
            self._check_held(index)
            self._holders[index] -= 1
            if is_burned:
                self._suspect.add(index)
            if self._holders[index]:
                continue
            if index in self._suspect:
                self._suspect.remove(index)
                self._quarantined.add(index)
                out.append(index)
            else:
                heapq.heappush(self._free, index)
        return out

    def release_quarantined(self, indices: Iterable[int]) -> None:
        """Those that were cleared and found clean are free again."""
        for index in indices:
            if index not in self._quarantined:
                raise ConfigError(f"{self.noun}={index}: is not in quarantine; release each once")
            self._quarantined.remove(index)
            heapq.heappush(self._free, index)

    def _check_held(self, index: int) -> None:
        if not 0 <= index < self.size or self._holders[index] < 1:
            raise ConfigError(f"{self.noun}={index}: nobody holds it; give back as often as was taken")
