"""A campaign as curves: what counts, in which order, with which interval."""

from __future__ import annotations

from typing import Any

from firetower.lab.curves import MAX_POINTS, campaign_curves
from firetower.lab.replay.records import (
    ArmResult,
    Campaign,
    CampaignEnd,
    Canary,
    CurveRow,
    Ignition,
    Isolation,
    RateRow,
    SeedMode,
    Try,
    TryEnd,
)
from firetower.lab.stats import anytime_rate


def one_try(number: int, end: TryEnd = TryEnd.CLEAN, arm: str = "base") -> Try:
    at = "2026-12-01T08:00:00.000Z"
    return Try(number=number, attempt=1, arm=arm, round=0, end=end, process="server 1", started_at=at, seconds=1.0)


def arm(fires: int, tries: int, name: str = "base", **fields: Any) -> ArmResult:
    rate = RateRow(fires=fires, tries=tries, rate=fires / tries, lower=0.0, upper=1.0, confidence=0.95, method="m")
    defaults: dict[str, Any] = {"settings": {}, "planned": tries, "num_dependent": 0, "num_lost": 0, "num_never": 0}
    return ArmResult(**(defaults | {"name": name, "num_warned": 0, "rate": rate} | fields))


def campaign(tries: list[Try], arms: tuple[ArmResult, ...], **fields: Any) -> Campaign:
    defaults: dict[str, Any] = {
        "id": "20261201-080000-ab",
        "created_at": "2026-12-01T08:00:00.000Z",
        "ended_at": "2026-12-01T09:00:00.000Z",
        "capture": "cap-1",
        "capture_digest": "ab" * 32,
        "model": "tiny",
        "target": "http://127.0.0.1:8000",
        "target_kind": "server",
        "planned": 4,
        "concurrency": 1,
        "isolation": Isolation.PROCESS,
        "seed_mode": SeedMode.FRESH,
        "seed": 0,
        "watching": True,
        "ended": CampaignEnd.PLANNED,
    }
    return Campaign(**(defaults | fields), arms=arms, tries=tuple(tries))


def test_points_count_in_the_order_in_which_tries_ended():
    fire, clean, lost = TryEnd.FIRE, TryEnd.CLEAN, TryEnd.LOST
    ends = [clean, fire, lost, clean, fire]
    curves = campaign_curves(campaign([one_try(i, e) for i, e in enumerate(ends)], (arm(2, 4, num_lost=1),)))
    [a] = curves.arms
    assert [(p.tries, p.fires) for p in a.points] == [(1, 0), (2, 1), (3, 1), (4, 2)]
    last = anytime_rate(2, 4)
    assert (a.points[-1].lower, a.points[-1].upper) == (last.lower, last.upper)
    assert "base: 1 try lost" in curves.notes[0]


def test_arms_are_kept_apart():
    tries = [one_try(0, arm="base"), one_try(1, TryEnd.FIRE, arm="hot"), one_try(2, TryEnd.FIRE, arm="hot")]
    curves = campaign_curves(campaign(tries, (arm(0, 1), arm(2, 2, "hot", settings={"temperature": 2}))))
    assert [(a.name, a.fires, a.tries) for a in curves.arms] == [("base", 0, 1), ("hot", 2, 2)]
    assert curves.arms[1].settings == "temperature=2"


def test_tries_that_wait_for_an_earlier_one_do_not_count():
    tries = [one_try(0), one_try(2, TryEnd.FIRE), one_try(1)]
    curves = campaign_curves(campaign(tries, (arm(0, 2, num_waiting=1),), ended=CampaignEnd.INTERRUPTED))
    assert (curves.arms[0].fires, curves.arms[0].tries) == (0, 2)
    assert any("ended interrupted" in n for n in curves.notes)


def test_survival_is_taken_as_it_was_computed():
    row = CurveRow(position=12, at_risk=4, fires=1, surviving=0.75, lower=0.2, upper=0.95)
    ignition = Ignition(points=(row,), last=64, median=float("inf"), median_lower=0, median_upper=0, sentence="s")
    [a] = campaign_curves(campaign([one_try(0, TryEnd.FIRE)], (arm(1, 1, ignition=ignition),))).arms
    assert [(p.position, p.surviving) for p in a.survival] == [(12, 0.75)]
    assert (a.last, a.survival_sentence) == (64, "s")


def test_a_long_campaign_is_thinned_and_keeps_its_fires_and_its_end():
    ends = [TryEnd.FIRE if i in (17, 1403) else TryEnd.CLEAN for i in range(5000)]
    [a] = campaign_curves(campaign([one_try(i, e) for i, e in enumerate(ends)], (arm(2, 5000),))).arms
    assert len(a.points) <= MAX_POINTS + 2
    assert {18, 1404, 5000} <= {p.tries for p in a.points}
    assert a.points[-1].fires == 2


def test_no_try_at_all():
    [a] = campaign_curves(campaign([], (arm(0, 1, rate=None),))).arms
    assert (a.points, a.sentence) == ((), "no try counted")


def test_dependence_is_told():
    canary = Canary(process="server 1", after=0, at="t", burned=2, prompts=2, persists=True)
    curves = campaign_curves(campaign([one_try(0)], (arm(0, 1),), isolation=Isolation.NONE, canaries=(canary,)))
    text = " ".join(curves.notes)
    assert "they may depend on each other" in text
    assert "poisoned their process" in text
    assert dict(curves.facts)["isolation"] == "none"
