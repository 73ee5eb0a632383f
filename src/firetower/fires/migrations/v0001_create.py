"""Version 1: fires with their whole JSON and the columns that queries need; private token ids apart."""

from __future__ import annotations

import sqlite3

APPLICATION_ID = 0x46545752
"""``FTWR`` in the SQLite header: tells a store of fires from any other SQLite file."""

_STATEMENTS = (
    """CREATE TABLE fires (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        created_ms INTEGER NOT NULL,
        last_seen_ms INTEGER NOT NULL,
        times INTEGER NOT NULL CHECK (times >= 1),
        source TEXT NOT NULL,
        model TEXT NOT NULL,
        stage TEXT NOT NULL,
        layer INTEGER,
        kind TEXT NOT NULL,
        phase TEXT NOT NULL,
        outcome TEXT NOT NULL,
        record TEXT NOT NULL
    )""",
    "CREATE INDEX fires_created ON fires (created_ms)",
    "CREATE INDEX fires_last_seen ON fires (last_seen_ms)",
    "CREATE INDEX fires_place ON fires (stage, layer)",
    """CREATE TABLE content (
        seq INTEGER PRIMARY KEY REFERENCES fires (seq) ON DELETE CASCADE,
        token_ids TEXT NOT NULL
    )""",
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty file."""
    for statement in _STATEMENTS:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
