"""The engine: what it says where evidence is missing, odd or of two faults at once."""

from __future__ import annotations

import numpy as np
import pytest

from firetower.core.families import DETAILS, FAMILIES
from firetower.core.verdict import Verdict
from firetower.lab.diagnose import NOTHING_SEEN, diagnose, explain
from firetower.lab.discriminate import STEPS
from firetower.lab.discriminate.causes import CAUSES, COMMON
from firetower.lab.discriminate.step import Cost
from firetower.lab.subject import Op, Outcome, Request, Sampled, Slot, State, Switch, Weight, array, hash_of
from firetower.lab.subjects.given import LISTS, GivenSubject


def overflow_op() -> Op:
    x = np.full((2, 8), 300, np.float16)
    with np.errstate(over="ignore"):
        y = x * x
    return Op(name="mul", inputs=(array("gate", x), array("up", x)), outputs=(array("out", y),))


def wide(dtype: str, what: str) -> tuple[object, ...] | None:
    return (array("out", np.full((2, 8), 9e4, np.float32)),) if what == "op" else None


def test_a_subject_without_parts_is_undecided_and_says_what_it_lacks():
    verdict = diagnose(GivenSubject("nothing"))
    assert (verdict.key, verdict.decided, verdict.evidence) == ("V/UNDECIDED", False, ())
    lacking = " ".join(verdict.not_testable)
    for part in ("weights", "states", "valid_rows", "run", "first_bad_op"):
        assert f"{part}: the subject has no such part" in lacking
    assert "nothing that was seen speaks for one" in verdict.statement


def test_a_part_that_cannot_tell_is_not_a_part_that_says_none():
    silent = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, quantised=lambda: None))
    spoken = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, none=("quantised",)))
    assert "quantised: the subject cannot tell" in silent.not_testable
    assert not silent.decided
    assert "B/SCALE_OVERFLOW" in silent.undecided_between
    assert spoken.key == "A/OVERFLOW_ACTIVATION"


def test_a_part_that_breaks_is_reported_and_guesses_nothing():
    def broken() -> None:
        raise ZeroDivisionError("no rows")

    verdict = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, quantised=broken))
    assert "quantised: failed with ZeroDivisionError: no rows" in verdict.not_testable
    assert not verdict.decided


def test_only_the_logits_were_seen():
    """Routed rows may be to blame, and nothing says so: no family is guessed."""

    def run(request: Request) -> Outcome:
        return Outcome(outputs=(array("logits", np.full(4, np.nan)),), origin="logits", kind="nan")

    verdict = diagnose(GivenSubject(run=run, switches=()))
    assert (verdict.key, verdict.decided) == ("V/UNDECIDED", False)
    assert verdict.next_test
    assert any(entry.startswith("slots: ") for entry in verdict.not_testable)


def test_where_one_cause_is_left_those_like_it_are_named():
    weight = array("w", np.full((2, 2), np.nan, np.float32))
    op = Op(name="linear", inputs=(array("x", np.ones((1, 2))),), weights=(weight,), outputs=(weight,))
    verdict = diagnose(GivenSubject(weights=(Weight(name="w", now=weight),), first_bad_op=op))
    assert verdict.undecided_between[0] == "M/BAD_WEIGHT"
    assert "K/WEIGHT_MUTATED" in verdict.undecided_between
    assert verdict.next_test == "weights-vs-load"


def test_a_clean_subject_gets_no_verdict_and_no_acquittal():
    verdict = diagnose(GivenSubject(none=LISTS, run=lambda r: Outcome(outputs=(array("y", np.ones(3)),)), switches=()))
    assert (verdict.detail, verdict.decided) == (NOTHING_SEEN, False)
    assert "replay it many times" in verdict.statement


def poisoned_state() -> State:
    value = np.full((2, 2), np.nan, np.float32)
    zeros = hash_of(np.zeros_like(value))
    return State(
        name="S", value=array("S", value), hash_now=hash_of(value), expected_hash=zeros, is_fresh_expected=True
    )


def test_persistence_is_judged_apart_from_ignition():
    def run(request: Request) -> Outcome:
        clean = request.switch is Switch.FRESH_STATE
        return Outcome(outputs=(array("y", np.ones(2) if clean else np.full(2, np.nan)),))

    verdict = diagnose(GivenSubject(states=(poisoned_state(),), run=run, switches=(Switch.FRESH_STATE,)))
    assert verdict.key == "E/STATE_NOT_CLEARED"
    assert verdict.persistence.startswith("E/STATE_NOT_CLEARED")
    assert "before this request" in verdict.ignition


def test_an_ignition_beside_fresh_states_leaves_no_persistence():
    verdict = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, none=LISTS))
    assert verdict.ignition.startswith("A/OVERFLOW_ACTIVATION")
    assert verdict.persistence.startswith("none seen")
    unseen = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, none=("quantised",)))
    assert unseen.persistence.startswith("not tested")


def test_what_became_of_a_bad_value_is_not_what_made_it():
    sampled = Sampled(row=0, logits=array("logits", np.full(4, np.nan)), token_id=0)
    verdict = diagnose(
        GivenSubject(first_bad_op=overflow_op(), reference=wide, sampled=(sampled,), none=("quantised",))
    )
    assert verdict.key == "A/OVERFLOW_ACTIVATION"
    assert verdict.aftermath.startswith("N/NAN_LAUNDERED")
    assert "N/NAN_LAUNDERED" in [r.key for r in verdict.rivals]


