"""A store that cannot be used: one clear line with the way out, and the file exactly as it was."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import firetower.fires.connection as connection_module
from firetower.core.errors import StoreError
from firetower.fires import Store

Spoil = Callable[[Path], None]


def _fill(path: Path, make_fire: Any, num_fires: int = 40) -> None:
    with Store(path) as store:
        store.add_many([make_fire() for _ in range(num_fires)])


def _use(path: Path, fire: Any, *, readonly: bool) -> None:
    with Store(path, readonly=readonly) as store:
        if not readonly:
            store.add(fire)
        store.list()


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _text(path: Path) -> None:
    path.write_text("these are not the fires you are looking for\n" * 9)


def _foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.execute("PRAGMA user_version = 99")
    other.close()


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 2")
        other.execute("ALTER TABLE fires ADD COLUMN mood TEXT")
    other.close()


def _newer_in_the_log(path: Path) -> None:
    """A newer firetower was killed after its upgrade: the version is in the log, not yet in the file."""
    live = path.with_name("live.sqlite")
    shutil.copy(path, live)
    other = sqlite3.connect(live, isolation_level=None)
    other.execute("PRAGMA wal_autocheckpoint = 0")
    other.execute("PRAGMA user_version = 2")
    shutil.copy(live.with_name("live.sqlite-wal"), path.with_name(path.name + "-wal"))
    shutil.copy(live, path)
    other.close()
    assert int.from_bytes(path.read_bytes()[60:64], "big") == 1


def _garbage_in_the_schema(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4096] = bytes(range(256)) * 16
    path.write_bytes(data[: len(path.read_bytes())])


def _garbage_in_the_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3 * 4096)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CASES: list[tuple[Spoil, str]] = [
    (_text, "is not a SQLite file; move it away, or set FIRETOWER_STORE"),
    (_foreign, "is a SQLite file of another program; set FIRETOWER_STORE"),
    (_newer, "has version 2, this firetower reads up to 1; upgrade firetower, or set"),
    (_newer_in_the_log, "has version 2, this firetower reads up to 1; upgrade firetower, or set"),
    (_garbage_in_the_schema, "is damaged; move it away"),
    (_garbage_in_the_pages, "is damaged; move it away"),
    (_truncated, "is damaged; move it away"),
    (_folder, "is a folder; set FIRETOWER_STORE"),
    (_pipe, "is not a regular file; set FIRETOWER_STORE"),
]


@pytest.mark.parametrize("readonly", [False, True], ids=["to write", "to read"])
@pytest.mark.parametrize(("spoil", "message"), CASES, ids=[spoil.__name__.strip("_") for spoil, _ in CASES])
def test_an_unusable_file_is_one_clear_line_and_stays_as_it_was(
    path: Path, make_fire: Any, spoil: Spoil, message: str, readonly: bool
) -> None:
    _fill(path, make_fire)
    spoil(path)
    before = _digest(path)
    with pytest.raises(StoreError) as caught:
        _use(path, make_fire(), readonly=readonly)
    text = str(caught.value)
    assert text.startswith(f"store={path}: ")
    assert message in text
    assert "\n" not in text
    assert _digest(path) == before
    assert _digest(path.with_name(path.name + "-wal")) is None or spoil is _newer_in_the_log


def test_a_store_upgraded_while_open_is_not_written_with_the_old_schema(path: Path, make_fire: Any) -> None:
    with Store(path) as store:
        store.add(make_fire())
        _newer(path)
        with pytest.raises(StoreError, match="has version 2"):
            store.add(make_fire())
        assert store.count() == 1


def test_an_empty_file_becomes_a_store(path: Path, make_fire: Any) -> None:
    path.parent.mkdir()
    path.touch()
    with Store(path) as store:
        fire = store.add(make_fire())
        assert store.list() == (fire,)


def test_a_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"store=.*file/sub/fires.sqlite: .*; check the path"):
        Store(tmp_path / "file" / "sub" / "fires.sqlite")


def test_a_locked_store_is_waited_for_and_then_an_error_and_still_readable(
    path: Path, make_fire: Any
) -> None:
    _fill(path, make_fire, 1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with Store(path, timeout_s=0.2) as store:
        with pytest.raises(StoreError, match=r"kept it locked for 0\.2 s; end that or try again"):
            store.add(make_fire())
        assert store.count() == 1
        holder.execute("COMMIT")
        holder.close()
        store.add(make_fire())
        assert store.count() == 2


def test_a_store_locked_against_readers_too_is_an_error(path: Path, make_fire: Any) -> None:
    _fill(path, make_fire, 1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match=r"kept it locked for 0\.1 s"):
        Store(path, timeout_s=0.1)
    holder.close()


def test_a_full_store_keeps_what_it_has_and_recovers(path: Path, make_fire: Any) -> None:
    _fill(path, make_fire, 20)
    with Store(path) as store:
        with store._read() as connection:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")
        big = [make_fire(notes=("x" * 2000,)) for _ in range(50)]
        with pytest.raises(
            StoreError, match=r"the disk is full; free space on it, or set FIRETOWER_STORE .* with room"
        ):
            deque(map(store.add, big), maxlen=0)
        kept = store.count()
        with store._read() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            connection.execute(f"PRAGMA max_page_count = {pages + 100}")
        store.add(make_fire())
        assert store.count() == kept + 1 >= 21


LIMITED = """
    import resource, signal, sys
    from firetower.core.codec import fire_from_dict
    from firetower.core.errors import StoreError
    from firetower.fires import Store
    from firetower.fires.handin import complete

    store = Store(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    first = {"dtype": "float16", "bits": "7e00", "row": 0, "column": 0}
    for i in range(1000):
        fire = {"id": f"f{i}", "origin": {"stage": "down"}, "first": first, "notes": ["x" * 5000]}
        try:
            print(store.add(fire_from_dict(complete(fire))).id, flush=True)
        except StoreError as e:
            print(e, file=sys.stderr)
            sys.exit(7)
"""


def test_a_write_that_the_system_refuses_loses_nothing_that_was_shown(path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr
    assert f"store={path}: " in done.stderr
    assert "set FIRETOWER_STORE" in done.stderr
    shown = done.stdout.split()
    assert shown
    with Store(path) as store:
        assert {f.id for f in store} >= set(shown)
        with store._read() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


READ_ONLY = """
    import os, sys
    from firetower.core.errors import StoreError
    from firetower.fires import SafeStore, Store

    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    try:
        Store(sys.argv[1])
    except StoreError as e:
        print(e)
    with Store(sys.argv[1], readonly=True) as store:
        print(store.count())
    print(sorted(os.listdir(os.path.dirname(sys.argv[1]))))
"""


def test_a_read_only_store_cannot_be_written_but_can_be_read(tmp_path_factory: Any, make_fire: Any) -> None:
    folder = tmp_path_factory.mktemp("readonly")
    path = folder / "fires.sqlite"
    _fill(path, make_fire, 3)
    # root may write anywhere, so the child gives that up; it must get through the folders above
    opened = [p for p in folder.parents if not p.stat().st_mode & 0o001]
    for p in opened:
        p.chmod(p.stat().st_mode | 0o001)
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        command = [sys.executable, "-c", textwrap.dedent(READ_ONLY), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        folder.chmod(0o755)
        for p in opened:
            p.chmod(p.stat().st_mode & ~0o001)
    assert done.returncode == 0, done.stderr
    refused, num_fires, files = done.stdout.splitlines()
    assert refused.startswith(
        f"store={path}: is read-only here; make file and folder writable, or set FIRETOWER_STORE"
    )
    assert num_fires == "3"
    assert files == "['fires.sqlite']"


def test_a_file_system_without_shared_memory_still_keeps_fires(
    path: Path, make_fire: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = connection_module._connect
    monkeypatch.setattr(
        connection_module, "_connect", lambda p, options, t: connect(p, options + "&vfs=unix-dotfile", t)
    )
    with Store(path) as store:
        fire = store.add(make_fire())
        assert store.list() == (fire,)
        with store._read() as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert "no write-ahead log here" in caplog.text
