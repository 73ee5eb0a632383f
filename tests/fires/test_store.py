"""The store: what goes in comes out, in order, filtered, merged, and erased for good."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from firetower.core.errors import ConfigError, RecordError, StoreError
from firetower.core.records import (
    BadValue,
    BurnedRow,
    Kind,
    Outcome,
    Phase,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
    utc_now,
)
from firetower.fires import PruneRule, Store


def test_a_fire_with_every_field_comes_back_equal(store: Store, make_fire: Any) -> None:
    signal = Signal(stage="swiglu", layer=3, op="aten.mul.Tensor", source="model.py:120 in forward")
    bad = BadValue(
        flat_index=2,
        row=0,
        column=2,
        bits=0x7FD6E000,
        dtype="float32",
        kind=Kind.NAN,
        shape=(1, 4),
        sequence=1,
    )
    summary = TensorSummary(
        name="x",
        shape=(1, 4),
        dtype="float32",
        num_nan=1,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=None,
        zero_frac=0.5,
        headroom=float("inf"),
    )
    fire = make_fire(
        origin=signal,
        first=bad,
        request="chat-1",
        bad_signals=(SignalReading(signal=signal, status=Status.BAD, first=bad, first_pad=bad),),
        burned=(BurnedRow(sequence=1, signal=signal, token=3, column=2, first=bad),),
        coverage=(7, 9),
        pad_before_real=True,
        laundered=False,
        inputs=(summary,),
        output=summary,
        weights=(summary, summary),
        notes=("the weight itself is non-finite",),
        verdict={"family": "M", "odds": -0.0},
        count=4,
        extra={"a": [1, 2.5, None, True]},
    )
    assert store.add(fire) == fire
    assert store.get(fire.id) == fire
    assert store.list() == (fire,)


def test_a_second_fire_of_one_id_is_refused_and_the_first_stays(store: Store, make_fire: Any) -> None:
    fire = store.add(make_fire())
    with pytest.raises(StoreError, match="is in the store already; use bump"):
        store.add(dataclasses.replace(fire, model="other"))
    assert store.get(fire.id) == fire


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", "-rf"),
        ("id", "a b"),
        ("id", "a\x1b[2J"),
        ("id", "a" * 129),
        ("created_at", "yesterday"),
        ("count", 0),
        ("count", 1 << 63),
        ("extra", {"nonfinite": "nan", "bits": "zz"}),
        ("extra", {"huge": 10**5000}),
    ],
    ids=["empty", "option", "space", "escape", "long", "time", "zero", "64 bits", "marker", "digits"],
)
def test_what_could_not_be_read_again_is_refused_when_added(
    store: Store, make_fire: Any, field: str, value: Any
) -> None:
    with pytest.raises(RecordError):
        store.add(make_fire(**{field: value}))
    assert store.list() == ()


def test_get_takes_a_unique_beginning_and_an_exact_id_wins(store: Store, make_fire: Any) -> None:
    for fire_id in ("ab-1", "ab-12", "c-9"):
        store.add(make_fire(id=fire_id))
    assert store.get("c").id == "c-9"
    assert store.get("ab-1").id == "ab-1"
    with pytest.raises(StoreError, match=r"id=ab: fits several fires \(ab-1, ab-12\); give more"):
        store.get("ab")
    for unknown in ("", "zz", "c-99", "\x1b"):
        with pytest.raises(StoreError, match="no such fire"):
            store.get(unknown)


def test_bump_counts_a_repeated_fire_and_moves_its_last_sight(store: Store, make_fire: Any) -> None:
    fire = store.add(make_fire(created_at="2020-02-03T04:05:06.789Z"))
    assert store.last_seen(fire.id) == fire.created_at
    assert store.bump(fire.id) == 2
    assert store.bump(fire.id, by=40) == 42
    assert store.get(fire.id) == dataclasses.replace(fire, count=42)
    assert store.last_seen(fire.id) > "2026"
    with pytest.raises(StoreError, match="no such fire"):
        store.bump("nobody")
    with pytest.raises(StoreError, match="by=0: must be at least 1"):
        store.bump(fire.id, by=0)


def test_list_is_newest_first_and_limited(store: Store, make_fire: Any) -> None:
    fires = [make_fire() for _ in range(5)]
    for fire in (fires[2], fires[0], fires[4], fires[1], fires[3]):
        store.add(fire)
    same_time = store.add(make_fire(created_at=fires[4].created_at))
    assert store.list() == (same_time, *reversed(fires))
    assert store.list(limit=2) == (same_time, fires[4])
    assert store.count() == 6


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, "abc"),
        ({"model": "smol"}, "ab"),
        ({"model": "Qwen"}, "c"),
        ({"model": "%"}, ""),
        ({"source": "import"}, "c"),
        ({"stage": "down"}, "ab"),
        ({"layer": 0}, "b"),
        ({"layer": 10**30}, ""),
        ({"kind": Kind.POS_INF}, "b"),
        ({"kind": "nan"}, "ac"),
        ({"phase": "prefill"}, "c"),
        ({"outcome": "isolated"}, "a"),
        ({"since": "2026-11-30T00:00:01Z"}, "bc"),
        ({"until": "2026-11-30T00:00:01.000+00:00"}, "a"),
        ({"since": "2026-11-30T01:00:01+01:00", "until": "2026-11-30T00:00:02"}, "b"),
        ({"stage": "down", "layer": 12, "kind": None}, "a"),
    ],
    ids=str,
)
def test_filters_hold_together(store: Store, make_fire: Any, filters: Any, expected: str) -> None:
    inf = BadValue(flat_index=0, row=0, column=0, bits=0x7C00, dtype="float16", kind=Kind.POS_INF)
    store.add(make_fire(id="a", outcome=Outcome.ISOLATED))
    store.add(make_fire(id="b", first=inf, origin=Signal(stage="down", layer=0)))
    store.add(
        make_fire(id="c", model="qwen", source="import", phase=Phase.PREFILL, origin=Signal(stage="logits"))
    )
    assert "".join(sorted(f.id for f in store.list(**filters))) == expected
    assert "".join(sorted(f.id for f in store.iterate(**filters))) == expected
    assert store.count(**filters) == len(expected)


def test_since_and_until_take_ages(store: Store, make_fire: Any) -> None:
    old, new = store.add(make_fire(created_at="2020-01-01")), store.add(make_fire(created_at=utc_now()))
    assert store.list(since="1h") == (new,)
    assert store.list(until="1h") == (old,)


def test_an_unknown_or_unreadable_filter_is_an_error_not_ignored(store: Store) -> None:
    with pytest.raises(ConfigError, match="filter='modle': unknown"):
        store.list(modle="x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="since='soon': must be"):
        store.list(since="soon")


def test_iteration_is_oldest_first_over_pages_and_lets_others_write(store: Store, make_fire: Any) -> None:
    fires = [make_fire(created_at=f"2026-11-{1 + i % 3:02d}") for i in range(600)]
    store.add_many(fires)
    expected = sorted(fires, key=lambda f: f.created_at)
    seen = []
    for fire in store:
        seen.append(fire)
        if len(seen) == 300:
            store.remove([fires[0].id])
    assert seen == expected


def test_remove_is_all_or_none(store: Store, make_fire: Any) -> None:
    a, b, c = (store.add(make_fire()) for _ in range(3))
    with pytest.raises(StoreError, match="no such fire"):
        store.remove([a.id, "nobody"])
    assert store.count() == 3
    assert store.remove([c.id, a.id, a.id[:-1]]) == (a.id, c.id)
    assert store.list() == (b,)


def _bytes_on_disk(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in path.parent.iterdir())


@pytest.mark.parametrize("how", ["remove", "remove content", "prune", "prune content"])
def test_erased_token_ids_are_in_no_byte_on_disk(store: Store, path: Path, make_fire: Any, how: str) -> None:
    fires = [store.add(make_fire()) for _ in range(50)]
    assert b"777001" in _bytes_on_disk(path)
    if how.startswith("remove"):
        store.remove([f.id for f in fires], content_only=how.endswith("content"))
    else:
        store.prune(PruneRule(keep=0, content_only=how.endswith("content")))
    assert b"777001" not in _bytes_on_disk(path)
    kept = [dataclasses.replace(f, token_ids=None) for f in fires] if how.endswith("content") else []
    assert list(store) == kept


def test_no_token_ids_and_an_empty_list_of_them_differ(store: Store, make_fire: Any) -> None:
    none, empty = store.add(make_fire(token_ids=None)), store.add(make_fire(token_ids=()))
    assert store.get(none.id).token_ids is None
    assert store.get(empty.id).token_ids == ()


def test_files_are_private_whatever_the_umask(path: Path, make_fire: Any) -> None:
    old = os.umask(0)
    try:
        with Store(path) as store:
            store.add(make_fire())
            files = sorted(path.parent.iterdir())
            assert [p.name for p in files] == ["fires.sqlite", "fires.sqlite-shm", "fires.sqlite-wal"]
            assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_pragmas_that_durability_and_privacy_rest_on(store: Store) -> None:
    expected = {
        "journal_mode": "wal",
        "synchronous": 2,
        "secure_delete": 1,
        "foreign_keys": 1,
        "auto_vacuum": 2,
        "busy_timeout": 10_000,
    }
    with store._read() as connection:
        values = {p: connection.execute(f"PRAGMA {p}").fetchone()[0] for p in expected}
    assert values == expected


def test_default_path_is_the_variable_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_fire: Any
) -> None:
    monkeypatch.setenv("FIRETOWER_STORE", str(tmp_path / "ünusual ?#% name.sqlite"))
    with Store() as store:
        store.add(make_fire())
    assert [p.name for p in tmp_path.iterdir()] == ["ünusual ?#% name.sqlite"]


def test_a_closed_store_says_so(store: Store, make_fire: Any) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.add(make_fire())


def test_threads_share_one_store(store: Store, make_fire: Any) -> None:
    errors: list[BaseException] = []
    target = store.add(make_fire())

    def work(fires: list[Any]) -> None:
        try:
            for fire in fires:
                store.add(fire)
                store.bump(target.id)
                store.list(limit=3)
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=work, args=([make_fire() for _ in range(25)],)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert store.count() == 201
    assert store.get(target.id).count == 201


def test_a_store_that_was_deleted_while_open_is_made_again(store: Store, path: Path, make_fire: Any) -> None:
    store.add(make_fire())
    for p in path.parent.iterdir():
        p.unlink()
    fire = store.add(make_fire())
    with Store(path) as other:
        assert other.list() == (fire,)


def test_a_read_only_store_reads_and_never_makes_or_changes(path: Path, make_fire: Any) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        Store(path, readonly=True)
    assert not path.parent.exists()
    with Store(path) as writer:
        fire = writer.add(make_fire())
        with Store(path, readonly=True) as reader:
            assert reader.list() == (fire,)
            for change in (lambda: reader.add(make_fire()), lambda: reader.remove([fire.id])):
                with pytest.raises(StoreError, match="was opened read-only"):
                    change()


FORK = """
    import os, signal, sys, threading
    from firetower.core.codec import fire_from_dict
    from firetower.fires import Store
    from firetower.fires.handin import complete

    def fire(name):
        first = {"dtype": "float16", "bits": "7e00", "row": 0, "column": 0}
        return fire_from_dict(complete({"id": name, "origin": {"stage": "down"}, "first": first}))

    store = Store(sys.argv[1])
    store.add(fire("before"))
    stop = threading.Event()
    def busy():
        n = 0
        while not stop.is_set():
            store.add(fire(f"thread-{n}")); n += 1
    thread = threading.Thread(target=busy)
    thread.start()
    for i in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            store.add(fire(f"child-{i}"))
            assert store.get("before").id == "before"
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set(); thread.join()
    store.add(fire("after"))
    names = {f.id for f in store}
    assert {"before", "after", *(f"child-{i}" for i in range(3))} <= names
    print(store._connection.execute("PRAGMA integrity_check").fetchone()[0])
"""


def test_a_forked_child_writes_through_its_own_connection(path: Path) -> None:
    code = textwrap.dedent(FORK)
    command = [sys.executable, "-W", "ignore", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
