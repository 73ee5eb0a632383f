"""Many processes, and processes that are killed: no fire that was shown is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from firetower.fires import Store

WRITER = textwrap.dedent("""
    import sys
    from firetower.core.codec import fire_from_dict
    from firetower.core.records import new_fire_id
    from firetower.fires import Store
    from firetower.fires.handin import complete

    def fire():
        first = {"dtype": "float16", "bits": "7e00", "row": 0, "column": 0}
        data = {"id": new_fire_id(), "origin": {"stage": "down"}, "first": first, "token_ids": [1, 2]}
        return fire_from_dict(complete(data))

    with Store(sys.argv[1], timeout_s=60) as store:
        for _ in range(int(sys.argv[2])):
            print(store.add(fire()).id, flush=True)
""")


def _start(path: Path, num_fires: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(num_fires)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _check(path: Path, shown: list[str], *, exactly: bool) -> None:
    with Store(path) as store:
        kept = [fire.id for fire in store]
        with store._read() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(set(kept)) == len(kept)
    assert set(kept) == set(shown) if exactly else set(kept) >= set(shown)


def _write_at_once(path: Path, num_processes: int, num_fires_each: int) -> None:
    writers = [_start(path, num_fires_each) for _ in range(num_processes)]
    outputs = [writer.communicate(timeout=900) for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * num_processes, outputs[0][1]
    shown = [fire_id for out, _ in outputs for fire_id in out.split()]
    assert len(shown) == num_processes * num_fires_each
    _check(path, shown, exactly=True)


def test_four_processes_make_and_fill_one_store(path: Path) -> None:
    _write_at_once(path, 4, 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_processes_write_10000_fires_and_none_is_lost(path: Path) -> None:
    _write_at_once(path, 8, 1250)


@pytest.mark.parametrize("num_shown", [1, 30])
def test_every_id_that_was_shown_survives_kill_9(path: Path, tmp_path: Path, num_shown: int) -> None:
    screens = [tmp_path / "screen 0", tmp_path / "screen 1"]
    writers = []
    for screen in screens:
        with screen.open("wb") as out:
            command = [sys.executable, "-c", WRITER, str(path), "100000"]
            writers.append(subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL))
    end = time.monotonic() + 60
    while any(screen.read_text().count("\n") < num_shown for screen in screens):
        assert time.monotonic() < end
        time.sleep(0.001)
    for writer in writers:
        writer.kill()
        assert writer.wait(timeout=60) == -signal.SIGKILL
    # what was cut in the middle of an id was not shown yet
    lines = [line for screen in screens for line in screen.read_text().splitlines(keepends=True)]
    shown = [line.strip() for line in lines if line.endswith("\n")]
    assert len(shown) >= 2 * num_shown
    _check(path, shown, exactly=False)
