"""Across stored fires: what is invariant, what varies, what each fire excludes."""

from __future__ import annotations

import time

import pytest

from firetower.core.errors import RecordError
from firetower.core.records import Kind, Signal, SignalReading, Status, TensorSummary
from firetower.core.verdict import Rival, Verdict
from firetower.lab.across import across


def summary(name: str, num_nan: int = 0) -> TensorSummary:
    return TensorSummary(
        name=name,
        shape=(4, 4),
        dtype="float16",
        num_nan=num_nan,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=1.0,
        zero_frac=0.0,
        headroom=None,
    )


def verdict(detail: str = "M/BAD_WEIGHT", **fields) -> dict:
    family, name = detail.split("/")
    return Verdict(family=family, detail=name, decided=True, statement="s", **fields).to_mapping()


def test_none_is_an_error():
    with pytest.raises(RecordError, match="fires=0"):
        across([])


def test_equal_fires_are_invariant_in_everything(make_fire):
    analysis = across(
        [make_fire(first={"position": 7}, inputs=(summary("x"),), weights=(summary("w", 3),)) for _ in range(4)]
    )
    assert {t.name for t in analysis.traits if t.is_invariant} == {
        "first bad signal", "layer", "column", "phase", "class of value", "build", "input of the first bad op", "bits",
        "token position",
    }  # fmt: skip
    assert analysis.having("favoured")[0].key == "M"
    assert "All 4 fires were traced" in analysis.survivorship


def test_a_single_fire_is_no_invariant(make_fire):
    assert not any(t.is_invariant for t in across([make_fire()]).traits)


def test_what_varies_is_counted(make_fire):
    fires = [make_fire(origin=Signal(stage="routed", layer=n), first={"column": 9 * n}) for n in (1, 1, 4, 8)]
    traits = {t.name: t for t in across(fires).traits}
    assert dict(traits["layer"].counts) == {"1": 2, "4": 1, "8": 1}
    assert not traits["layer"].is_invariant
    assert traits["first bad signal"].is_invariant


def test_an_unknown_property_is_not_counted_as_agreeing(make_fire):
    traits = {t.name: t for t in across([make_fire(first={"position": 3}), make_fire(), make_fire()]).traits}
    assert (traits["token position"].num_known, traits["token position"].num_fires) == (1, 3)
    assert not traits["token position"].is_invariant


def test_a_rival_that_its_verdict_excluded_is_excluded_for_that_fire(make_fire):
    rival = Rival(family="J", detail="RACE_SUSPECTED", status="excluded", why="40 of 40 replays fire")
    open_rival = Rival(family="M", detail="BAD_WEIGHT", status="open", why="not looked at")
    e = Rival(family="E", detail="STATE_NOT_CLEARED", status="excluded", why="the state is zero")
    analysis = across([make_fire(verdict=verdict("A/OVERFLOW_ACTIVATION", rivals=(rival, open_rival, e))), make_fire()])
    assert dict(analysis.fires[0].excludes) == {"E/STATE_NOT_CLEARED": "the state is zero"}
    assert analysis.fires[1].excludes == ()


def test_one_verdict_for_all_is_said_and_two_are_not(make_fire):
    same = across([make_fire(verdict=verdict()), make_fire(verdict=verdict())])
    assert same.conclusion == "Every one of the 2 fires has the verdict M/BAD_WEIGHT, each with its own evidence."
    mixed = across([make_fire(verdict=verdict()), make_fire(verdict=verdict("A/OVERFLOW_ACTIVATION"))])
    assert mixed.conclusion.startswith("No single cause is proven.")
    some = across([make_fire(verdict=verdict()), make_fire()])
    assert some.conclusion.startswith("No single cause is proven.")


def test_a_verdict_of_another_engine_is_not_compared(make_fire):
    analysis = across([make_fire(verdict={"family": "M", "retriable": False}), make_fire()])
    assert not any(o.name == "verdicts" for o in analysis.observations)


def test_a_state_that_is_bad_first_speaks_for_a_state_kept(make_fire):
    fires = [make_fire(origin=Signal(stage="recurrent_state", layer=3)) for _ in range(3)]
    [seen] = [o for o in across(fires).observations if o.name == "states"]
    assert seen.speaks["E/STATE_NOT_CLEARED"] == "for"


def test_inf_first_and_nan_first_point_apart(make_fire):
    inf = across([make_fire(first={"bits": 0x7C00, "kind": Kind.POS_INF}) for _ in range(3)])
    nan = across([make_fire() for _ in range(3)])

    def speaks(analysis, key):
        return [o.speaks.get(key) for o in analysis.observations if o.name == "class"]

    assert speaks(inf, "A") == ["for"]
    assert speaks(nan, "A") == ["against"]


def test_a_type_that_only_the_engine_knows_is_left_out_of_the_bits(make_fire):
    analysis = across([make_fire(first={"dtype": "posit16"}), make_fire()])
    assert [b.count for b in analysis.bits] == [1]


def test_both_sides_of_a_split_model(make_fire):
    fires = [make_fire(origin=Signal(stage=side, layer=n)) for n, side in enumerate(("hit", "miss", "hit"))]
    [seen] = [o for o in across(fires).observations if o.name == "sides"]
    assert seen.speaks["P/GPU_KERNEL"] == seen.speaks["P/CPU_KERNEL"] == "against"
    assert {h.key for h in across(fires).hypotheses if h.key[0] == "P"} == {"P/GPU_KERNEL", "P/CPU_KERNEL"}


def test_without_sides_kernels_are_one_hypothesis(make_fire):
    assert [h.key for h in across([make_fire()]).hypotheses if h.key[0] == "P"] == ["P"]


def test_the_first_layer_of_each_signal_is_kept(make_fire):
    signals = tuple(
        SignalReading(signal=Signal(stage=s, layer=n), status=Status.BAD)
        for s, n in (("down", 3), ("input", 4), ("input", 5))
    )
    [line] = across([make_fire(bad_signals=signals)]).fires
    assert line.first_layers == {"down": 3, "input": 4}


def test_a_thousand_fires_take_less_than_a_second(make_fire):
    fires = [make_fire(origin=Signal(stage="down", layer=n % 40), first={"column": n}) for n in range(1000)]
    start = time.perf_counter()
    analysis = across(fires)
    assert time.perf_counter() - start < 1.0
    assert analysis.num_fires == 1000
    assert len(analysis.fires) == 200
