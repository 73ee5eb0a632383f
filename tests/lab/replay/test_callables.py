"""Callables as targets: in this process, in children, what their return values mean, crashes and hangs."""

from __future__ import annotations

import sys
import textwrap

import pytest

from firetower.core.errors import ReplayError
from firetower.lab.replay.arms import Arm
from firetower.lab.replay.campaign import open_campaign
from firetower.lab.replay.function import FunctionRunner
from firetower.lab.replay.records import CampaignEnd, Isolation, SeedMode, TryEnd
from firetower.lab.replay.request import ReplayRequest

TARGETS = """
import os, random, signal, sys, time
import numpy as np

calls = 0

def seeded(request):
    if request["is_canary"]:
        return "fine"
    return random.Random(request["seed"]).random() < 0.3

def poisoned(request):
    global calls
    if calls < 0:
        return True
    if request["is_canary"]:
        return False
    calls += 1
    if calls == 3:
        calls = -1
        return True
    return False

def crashes(request):
    if not request["is_canary"] and random.Random(request["seed"]).random() < 0.3:
        os.kill(os.getpid(), signal.SIGSEGV)

def hangs(request):
    if not request["is_canary"]:
        time.sleep(60)

def by_variable(request):
    return not request["is_canary"] and os.environ.get("TOWER_MODE") == "hot"

def prints(request):
    print("noise on stdout")
    return False

def number(request):
    return float(request["body"]["value"])

def pid(request):
    with open(os.environ["PID_FILE"], "a") as f:
        if not request["is_canary"]:
            f.write(f"{os.getpid()}\\n")

def slow_pid(request):
    time.sleep(0.3)
    return pid(request)

def raises(request):
    raise RuntimeError("PRIVATE-DETAIL")
"""


