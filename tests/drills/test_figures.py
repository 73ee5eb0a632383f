"""Figures and confusion matrix of a board, from results made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from firetower.core.records import Kind
from firetower.drills import board
from firetower.drills.judging import Judgement
from firetower.drills.runner import Result
from firetower.drills.spec import Origin

GOOD = Judgement(
    wanted="A/OVERFLOW_ACTIVATION",
    said="A/OVERFLOW_ACTIVATION",
    statement="",
    undecided_between=(),
    declared_open=(),
    is_detected=True,
    unnamed=(),
    refuter="wider-type",
    refuted="V/UNDECIDED",
    twin_said=None,
)
SEEN = Origin(module="m", row=1, column=2, kind=Kind.NAN)


def result(drill="d", judgement=GOOD, **more):
    fields = {"expected": SEEN, "seen": SEEN, "elapsed_ms": 1.0, **more}
    return Result(drill=drill, variant="v", host="pure", level="layers", judgement=judgement, **fields)


def said(key, **more):
    return dataclasses.replace(GOOD, said=key, **more)


def by_name(results):
    return {f.name: f for f in board.figures(results)}


def test_a_board_without_a_miss_meets_every_bar():
    results = [result(), result(drill="e")]
    assert all(f.is_met for f in board.figures(results))
    assert board.misses(results) == []


@pytest.mark.parametrize(
    ("bad", "name", "count"),
    [
        (result(seen=None), "detected", 9),
        (result(mismatches=("row",)), "origin exact", 9),
        (result(twin=SEEN), "twins that fired", 1),
        (result(judgement=said("A/OVERFLOW_ACTIVATION", twin_said="M/ZEROED")), "twins that fired", 1),
        (result(judgement=said("M/BAD_WEIGHT")), "family wrong", 1),
        (result(judgement=said("V/UNDECIDED")), "undecided unannounced", 1),
        (result(judgement=said("A/OVERFLOW_ACTIVATION", refuted="A/OVERFLOW_ACTIVATION")), "refuter flips", 9),
    ],
    ids=["missed", "misplaced", "twin fired", "twin named", "wrong", "undecided", "no flip"],
)
def test_one_bad_result_of_ten_misses_its_bar(bad, name, count):
    results = [*(result() for _ in range(9)), bad]
    figure = by_name(results)[name]
    assert figure.count == count
    assert not figure.is_met
    assert "MISSED" in str(figure)
    assert board.misses(results) == [bad]


def test_undecided_is_right_where_it_was_declared():
    pair = ("A/OVERFLOW_ACTIVATION", "P/KERNEL_WRONG")
    announced = said("V/UNDECIDED", declared_open=pair, undecided_between=pair)
    figures = by_name([result(judgement=announced)])
    assert figures["family right"].count == 1
    assert figures["undecided unannounced"].count == 0
    half = dataclasses.replace(announced, undecided_between=pair[:1])
    assert by_name([result(judgement=half)])["family right"].count == 0
    decided = dataclasses.replace(GOOD, declared_open=pair)
    assert by_name([result(judgement=decided)])["family right"].count == 1


def test_the_matrix_has_a_row_a_planted_family_and_a_column_for_undecided():
    results = [result(), result(judgement=said("M/BAD_WEIGHT")), result(judgement=said("V/UNDECIDED"))]
    assert board.confusion(results) == {"A": {"A": 1, "M": 1, "V": 1}}


def test_a_line_sums_up_a_drill_and_leaves_skipped_variants_out():
    results = [result(), result(mismatches=("row",)), result(skipped="no file"), result(drill="e")]
    lines = board.lines(results)
    assert [(x.drill, x.num_variants, x.placed, x.right) for x in lines] == [("d", 2, 1, 2), ("e", 1, 1, 1)]
    assert lines[0].elapsed_ms == 2.0


def test_a_finite_fault_is_the_labs_to_detect_and_to_place():
    finite = dataclasses.replace(result(), level="finite", expected=None, seen=None, places=("slot 3",))
    assert finite.is_detected
    assert finite.is_placed
    unnamed = dataclasses.replace(finite, judgement=dataclasses.replace(GOOD, unnamed=("slot 3",)))
    assert not unnamed.is_placed
    unseen = dataclasses.replace(finite, judgement=said("V/UNDECIDED", is_detected=False))
    assert not unseen.is_detected
