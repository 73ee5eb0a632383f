"""How often it fires, and how many clean tries would support "fixed", in sentences."""

from __future__ import annotations

from firetower.lab.incident.case import Case


def rate_sentences(case: Case) -> tuple[str, ...]:
    """Sentences on the rate; none where no tries were counted.

    Raises:
        StatsError: counts that cannot be.
    """
    if not case.rounds and not case.tries:
        return ()
    # scipy takes half a second: an incident without tries does not pay for it
    from firetower.lab.stats import fixed_support, rate

    before = rate(*case.tries) if case.tries else None
    said = [before.sentence] if before else []
    if not before:
        from firetower.lab.stats import Round, rounds_dispersion, rounds_rate

        rounds = [Round(tries=r or case.round_cap or 1, fired=r is not None) for r in case.rounds]
        shown = ", ".join(str(r or "none") for r in case.rounds)
        all_fired = all(r.fired for r in rounds)
        before = rounds_rate(rounds, cap=None if all_fired else case.round_cap)
        said.append(f"Rounds that stop at their first fire ({shown}): {before.sentence}")
        if all_fired and case.round_cap:
            said.append(_with_cap(case, before.lower, before.upper))
        if len(rounds) > 1:
            said.append(rounds_dispersion(rounds, cap=None if all_fired else case.round_cap).sentence)
    said += _pooling(case)
    if before.fires:
        said.append(fixed_support(before).sentence)
    return tuple(said)


def _with_cap(case: Case, lower: float, upper: float) -> str:
    from firetower.lab.stats import Round, rounds_rate
    from firetower.lab.stats.text import interval

    capped = rounds_rate([Round(tries=r or 1) for r in case.rounds], cap=case.round_cap)
    with_cap = interval(capped.lower, capped.upper)
    same = with_cap == interval(lower, upper)
    said = "the same" if same else f"{with_cap}, and that is the one to use if the cap was planned"
    return f"No round reached its cap of {case.round_cap} tries; with the cap in the design the interval is {said}."


def _pooling(case: Case) -> list[str]:
    builds = list(dict.fromkeys(s.build for s in case.sightings if s.build and s.try_number is not None))
    if len(builds) < 2:
        return []
    return [
        f"The tries are pooled over {len(builds)} builds ({'; '.join(builds)}): one rate for all is an assumption, "
        "which so few rounds cannot test. The builds differ in what was switched off or watched, "
        "and watching may change the rate."
    ]
