"""What the lab says of drills: the planted family, overturned by its refuter, and nothing of the twins."""

from __future__ import annotations

import dataclasses
from functools import cache
from random import Random

import pytest

from firetower.core.families import DETAILS
from firetower.drills import all_drills, find_drills
from firetower.drills.evidence import remembered, subject_of
from firetower.drills.hosts import SMOLLM2_FILE, cache_folder
from firetower.drills.judging import judge
from firetower.lab.diagnose import diagnose
from firetower.lab.discriminate import STEPS
from firetower.lab.subjects.torch_call import TorchSubject

has_smollm2 = (cache_folder() / "models" / SMOLLM2_FILE).is_file()

NUM_REPLAYS = 24

IN_A_HOST = ("state-not-cleared", "slot-mismatch", "unwritten-slot", "drafts-kept", "wild-write")
"""Drills of which the default run takes a variant inside a host as well."""


def _chosen(drill):
    """The variants of the default run: the first, and the first in a host of some."""
    variants = drill.variants(0)
    hosted = [v for v in variants if v.host == "qwen35moe"][: drill.name in IN_A_HOST]
    return [variants[0], *hosted]


DEFAULT = [(d, v) for d in all_drills() for v in _chosen(d)]
OTHERS = [
    (d, v)
    for d in all_drills()
    for v in d.variants(0)
    if v.id not in {c.id for c in _chosen(d)} and (v.host != "smollm2" or has_smollm2)
]


def _params(pairs):
    return [pytest.param(d, v, id=f"{d.name}-{v.host}-{v.id}") for d, v in pairs]


@cache
def _subject(name, number):
    """The subject of one variant of a drill; what it answered is kept, so that many diagnoses are cheap."""
    return remembered(subject_of(find_drills([name])[0].variants(0)[number].build(True)))


def _verdict(name, number=0, **more):
    return diagnose(_subject(name, number), num_replays=NUM_REPLAYS, **more)


def _assert_judged(drill, variant):
    found = judge(drill, variant, variant.build(True), variant.build(False))
    assert found.is_right, f"planted {found.wanted}, said {found.said}: {found.statement}"
    assert not found.is_wrong
    assert found.is_detected
    assert found.unnamed == (), found.statement
    assert found.has_flipped, f"refuted by {found.refuter}, still {found.refuted}"
    assert found.twin_said is None


@pytest.mark.parametrize(("drill", "variant"), _params(DEFAULT))
def test_the_family_is_named_the_refuter_flips_it_and_the_twin_is_let_be(drill, variant):
    _assert_judged(drill, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "variant"), _params(OTHERS))
def test_so_it_is_in_every_other_variant(drill, variant):
    _assert_judged(drill, variant)


def test_drills_are_many_and_over_most_families():
    drills = all_drills()
    planted = {d.verdict_of(v)[0] for d in drills for v in d.variants(0)}
    assert len(drills) >= 40
    assert len(planted - {"V"}) >= 16


@pytest.mark.parametrize("drill", all_drills(), ids=lambda d: d.name)
def test_what_is_declared_exists(drill):
    tests = {s.name for s in STEPS}
    for v in drill.variants(0):
        assert drill.verdict_of(v) in DETAILS
        assert drill.refuter_of(v).test in tests
        assert all(key in DETAILS for key in v.undecided_between)


def test_refuters_and_places_are_of_the_drills_room_only():
    """Verdict code that read what a drill declares would know the answer."""
    import firetower.lab.diagnose as lab

    for drill in all_drills():
        assert drill.name not in lab.__doc__
    subject = _subject("wild-write", 0)
    shown = {f.name for f in dataclasses.fields(subject)}
    assert not shown & {"verdict", "family", "refuter", "places", "expected", "drill"}
    assert subject.name == ""


def test_renamed_and_permuted_the_verdicts_are_the_same():
    names = [d.name for d in all_drills()]
    plain = {n: _verdict(n).to_mapping() for n in names}
    shuffled = Random(3).sample(names, len(names))
    for number, name in enumerate(shuffled):
        renamed = dataclasses.replace(_subject(name, 0), name=f"drill {number} of family {'ABC'[number % 3]}")
        assert diagnose(renamed, num_replays=NUM_REPLAYS).to_mapping() == plain[name], name


def _wrong_without(step, name, number=0):
    """The verdict without one test, where that is decided and of another family than those planted.

    A drill is listed under the family of what happens to the bad value, where that is planted too.
    """
    drill = find_drills([name])[0]
    planted = (drill.verdict_of(drill.variants(0)[number])[0], drill.family)
    rest = [s for s in STEPS if s is not step]
    found = _verdict(name, number, steps=rest)
    return found.key if found.decided and found.family not in planted else None


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.name)
def test_without_one_test_a_verdict_may_become_undecided_never_wrong(step):
    names = [d.name for d in all_drills() if _rests_on(d.name, 0, step)]
    wrong = {n: key for n in names if (key := _wrong_without(step, n)) is not None}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.name)
