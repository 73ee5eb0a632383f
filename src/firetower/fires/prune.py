"""Which fires a prune takes: by age, by number, by the size of the file."""

from __future__ import annotations

import dataclasses
import sqlite3
import time

from firetower.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PruneRule:
    """What goes: fires that any given limit is against. A fire's age counts from the last time it was seen.

    Attributes:
        older_than_s: last seen longer ago than this many seconds.
        keep: all but this many, the last seen ones staying.
        max_bytes: the longest unseen ones until the store's live pages fit; an empty store has about 40 KiB.
        content_only: erase token ids only, of fires that have them.

    Raises:
        ConfigError: no limit, a negative one, or ``max_bytes`` together with ``content_only``.
    """

    older_than_s: float | None = None
    keep: int | None = None
    max_bytes: int | None = None
    content_only: bool = False

    def __post_init__(self) -> None:
        limits = {"older_than_s": self.older_than_s, "keep": self.keep, "max_bytes": self.max_bytes}
        for name, value in limits.items():
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: must not be negative")
        if all(value is None for value in limits.values()):
            raise ConfigError("prune: needs at least one limit: --older-than, --keep or --max-bytes")
        if self.content_only and self.max_bytes is not None:
            raise ConfigError("max_bytes: cannot be met by erasing token ids only; leave out one of the two")


def take_victims(
    connection: sqlite3.Connection, rule: PruneRule, now: float | None = None
) -> list[tuple[str, int]]:
    """Delete what ``rule`` names and return its records and counts, longest unseen first.

    Runs inside the caller's transaction, whose rollback makes a dry run of it.
    """
    taken: list[tuple[str, int]] = []
    if rule.older_than_s is not None:
        cutoff_ms = int(((time.time() if now is None else now) - rule.older_than_s) * 1000)
        taken += _take(connection, rule, "last_seen_ms < ?", cutoff_ms)
    if rule.keep is not None:
        newest = "SELECT seq FROM fires ORDER BY last_seen_ms DESC, seq DESC LIMIT ?"
        taken += _take(connection, rule, f"seq NOT IN ({newest})", rule.keep)
    if rule.max_bytes is not None:
        taken += _take_until_it_fits(connection, rule, rule.max_bytes)
    return taken


def _take(
    connection: sqlite3.Connection, rule: PruneRule, condition: str, parameter: int
) -> list[tuple[str, int]]:
    if rule.content_only:
        condition += " AND seq IN (SELECT seq FROM content)"
    rows = connection.execute(
        f"SELECT seq, record, times FROM fires WHERE {condition} ORDER BY last_seen_ms, seq", (parameter,)
    ).fetchall()
    table = "content" if rule.content_only else "fires"
    connection.executemany(f"DELETE FROM {table} WHERE seq = ?", [row[:1] for row in rows])
    return [(record, times) for _, record, times in rows]


def _take_until_it_fits(
    connection: sqlite3.Connection, rule: PruneRule, max_bytes: int
) -> list[tuple[str, int]]:
    """Delete in steps that halve the excess at an average fire's size, in the end one by one."""
    taken: list[tuple[str, int]] = []
    while (excess := _live_bytes(connection) - max_bytes) > 0:
        num_fires = connection.execute("SELECT count(*) FROM fires").fetchone()[0]
        if num_fires == 0:
            break
        step = max(1, excess * num_fires // _live_bytes(connection) // 2)
        oldest = "SELECT seq FROM fires ORDER BY last_seen_ms, seq LIMIT ?"
        taken += _take(connection, rule, f"seq IN ({oldest})", step)
    return taken


def _live_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    live: int = (pages - free) * size
    return live