@pytest.fixture(autouse=True)
def targets(tmp_path, monkeypatch):
    """A module of callables that children find through their working directory."""
    (tmp_path / "tower_targets.py").write_text(textwrap.dedent(TARGETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("tower_targets", None)


def run(folder, settings):
    opened = open_campaign(folder, settings)
    try:
        return opened.run()
    finally:
        opened.close()


@pytest.mark.parametrize("isolation", list(Isolation))
def test_the_same_seeds_burn_however_tries_are_isolated(isolation, capture, settings):
    how = {"seed_mode": SeedMode.FRESH, "isolation": isolation}
    campaign = run(capture, settings("tower_targets:seeded", 6, **how))
    from random import Random

    expected = {t.number for t in campaign.tries if Random(t.seed).random() < 0.3}
    assert {t.number for t in campaign.tries if t.end is TryEnd.FIRE} == expected
    assert 0 < len(expected) < 6
    assert campaign.arms[0].rate.tries == 6


def test_a_poisoned_process_is_replaced_and_its_later_tries_never_count(capture, settings):
    campaign = run(capture, settings("tower_targets:poisoned", 7))
    assert [t.end for t in campaign.tries] == [TryEnd.CLEAN, TryEnd.CLEAN, TryEnd.FIRE] * 2 + [TryEnd.CLEAN]
    assert len({t.process for t in campaign.tries}) == 3
    assert [c.persists for c in campaign.canaries if c.after is not None] == [True, True]


def test_without_isolation_a_poisoned_process_ends_the_campaign(capture, settings):
    campaign = run(capture, settings("tower_targets:poisoned", 7, isolation=Isolation.NONE))
    assert campaign.ended is CampaignEnd.POISONED
    assert campaign.arms[0].rate.tries == 3


def test_each_try_has_a_process_of_its_own(capture, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pids"))
    run(capture, settings("tower_targets:pid", 4, isolation=Isolation.PROCESS))
    assert len(set((tmp_path / "pids").read_text().split())) == 4


def test_a_crash_loses_one_try_and_is_made_again(capture, settings):
    campaign = run(capture, settings("tower_targets:crashes", 6, seed_mode=SeedMode.FRESH))
    lost = [t for t in campaign.tries if t.end is TryEnd.LOST]
    assert lost
    assert all(t.detail == "the worker died of SIGSEGV" for t in lost)
    assert campaign.arms[0].rate.tries == 6


def test_a_hang_is_ended(capture, settings):
    campaign = run(capture, settings("tower_targets:hangs", 1, timeout_s=0.5, max_attempts=1))
    assert [(t.end, t.detail) for t in campaign.tries] == [(TryEnd.LOST, "timed out")]


def test_an_arm_may_set_a_variable_of_its_process(capture, settings):
    arms = ("off:env.TOWER_MODE=cold", "on:env.TOWER_MODE=hot")
    campaign = run(capture, settings("tower_targets:by_variable", 3, arms=arms, isolation=Isolation.PROCESS))
    assert {(t.arm, t.end) for t in campaign.tries} == {("off", TryEnd.CLEAN), ("on", TryEnd.FIRE)}


def test_a_variable_without_a_process_of_its_own_is_refused(settings):
    with pytest.raises(ReplayError, match="--isolate-tries process"):
        settings("tower_targets:by_variable", 3, arms=("on:env.A=1",), isolation=Isolation.NONE)


def test_several_children_work_at_once(capture, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pids"))
    campaign = run(capture, settings("tower_targets:slow_pid", 8, concurrency=2))
    assert campaign.arms[0].rate.tries == 8
    assert len(set((tmp_path / "pids").read_text().split())) == 2


def test_what_a_target_prints_does_not_disturb_the_protocol(capture, settings):
    assert run(capture, settings("tower_targets:prints", 2)).arms[0].rate.tries == 2


def test_errors_of_the_target_are_lost_tries_and_their_text_is_not_stored(capture, settings):
    opened = open_campaign(capture, settings("tower_targets:raises", 1, max_attempts=1, isolation=Isolation.NONE))
    said = []
    with pytest.raises(ReplayError, match="RuntimeError: PRIVATE-DETAIL"):
        opened.run(say=said.append)
    opened.close()
    assert "PRIVATE-DETAIL" not in opened.journal.path.read_text()


def test_a_capture_cannot_name_the_target(capture, settings):
    with pytest.raises(ReplayError, match="cannot be imported"):
        run(capture, settings("tower_targets:missing", 1, isolation=Isolation.NONE))
    with pytest.raises(ReplayError, match="cannot be imported"):
        run(capture, settings("tower_targets:missing", 1))


def request(**body):
    return ReplayRequest(kind="chat.completions", body=body, seed=1)


@pytest.mark.parametrize(
    ("value", "end"),
    [("1.5", TryEnd.CLEAN), ("nan", TryEnd.FIRE), ("-inf", TryEnd.FIRE), ("words", TryEnd.LOST)],
)
def test_numbers_are_judged(value, end):
    assert FunctionRunner("tower_targets:number").run(request(value=value)).end is end


@pytest.mark.parametrize(
    ("returned", "end"),
    [
        (None, TryEnd.CLEAN),
        (False, TryEnd.CLEAN),
        (True, TryEnd.FIRE),
        ("an answer", TryEnd.CLEAN),
        ("!" * 3000, TryEnd.FIRE),
        ([[1.0, 2.0], [3.0, float("nan")]], TryEnd.FIRE),
        ({"choices": [{"message": {"content": "an answer"}, "finish_reason": "stop"}]}, TryEnd.CLEAN),
        ({"error": {"message": "Out of range float values are not JSON compliant: nan"}}, TryEnd.FIRE),
        ({"nothing": 1}, TryEnd.LOST),
        pytest.param(object(), TryEnd.LOST, id="an object"),
    ],
    ids=repr,
)
def test_what_comes_back_is_judged(returned, end, monkeypatch):
    import tower_targets

    monkeypatch.setattr(tower_targets, "returns", lambda request: returned, raising=False)
    assert FunctionRunner("tower_targets:returns").run(request()).end is end


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_tensor_is_judged(dtype, monkeypatch):
    import torch
    import tower_targets

    bad = torch.tensor([1.0, float("inf")], dtype=getattr(torch, dtype))
    monkeypatch.setattr(tower_targets, "returns", lambda request: bad, raising=False)
    result = FunctionRunner("tower_targets:returns").run(request())
    assert result.end is TryEnd.FIRE
    assert "inf" in result.signs[0].reason


def test_arms_with_one_process_kind_share_it(capture, settings):
    campaign = run(capture, settings("tower_targets:seeded", 3, arms=("a:", "b:temperature=0")))
    assert campaign.arms[0].settings == Arm(name="a").settings == {}
    assert {t.arm for t in campaign.tries} == {"a", "b"}
