"""A replay campaign as curves for its report: fires so far with the anytime interval, and where fires start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firetower.core.analysis import ArmCurve, CampaignCurves, RatePoint, SurvivalPoint
from firetower.lab.replay.records import ArmResult, Campaign, Try

MAX_POINTS = 150
"""Looks at which the interval is computed; every fire is one of them while there are fewer."""


def campaign_curves(campaign: Campaign) -> CampaignCurves:
    """Draw every arm of a campaign.

    Tries count in the order in which they ended. Lost and dependent ones do not count, nor do tries that ended before
    an earlier one of a stopped campaign: fires end sooner than clean tries.
    """
    return CampaignCurves(
        title=f"Campaign {campaign.id}: {campaign.model or campaign.capture}",
        arms=tuple(_arm(campaign, arm) for arm in campaign.arms),
        sentences=campaign.sentences,
        notes=tuple(_notes(campaign)),
        facts=tuple(_facts(campaign)),
    )


def _arm(campaign: Campaign, arm: ArmResult) -> ArmCurve:
    tries = _counted(campaign, arm)
    return ArmCurve(
        name=arm.name,
        settings=_settings(arm.settings),
        points=tuple(_points(tries)),
        sentence=_rate(arm),
        survival=tuple(
            SurvivalPoint(position=p.position, surviving=p.surviving, lower=p.lower, upper=p.upper)
            for p in (arm.ignition.points if arm.ignition else ())
        ),
        survival_sentence=arm.ignition.sentence if arm.ignition else "",
        last=arm.ignition.last if arm.ignition else 0,
    )


def _counted(campaign: Campaign, arm: ArmResult) -> list[Try]:
    """The tries behind the arm's rate: of a stopped campaign the first of the plan, without the waiting ones."""
    ended = [t for t in campaign.tries if t.arm == arm.name and t.counts]
    wanted = arm.rate.tries if arm.rate else 0
    if wanted < len(ended):
        kept = {t.number for t in sorted(ended, key=lambda t: t.number)[:wanted]}
        ended = [t for t in ended if t.number in kept]
    return ended


def _points(tries: list[Try]) -> Iterator[RatePoint]:
    from firetower.lab.stats import anytime_rate

    fires, looks = 0, _looks(tries)
    for number, t in enumerate(tries, start=1):
        fires += t.end == "fire"
        if number in looks:
            rate = anytime_rate(fires, number)
            yield RatePoint(tries=number, fires=fires, lower=rate.lower, upper=rate.upper)


def _looks(tries: list[Try]) -> set[int]:
    n = len(tries)
    even = {round(1 + i * (n - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} if n else set()
    at_fires = {i for i, t in enumerate(tries, start=1) if t.end == "fire"}
    return even | at_fires if len(at_fires) <= MAX_POINTS else even


def _rate(arm: ArmResult) -> str:
    from firetower.lab.stats.text import count, interval, percent, share

    r = arm.rate
    if r is None:
        return "no try counted"
    said = f"{count(r.fires, 'fire')} in {count(r.tries, 'try')}: rate {share(r.rate)}; "
    said += f"{percent(r.confidence)} {interval(r.lower, r.upper)} ({r.method})"
    if arm.excludes_above is not None:
        said += f"; rates above {share(arm.excludes_above)} are excluded"
    if arm.more_clean:
        said += f"; {arm.more_clean:,} more clean tries needed"
    return said


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in settings.items())


def _notes(campaign: Campaign) -> Iterator[str]:
    if campaign.ended != "planned":
        yield f"the campaign ended {campaign.ended}: the planned number of tries was not reached"
    if campaign.isolation == "none":
        yield "tries ran in one process that was never started anew: they may depend on each other"
    for arm in campaign.arms:
        named = (
            (arm.num_dependent, "set aside: they ran after a fire in a process that it had poisoned"),
            (arm.num_lost, "lost: no answer that can be judged"),
            (arm.num_never, "planned and never made"),
            (arm.num_waiting, "not counted yet: an earlier try of the plan had not ended"),
            (arm.num_warned, "clean with a warning sign, counted as clean"),
        )
        yield from (f"{arm.name}: {n} {'try' if n == 1 else 'tries'} {what}" for n, what in named if n)
        yield from (f"{arm.name}, {s.what}: {s.sentence}" for s in arm.scatter if s.overdispersed)
    if poisoned := sum(1 for c in campaign.canaries if c.persists):
        yield f"the canary burned after {poisoned} fires: these poisoned their process"


def _facts(campaign: Campaign) -> Iterator[tuple[str, str]]:
    yield "capture", campaign.capture
    yield "capture digest", campaign.capture_digest
    yield "target", f"{campaign.target} ({campaign.target_kind})"
    yield "started", campaign.created_at
    yield "ended", f"{campaign.ended_at}, {campaign.ended}"
    yield "planned", f"{campaign.planned} tries an arm, {campaign.concurrency} at once"
    yield "isolation", str(campaign.isolation)
    yield "seeds", f"{campaign.seed_mode}, order from {campaign.seed}"
    yield from ((name, str(value)) for name, value in campaign.settings.items())
    yield from campaign.environment.items()
