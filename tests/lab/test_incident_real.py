"""The public incident: what its facts say, with their limits, and what they do not prove."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firetower.core.analysis import Analysis
from firetower.lab.across import across_incident
from firetower.lab.incident import read_incident

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def real() -> Analysis:
    return across_incident(read_incident(DATA / "hybrid-moe-offload.json"))


def standing(analysis: Analysis, key: str) -> str:
    [found] = [h for h in analysis.hypotheses if h.key == key]
    return found.standing


def trait(analysis: Analysis, name: str) -> dict[str, int]:
    [found] = [t for t in analysis.traits if t.name == name]
    return dict(found.counts)


def test_survivorship_is_stated(real):
    assert (real.num_fires, real.num_traced) == (21, 13)
    assert "13 of 21 fires were traced" in real.survivorship
    assert "11 of 13 traced began in routed expert rows" in real.survivorship
    assert "other 8" in real.survivorship
    assert trait(real, "first bad signal")["routed"] == 11


def test_layers_and_positions_vary(real):
    assert list(trait(real, "layer")) == ["3", "13", "15", "16", "18", "20", "22", "26", "28", "37"]
    assert {"311", "77,261", "88,443"} <= set(trait(real, "token position"))
    [place] = [o for o in real.observations if o.name == "positions"]
    assert "311 to 88,443" in place.statement
    assert "a long context is not needed" in place.statement


def test_the_rate_is_pooled_over_builds_and_says_so(real):
    text = " ".join(real.rate)
    assert "4 fires in 34 tries: rate .118" in text
    assert ".033-.243" in text
    assert "pooled over 4 builds" in text
    assert "24 clean tries against the point rate .118" in text
    assert "90 against the lower limit .033" in text


def test_the_bits_are_read_with_their_limits(real):
    said = {b.bits_hex: " ".join(b.sentences) for b in real.bits}
    assert "nvidia arithmetic" in said["7fffffff"]
    assert "cannot prove garbage" in said["7fffffff"]
    assert "x86 arithmetic" in said["ffc00000"]
    assert "float16 NaN 7eb7 widened" in said["7fd6e000"]
    assert "Rival: two adjacent 16-bit fields, high 7fd6 low e000" in said["7fd6e000"]
    assert "float16 NaN 7e9f widened" in said["7fd3e000"]
    assert {b.bits_hex: b.count for b in real.bits} == {"7fffffff": 6, "7fd6e000": 1, "7fd3e000": 1, "ffc00000": 1}


def test_arithmetic_bits_bear_on_no_hypothesis(real):
    [default] = [o for o in real.observations if o.name == "default bits"]
    assert "7fffffff x6" in default.statement
    assert dict(default.speaks) == {}


@pytest.mark.parametrize("key", ["B/SCALE_OVERFLOW", "L/EXPERT_SLOT_MISMATCH", "M", "N", "E/STATE_NOT_CLEARED"])
def test_what_its_tests_exclude(real, key):
    assert standing(real, key) == "excluded"


@pytest.mark.parametrize("key", ["C", "D", "J", "K", "U", "Q", "O", "L/EVICTED_IN_USE", "P/GPU_KERNEL", "P/CPU_KERNEL"])
def test_what_they_do_not_exclude(real, key):
    assert standing(real, key) != "excluded"
    assert re.search(rf"Not excluded:.*\b{key}\b", real.conclusion) or f"{key} (" in real.conclusion


def test_no_single_cause_is_proven(real):
    assert real.conclusion.startswith("No single cause is proven.")
    assert {h.key for h in real.having("favoured")} == {"C", "J"}


def test_audits_and_kinds_of_layers_are_shown(real):
    [line] = [f for f in real.fires if f.id == "D"]
    assert line.summary.startswith("layer 37 miss (gdn), bits ffc00000 float32, position 85,965, try 9")
    assert "planned row audit: 7fffffff, layer 38, row 15, column 2176, expert 5" in line.summary
    assert "stage audit: gate 7fffffff, layer 47" in line.summary
    assert trait(real, "kind of layer") == {"gdn": 2}


def test_single_fires_exclude_different_causes(real):
    excludes = {f.id: dict(f.excludes) for f in real.fires}
    assert "76,800 values" in excludes["C"]["P/CPU_KERNEL"]
    assert "P/GPU_KERNEL" in excludes["D"]
    assert "P/GPU_KERNEL" not in excludes["C"]
    assert "L" in excludes["E"], "attention was bad before any expert ran"
    assert "slot 4203" in excludes["F"]["L/EXPERT_SLOT_MISMATCH"]


def test_what_the_reporter_concluded_is_shown_and_not_used(real):
    [(name, said)] = [r for r in real.reported if "concluded" in r[0]]
    assert "not used" in name
    assert "garbage" in said


def test_the_looks_like_sentence_has_reason_test_and_public_numbers(real):
    [race] = [h for h in real.hypotheses if h.key == "J"]
    sentence = race.looks_like
    assert sentence.startswith(
        "looks like J race (15 of 172 public reports) because fires begin in 10 different layers"
    )
    assert "the test that tells: serialise" in sentence
