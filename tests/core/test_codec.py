from __future__ import annotations

import dataclasses
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.codec import decode, dumps, encode, fire_from_dict, fire_to_dict
from firetower.core.errors import RecordError
from firetower.core.records import (
    DTYPE_BITS,
    SCHEMA_VERSION,
    BadValue,
    BurnedRow,
    Fire,
    Kind,
    Legal,
    Outcome,
    Phase,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
)

TEXT = st.text(max_size=12)
COUNTS = st.integers(0, 2**31)
FLOATS = st.integers(0, 2**64 - 1).map(lambda b: struct.unpack(">d", struct.pack(">Q", b))[0])

signals = st.builds(
    Signal,
    stage=TEXT,
    layer=st.none() | COUNTS,
    module=TEXT,
    legal=st.sampled_from(Legal),
    op=st.none() | TEXT,
    source=st.none() | TEXT,
)


@st.composite
def bad_values(draw):
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    return BadValue(
        flat_index=draw(COUNTS),
        row=draw(COUNTS),
        column=draw(COUNTS),
        bits=draw(st.integers(0, 2 ** DTYPE_BITS[dtype] - 1)),
        dtype=dtype,
        kind=draw(st.sampled_from(Kind)),
        shape=tuple(draw(st.lists(COUNTS, max_size=4))),
        position=draw(st.none() | COUNTS),
        is_pad=draw(st.none() | st.booleans()),
    )


readings = st.builds(
    SignalReading,
    signal=signals,
    status=st.sampled_from(Status),
    first=st.none() | bad_values(),
    reason=st.none() | TEXT,
)
summaries = st.builds(
    TensorSummary,
    name=TEXT,
    shape=st.lists(COUNTS, max_size=4).map(tuple),
    dtype=TEXT,
    num_nan=COUNTS,
    num_pos_inf=COUNTS,
    num_neg_inf=COUNTS,
    absmax=st.none() | FLOATS,
    zero_frac=FLOATS,
    headroom=st.none() | FLOATS,
)
extras = st.dictionaries(
    TEXT.filter(lambda k: k not in ("nonfinite", "bits")),
    st.none() | st.booleans() | COUNTS | FLOATS | TEXT,
    max_size=4,
)
fires = st.builds(
    Fire,
    id=TEXT,
    created_at=TEXT,
    source=TEXT,
    runtime=TEXT,
    model=TEXT,
    device=TEXT,
    phase=st.sampled_from(Phase),
    step=COUNTS,
    origin=signals,
    first=bad_values(),
    outcome=st.sampled_from(Outcome),
    bad_signals=st.lists(readings, max_size=2).map(tuple),
    burned=st.lists(st.builds(BurnedRow, sequence=COUNTS, signal=signals), max_size=2).map(tuple),
    coverage=st.tuples(COUNTS, COUNTS),
    inputs=st.lists(summaries, max_size=2).map(tuple),
    output=st.none() | summaries,
    notes=st.lists(TEXT, max_size=2).map(tuple),
    verdict=st.none() | extras,
    token_ids=st.none() | st.lists(COUNTS, max_size=3).map(tuple),
    extra=extras,
)


def float_bits(value: float) -> bytes:
    return struct.pack(">d", value)


def some_fire() -> Fire:
    return Fire(
        id="20261130-214415-3f9a2c41d7",
        created_at="2026-11-30T21:44:15.123Z",
        source="attach",
        runtime="transformers",
        model="m",
        device="cpu",
        phase=Phase.DECODE,
        step=3,
        origin=Signal(stage="down", layer=12),
        first=BadValue(flat_index=5, row=0, column=5, bits=0x7FC00000, dtype="float32", kind=Kind.NAN),
        outcome=Outcome.RAISED,
    )


@given(fires)
def test_a_fire_survives_its_json(fire):
    text = dumps(fire)
    again = fire_from_dict(json.loads(text, parse_constant=pytest.fail))
    assert dumps(again) == text
    assert again.first == fire.first
    assert again.token_ids == fire.token_ids


@given(FLOATS)
def test_every_float_keeps_its_64_bits(value):
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert float_bits(again) == float_bits(value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (math.inf, {"nonfinite": "+inf", "bits": "7ff0000000000000"}),
        (-math.inf, {"nonfinite": "-inf", "bits": "fff0000000000000"}),
        (math.nan, {"nonfinite": "nan", "bits": "7ff8000000000000"}),
        ({"a": [1, (2.5, None)]}, {"a": [1, [2.5, None]]}),
        (Kind.NAN, "nan"),
    ],
)
def test_encoded_forms(value, encoded):
    assert encode(value) == encoded


@pytest.mark.parametrize("value", [object(), {1: 2}, b"x", {3.0}])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(RecordError):
        encode(value)


@pytest.mark.parametrize("bits", ["3ff0000000000000", "7ff", "zz", 5, None])
def test_a_nonfinite_mark_over_other_bits_is_refused(bits):
    with pytest.raises(RecordError, match="bits="):
        decode({"nonfinite": "nan", "bits": bits})


def edited(**changes):
    return {**fire_to_dict(some_fire()), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": 1}, "fire.stage: unknown field"),
        ({"step": "3"}, "fire.step='3': must be int"),
        ({"step": True}, "fire.step=True: must be int"),
        ({"phase": "lunch"}, "fire.phase='lunch': must be one of prefill"),
        ({"origin": {}}, "fire.origin.stage: missing"),
        ({"origin": 3}, "fire.origin=3: must be an object"),
        ({"coverage": [1]}, "fire.coverage=[1]: must have 2 items"),
        ({"notes": "x"}, "fire.notes='x': must be a list"),
        ({"notes": [1]}, "fire.notes[0]=1: must be str"),
        ({"extra": []}, "fire.extra=[]: must be an object"),
        ({"schema": SCHEMA_VERSION + 1}, "newer than this firetower reads"),
        ({"schema": 0}, "schema=0: must be a whole number"),
        ({"schema": True}, "schema=True: must be a whole number"),
        ({"schema": "1"}, "schema='1': must be a whole number"),
    ],
)
def test_a_wrong_field_is_named_with_its_rule(changes, message):
    with pytest.raises(RecordError) as e:
        fire_from_dict(edited(**changes))
    assert message in str(e.value)


@pytest.mark.parametrize("field", ["id", "origin", "first", "outcome"])
def test_a_missing_field_is_named(field):
    data = fire_to_dict(some_fire())
    del data[field]
    with pytest.raises(RecordError, match=rf"fire\.{field}: missing"):
        fire_from_dict(data)


def test_fields_with_defaults_may_be_left_out():
    required = {f.name for f in dataclasses.fields(Fire) if f.default is f.default_factory}
    data = {k: v for k, v in fire_to_dict(some_fire()).items() if k in required}
    assert fire_from_dict(data) == some_fire()


def test_a_mapping_that_would_read_as_a_float_is_refused():
    with pytest.raises(RecordError, match="reserved"):
        encode({"nonfinite": "nan", "bits": "7ff8000000000000"})
    assert encode({"nonfinite": "nan", "bits": "7f", "more": 1}) == {"nonfinite": "nan", "bits": "7f", "more": 1}
