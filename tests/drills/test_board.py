"""The board: every fault at its exact origin, every twin silent; and the runner sees it when they are not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from firetower.core.errors import FiretowerError
from firetower.drills import all_drills, find_drills
from firetower.drills.hosts import SMOLLM2_FILE, cache_folder
from firetower.drills.runner import observe, pick, run_variant
from firetower.drills.spec import Drill, Variant

BOARD = [(d, v) for d in all_drills() for v in d.variants(0)]

IN_A_HOST = ("bad-weight", "every-stage", "state-not-cleared")
"""Drills of which the default run takes every variant in a small host; of each it takes one without a host."""

FIRST = {(d.name, d.variants(0)[0].id) for d in all_drills()}
has_smollm2 = (cache_folder() / "models" / SMOLLM2_FILE).is_file()


def _is_quick(drill, variant):
    if variant.host == "pure":
        return (drill.name, variant.id) in FIRST
    return variant.host != "smollm2" and drill.name in IN_A_HOST


def _params(*, quick: bool, smollm2: bool = False):
    chosen = [(d, v) for d, v in BOARD if _is_quick(d, v) is quick and (v.host == "smollm2") is smollm2]
    return [pytest.param(d, v, id=f"{d.name}-{v.host}-{v.id}") for d, v in chosen]


def _assert_exact(drill: Drill, variant: Variant) -> None:
    result = run_variant(drill, variant)
    assert result.skipped is None
    assert result.is_detected, f"planted {result.expected or result.places}: nothing reported"
    assert result.mismatches == (), f"planted {result.expected}: reported {result.seen}"
    assert result.is_placed, f"planted {result.places}: not named by {result.judgement}"
    assert result.twin is None
    assert result.is_twin_silent, result.judgement
    assert result.failures == ()
    assert result.is_exact


@pytest.mark.parametrize(("drill", "variant"), _params(quick=True))
def test_origin_is_exact_and_twin_silent(drill, variant):
    _assert_exact(drill, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "variant"), _params(quick=False))
def test_origin_is_exact_in_every_other_variant(drill, variant):
    _assert_exact(drill, variant)


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs `make models`")
@pytest.mark.parametrize(("drill", "variant"), _params(quick=False, smollm2=True))
def test_origin_is_exact_inside_smollm2(drill, variant):
    _assert_exact(drill, variant)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, *(pytest.param(s, marks=pytest.mark.soak) for s in (1, 3, 4))])
def test_other_seeds_are_as_exact(seed):
    plan = [(d, v) for d in all_drills() for v in d.variants(seed) if v.host != "smollm2"]
    missed = [r for r in itertools.starmap(run_variant, plan) if not r.is_exact]
    assert missed == []


def _bad_weight(level: str) -> tuple[Drill, Variant]:
    drill = find_drills(["M1"])[0]
    return drill, next(v for v in drill.variants(0) if v.host == "pure" and v.level == level)


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_a_fault_that_is_not_there_is_a_miss(level):
    drill, variant = _bad_weight(level)
    expected = variant.build(True).expected

    def only_twins(fault):
        return dataclasses.replace(variant.build(False), expected=expected if fault else None)

    result = run_variant(drill, dataclasses.replace(variant, build=only_twins))
    assert result.seen is None
    assert not result.is_exact


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_a_twin_that_fires_is_told(level):
    drill, variant = _bad_weight(level)
    result = run_variant(drill, dataclasses.replace(variant, build=lambda fault: variant.build(True)))
    assert result.mismatches == ()
    assert result.twin == result.seen
    assert not result.is_exact


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_a_wrong_column_is_told(level):
    drill, variant = _bad_weight(level)

    def elsewhere(fault):
        case = variant.build(fault)
        wrong = case.expected and dataclasses.replace(case.expected, column=case.expected.column + 1)
        return dataclasses.replace(case, expected=wrong)

    result = run_variant(drill, dataclasses.replace(variant, build=elsewhere))
    assert result.mismatches == ("column",)
    assert not result.is_exact


def test_launderers_do_hand_out_ordinary_values():
    """The N drills test nothing unless the run's own result looks fine."""
    for name in ("nan-sampled", "nan-guarded"):
        for variant in find_drills([name])[0].variants(0):
            if variant.host != "smollm2":
                out = variant.build(True).call()
                out = getattr(out, "logits", out)
                assert not out.is_floating_point() or out.isfinite().all(), variant.id


def test_a_nan_query_is_seen_where_the_attention_kernel_hides_it():
    """On the CPU the fused kernel answers a NaN query with zeros: the mixer's output alone would look clean."""
    _, variant = next((d, v) for d, v in BOARD if v.id.startswith("qproj"))
    seen = observe(variant.build(True), dataclasses.replace(variant, level="layers"))[0].origin
    assert seen is not None
    assert seen.stage == "query"


def test_what_the_black_box_reports_leaves_the_model_as_it_was():
    _, variant = _bad_weight("layers")
    case = variant.build(False)
    before = torch.cat([p.flatten() for p in case.model.parameters()]).clone()
    bare = case.call()
    for level in ("layers", "ops"):
        assert all(o.origin is None for o in observe(case, dataclasses.replace(variant, level=level)))
    assert torch.equal(bare, case.call())
    assert torch.equal(before, torch.cat([p.flatten() for p in case.model.parameters()]))


def test_a_black_box_that_breaks_is_told_and_the_board_goes_on(monkeypatch):
    drill, variant = _bad_weight("layers")

    def broken(*args, **kwargs):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("firetower.attach.watch.Watch.coverage", broken)
    result = run_variant(drill, variant)
    assert result.failures == ("attach: IndexError: tuple index out of range",) * 2
    assert not result.is_exact


def test_pick_draws_as_many_as_asked_for_from_later_seeds():
    drill = find_drills(["rope-position"])[0]
    drawn = pick(drill, 0, 10)
    assert [v.id for v in drawn[:5]] == [v.id for v in drill.variants(0)]
    assert [v.id for v in drawn[5:]] == [v.id for v in drill.variants(1)]
    assert len(drawn) == 10
    assert {v.host for v in pick(drill, 0, 3, "pure")} == {"pure"}
    assert pick(drill, 0, 3, "qwen4exp") == []


def test_drills_are_found_by_name_and_by_case_once():
    assert [d.name for d in find_drills(["m1", "bad-weight", "A1"])] == ["bad-weight", "activation-overflow"]
    assert [d.name for d in find_drills(["T1"])] == ["rope-position", "rounded-positions"]
    with pytest.raises(FiretowerError, match="known: activation-overflow"):
        find_drills(["no-such"])
