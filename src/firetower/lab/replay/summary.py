"""From the tries to the campaign's result: figures by `lab.stats`, and sentences, most important first."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firetower.lab import stats
from firetower.lab.replay.arms import Arm
from firetower.lab.replay.plan import PlannedTry
from firetower.lab.replay.records import (
    ArmComparison,
    ArmResult,
    CampaignEnd,
    CurveRow,
    Ignition,
    Isolation,
    RateRow,
    Scatter,
    Try,
    TryEnd,
)
from firetower.lab.replay.state import CampaignState
from firetower.lab.stats.text import count, percent, share

MAX_BLOCKS = 10
MIN_BLOCK_TRIES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What the figures depend on besides the tries.

    Attributes:
        plan, arms: as made before the first try. confidence: of everything.
        watching: looks were allowed; the anytime-valid figures are used.
        isolation, concurrency: see `Options`. exclude_rate: to hold clean tries against.
    """

    plan: Sequence[PlannedTry]
    arms: Sequence[Arm]
    confidence: float
    watching: bool
    isolation: Isolation
    concurrency: int
    exclude_rate: float | None = None

    @property
    def planned(self) -> int:
        """Tries of each arm."""
        return len(self.plan) // len(self.arms)


def counted_tries(design: Design, state: CampaignState, ended: CampaignEnd | None = None) -> dict[str, list[Try]]:
    """Tries of each arm that the figures rest on: of the plan's settled beginning, in its order.

    While tries run side by side, those that fired are over before those that did not. Without a gap, what is
    counted does not depend on who was faster. A campaign that ended on a poisoned process closes no gap any more:
    there every try from before the poison counts, and the sentences say which way that leans.
    """
    found: dict[str, list[Try]] = {arm.name: [] for arm in design.arms}
    size = len(design.plan)
    for number in range(size if ended is CampaignEnd.POISONED else state.prefix(size)):
        if number in state.counted:
            found[design.plan[number].arm].append(state.counted[number])
    return found


def arms_differ(design: Design, state: CampaignState) -> bool:
    """While watching: whether every arm is already shown to differ from the first."""
    tries = counted_tries(design, state)
    found = list(_comparisons(design, tries, anytime=True))
    return len(found) == len(design.arms) - 1 and all(c.differs for c in found)


def is_anytime(design: Design, ended: CampaignEnd) -> bool:
    """Whether the number of tries was not the planned one, so that only anytime-valid figures hold."""
    return design.watching or ended is not CampaignEnd.PLANNED


def summarize(
    design: Design, state: CampaignState, ended: CampaignEnd
) -> tuple[tuple[ArmResult, ...], tuple[ArmComparison, ...], tuple[str, ...]]:
    """(arms, comparisons, sentences) of a campaign as far as it came."""
    anytime = is_anytime(design, ended)
    tries = counted_tries(design, state, ended)
    arms = tuple(_arm_result(design, state, arm, tries[arm.name], anytime=anytime) for arm in design.arms)
    comparisons = tuple(_comparisons(design, tries, anytime=anytime))
    return arms, comparisons, tuple(_sentences(design, state, ended, arms, comparisons))


def _arm_result(design: Design, state: CampaignState, arm: Arm, tries: Sequence[Try], *, anytime: bool) -> ArmResult:
    numbers = [p.number for p in design.plan if p.arm == arm.name]
    aside = [t for t in state.tries() if t.arm == arm.name and not t.counts]
    clean = None
    if tries and not any(t.end is TryEnd.FIRE for t in tries):
        clean = stats.clean_so_far(len(tries), confidence=design.confidence)
    return ArmResult(
        name=arm.name,
        settings=arm.settings,
        planned=design.planned,
        num_dependent=sum(t.end is TryEnd.DEPENDENT for t in aside),
        num_lost=sum(t.end is TryEnd.LOST for t in aside),
        num_never=sum(n not in state.counted for n in numbers),
        num_warned=sum(t.is_warned for t in tries),
        num_waiting=sum(n in state.counted for n in numbers) - len(tries),
        rate=_rate(tries, design.confidence, anytime=anytime) if tries else None,
        excludes_above=clean.excludes_above if clean else None,
        more_clean=_more_clean(design, clean) if clean else None,
        ignition=_ignition(tries, design.confidence),
        scatter=tuple(_scatter(design, tries)),
    )


def _rate(tries: Sequence[Try], confidence: float, *, anytime: bool) -> RateRow:
    make = stats.anytime_rate if anytime else stats.rate
    return RateRow(**dataclasses.asdict(make(_num_fires(tries), len(tries), confidence=confidence)))


def _num_fires(tries: Sequence[Try]) -> int:
    return sum(t.end is TryEnd.FIRE for t in tries)


