"""Opening the SQLite file: checks that leave a foreign, newer or damaged file alone, pragmas, errors."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from firetower.core.errors import StoreError
from firetower.fires.migrations import MIGRATIONS, migrate, schema_version
from firetower.fires.migrations.v0001_create import APPLICATION_ID
from firetower.fires.text import visible

_logger = logging.getLogger("firetower.fires")

_MAGIC = b"SQLite format 3\0"
_ELSEWHERE = "set FIRETOWER_STORE (or --store) to a file elsewhere"


def open_connection(path: Path, *, readonly: bool, timeout_s: float) -> sqlite3.Connection:
    """Open the store at ``path``, making and upgrading it unless ``readonly``.

    A read-only store still upgrades an older file where it may; on a read-only disk it reads it as it is.

    Raises:
        StoreError: not a store, newer, damaged, locked, full or forbidden; the file was left as it was.
    """
    with store_errors(path, timeout_s):
        if readonly and not path.exists():
            raise StoreError(f"{_name(path)}: does not exist; firetower makes it at the first fire")
        if not readonly:
            _create(path)
        check_file(path, timeout_s)
        if readonly and not _may_write(path):
            return _open_as_it_is(path, timeout_s)
        return _open_writable(path, readonly=readonly, timeout_s=timeout_s)


def check_file(path: Path, timeout_s: float) -> None:
    """Refuse, before SQLite may write to it, a file that is not a store of this version or an older one.

    Raises:
        StoreError: a folder, a device, another format, another program's database, or a newer store.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise StoreError(f"{_name(path)}: is {what}; {_ELSEWHERE}")
    with path.open("rb") as f:
        header = f.read(100)
    if not header:
        return
    if not header.startswith(_MAGIC):
        raise StoreError(f"{_name(path)}: is not a SQLite file; move it away, or {_ELSEWHERE}")
    _refuse_newer(path, int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big"))
    if _size(wal_path(path)):
        # the log counts too; a read-only connection sees it and never folds it into the file
        with closing(_connect(path, "mode=ro", timeout_s)) as connection:
            _check_owner(connection, path)


def wal_path(path: Path) -> Path:
    """SQLite's write-ahead log beside the store."""
    return path.with_name(path.name + "-wal")


@contextmanager
def store_errors(path: Path, timeout_s: float) -> Iterator[None]:
    """Turn errors of SQLite and of the system into one `StoreError` with the way out."""
    try:
        yield
    except sqlite3.Error as e:
        raise _explain(e, path, timeout_s) from e
    except OSError as e:
        raise StoreError(
            f"{_name(path)}: {e.strerror or e}; check the path and its permissions, or {_ELSEWHERE}"
        ) from e


def refuse_newer(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a store that a newer firetower upgraded, also while it was open here.

    Raises:
        StoreError: its version is above what this firetower knows.
    """
    _refuse_newer(path, schema_version(connection), APPLICATION_ID)


def _create(path: Path) -> None:
    missing = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        # SQLite gives the log and the index beside it the permissions of the file
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return


def _open_writable(path: Path, *, readonly: bool, timeout_s: float) -> sqlite3.Connection:
    connection = _connect(path, "mode=rw", timeout_s)
    try:
        _check_owner(connection, path)
        if schema_version(connection) == 0:
            # gives pages back after a prune; only an empty file can take it
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # what is erased is overwritten rather than left in free pages
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        _use_wal(connection, path, timeout_s)
        connection.execute("PRAGMA synchronous = FULL")
        migrate(connection)
        refuse_newer(connection, path)
        if readonly:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_as_it_is(path: Path, timeout_s: float) -> sqlite3.Connection:
    # without a log the file is complete, and immutable lets SQLite read it without making files beside it
    options = "mode=ro" if _size(wal_path(path)) else "mode=ro&immutable=1"
    connection = _connect(path, options, timeout_s)
    try:
        version = _check_owner(connection, path)
        if version < len(MIGRATIONS):
            raise StoreError(
                f"{_name(path)}: has the older version {version} and cannot be upgraded on a read-only disk; "
                f"copy it to a writable folder, and {_ELSEWHERE}"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, options: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)


def _check_owner(connection: sqlite3.Connection, path: Path) -> int:
    # one transaction: a store that another process is just making shows all of it or nothing
    connection.execute("BEGIN")
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = schema_version(connection)
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    connection.execute("COMMIT")
    if application != APPLICATION_ID and (application or version or num_tables):
        raise StoreError(f"{_name(path)}: is a SQLite file of another program; {_ELSEWHERE}")
    _refuse_newer(path, version, application)
    return version


def _refuse_newer(path: Path, version: int, application: int) -> None:
    if application == APPLICATION_ID and version > len(MIGRATIONS):
        raise StoreError(
            f"{_name(path)}: has version {version}, this firetower reads up to {len(MIGRATIONS)}; "
            f"upgrade firetower, or {_ELSEWHERE}"
        )


def _use_wal(connection: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    """Switch to the write-ahead log; SQLite does not wait for other processes here, so this does."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if mode != "wal":
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as e:
            if not e.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > end:
                raise
        time.sleep(0.01)
    if mode != "wal":
        _logger.warning(
            "%s: no write-ahead log here (journal_mode=%s); writers wait for readers", _name(path), mode
        )


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _name(path: Path) -> str:
    return f"store={visible(str(path))}"


_RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("SQLITE_BUSY", "SQLITE_LOCKED"),
        "another program kept it locked for {timeout_s:g} s; end that or try again",
    ),
    (("SQLITE_FULL",), "the disk is full; free space on it, or {elsewhere} with room"),
    (
        ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"),
        "is read-only here; make file and folder writable, or {elsewhere}",
    ),
    (("SQLITE_CANTOPEN",), "cannot be opened; make file and folder writable, or {elsewhere}"),
    (
        ("SQLITE_CORRUPT", "SQLITE_NOTADB"),
        "is damaged; move it away ('sqlite3 FILE .recover' may save its fires), or {elsewhere}",
    ),
    (("SQLITE_IOERR",), "reading or writing failed ({code}); check disk space and limits, or {elsewhere}"),
)
"""What SQLite's error names mean to the user, and the way out."""


def _explain(error: sqlite3.Error, path: Path, timeout_s: float) -> StoreError:
    code = getattr(error, "sqlite_errorname", type(error).__name__)
    unknown = f"{visible(str(error))} ({code}); {_ELSEWHERE}"
    rule = next((rule for codes, rule in _RULES if code.startswith(codes)), None)
    what = rule.format(timeout_s=timeout_s, elsewhere=_ELSEWHERE, code=code) if rule else unknown
    return StoreError(f"{_name(path)}: {what}")
