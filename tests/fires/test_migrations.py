"""Old files keep opening: the goldens, and the machinery that takes a file from version to version."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from firetower.fires import Store
from firetower.fires.jsonl import read_lines
from firetower.fires.migrations import MIGRATIONS, migrate, schema_version

GOLDENS = Path(__file__).parent / "goldens"


def _restore(path: Path, version: int) -> None:
    """Make the store of an old firetower from its dump."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript((GOLDENS / f"v{version}.sql").read_text(encoding="utf-8"))
    connection.close()


def _schema(path: Path) -> dict[str, str]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {name: " ".join(sql.split()) for name, sql in rows}


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_store_of_each_old_version_opens_with_all_that_it_held(path: Path, version: int) -> None:
    _restore(path, version)
    expected = read_lines(io.BytesIO((GOLDENS / f"v{version}.jsonl").read_bytes()), "golden")
    assert len(expected) >= 3
    with Store(path) as store:
        assert list(store) == expected
        with store._read() as connection:
            assert schema_version(connection) == len(MIGRATIONS)
    with Store(path, readonly=True) as store:
        assert list(store) == expected


def test_the_newest_golden_has_today_s_schema(path: Path, tmp_path: Path) -> None:
    """Fails when a landed step is edited, or when a new one comes without its golden."""
    Store(path).close()
    _restore(tmp_path / "golden.sqlite", len(MIGRATIONS))
    assert _schema(path) == _schema(tmp_path / "golden.sqlite")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)
    yield opened
    opened.close()


def _one(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE a (x)")
    connection.execute("INSERT INTO a VALUES (1)")


def _two(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE a ADD COLUMN y")
    connection.execute("UPDATE a SET y = x + 1")


def _half(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE a SET x = 99")
    connection.execute("CREATE TABLE b (x)")
    raise RuntimeError("power cut")


def test_steps_run_once_each_from_where_the_file_is(connection: sqlite3.Connection) -> None:
    assert migrate(connection, [_one]) == 1
    assert migrate(connection, [_one, _two]) == 2
    assert migrate(connection, [_one, _two]) == 2
    assert connection.execute("SELECT x, y FROM a").fetchall() == [(1, 2)]


def test_a_step_that_fails_leaves_the_version_before_it(connection: sqlite3.Connection) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        migrate(connection, [_one, _half])
    assert schema_version(connection) == 1
    assert connection.execute("SELECT x FROM a").fetchall() == [(1,)]
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("a",)]
    assert migrate(connection, [_one, _two]) == 2


def test_a_newer_file_is_left_alone(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA user_version = 9")
    assert migrate(connection, [_one, _two]) == 9
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
