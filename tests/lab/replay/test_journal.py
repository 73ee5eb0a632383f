"""The journal: a kill at any byte loses no finished try, and no try ever counts twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ReplayError
from firetower.lab.replay.campaign import open_campaign
from firetower.lab.replay.journal import Journal
from firetower.lab.replay.records import CampaignEnd, Canary, Try, TryEnd
from firetower.lab.replay.state import CampaignState


def made(number, end, process="server 1", attempt=1):
    return Try(
        number=number, attempt=attempt, arm="a", round=number, end=end, process=process,
        started_at="2026-01-01T00:00:00.000Z", seconds=1.0,
    )  # fmt: skip


def events_of(*items):
    """Journal lines of tries and canaries, as a reader sees them."""
    from firetower.lab.replay.journal import plain

    found = []
    for item in items:
        if isinstance(item, Try):
            found.append({"event": "start", "number": item.number, "attempt": item.attempt, "process": item.process})
            found.append({"event": "try", "try": plain(item)})
        elif isinstance(item, Canary):
            found.append({"event": "canary", "canary": plain(item)})
        else:
            found.append(item)
    return found


def canary(process="server 1", *, persists, after=0):
    burned = 0 if persists is False else 2
    return Canary(process=process, after=after, at="", burned=burned, prompts=2, persists=persists)


def fold(*items, max_attempts=3):
    state = CampaignState(max_attempts)
    state.take_all(events_of(*items))
    return state


def test_after_a_fire_nothing_counts_until_the_canary_says_so():
    fire, sibling = made(0, TryEnd.FIRE), made(1, TryEnd.CLEAN)
    held = fold(fire, sibling)
    assert set(held.counted) == {0}
    assert held.is_held(1)
    assert held.tries()[1].end is TryEnd.DEPENDENT
    assert set(fold(fire, sibling, canary(persists=False)).counted) == {0, 1}
    for answer in (True, None):
        poisoned = fold(fire, sibling, canary(persists=answer))
        assert set(poisoned.counted) == {0}
        assert not poisoned.is_settled(1)
        assert poisoned.tries()[1].end is TryEnd.DEPENDENT


def test_a_second_fire_in_a_poisoned_process_does_not_count():
    state = fold(made(0, TryEnd.FIRE), made(1, TryEnd.FIRE), canary(persists=True))
    assert set(state.counted) == {0}


def test_replacing_poisoned_processes_does_not_bend_the_rate():
    import random

    rng, rate, fires = random.Random(0), 0.2, 0
    for _ in range(400):
        state, life, number = CampaignState(), 0, 0
        while number < 20:
            life += 1
            is_poisoned = False
            while number < 20 and not is_poisoned:
                is_poisoned = rng.random() < rate
                end = TryEnd.FIRE if is_poisoned else TryEnd.CLEAN
                state.take_all(events_of(made(number, end, f"server {life}")))
                number += 1
            if is_poisoned:
                state.take_all(events_of(canary(f"server {life}", persists=True)))
        assert len(state.counted) == 20
        fires += sum(t.end is TryEnd.FIRE for t in state.counted.values())
    standard_error = (rate * (1 - rate) / 8000) ** 0.5
    assert abs(fires / 8000 - rate) < 3 * standard_error


def test_another_process_is_not_in_question():
    state = fold(made(0, TryEnd.FIRE), made(1, TryEnd.CLEAN, process="server 2"))
    assert set(state.counted) == {0, 1}


def test_what_was_held_when_the_campaign_was_killed_is_made_again():
    again = made(1, TryEnd.CLEAN, process="server 2", attempt=2)
    state = fold(made(0, TryEnd.FIRE), made(1, TryEnd.FIRE), {"event": "session"}, again)
    assert state.counted[1].attempt == 2
    assert [t.end for t in state.tries()] == [TryEnd.FIRE, TryEnd.DEPENDENT, TryEnd.CLEAN]


def test_a_number_that_ends_twice_counts_once():
    state = fold(made(0, TryEnd.CLEAN), made(0, TryEnd.FIRE, attempt=2))
    assert state.counted[0].end is TryEnd.CLEAN
    assert [t.end for t in state.tries()] == [TryEnd.CLEAN, TryEnd.DEPENDENT]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_history_counts_a_number_twice_or_a_try_after_its_process_was_poisoned(data):
    items, attempts = [], {}
    for _ in range(data.draw(st.integers(1, 25))):
        process = f"server {data.draw(st.integers(1, 3))}"
        what = data.draw(st.sampled_from(["clean", "fire", "lost", "well", "poisoned", "session"]))
        if what in ("well", "poisoned"):
            items.append(canary(process, persists=what == "poisoned"))
        elif what == "session":
            items.append({"event": "session"})
        else:
            number = data.draw(st.integers(0, 5))
            attempts[number] = attempts.get(number, 0) + 1
            items.append(made(number, TryEnd(what), process, attempts[number]))
    state = fold(*items)
    tries = state.tries()
    assert len(tries) == sum(isinstance(i, Try) for i in items)
    counting = [t for t in tries if t.counts]
    assert len({t.number for t in counting}) == len(counting)
    assert {t.number: t for t in counting} == state.counted
    # judged again without the fold: nothing counts while its process is bad or in question for good
    bad: dict[str, bool] = {}
    for item in items:
        if isinstance(item, Canary):
            bad[item.process] = item.persists is not False
        elif isinstance(item, Try) and bad.get(item.process):
            assert next(t for t in tries if t.attempt == item.attempt and t.number == item.number).end in (
                TryEnd.DEPENDENT,
                TryEnd.LOST,
            )


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 4000))
def test_a_journal_cut_at_any_byte_reads_up_to_the_last_whole_line(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "j.jsonl"
    journal = Journal.create(path, {"id": "x"})
    for number in range(6):
        journal.add("try", **{"try": made(number, TryEnd.CLEAN)})
    journal.close()
    raw = path.read_bytes()
    head = raw.index(b"\n") + 1
    kept = raw[: max(head, min(cut, len(raw)))]
    path.write_bytes(kept)
    reopened = Journal.reopen(path)
    assert len(reopened.events) == kept.count(b"\n") - 1
    reopened.add("end", ended="planned")
    reopened.close()
    again = Journal.reopen(path)
    assert [e["event"] for e in again.events] == ["try"] * (kept.count(b"\n") - 1) + ["end"]
    again.close()


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal.create(path, {"id": "x"})
    journal.add("end", ended="planned")
    journal.close()
    path.write_bytes(path.read_bytes().replace(b'"end"', b'"end', 1) + b'{"event": "end"}\n')
    with pytest.raises(ReplayError, match="line 2 is not JSON"):
        Journal.reopen(path)


def test_a_journal_of_a_newer_firetower_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"event": "campaign", "schema": 99}\n')
    with pytest.raises(ReplayError, match="newer"):
        Journal.reopen(path)
    assert path.read_text() == '{"event": "campaign", "schema": 99}\n'


def test_a_journal_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "other").write_text("x")
    (tmp_path / "j.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(ReplayError):
        Journal.reopen(tmp_path / "j.jsonl")
    with pytest.raises(ReplayError):
        Journal.create(tmp_path / "j.jsonl", {})
    assert (tmp_path / "other").read_text() == "x"


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    journal = Journal.create(tmp_path / "j.jsonl", {"id": "x"})
    journal.add("end", ended="planned")
    size = (tmp_path / "j.jsonl").stat().st_size

    def full(handle, data):
        real_write(handle, data[:5])
        raise OSError(28, "No space left on device")

    real_write = os.write
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ReplayError, match="No space left on device; make space"):
        journal.add("end", ended="early")
    assert (tmp_path / "j.jsonl").stat().st_size == size
    journal.close()


def test_a_killed_campaign_goes_on_where_it_stopped(burning_server, capture, settings, own_data_folder):
    with burning_server("bangs", 0.3, delay_s=0.05, seed=4) as server:
        command = [sys.executable, "-m", "firetower.cli.main", "replay", str(capture), "--target", server.url]
        command += ["--tries", "30"]
        child = subprocess.Popen([*command, "--concurrency", "2"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while len(server.bodies) < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        [path] = (own_data_folder / "campaigns").glob("*.jsonl")
        before = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
        finished = [e["try"]["number"] for e in before if e["event"] == "try"]
        assert 0 < len(finished) < 30
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert "Going on:" in done.stderr
    campaign = json.loads(done.stdout)
    assert done.returncode == 3
    counting = [t for t in campaign["tries"] if t["end"] in ("clean", "fire")]
    assert sorted(t["number"] for t in counting) == list(range(30))
    kept = {t["number"] for t in counting if t["attempt"] == 1}
    assert len(kept & set(finished)) >= len(finished) - 2  # at most what a fire held back
    assert campaign["arms"][0]["rate"]["tries"] == 30


def test_an_interrupted_campaign_reports_what_holds_and_goes_on(burning_server, capture, settings):
    with burning_server("bangs", 0.0) as server:

        def interrupt(campaign, in_flight):
            if len(campaign.state.counted) >= 4:
                raise KeyboardInterrupt

        opened = open_campaign(capture, settings(server.url, 10))
        campaign = opened.run(tick=interrupt)
        opened.close()
        assert campaign.ended is CampaignEnd.INTERRUPTED
        assert campaign.arms[0].rate.tries == 4
        assert "any way of stopping" in campaign.arms[0].rate.method
        opened = open_campaign(capture, settings(server.url, 10))
        campaign = opened.run()
        opened.close()
    assert campaign.ended is CampaignEnd.PLANNED
    assert [t.number for t in campaign.tries] == list(range(10))
    assert "exact" in campaign.arms[0].rate.method


def test_a_stopped_campaign_counts_only_the_gapless_beginning():
    from firetower.lab.replay.arms import Arm
    from firetower.lab.replay.plan import make_plan
    from firetower.lab.replay.records import Isolation
    from firetower.lab.replay.summary import Design, summarize

    design = Design(
        plan=make_plan(["a"], 10, 0),
        arms=(Arm(name="a"),),
        confidence=0.95,
        watching=False,
        isolation=Isolation.NONE,
        concurrency=4,
    )
    state = fold(made(0, TryEnd.CLEAN), made(2, TryEnd.FIRE, "server 2"), made(3, TryEnd.FIRE, "server 3"))
    [arm], _, sentences = summarize(design, state, CampaignEnd.INTERRUPTED)
    assert (arm.rate.fires, arm.rate.tries, arm.num_waiting) == (0, 1, 2)
    assert any("ended ahead" in s for s in sentences)
