"""The store of fires: one SQLite file, used by many threads and processes at once."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, Unpack

from firetower.core.config import store_path
from firetower.core.errors import StoreError
from firetower.core.records import Fire
from firetower.fires.connection import open_connection, refuse_newer, store_errors, wal_path
from firetower.fires.fork import pause_on_fork
from firetower.fires.prune import PruneRule, take_victims
from firetower.fires.query import FireFilter, where
from firetower.fires.rows import COLUMNS, FireRow, from_row, to_row
from firetower.fires.text import visible
from firetower.fires.times import format_ms

_MARKS = ", ".join("?" * len(COLUMNS))
_INSERT = f"INSERT INTO fires ({', '.join(COLUMNS)}) VALUES ({_MARKS}) ON CONFLICT (id) DO NOTHING"
_SELECT = "SELECT seq, created_ms, record, times, token_ids FROM fires LEFT JOIN content USING (seq)"
_PAGE = 256


class AddResult(NamedTuple):
    """What `Store.add_many` did: ids that are new, and how many fires were there already."""

    added: tuple[str, ...]
    num_skipped: int


class Store:
    """Fires in a SQLite file. Safe to share between threads, across processes and over a fork.

    Each change is committed and synced before the call returns, so an id that was shown survives ``kill -9``.
    A write waits up to ``timeout_s`` for other writers.

    Args:
        path: the file; None for `core.config.store_path`. Made with its folder (0600, 0700) if missing.
        readonly: never make the file nor change a fire; also reads from a read-only disk.
        timeout_s: longest wait for another process's lock.

    Raises:
        StoreError: not a store, newer, damaged, locked, full or forbidden; the file was left as it was.
    """

    def __init__(
        self, path: Path | str | None = None, *, readonly: bool = False, timeout_s: float = 10.0
    ) -> None:
        self.path = store_path() if path is None else Path(path).expanduser()
        self.readonly = readonly
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        self._file: tuple[int, int] | None = None
        with self._lock:
            self._open()
        pause_on_fork(self)

    def add(self, fire: Fire) -> Fire:
        """Store a new fire and return it as `get` will; on disk when this returns.

        Raises:
            StoreError: the id is taken, or the store cannot be written.
            RecordError: a field that cannot be stored.
        """
        if not self.add_many([fire]).added:
            raise StoreError(f"id={fire.id}: is in the store already; use bump() to count it again")
        return fire

    def add_many(self, fires: Iterable[Fire]) -> AddResult:
        """Store all fires or, on an error, none; those whose id is in the store already are skipped.

        Raises:
            StoreError: the store cannot be written.
            RecordError: a field that cannot be stored.
        """
        rows = [to_row(fire) for fire in fires]
        with self._write() as connection:
            added = tuple(row.id for row in rows if _insert(connection, row))
        return AddResult(added, len(rows) - len(added))

    def bump(self, fire_id: str, by: int = 1) -> int:
        """Count a fire of the same origin into a stored one, and return the new count.

        Raises:
            StoreError: no fire has this id, or the store cannot be written.
        """
        if by < 1:
            raise StoreError(f"by={by}: must be at least 1")
        now_ms = int(time.time() * 1000)
        with self._write() as connection:
            connection.execute(
                "UPDATE fires SET times = times + ?, last_seen_ms = max(last_seen_ms, ?) WHERE id = ?",
                (by, now_ms, fire_id),
            )
            row = connection.execute("SELECT times FROM fires WHERE id = ?", (fire_id,)).fetchone()
            if row is None:
                raise self._unknown(fire_id)
        count: int = row[0]
        return count

    def get(self, id_or_prefix: str) -> Fire:
        """The fire with this id, or the only one whose id starts so.

        Raises:
            StoreError: none or several match.
        """
        seq = self._find(id_or_prefix)
        with self._read() as connection:
            row = connection.execute(f"{_SELECT} WHERE seq = ?", (seq,)).fetchone()
        if row is None:
            raise self._unknown(id_or_prefix)
        return from_row(*row[2:])

    def last_seen(self, id_or_prefix: str) -> str:
        """When the fire was last counted (UTC, ISO 8601); its creation if it was seen once.

        Raises:
            StoreError: none or several match.
        """
        seq = self._find(id_or_prefix)
        with self._read() as connection:
            row = connection.execute("SELECT last_seen_ms FROM fires WHERE seq = ?", (seq,)).fetchone()
        if row is None:
            raise self._unknown(id_or_prefix)
        return format_ms(row[0])

    def list(self, *, limit: int | None = None, **filters: Unpack[FireFilter]) -> tuple[Fire, ...]:
        """The fires that match, newest first, at most ``limit``."""
        condition, parameters = where(filters)
        with self._read() as connection:
            rows = connection.execute(
                f"{_SELECT} WHERE {condition} ORDER BY created_ms DESC, seq DESC LIMIT ?",
                (*parameters, -1 if limit is None else limit),
            ).fetchall()
        return tuple(from_row(*row[2:]) for row in rows)

    def count(self, **filters: Unpack[FireFilter]) -> int:
        """How many stored fires match; a merged one counts once."""
        condition, parameters = where(filters)
        with self._read() as connection:
            number: int = connection.execute(
                f"SELECT count(*) FROM fires WHERE {condition}", parameters
            ).fetchone()[0]
        return number

    def iterate(self, **filters: Unpack[FireFilter]) -> Iterator[Fire]:
        """The fires that match, oldest first; read a page at a time, no lock held in between."""
        condition, parameters = where(filters)
        select = (
            f"{_SELECT} WHERE {condition} AND (created_ms, seq) > (?, ?) ORDER BY created_ms, seq LIMIT ?"
        )
        after = (-(1 << 63), 0)
        while True:
            with self._read() as connection:
                rows = connection.execute(select, (*parameters, *after, _PAGE)).fetchall()
            for row in rows:
                yield from_row(*row[2:])
            if len(rows) < _PAGE:
                return
            after = rows[-1][:2][::-1]

    def __iter__(self) -> Iterator[Fire]:
        return self.iterate()

    def remove(self, ids: Sequence[str], *, content_only: bool = False) -> tuple[str, ...]:
        """Erase fires, or only their token ids, and return the ids in full. All or none.

        Args:
            ids: full ids or unique prefixes.
            content_only: keep the fires, erase their private content.

        Raises:
            StoreError: an id that none or several match, or a store that cannot be written.
        """
        with self._write() as connection:
            seqs = [self._find(i) for i in ids]
            marks = ",".join("?" * len(seqs))
            rows = connection.execute(
                f"SELECT id FROM fires WHERE seq IN ({marks}) ORDER BY seq", seqs
            ).fetchall()
            table = "content" if content_only else "fires"
            connection.executemany(f"DELETE FROM {table} WHERE seq = ?", [(seq,) for seq in seqs])
        self._fold_log()
        return tuple(row[0] for row in rows)

    def prune(self, rule: PruneRule, *, dry_run: bool = False) -> tuple[Fire, ...]:
        """Erase what ``rule`` names, oldest first, and return it without token ids.

        Args:
            rule: which fires, and whether all of them or only their token ids go.
            dry_run: do all of it, then take it back: the answer is exact.

        Raises:
            StoreError: the store cannot be written.
        """
        with self._write(commit=not dry_run) as connection:
            taken = take_victims(connection, rule)
        if not dry_run:
            self._fold_log()
        return tuple(from_row(record, times, None) for record, times in taken)

    def size_bytes(self) -> int:
        """Bytes on disk of the store and its log."""
        with store_errors(self.path, self.timeout_s):
            return sum(p.stat().st_size for p in (self.path, wal_path(self.path)) if p.exists())

    def set_timeout(self, timeout_s: float) -> None:
        """Change the longest wait for another process's lock."""
        with self._lock:
            self.timeout_s = timeout_s
            if self._connection is not None:
                self._connection.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        with self._lock:
            self._disconnect()
            self._is_closed = True

    def pause(self) -> None:
        """Keep every thread out and close the connection, for a fork; the next use opens it again."""
        self._lock.acquire()
        self._disconnect()

    def resume(self) -> None:
        """End a `pause`."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        connection = open_connection(self.path, readonly=self.readonly, timeout_s=self.timeout_s)
        self._connection, self._file = connection, self._identity()
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock, store_errors(self.path, self.timeout_s):
            if self._is_closed:
                raise StoreError(f"store={visible(str(self.path))}: is closed; open it again")
            if self._file != self._identity():
                # deleted or replaced while open: what is written must be found under the path
                self._disconnect()
            yield self._connection or self._open()

    @contextmanager
    def _write(self, *, commit: bool = True) -> Iterator[sqlite3.Connection]:
        if self.readonly:
            raise StoreError(
                f"store={visible(str(self.path))}: was opened read-only; open it without readonly=True"
            )
        with self._read() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                refuse_newer(connection, self.path)
                yield connection
                connection.execute("COMMIT" if commit else "ROLLBACK")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _find(self, id_or_prefix: str) -> int:
        with self._read() as connection:
            rows = connection.execute(
                "SELECT seq, id FROM fires WHERE id >= ? AND id < ? ORDER BY id LIMIT 4",
                (id_or_prefix, id_or_prefix + "\x7f"),
            ).fetchall()
        if not id_or_prefix or not rows:
            raise self._unknown(id_or_prefix)
        seq, first_id = rows[0]
        if len(rows) > 1 and first_id != id_or_prefix:
            some = ", ".join(row[1] for row in rows[:3]) + (", ..." if len(rows) > 3 else "")
            raise StoreError(f"id={visible(id_or_prefix)}: fits several fires ({some}); give more of the id")
        found: int = seq
        return found

    def _unknown(self, fire_id: str) -> StoreError:
        return StoreError(
            f"id={visible(fire_id)!r}: no such fire in {visible(str(self.path))}; see 'firetower fires list'"
        )

    def _fold_log(self) -> None:
        """Give pages back and fold the log into the file, so that what was erased is on the disk nowhere.

        While another process reads, SQLite puts this off until that reader is done.
        """
        with self._read() as connection:
            # as a script: `execute` takes one step of this pragma, and each step gives one page back
            connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)")


def _insert(connection: sqlite3.Connection, row: FireRow) -> bool:
    cursor = connection.execute(_INSERT, row[:-1])
    if cursor.rowcount != 1:
        return False
    if row.token_ids is not None:
        connection.execute(
            "INSERT INTO content (seq, token_ids) VALUES (?, ?)", (cursor.lastrowid, row.token_ids)
        )
    return True
