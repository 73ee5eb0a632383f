"""A stored fire alone: its summaries are all there is; nothing can be run."""

from __future__ import annotations

from firetower.core.records import Fire


class StoredSubject:
    """A subject of one part. Its verdict is rarely decided: a summary does not tell how a value got there."""

    def __init__(self, fire: Fire) -> None:
        self.fire = fire

    @property
    def name(self) -> str:
        """The fire's id."""
        return self.fire.id
