"""The schema of the store, one step a file: step n takes a store from version n-1 to n, in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from firetower.fires.migrations import v0001_create

Step = Callable[[sqlite3.Connection], None]

MIGRATIONS: tuple[Step, ...] = (v0001_create.upgrade,)
"""All steps, oldest first; their number is the version that this firetower reads and writes."""


def schema_version(connection: sqlite3.Connection) -> int:
    """The version a store is at; 0 for an empty file."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection, steps: Sequence[Step] = MIGRATIONS) -> int:
    """Bring a store up to ``len(steps)``, each step in its own transaction, and return the version it is at.

    Safe while other processes do the same: the version is read again under the write lock. A failing step
    leaves the store at the version before it. A store that is already newer is not touched.
    """
    while schema_version(connection) < len(steps):
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = schema_version(connection)
            if version < len(steps):
                steps[version](connection)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    return schema_version(connection)
