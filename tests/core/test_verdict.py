"""A verdict as plain data and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.codec import dumps, fire_from_dict, fire_to_dict
from firetower.core.errors import RecordError
from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal
from firetower.core.verdict import Evidence, Rival, Verdict

TEXT = st.text(max_size=20)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
VERDICTS = st.builds(
    Verdict,
    family=TEXT,
    detail=TEXT,
    decided=st.booleans(),
    statement=TEXT,
    evidence=st.lists(st.builds(Evidence, test=TEXT, statement=TEXT, supports=TEXTS, against=TEXTS), max_size=3).map(
        tuple
    ),
    rivals=st.lists(
        st.builds(Rival, family=TEXT, detail=TEXT, status=st.sampled_from(["open", "excluded"]), why=TEXT, test=TEXT),
        max_size=3,
    ).map(tuple),
    refuter=TEXT,
    next_test=TEXT,
    next_command=TEXT,
    scope=st.sampled_from(["request", "slot", "prefix", "engine", "file", "unknown"]),
    cure=TEXT,
    retriable=st.sampled_from(["yes", "no", "unknown"]),
    ignition=TEXT,
    persistence=TEXT,
    aftermath=TEXT,
    not_testable=TEXTS,
    undecided_between=TEXTS,
)
PLAIN: dict[str, Any] = {"family": "A", "detail": "OVERFLOW", "decided": True, "statement": "too large"}


@given(VERDICTS)
def test_through_json_and_back_without_loss(verdict):
    assert Verdict.from_mapping(json.loads(dumps(verdict.to_mapping()))) == verdict


@given(VERDICTS)
def test_stored_with_a_fire(verdict):
    fire = Fire(
        id="f",
        created_at="2026-11-30T21:44:15.000Z",
        source="test",
        runtime="",
        model="m",
        device="x86_64",
        phase=Phase.DECODE,
        step=0,
        origin=Signal(stage="down"),
        first=BadValue(flat_index=0, row=0, column=0, bits=0x7E00, dtype="float16", kind=Kind.NAN),
        outcome=Outcome.RECORDED,
        verdict=verdict.to_mapping(),
    )
    back = fire_from_dict(json.loads(dumps(fire_to_dict(fire))))
    assert back.verdict is not None
    assert Verdict.from_mapping(back.verdict) == verdict


def test_what_is_left_out_has_its_default():
    verdict = Verdict.from_mapping(PLAIN)
    assert (verdict.key, verdict.scope, verdict.retriable, verdict.evidence) == ("A/OVERFLOW", "unknown", "unknown", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdikt": 1}, "verdict.verdikt: unknown field"),
        ({"decided": "yes"}, "verdict.decided='yes': must be bool"),
        ({"family": 3}, "verdict.family=3: must be str"),
        ({"scope": "house"}, "verdict.scope='house': must be one of request, slot"),
        ({"retriable": "maybe"}, "verdict.retriable='maybe': must be one of yes, no, unknown"),
        ({"evidence": "much"}, "verdict.evidence='much': must be a list"),
        ({"evidence": ["much"]}, "verdict.evidence='much': must be a list of objects"),
        ({"evidence": [{"test": "x"}]}, "verdict.evidence.statement: missing"),
        (
            {"rivals": [{"family": "B", "detail": "D", "status": "dead", "why": ""}]},
            "status='dead': must be one of open",
        ),
        ({"not_testable": [1]}, "must be a list of strings"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(RecordError, match=message.replace("(", r"\(")):
        Verdict.from_mapping(PLAIN | change)


def test_a_missing_field_is_named():
    with pytest.raises(RecordError, match=r"verdict.statement: missing"):
        Verdict.from_mapping({k: v for k, v in PLAIN.items() if k != "statement"})


def test_rivals_and_verdicts_have_a_key():
    rival = Rival(family="K", detail="WEIGHT_MUTATED", status="open", why="")
    assert rival.key == "K/WEIGHT_MUTATED"
    assert dataclasses.replace(Verdict.from_mapping(PLAIN), detail="X").key == "A/X"