def _more_clean(design: Design, clean: stats.CleanSoFar) -> int:
    """Further clean tries that exclude the wanted rate; without one, half of what they exclude by now."""
    target = clean.excludes_above / 2 if design.exclude_rate is None else design.exclude_rate
    return max(0, stats.clean_needed(target, confidence=design.confidence).tries - clean.tries)


def _ignition(tries: Sequence[Try], confidence: float) -> Ignition | None:
    """The curve, where the place of every fire and the length of every clean answer is known: else it would lie."""
    fires = [t for t in tries if t.end is TryEnd.FIRE]
    if not fires or any(t.ignition is None for t in fires):
        return None
    if any(t.num_tokens is None for t in tries if t.end is TryEnd.CLEAN):
        return None
    places = [
        stats.Position(at=(t.ignition if t.end is TryEnd.FIRE else t.num_tokens) or 0, fired=t.end is TryEnd.FIRE)
        for t in tries
    ]
    curve = stats.ignition_curve(places, confidence=confidence)
    return Ignition(
        points=tuple(CurveRow(**dataclasses.asdict(p)) for p in curve.points),
        last=curve.last,
        median=curve.median,
        median_lower=curve.median_lower,
        median_upper=curve.median_upper,
        sentence=curve.sentence,
    )


def _scatter(design: Design, tries: Sequence[Try]) -> Iterator[Scatter]:
    size = max(MIN_BLOCK_TRIES, -(-len(tries) // MAX_BLOCKS))
    blocks = [tries[i : i + size] for i in range(0, len(tries), size)]
    counts = [(_num_fires(b), len(b)) for b in blocks]
    if len(counts) > 1:
        yield _scatter_of(f"blocks of {size} tries, in order", counts, stats.dispersion(counts))
    lives: dict[str, list[Try]] = defaultdict(list)
    for t in sorted(tries, key=lambda t: t.started_at):
        lives[t.process].append(t)
    ends_at_fire = all(_num_fires(life[:-1]) == 0 for life in lives.values())
    if design.isolation is Isolation.RESTART and ends_at_fire and len(lives) > 1:
        rounds = [stats.Round(tries=len(life), fired=life[-1].end is TryEnd.FIRE) for life in lives.values()]
        # how long a life would have been let run: until all planned tries were made
        cap = None if all(r.fired for r in rounds) else max(r.tries for r in rounds)
        counts = [(int(r.fired), r.tries) for r in rounds]
        yield _scatter_of(
            "lives of a process, each until its first fire", counts, stats.rounds_dispersion(rounds, cap=cap)
        )


def _scatter_of(what: str, counts: Sequence[tuple[int, int]], found: stats.Dispersion) -> Scatter:
    return Scatter(
        what=what,
        counts=tuple(counts),
        index=found.index,
        p_value=found.p_value,
        overdispersed=found.overdispersed,
        sentence=found.sentence,
    )


def _comparisons(design: Design, tries: Mapping[str, Sequence[Try]], *, anytime: bool) -> Iterator[ArmComparison]:
    first, *others = design.arms
    if not others or not tries[first.name]:
        return
    # Bonferroni: all comparisons hold together at the wanted confidence
    confidence = 1 - (1 - design.confidence) / len(others)
    base = stats.rate(_num_fires(tries[first.name]), len(tries[first.name]))
    for arm in others:
        own = tries[arm.name]
        if not own:
            continue
        make: Any = stats.compare_watching if anytime else stats.compare
        names = (first.name, arm.name)
        found = make(base, stats.rate(_num_fires(own), len(own)), names=names, confidence=confidence)
        fields = {f.name for f in dataclasses.fields(ArmComparison)} - {"a", "b", "test", "differs", "sentence"}
        yield ArmComparison(
            a=first.name,
            b=arm.name,
            test=getattr(found, "test", "anytime"),
            differs=found.differs,
            sentence=found.sentence,
            **{name: getattr(found, name) for name in fields if hasattr(found, name)},
        )


def _sentences(
    design: Design,
    state: CampaignState,
    ended: CampaignEnd,
    arms: Sequence[ArmResult],
    comparisons: Sequence[ArmComparison],
) -> Iterator[str]:
    many = len(arms) > 1
    yield from (c.sentence for c in comparisons)
    if len(comparisons) > 1:
        confidence = percent(comparisons[0].confidence)
        yield f"Each of the {len(comparisons)} comparisons is made at {confidence}, so that all hold together."
    for arm in arms:
        head = f"{arm.name}: " if many else ""
        yield from (head + s for s in _arm_sentences(design, arm))
    yield from _fixed_sentences(design, arms)
    yield from _end_sentences(design, state, ended, arms)


def _arm_sentences(design: Design, arm: ArmResult) -> Iterator[str]:
    if arm.rate is None:
        yield "no try counts."
        return
    yield stats.Rate(**dataclasses.asdict(arm.rate)).sentence
    if arm.excludes_above is not None and arm.more_clean is not None:
        at = percent(design.confidence)
        said = f"{count(arm.rate.tries, 'clean try')} exclude rates above {share(arm.excludes_above)} at {at}"
        target = arm.excludes_above / 2 if design.exclude_rate is None else design.exclude_rate
        what = "half of that" if design.exclude_rate is None else f"a rate of {share(target)}"
        if arm.more_clean:
            yield f"{said}; {arm.more_clean:,} more needed to exclude {what}."
        else:
            yield f"{said}, and so {what}."
    if arm.ignition is not None:
        yield f"Where it starts: {arm.ignition.sentence}"
    yield from (f"{s.what[0].upper()}{s.what[1:]}: {s.sentence}" for s in arm.scatter if s.overdispersed)
    if arm.num_warned:
        yield f"{count(arm.num_warned, 'clean try')} showed a sign that is no proof; see the tries."


def _fixed_sentences(design: Design, arms: Sequence[ArmResult]) -> Iterator[str]:
    """For arms that stayed clean beside a first arm that fired: what supports that they are fixed."""
    before = arms[0].rate
    if before is None or not before.fires:
        return
    support = stats.fixed_support(stats.Rate(**dataclasses.asdict(before)), confidence=design.confidence)
    for arm in arms[1:]:
        if arm.rate is not None and not arm.rate.fires:
            yield f"{arm.name}, {count(arm.rate.tries, 'clean try')} so far: {support.sentence}"


def _end_sentences(
    design: Design, state: CampaignState, ended: CampaignEnd, arms: Sequence[ArmResult]
) -> Iterator[str]:
    burned = [c for c in state.canaries if c.burned]
    first = next((c for c in burned if c.after is None), None)
    if first is not None:
        yield (
            f"The canary burned in {first.process} before any try was made there ({first.detail}): what burns there "
            "needs no captured request. Next: firetower triage."
        )
    # a process that is waited for is asked again and again: the first answer is the one about the fire
    after = {c.after: c for c in reversed(state.canaries) if c.after is not None and c.prompts}
    if after:
        kept = sum(c.persists is True for c in after.values())
        yield (
            f"The canary was asked {count(len(after), 'time')} after a fire or a lost try: "
            f"the process stayed poisoned {count(kept, 'time')}."
        )
    if (num := sum(a.num_dependent for a in arms)) > 0:
        yield f"{count(num, 'try')} in a process in question or poisoned do not count, whatever they showed."
        if design.concurrency > 1 and design.isolation is not Isolation.PROCESS:
            yield (
                "Tries ran side by side in one process that stays poisoned, and a fire ends sooner than a clean try: "
                "the rate leans high. For an exact one: --concurrency 1."
            )
    yield from _lost_sentences(state, arms)
    words = _ENDS.get(ended)
    if words:
        yield words
    if is_anytime(design, ended) and not design.watching:
        yield "It did not reach the planned number of tries: the intervals are the wider ones that hold at any stop."
    if (num := sum(a.num_waiting for a in arms)) > 0:
        yield f"{count(num, 'try')} ended ahead of an earlier one of the plan, and count once that has ended."


_ENDS = {
    CampaignEnd.EARLY: "Stopped early, as watching allows: the intervals hold at any stop.",
    CampaignEnd.INTERRUPTED: "Interrupted. The same command goes on where it stopped.",
    CampaignEnd.POISONED: (
        "Stopped: the process is poisoned and nothing restarts it. Restart it, then give the same command; or let "
        "firetower do it: --isolate-tries restart (of a server: with --restart-command)."
    ),
    CampaignEnd.FAILING: "Stopped: no answers any more. The same command goes on once the target answers again.",
}


def _lost_sentences(state: CampaignState, arms: Sequence[ArmResult]) -> Iterator[str]:
    lost = [t for t in state.tries() if t.end is TryEnd.LOST]
    if not lost:
        return
    reasons = Counter(t.detail or "no reason" for t in lost)
    listed = ", ".join(f"{reason} ({n:,})" for reason, n in reasons.most_common(4))
    yield f"{count(len(lost), 'attempt')} gave no answer that can be judged: {listed}. They count neither way."
    for arm in arms:
        own = len([t for t in lost if t.arm == arm.name])
        if arm.rate is not None and own:
            worst = (arm.rate.fires + own) / (arm.rate.tries + own)
            yield f"Had all of them been fires, {arm.name} would have a rate of {share(worst)}."