def test_without_one_test_so_it_is_in_hosts(step):
    hosted = [
        (d.name, i)
        for d in all_drills()
        for i, v in enumerate(d.variants(0))
        if v.host == "qwen35moe" and v.id == next(h.id for h in d.variants(0) if h.host == "qwen35moe")
    ]
    wrong = {n: key for n, i in hosted if _rests_on(n, i, step) and (key := _wrong_without(step, n, i)) is not None}
    assert wrong == {}


@cache
def _spoke(name, number):
    """Tests whose facts a verdict has: without any other it cannot change."""
    return frozenset(e.test for e in _verdict(name, number).evidence)


def _rests_on(name, number, step):
    return step.name in _spoke(name, number)


def test_a_judgement_tells_a_wrong_family_from_an_undecided_one():
    drill = find_drills(["wild-write"])[0]
    variant = drill.variants(0)[0]
    other = dataclasses.replace(drill, verdict="M/BAD_WEIGHT")
    wrong = judge(other, variant, variant.build(True), variant.build(False))
    assert (wrong.is_right, wrong.is_wrong) == (False, True)
    blind = dataclasses.replace(
        variant.build(True), parts=dict.fromkeys(("weights", "first_bad_op", "reference", "run"))
    )
    undecided = judge(drill, variant, blind, variant.build(False))
    assert (undecided.is_right, undecided.is_wrong) == (False, False)
    assert undecided.family_said == "V"


def test_a_twin_that_is_named_is_told():
    drill = find_drills(["wild-write"])[0]
    variant = drill.variants(0)[0]
    found = judge(drill, variant, variant.build(True), variant.build(True))
    assert found.twin_said == "K/WEIGHT_MUTATED"


def test_a_refuter_that_changes_nothing_is_told():
    drill = find_drills(["wild-write"])[0]
    idle = dataclasses.replace(drill, refuter=dataclasses.replace(drill.refuter, flip=lambda s: s))
    variant = drill.variants(0)[0]
    assert not judge(idle, variant, variant.build(True), variant.build(False)).has_flipped


def test_undecided_is_right_only_where_that_pair_was_declared():
    drill = find_drills(["wild-write"])[0]
    variant = drill.variants(0)[0]
    nothing = dict.fromkeys(("weights", "first_bad_op", "reference", "run", "launderers"))
    blind = dataclasses.replace(variant.build(True), parts=nothing)
    declared = dataclasses.replace(variant, undecided_between=("K/WEIGHT_MUTATED", "M/BAD_WEIGHT"))
    assert not judge(drill, declared, blind, variant.build(False)).is_right


OPEN_IN_A_HOST = ("zero-key",)
"""In a layer with several exponentials a bare call cannot tell whether its softmax is split."""


def _is_plain(variant):
    """Whether a case is a bare call of a model: nothing that only the drill could tell the lab of it."""
    case = variant.build(True)
    own = (case.kernels, case.serve, case.parts, case.switches, case.real_rows)
    return all(not x for x in own[:4]) and own[4] is None


def _assert_same_family_by_the_labs_own_look(drill, variant):
    case = variant.build(True)
    call = case.model if case.method == "__call__" else getattr(case.model, case.method)
    loaded = {n: p.detach().clone() for n, p in case.model.named_parameters()}
    subject = TorchSubject(call, *case.args, kwargs=dict(case.kwargs), at_load=loaded)
    verdict = diagnose(subject)
    may_be_open = variant.host != "pure" and drill.name in OPEN_IN_A_HOST
    assert verdict.family in (drill.verdict_of(variant)[0], *("V" * may_be_open)), verdict.statement


@pytest.mark.parametrize(("drill", "variant"), _params((d, v) for d, v in DEFAULT if v.host == "pure" and _is_plain(v)))
def test_the_labs_own_subject_of_a_bare_call_gets_the_same_family(drill, variant):
    _assert_same_family_by_the_labs_own_look(drill, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "variant"), _params((d, v) for d, v in OTHERS if v.host == "qwen35moe"))
def test_the_labs_own_subject_gets_the_same_family_in_hosts(drill, variant):
    if variant.level == "finite" or not _is_plain(variant):
        pytest.skip("the lab needs what only the drill can tell")
    _assert_same_family_by_the_labs_own_look(drill, variant)
