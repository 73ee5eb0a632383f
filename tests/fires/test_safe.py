"""What inference sees of a store: never an exception, failures counted and said once."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from firetower.fires import SafeStore, Store


def test_a_healthy_store_is_written_through(path: Path, make_fire: Any) -> None:
    safe = SafeStore(path)
    assert not path.exists()
    fire = make_fire()
    assert safe.add(fire) == fire
    assert safe.bump(fire.id) == 2
    assert (safe.failures, safe.last_error) == (0, None)
    safe.close()
    assert safe.add(make_fire()) is not None
    safe.close()


def test_failures_are_counted_logged_once_and_over_when_the_cause_is(
    tmp_path: Path, make_fire: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fires.sqlite"
    path.mkdir()
    safe = SafeStore(path)
    with caplog.at_level(logging.WARNING, "firetower.fires"):
        assert safe.add(make_fire()) is None
        assert safe.add(make_fire()) is None
        assert safe.bump("x") is None
    assert safe.failures == 3
    assert safe.last_error is not None
    assert "is a folder" in safe.last_error
    assert len(caplog.records) == 1
    assert "inference goes on" in caplog.text
    path.rmdir()
    assert safe.add(make_fire()) is not None
    assert safe.failures == 3
    safe.close()


def test_a_fire_that_cannot_be_stored_is_a_failure_not_an_error(store: Store, make_fire: Any) -> None:
    safe = SafeStore(store)
    assert safe.add(make_fire(extra={"object": object()})) is None
    assert safe.add(make_fire(first=None)) is None
    assert safe.failures == 2
    safe.close()
    assert safe.add(make_fire()) is None
    assert safe.failures == 3


def test_a_stuck_lock_stalls_one_step_only(path: Path, make_fire: Any) -> None:
    with closing(SafeStore(path, timeout_s=0.4)) as safe:
        safe.add(make_fire())
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        waits = []
        for _ in range(4):
            start = time.monotonic()
            assert safe.add(make_fire()) is None
            waits.append(time.monotonic() - start)
        assert waits[0] >= 0.4
        assert sum(waits[1:]) < 0.4
        holder.execute("COMMIT")
        holder.close()
        assert safe.add(make_fire()) is not None
        assert safe._store is not None
        assert safe._store.timeout_s == 0.4