def test_two_faults_at_once_the_one_upstream_is_the_verdict_and_the_other_a_rival():
    slot = Slot(slot=0, expert=1, hash_now="b", source_hash="a", known={2: "b"})
    op = dataclass_with_zero_division()
    verdict = diagnose(GivenSubject(slots=(slot,), first_bad_op=op, none=[n for n in LISTS if n != "slots"]))
    assert verdict.key == "L/EXPERT_SLOT_MISMATCH"
    assert verdict.rivals


def dataclass_with_zero_division() -> Op:
    scores = np.float32([[-np.inf, -np.inf], [0, 0]])
    with np.errstate(invalid="ignore"):
        shifted = scores - scores.max(-1, keepdims=True)
    return Op(name="sub", inputs=(array("scores", scores),), outputs=(array("z", shifted),))


def test_dear_tests_do_not_run_once_a_cause_is_shown():
    runs: list[Request] = []

    def run(request: Request) -> Outcome:
        runs.append(request)
        return Outcome(outputs=(array("y", np.full(2, np.inf)),))

    parts = {"first_bad_op": overflow_op(), "reference": wide, "run": run, "switches": tuple(Switch)}
    verdict = diagnose(GivenSubject(none=LISTS, **parts), num_replays=50)
    assert verdict.key == "A/OVERFLOW_ACTIVATION"
    assert len(runs) < 20


def test_each_run_starts_from_the_same_point():
    """A subject that is worn by its runs is put back before each."""
    worn = {"runs": 0}

    def reset() -> None:
        worn["runs"] = 0

    def run(request: Request) -> Outcome:
        worn["runs"] += 1
        return Outcome(outputs=(array("y", np.float64([worn["runs"]])),), is_wrong=worn["runs"] > 1)

    verdict = diagnose(GivenSubject(none=LISTS, run=run, reset=reset, switches=()), num_replays=5)
    assert verdict.detail == NOTHING_SEEN
    assert "0 of 5 replays are wrong" in " ".join(e.statement for e in verdict.evidence)


def test_verdicts_do_not_read_names():
    op = overflow_op()
    first = diagnose(GivenSubject("activation overflow A1", first_bad_op=op, reference=wide, none=LISTS))
    second = diagnose(GivenSubject("unwritten pads", first_bad_op=op, reference=wide, none=LISTS))
    assert first == second


def test_the_rules_speak_only_of_facts_that_some_test_can_establish():
    able = {name for step in STEPS for name in step.facts}
    wanted = {n.removeprefix("not ") for c in CAUSES for n in (*c.requires, *c.excludes, *c.against)}
    assert wanted - able == set()
    assert able >= COMMON


def test_every_detail_has_a_rule_and_every_rule_a_detail():
    assert {c.key for c in CAUSES} == set(DETAILS)
    assert {d.family for d in DETAILS.values()} | {"V"} == set(FAMILIES)


def test_steps_run_in_order_of_cost_and_have_names_of_their_own():
    assert [s.cost for s in STEPS] == sorted(s.cost for s in STEPS)
    assert len({s.name for s in STEPS}) == len(STEPS)
    assert {s.cost for s in STEPS} == set(Cost)
    assert all(s.command and s.title.endswith("?") for s in STEPS)


def test_the_page_puts_the_conclusion_first_and_groups_what_is_missing():
    verdict = diagnose(GivenSubject(first_bad_op=overflow_op(), reference=wide, none=("quantised",)))
    lines = list(explain(verdict))
    assert lines[0] == "Verdict: A overflow, OVERFLOW_ACTIVATION (17 of 172 public reports)"
    assert "90,000 > 65,504" in lines[1]
    missing = [line for line in lines if line.endswith("the subject has no such part")]
    assert len(missing) == 1
    assert "weights, states" in missing[0]
    assert lines[-1].startswith("Next: ")


@pytest.mark.parametrize("parts", [{}, {"first_bad_op": overflow_op(), "reference": wide, "none": ("quantised",)}])
def test_a_verdict_survives_storing(parts):
    verdict = diagnose(GivenSubject(**parts))
    assert Verdict.from_mapping(verdict.to_mapping()) == verdict


def test_an_op_that_burned_by_itself_is_not_explained_by_the_sampler_behind_it():
    x = np.ones((2, 2), np.float32)
    op = Op(name="fused", inputs=(array("x", x),), outputs=(array("y", x * np.nan),))
    sampled = Sampled(row=0, logits=array("logits", np.full(4, np.nan)), token_id=0)
    verdict = diagnose(GivenSubject(first_bad_op=op, sampled=(sampled,)))
    assert not verdict.decided
    assert verdict.aftermath.startswith("N/NAN_LAUNDERED")


def test_a_suspect_upstream_keeps_the_sampler_from_being_blamed():
    weight = array("w", np.full((2, 2), np.nan, np.float32))
    op = Op(name="linear", inputs=(array("x", np.ones((1, 2))),), weights=(weight,), outputs=(weight,))
    sampled = Sampled(row=0, logits=array("logits", np.full(4, np.nan)), token_id=0)
    verdict = diagnose(GivenSubject(weights=(Weight(name="w", now=weight),), first_bad_op=op, sampled=(sampled,)))
    assert "M/BAD_WEIGHT" in verdict.undecided_between
    assert verdict.aftermath.startswith("N/NAN_LAUNDERED")
