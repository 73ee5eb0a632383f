"""From a subject to a verdict: run the discriminating tests, cheap first, and read the rules of `causes`.

from firetower.lab.diagnose import diagnose

print(diagnose(subject).statement)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from firetower.core.families import DETAILS, FAMILIES, Detail, share
from firetower.core.verdict import UNDECIDED, Evidence, Rival, RivalStatus, Verdict
from firetower.lab.discriminate import STEPS, Step
from firetower.lab.discriminate.causes import CAUSES, Cause
from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact
from firetower.lab.discriminate.values import kinds, num_nonfinite, where
from firetower.lab.subject import Op, Subject

CHEAP = Cost.RECOMPUTE
"""What still runs after a cause is shown: it may add a rival."""

NUM_REPLAYS = 40
MAX_RIVALS = 8
MAX_OPEN = 6

NOTHING_SEEN = "NOTHING_SEEN"
"""Detail of an undecided verdict on a subject that showed nothing wrong."""


def diagnose(subject: Subject, *, steps: Sequence[Step] = STEPS, num_replays: int = NUM_REPLAYS) -> Verdict:
    """Say what is to blame for what a subject shows, as far as its evidence goes.

    Args:
        subject: see `lab.subject`; parts that it lacks are listed in ``not_testable``.
        steps: the discriminating tests to run, in order of cost.
        num_replays: replays of a test that replays; 40 shows a fault of one in 20 with 87% chance.

    Returns:
        A decided verdict, or one that says between which causes it is undecided and what to run next.
    """
    case = _Case(Look(subject, num_replays=num_replays), steps)
    case.run()
    return _decided(case) if case.culprit() is not None else _undecided(case)


@dataclasses.dataclass(slots=True)
class _Case:
    """What is known so far."""

    look: Look
    steps: Sequence[Step]
    facts: dict[str, Fact] = dataclasses.field(default_factory=dict)
    made_by: dict[str, str] = dataclasses.field(default_factory=dict)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        """Run the steps; once a cause is shown, the cheap ones only."""
        for step in sorted(self.steps, key=lambda s: s.cost):
            if step.cost > CHEAP and self._is_settled(step):
                continue
            missing = [p for p in step.needs if not self.look.has(p)]
            if missing:
                self.not_run[step.name] = ", ".join(missing)
                continue
            self._take(step)

    def _is_settled(self, step: Step) -> bool:
        """Whether a cause is shown, and nothing upstream of it is left for this step to show."""
        shown = [c for c in self.shown() if DETAILS[c.key].role != "aftermath"]
        if not shown:
            return False
        rank = CAUSES.index(shown[0])
        upstream = (c for c in CAUSES[:rank] if c.speaks_for(self.facts) and c.standing(self.facts) == "open")
        against = {n.removeprefix("not ") for n in shown[0].against}
        wanted = {n for c in upstream for n in c.unknown(self.facts)} | against
        return not wanted & set(step.facts)

    def _take(self, step: Step) -> None:
        try:
            found = list(step.run(self.look))
        except Exception as e:  # noqa: BLE001 - odd evidence must not end a diagnosis; it is reported
            self.not_run[step.name] = f"failed with {type(e).__name__}: {e}"
            return
        for f in found:
            assert f.name in step.facts, f"{step.name} yields {f.name}, which it does not declare"
            # two tests may speak to one fact: what was seen by either holds
            if f.name not in self.facts or (f.holds and not self.facts[f.name].holds):
                self.facts[f.name], self.made_by[f.name] = f, step.name
        if not found:
            self.not_run.setdefault(step.name, "gave no answer")

    def came_back_clean(self) -> bool:
        """Whether there was a run, nothing is wrong with it, and nothing speaks for any cause."""
        if not self.look.has("run") or self.open() or self.look.part("first_bad_op") is not None:
            return False
        return self.look.outcome() is not None and not self.look.is_wrong(self.look.outcome())

    def shown(self) -> list[Cause]:
        """Causes that are shown, upstream first."""
        return [c for c in CAUSES if c.standing(self.facts) == "shown"]

    def culprit(self) -> Cause | None:
        """The cause that the verdict names.

        What handles a bad value badly is it only where nothing is known, or suspected, of what made that value.
        """
        shown = self.shown()
        made = next((c for c in shown if DETAILS[c.key].role != "aftermath"), None)
        if made is None and any(DETAILS[c.key].role != "aftermath" for c in self.open()):
            return None
        operands = self.facts.get("operands_finite")
        if made is None and operands is not None and operands.holds:
            # an op made it of finite operands, and nobody knows why
            return None
        return made or next(iter(shown), None)

    def open(self) -> list[Cause]:
        """Causes with something for them and nothing against, the best supported first; one a detail."""
        found = [c for c in CAUSES if c.standing(self.facts) == "open" and c.is_candidate(self.facts)]
        found.sort(key=lambda c: -len(c.speaks_for(self.facts)) / len(c.requires))
        return list({c.key: c for c in reversed(found)}.values())[::-1]

    def left_over(self) -> list[Cause]:
        """The open causes; where it is one, also those that it could be mistaken for."""
        found = self.open()
        if len(found) == 1:
            untold = [n for n in found[0].excludes if n not in self.facts]
            alike = (c for n in untold for c in CAUSES if n in c.requires)
            # hardware is suspected on evidence only
            found += [c for c in alike if c.standing(self.facts) == "open" and not c.key.startswith("U/")]
        return list({c.key: c for c in found}.values())

    def step_for(self, cause: Cause) -> Step | None:
        """The cheapest test that can establish a missing fact of a cause; rather one that can run."""
        missing = cause.unknown(self.facts)
        able = [s for s in STEPS if set(s.facts) & set(missing)]
        return min(able, key=lambda s: (s.name in self.not_run, s.cost), default=None)

    def step_of(self, fact: Fact) -> str:
        """Which test established a fact."""
        return self.made_by.get(fact.name, "")


def _decided(case: _Case) -> Verdict:
    shown, first = case.shown(), case.culprit()
    assert first is not None
    detail = DETAILS[first.key]
    refuter = _refuting_step(case, first)
    return Verdict(
        family=detail.family,
        detail=detail.name,
        decided=True,
        statement=_statement(case, first, detail),
        evidence=_evidence(case),
        rivals=_rivals(case, first),
        refuter=detail.refuter,
        next_test=refuter.name if refuter else "",
        next_command=refuter.command if refuter else "",
        scope=detail.scope,
        cure=detail.cure,
        retriable=detail.retriable,
        ignition=_ignition(case, first, shown),
        persistence=_persistence(case, shown),
        aftermath=_aftermath(shown),
        not_testable=_not_testable(case),
    )


def _undecided(case: _Case) -> Verdict:
    if case.came_back_clean():
        return _clean(case)
    left = case.left_over()[:MAX_OPEN]
    step = next((s for c in left if (s := case.step_for(c)) is not None), None)
    if step is None:
        step = next((s for s in STEPS if s.name in case.not_run), STEPS[0])
    names = [c.key for c in left]
    between = " and ".join(names) if names else "all causes: nothing that was seen speaks for one"
    return Verdict(
        family=UNDECIDED,
        detail="UNDECIDED",
        decided=False,
        statement=f"Undecided between {between}; run {step.name}: {step.title}",
        evidence=_evidence(case),
        rivals=_rivals(case, None),
        refuter="",
        next_test=step.name,
        next_command=step.command,
        ignition="not known",
        persistence=_persistence(case, []),
        aftermath=_aftermath(case.shown()),
        not_testable=_not_testable(case),
        undecided_between=tuple(names),
    )


def _clean(case: _Case) -> Verdict:
    """Nothing wrong was seen: that is a finding too, and no acquittal."""
    return Verdict(
        family=UNDECIDED,
        detail=NOTHING_SEEN,
        decided=False,
        statement=(
            "Nothing wrong was seen: the run came back clean and no test found a cause. If it burned before, "
            "state, ordering or memory layout differed; replay it many times"
        ),
        evidence=_evidence(case),
        next_test="replays",
        next_command=next(s.command for s in STEPS if s.name == "replays"),
        ignition="not seen",
        persistence=_persistence(case, []),
        not_testable=_not_testable(case),
    )


def _statement(case: _Case, cause: Cause, detail: Detail) -> str:
    seen = "; ".join(f.statement for f in cause.speaks_for(case.facts))
    place = _place(case.look, seen)
    return f"{detail.title[0].upper()}{detail.title[1:]}{place}: {seen}."


def _place(look: Look, seen: str) -> str:
    """Where the first bad op is, unless what was seen says it."""
    op = look.part("first_bad_op")
    if not isinstance(op, Op) or not op.outputs or f"{where(op)} stores" in seen:
        return ""
    bad = op.outputs[0]
    return f" ({where(op)} stores {kinds(bad)})" if num_nonfinite(bad) else f" (first seen at {where(op)})"


def _evidence(case: _Case) -> tuple[Evidence, ...]:
    found = []
    speaking = [(c.key, {f.name for f in c.speaks_against(case.facts)}) for c in CAUSES]
    for name, f in case.facts.items():
        supports = {c.key for c in CAUSES if name in c.requires and f.holds}
        against = {key for key, names in speaking if name in names}
        found.append(
            Evidence(
                test=case.step_of(f),
                statement=f.statement,
                supports=tuple(sorted(supports)),
                against=tuple(sorted(against - supports)),
            )
        )
    return tuple(found)


def _rivals(case: _Case, winner: Cause | None) -> tuple[Rival, ...]:
    """Causes with something for them: those that stay open, then those that were ruled out."""
    found: dict[str, Rival] = {}
    for c in (*case.shown(), *case.open()):
        if winner is not None and c.key != winner.key:
            step = case.step_for(c)
            why = "; ".join(f.statement for f in c.speaks_for(case.facts))
            found.setdefault(c.key, _rival(c, "open", why, step.name if step else ""))
    for c in CAUSES:
        against = c.speaks_against(case.facts)
        if c.speaks_for(case.facts) and against and (winner is None or c.key != winner.key):
            found.setdefault(c.key, _rival(c, "excluded", against[0].statement, case.step_of(against[0])))
    return tuple(found.values())[:MAX_RIVALS]


def _rival(cause: Cause, status: RivalStatus, why: str, test: str) -> Rival:
    detail = DETAILS[cause.key]
    return Rival(family=detail.family, detail=detail.name, status=status, why=why, test=test)


def _refuting_step(case: _Case, cause: Cause) -> Step | None:
    """The test that would overturn a verdict: a cure that was not tried, else the dearest that decided it."""
    cures = {n.removeprefix("not ") for n in cause.against if n.startswith("not ")} - set(case.facts)
    untried = [s for s in STEPS if set(s.facts) & cures]
    decisive = [s for s in STEPS if set(s.facts) & set(cause.requires)]
    return next(iter(untried), None) or max(decisive, key=lambda s: s.cost, default=None)


def _ignition(case: _Case, first: Cause, shown: Sequence[Cause]) -> str:
    role = DETAILS[first.key].role
    if role == "ignition":
        return f"{first.key}: {DETAILS[first.key].title}"
    other = next((c for c in shown if DETAILS[c.key].role == "ignition"), None)
    if other is not None:
        return f"{other.key}: {DETAILS[other.key].title}"
    if role == "persistence":
        return "not seen here: it happened before this request; diagnose the first fire on this slot"
    return "not seen here: it lies before the logits; diagnose with the ops before them"


def _persistence(case: _Case, shown: Sequence[Cause]) -> str:
    kept = [c for c in shown if DETAILS[c.key].role == "persistence"]
    if kept:
        return f"{kept[0].key}: {DETAILS[kept[0].key].title}"
    if any(c.key in ("K/WEIGHT_MUTATED", "U/SINGLE_BIT") for c in shown):
        return "the weight stays as it is until it is loaded again"
    if any(c.key.startswith("M/") for c in shown):
        return "the file: every process that loads it"
    checked = [case.facts[n] for n in ("state_nonfinite_at_start", "state_left_over") if n in case.facts]
    if len(checked) == 2:
        return "none seen: new requests start on fresh states"
    return "not tested: states at request start were not seen"


def _aftermath(shown: Sequence[Cause]) -> str:
    after = (c.key for c in shown if DETAILS[c.key].role == "aftermath")
    return next((f"{key}: {DETAILS[key].title}" for key in after), "")


def _not_testable(case: _Case) -> tuple[str, ...]:
    return tuple(f"{part}: {why}" for part, why in case.look.missing.items())


def explain(verdict: Verdict) -> Iterator[str]:
    """The verdict as lines of text, conclusion first."""
    yield _headline(verdict)
    yield verdict.statement
    for name, text in (
        ("refuted if", verdict.refuter),
        ("cure", verdict.cure),
        ("scope", f"{verdict.scope}; retriable: {verdict.retriable}" if verdict.decided else ""),
        ("ignition", verdict.ignition),
        ("persistence", verdict.persistence),
        ("aftermath", verdict.aftermath),
    ):
        if text:
            yield f"  {name:11} {text}"
    speaking = [e for e in verdict.evidence if e.supports]
    yield from _listed("Evidence", (str(e) for e in speaking))
    if num_rest := len(verdict.evidence) - len(speaking):
        yield f"{num_rest} further observations speak for no cause or rule one out (--json has them)."
    yield from _listed("Rivals", (f"{r.key}, {r.status}: {r.why}" for r in verdict.rivals))
    yield from _listed("Not testable", _by_reason(verdict.not_testable))
    yield f"Next: {verdict.next_test}: {verdict.next_command}"


def _by_reason(not_testable: Sequence[str]) -> Iterator[str]:
    """Parts that are missing for the same reason, on one line."""
    parts: dict[str, list[str]] = {}
    for entry in not_testable:
        part, _, why = entry.partition(": ")
        parts.setdefault(why, []).append(part)
    yield from (f"{', '.join(names)}: {why}" for why, names in parts.items())


def _headline(verdict: Verdict) -> str:
    if not verdict.decided:
        return "Verdict: undecided"
    name = FAMILIES[verdict.family].name
    return f"Verdict: {verdict.family} {name}, {verdict.detail} ({share(verdict.family)})"


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield f"{title}:"
        yield from (f"  {line}" for line in found)
