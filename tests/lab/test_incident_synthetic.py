"""Incidents with other truths: the analysis follows the facts, and each fact matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firetower.core.analysis import Analysis
from firetower.lab.across import across_incident
from firetower.lab.incident import incident_from_dict, read_incident

DATA = Path(__file__).parent / "data"


def facts(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def analysed(data: dict[str, Any]) -> Analysis:
    return across_incident(incident_from_dict(data))


def favoured(analysis: Analysis) -> list[str]:
    return [h.key for h in analysis.having("favoured")]


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("overflow", "A"),
        ("state-kept", "E/STATE_NOT_CLEARED"),
        ("evicted-expert", "L/EVICTED_IN_USE"),
        ("bad-weight", "M"),
    ],
)
def test_the_truth_is_supported_best_and_never_called_proven(name, truth):
    analysis = across_incident(read_incident(DATA / f"{name}.json"))
    assert favoured(analysis)[0] == truth
    assert analysis.conclusion.startswith("No single cause is proven.")
    assert analysis.next_steps[0].startswith(f"{truth}: ")


def test_the_wrong_families_are_not_favoured():
    assert not {"J", "C", "N"} & set(favoured(analysed(facts("overflow"))))
    assert not {"J", "L/EVICTED_IN_USE", "E/STALE_STATE_FINITE"} & set(favoured(analysed(facts("state-kept"))))
    assert not {"M", "A", "P/CPU_KERNEL"} & set(favoured(analysed(facts("evicted-expert"))))
    assert favoured(analysed(facts("bad-weight"))) == ["M"]


def test_rounds_without_a_fire_are_counted():
    analysis = across_incident(read_incident(DATA / "evicted-expert.json"))
    assert "3, none, 11, 5" in analysis.rate[0]
    assert "3 fires in 39 tries" in analysis.rate[0]


def test_equal_layers_are_invariant_and_different_ones_are_not():
    traits = {t.name: t for t in analysed(facts("bad-weight")).traits}
    assert traits["layer"].is_invariant
    assert traits["column"].is_invariant
    assert not {t.name: t for t in analysed(facts("evicted-expert")).traits}["layer"].is_invariant


def test_other_columns_take_the_bad_weight_back():
    data = facts("bad-weight")
    for i, fire in enumerate(data["fires"]):
        fire["first_down"]["col"] = 97 * i
    assert favoured(analysed(data)) != ["M"]


def test_clean_slots_exclude_a_slot_mismatch_but_not_an_eviction():
    data = facts("evicted-expert")
    data["fires"][0]["slot_vs_file"] = {"slot": 3, "layer": 4, "expert": 9, "identical": True}
    standings = {h.key: h.standing for h in analysed(data).hypotheses}
    assert standings["L/EXPERT_SLOT_MISMATCH"] == "excluded"
    assert standings["L/EVICTED_IN_USE"] == "favoured"


def test_a_difference_from_the_file_speaks_for_it():
    data = facts("evicted-expert")
    data["fires"][0]["slot_vs_file"] = {"slot": 3, "layer": 4, "expert": 9, "identical": False}
    analysis = analysed(data)
    [seen] = [o for o in analysis.observations if o.name == "slots"]
    assert seen.speaks["L/EXPERT_SLOT_MISMATCH"] == "for"
    assert "slot 3, layer 4, expert 9" in seen.statement


def test_a_test_of_the_reporter_may_name_its_families():
    data = facts("evicted-expert")
    data["ruled_out_by_its_reporter"] = {"pinned experts": {"how": "still fires", "against": ["L/EVICTED_IN_USE", "J"]}}
    standings = {h.key: h.standing for h in analysed(data).hypotheses}
    assert standings["L/EVICTED_IN_USE"] == standings["J"] == "excluded"


def test_words_that_tell_nothing_bear_on_nothing():
    data = facts("overflow")
    before = {h.key: h.standing for h in analysed(data).hypotheses}
    data["ruled_out_by_its_reporter"] = {"the moon": "was full, still fires"}
    analysis = analysed(data)
    assert {h.key: h.standing for h in analysis.hypotheses} == before
    [seen] = [o for o in analysis.observations if "moon" in o.name]
    assert "not held against any hypothesis" in seen.limit


def test_no_fires_known_singly_and_no_tries_still_gives_an_analysis():
    analysis = analysed({"what": "only a number is known", "fires_total": 3})
    assert analysis.num_traced == 0
    assert "What the other 3 would have shown is not known" in analysis.survivorship
    assert not analysis.having("favoured")
    assert any("count tries" in step for step in analysis.next_steps)
