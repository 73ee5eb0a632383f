"""Campaigns over HTTP against a server that burns: what counts, what does not, what is sent and what is kept."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from firetower.core.errors import ReplayError
from firetower.lab.replay.campaign import open_campaign
from firetower.lab.replay.records import CampaignEnd, Isolation, TryEnd
from firetower.lab.replay.schema import campaign_from_dict, campaign_to_dict


def run(folder, settings, **more):
    """A whole campaign."""
    opened = open_campaign(folder, settings, **more)
    try:
        return opened.run()
    finally:
        opened.close()


@pytest.mark.parametrize("kind", ["bangs", "flat", "not-json"])
def test_a_burned_answer_is_a_fire(kind, burning_server, capture, settings):
    with burning_server(kind, 1.0) as server:
        campaign = run(capture, settings(server.url, 3))
    assert [t.end for t in campaign.tries] == [TryEnd.FIRE] * 3
    assert all(s.severity == "fire" for t in campaign.tries for s in t.signs[:1])
    assert campaign.arms[0].rate.fires == 3
    assert [c.persists for c in campaign.canaries] == [False] * 4


def test_a_healthy_server_is_clean_and_the_campaign_says_what_that_excludes(burning_server, capture, settings):
    with burning_server("bangs", 0.0) as server:
        campaign = run(capture, settings(server.url, 8, exclude_rate=1 / 18))
    [arm] = campaign.arms
    assert (arm.rate.fires, arm.rate.tries) == (0, 8)
    assert arm.excludes_above == pytest.approx(1 - 0.05 ** (1 / 8))
    assert arm.more_clean == 53 - 8
    assert any("8 clean tries exclude rates above .312 at 95%; 45 more needed" in s for s in campaign.sentences)
    assert not campaign.saw_fire


@pytest.mark.parametrize("kind", ["error-500", "disconnect"])
def test_no_answer_counts_neither_way_unless_asked(kind, burning_server, capture, settings):
    with burning_server(kind, 0.5, seed=3) as server:
        campaign = run(capture, settings(server.url, 6))
        counting = run(capture, settings(server.url, 6, counts_errors=True))
    [arm] = campaign.arms
    assert arm.rate.fires == 0
    assert arm.num_lost > 0
    assert {t.end for t in campaign.tries} == {TryEnd.CLEAN, TryEnd.LOST}
    assert any("count neither way" in s and f"({arm.num_lost})" in s for s in campaign.sentences)
    assert counting.arms[0].rate.fires > 0
    assert counting.arms[0].num_lost == 0


def test_a_try_that_is_always_lost_is_given_up(burning_server, capture, settings):
    with burning_server("error-500", 1.0) as server:
        campaign = run(capture, settings(server.url, 2, max_attempts=2))
    assert [(t.number, t.attempt) for t in campaign.tries] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert campaign.arms[0].num_never == 2
    assert campaign.arms[0].rate is None
    assert campaign.ended is CampaignEnd.PLANNED


def test_many_lost_tries_in_a_row_end_the_campaign(burning_server, capture, settings):
    with burning_server("error-500", 1.0) as server:
        campaign = run(capture, settings(server.url, 20))
    assert campaign.ended is CampaignEnd.FAILING
    assert len(campaign.tries) == 8


def test_a_slow_answer_times_out(burning_server, capture, settings):
    with burning_server("slow", 1.0) as server:
        campaign = run(capture, settings(server.url, 1, timeout_s=1.5, max_attempts=1))
    [made] = campaign.tries
    assert (made.end, made.detail) == (TryEnd.LOST, "timed out in all")
    assert made.seconds < 4


def test_silence_times_out_too(burning_server, capture, settings):
    with burning_server("slow", 1.0) as server:
        campaign = run(capture, settings(server.url, 1, idle_s=0.3, max_attempts=1))
    assert campaign.tries[0].detail == "timed out without a byte"


def test_after_a_fire_that_persists_no_further_try_counts(burning_server, capture, settings):
    with burning_server("poison", 1.0) as server:
        campaign = run(capture, settings(server.url, 10))
    assert campaign.ended is CampaignEnd.POISONED
    assert [t.end for t in campaign.tries] == [TryEnd.FIRE]
    assert campaign.canaries[1].persists is True
    assert campaign.canaries[1].after == 0
    assert any("--isolate-tries restart" in s for s in campaign.sentences)
    assert any(
        "asked 1 time after a fire or a lost try: the process stayed poisoned 1 time" in s for s in campaign.sentences
    )
    assert not any("before any try" in s for s in campaign.sentences)


def test_tries_under_way_when_a_process_is_poisoned_are_set_aside(burning_server, capture, settings):
    with burning_server("poison", 1.0, delay_s=0.1) as server:
        campaign = run(capture, settings(server.url, 8, concurrency=4))
    ends = [t.end for t in campaign.tries]
    assert ends == [TryEnd.FIRE, *[TryEnd.DEPENDENT] * 3]
    assert campaign.arms[0].rate.fires == 1
    assert campaign.arms[0].num_dependent == 3
    assert any("leans high" in s for s in campaign.sentences)


def test_fires_that_do_not_persist_leave_the_others_counted(burning_server, capture, settings):
    with burning_server("bangs", 0.5, delay_s=0.02, seed=1) as server:
        campaign = run(capture, settings(server.url, 20, concurrency=4))
    assert len(campaign.tries) == 20
    assert {t.end for t in campaign.tries} == {TryEnd.CLEAN, TryEnd.FIRE}


def test_a_poisoned_server_is_restarted_and_the_plan_is_made_in_full(burning_server, capture, settings, tmp_path):
    with burning_server("poison", 0.6, seed=5) as server:
        script = f"import urllib.request as u; u.urlopen(u.Request('{server.url}/restart', method='POST')).read()"
        command = f'"{sys.executable}" -c "{script}"'
        how = {"isolation": Isolation.RESTART, "restart_command": command, "restart_wait_s": 10.0}
        campaign = run(capture, settings(server.url, 8, **how))
    [arm] = campaign.arms
    assert campaign.ended is CampaignEnd.PLANNED
    assert arm.rate.tries == 8
    assert arm.rate.fires > 1
    assert server.num_restarts == arm.rate.fires - (campaign.tries[-1].end is TryEnd.FIRE)
    assert len({t.process for t in campaign.tries}) == server.num_restarts + 1
    assert [s.what for s in arm.scatter][-1].startswith("lives of a process")


def test_a_server_that_others_restart_is_waited_for(burning_server, capture, settings):
    with burning_server("poison", 1.0) as server:
        opened = open_campaign(capture, settings(server.url, 2, recover_wait_s=20.0))

        def cure(campaign, in_flight):
            if server.is_poisoned and len(campaign.state.canaries) > 2:
                server.restart()

        campaign = opened.run(tick=cure)
        opened.close()
    assert [t.end for t in campaign.tries] == [TryEnd.FIRE, TryEnd.FIRE]
    assert campaign.tries[0].process != campaign.tries[1].process


def test_a_server_poisoned_from_the_start_is_said_to_be(burning_server, capture, settings):
    with burning_server("poison", 1.0) as server:
        server.is_poisoned = True
        campaign = run(capture, settings(server.url, 3, recover_wait_s=0.1))
    assert campaign.ended is CampaignEnd.POISONED
    assert campaign.tries == ()
    assert campaign.saw_fire
    assert any("needs no captured request" in s for s in campaign.sentences)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_never_more_requests_at_once_than_asked(concurrency, burning_server, capture, settings):
    with burning_server("bangs", 0.2, delay_s=0.05) as server:
        run(capture, settings(server.url, 12, concurrency=concurrency))
    assert server.max_in_flight == concurrency


def test_the_limit_holds_over_all_arms_together(burning_server, capture, settings):
    with burning_server("bangs", 0.2, delay_s=0.05) as server:
        other = server.url.replace("127.0.0.1", "localhost")
        run(capture, settings(server.url, 10, arms=("a:", f"b:url={other}"), concurrency=2))
    assert server.max_in_flight == 2


def test_arms_are_balanced_interleaved_and_send_what_they_say(burning_server, capture, settings):
    arms = ("base:", "cold:temperature=0", "cold:chat_template_kwargs.enable_thinking=false", "cold:max_tokens=")
    with burning_server("bangs", 0.0) as server:
        campaign = run(capture, settings(server.url, 12, arms=arms))
    tries = [b for b in server.bodies if "PRIVATE-PROMPT" in json.dumps(b)]
    cold = [b for b in tries if b.get("temperature") == 0]
    assert len(tries) == 24
    assert len(cold) == 12
    assert all(b["chat_template_kwargs"] == {"enable_thinking": False} and "max_tokens" not in b for b in cold)
    assert all("chat_template_kwargs" not in b and b["max_tokens"] == 400 for b in tries if b not in cold)
    order = [t.arm for t in campaign.tries]
    assert all(sorted(order[i : i + 2]) == ["base", "cold"] for i in range(0, 24, 2))
    assert order != ["base", "cold"] * 12


def test_arms_that_differ_are_told_apart_by_the_exact_test(burning_server, capture, settings, tmp_path):
    with burning_server("bangs", 1.0) as hot, burning_server("bangs", 0.0) as cold:
        campaign = run(capture, settings(hot.url, 6, arms=("hot:", f"cold:url={cold.url}")))
    [comparison] = campaign.comparisons
    assert (comparison.a, comparison.b, comparison.test, comparison.differs) == ("hot", "cold", "boschloo", True)
    assert comparison.difference == -1
    assert [a.rate.fires for a in campaign.arms] == [6, 0]
    assert any(s.startswith("cold, 6 clean tries so far") for s in campaign.sentences)


def test_watching_may_stop_early_and_its_figures_say_so(burning_server, capture, settings):
    with burning_server("bangs", 1.0) as hot, burning_server("bangs", 0.0) as cold:
        arms = ("hot:", f"cold:url={cold.url}")
        campaign = run(capture, settings(hot.url, 60, arms=arms, watching=True))
    [comparison] = campaign.comparisons
    assert campaign.ended is CampaignEnd.EARLY
    assert comparison.test == "anytime"
    assert comparison.differs
    assert len(campaign.tries) < 60
    assert "any way of stopping" in campaign.arms[0].rate.method


def test_stop_after_fires_needs_watching(burning_server, capture, settings):
    with pytest.raises(ReplayError, match="needs --watch"):
        settings("http://127.0.0.1:1", 5, stop_after_fires=2)
    with burning_server("bangs", 1.0) as server:
        campaign = run(capture, settings(server.url, 20, watching=True, stop_after_fires=2))
    assert len(campaign.tries) == 2


def test_the_key_goes_to_the_server_and_nowhere_else(burning_server, capture, settings, monkeypatch, tmp_path):
    key = "sk-very-secret-key-0123456789"
    monkeypatch.setenv("FIRETOWER_API_KEY", key)
    said = []
    with burning_server("bangs", 0.5, key=key) as server:
        opened = open_campaign(capture, settings(server.url, 4))
        campaign = opened.run(say=said.append)
        opened.close()
    assert campaign.arms[0].rate.tries == 4
    kept = opened.journal.path.read_text() + json.dumps(campaign_to_dict(campaign)) + "".join(said)
    assert key not in kept
    assert "PRIVATE-PROMPT" not in kept


def test_a_refused_key_ends_it_at_once_and_is_not_echoed(burning_server, capture, settings, monkeypatch):
    monkeypatch.setenv("FIRETOWER_API_KEY", "wrong-key-0123456789")
    said = []
    with burning_server("bangs", 0.5, key="right") as server:
        opened = open_campaign(capture, settings(server.url, 4))
        with pytest.raises(ReplayError, match="FIRETOWER_API_KEY") as error:
            opened.run(say=said.append)
        opened.close()
    assert "wrong-key" not in str(error.value) + "".join(said) + opened.journal.path.read_text()


def test_a_server_that_is_not_there_is_a_clear_error(capture, settings):
    opened = open_campaign(capture, settings("http://127.0.0.1:9", 2))
    with pytest.raises(ReplayError, match="connection refused"):
        opened.run()
    opened.close()


def test_journal_and_folder_are_for_the_owner_only(burning_server, capture, settings):
    with burning_server("bangs", 0.0) as server:
        opened = open_campaign(capture, settings(server.url, 1))
        opened.run()
        opened.close()
    assert stat.S_IMODE(os.stat(opened.journal.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(opened.journal.path.parent).st_mode) == 0o700


def test_what_a_campaign_says_survives_its_file(burning_server, capture, settings):
    with burning_server("bangs", 0.5) as server:
        campaign = run(capture, settings(server.url, 12, arms=("a:", "b:temperature=0")))
    data = json.loads(json.dumps(campaign_to_dict(campaign), allow_nan=False))
    assert campaign_from_dict(data) == campaign


def test_seeds_are_fresh_or_fixed_as_asked(burning_server, capture, settings):
    from firetower.lab.replay.records import SeedMode

    found = {}
    with burning_server("bangs", 0.0) as server:
        for mode in SeedMode:
            server.bodies.clear()
            run(capture, settings(server.url, 4, seed_mode=mode))
            found[mode] = [b.get("seed") for b in server.bodies if "PRIVATE" in json.dumps(b)]
    assert found[SeedMode.CAPTURED] == [None] * 4
    assert found[SeedMode.FIXED] == [0] * 4
    assert len(set(found[SeedMode.FRESH])) == 4


def test_where_a_fire_starts_is_a_curve_over_tokens(burning_server, capture, settings):
    with burning_server("bangs", 0.5, seed=2) as server:
        campaign = run(capture, settings(server.url, 10))
    fires = [t for t in campaign.tries if t.end is TryEnd.FIRE]
    assert [t.ignition for t in fires] == [0] * len(fires)
    assert all(t.num_tokens == 57 for t in campaign.tries if t.end is TryEnd.CLEAN)
    [point] = campaign.arms[0].ignition.points
    assert (point.position, point.fires, point.at_risk) == (0, len(fires), 10)


def test_two_campaigns_do_not_share_a_journal(burning_server, capture, settings, tmp_path):
    path = tmp_path / "one.jsonl"
    with burning_server("bangs", 0.0) as server:
        run(capture, settings(server.url, 2), journal_path=path)
        with pytest.raises(ReplayError, match="another tries"):
            open_campaign(capture, settings(server.url, 3), journal_path=path)


def test_a_journal_has_one_writer(burning_server, capture, settings):
    with burning_server("bangs", 0.0) as server:
        first = open_campaign(capture, settings(server.url, 2))
        with pytest.raises(ReplayError, match="another firetower"):
            open_campaign(capture, settings(server.url, 2))
        first.close()


def test_the_journal_holds_one_line_an_event(burning_server, capture, settings):
    with burning_server("bangs", 0.0) as server:
        opened = open_campaign(capture, settings(server.url, 2))
        opened.run()
        opened.close()
    events = [json.loads(line)["event"] for line in Path(opened.journal.path).read_text().splitlines()]
    assert events == ["campaign", "process", "canary", "start", "try", "start", "try", "end"]
