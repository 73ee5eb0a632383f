"""One stretch of repetition: where it starts, how often, of what, and how far it has risen."""

from __future__ import annotations

import dataclasses

from firetower.detect.records import FindingKind

FILL_CHARACTERS = frozenset(" \t\n\r\f\v\u00a0\u3000=-_*#~.+|·•…0123456789AfFxX") | {
    chr(c) for c in range(0x2500, 0x25A0)
}
"""Characters that people, code, tables, hex and base64 repeat on purpose (box drawing included)."""

MAX_EPISODES = 16
"""Warned stretches, and fires, kept for one stream: it bounds the memory."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Episode:
    """A stretch of one repeated unit; ``count`` grows while it lasts.

    ``is_fill``: the unit is one that is repeated on purpose. ``is_special``: it is the text of a special
    token (``<unk>``). ``is_one_glyph``: it is one character, spaces not counted. ``is_sign``: long enough to
    be a fire with a second sign; ``warns``: long enough to warn. ``level``: how far `Episodes.offer` has
    seen it rise.
    """

    kind: FindingKind
    start: int
    count: int
    sample: str
    period: int = 1
    is_fill: bool = False
    is_special: bool = False
    is_one_glyph: bool = False
    is_sign: bool = False
    warns: bool = False
    fires: bool = False
    is_open: bool = True
    level: int = 0


class Episodes:
    """The stretches of one stream worth keeping: first warned ones, first fires, the longest silent one."""

    def __init__(self) -> None:
        self._warned: list[Episode] = []
        self._fires: list[Episode] = []
        self._silent: Episode | None = None
        self._has_risen = False

    def offer(self, episode: Episode) -> None:
        """Look at a stretch, again after it grew; keeps it when it is worth it."""
        level = episode.is_sign + episode.warns + episode.fires
        if level > episode.level:
            episode.level = level
            self._has_risen = True
        for is_wanted, bucket in ((episode.warns, self._warned), (episode.fires, self._fires)):
            is_new = is_wanted and not any(e is episode for e in bucket)
            if is_new and len(bucket) < MAX_EPISODES:
                bucket.append(episode)
        if episode.is_sign and (self._silent is None or episode.count > self._silent.count):
            self._silent = episode

    def take_risen(self) -> bool:
        """Whether any stretch rose since this was last asked."""
        risen, self._has_risen = self._has_risen, False
        return risen

    def all(self) -> list[Episode]:
        """Every kept stretch once, first one first."""
        silent = [] if self._silent is None else [self._silent]
        unique = {id(e): e for e in (*self._warned, *self._fires, *silent)}
        return sorted(unique.values(), key=lambda e: (e.start, e.kind))
