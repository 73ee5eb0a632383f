from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.records import (
    BadValue,
    Fire,
    Kind,
    Outcome,
    Phase,
    Reading,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
    new_fire_id,
    utc_now,
)


def bad(bits: int = 0x7E00, dtype: str = "float16") -> BadValue:
    return BadValue(flat_index=0, row=0, column=0, bits=bits, dtype=dtype, kind=Kind.NAN)


def reading(*statuses: Status) -> Reading:
    signals = tuple(
        SignalReading(
            signal=Signal(stage="down", layer=i), status=s, first=bad() if s is Status.BAD else None
        )
        for i, s in enumerate(statuses)
    )
    return Reading(step=0, phase=Phase.DECODE, num_tokens=1, signals=signals)


@pytest.mark.parametrize(
    ("bits", "dtype", "shown"),
    [
        (0x7E00, "float16", "7e00"),
        (0x7F, "float8_e4m3fn", "7f"),
        (1, "float32", "00000001"),
        (0x7FF8 << 48, "float64", "7ff8000000000000"),
    ],
)
def test_bits_are_shown_in_the_width_of_their_type(bits, dtype, shown):
    assert bad(bits, dtype).bits_hex == shown


def test_a_signal_is_named_for_people():
    assert Signal(stage="down", layer=12).name == "layer 12 down"
    assert Signal(stage="logits").name == "logits"


def test_a_reading_tells_bad_clean_and_not_covered_apart():
    r = reading(Status.CLEAN, Status.NOT_COVERED, Status.BAD, Status.BAD)
    assert r.origin is r.signals[2]
    assert r.bad == r.signals[2:]
    assert not r.is_clean
    assert r.not_covered == (r.signals[1],)
    assert r.coverage == (3, 4)


def test_a_signal_that_did_not_run_is_no_fire_and_no_coverage():
    r = reading(Status.NOT_COVERED, Status.NOT_COVERED)
    assert r.is_clean
    assert r.origin is None
    assert r.coverage == (0, 2)


def fire(**changes) -> Fire:
    base = Fire(
        id="x",
        created_at="x",
        source="attach",
        runtime="torch",
        model="m",
        device="cpu",
        phase=Phase.DECODE,
        step=0,
        origin=Signal(stage="down", layer=1),
        first=bad(),
        outcome=Outcome.RAISED,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("changes", [{"id": "y"}, {"step": 9}, {"request": "r2"}, {"first": bad(0x7E01)}])
def test_the_same_origin_seen_again_is_one_incident(changes):
    assert fire(**changes).merge_key == fire().merge_key


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"origin": Signal(stage="up", layer=1)},
        {"origin": Signal(stage="down", layer=2)},
        {"origin": Signal(stage="down")},
        {"first": dataclasses.replace(bad(), kind=Kind.POS_INF)},
    ],
)
def test_another_origin_or_class_is_another_incident(changes):
    assert fire(**changes).merge_key != fire().merge_key


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fire().step = 1  # type: ignore[misc]


def test_a_summary_counts_every_class():
    summary = TensorSummary(
        name="x",
        shape=(2,),
        dtype="float32",
        num_nan=1,
        num_pos_inf=2,
        num_neg_inf=4,
        absmax=None,
        zero_frac=0.0,
        headroom=None,
    )
    assert summary.num_nonfinite == 7


def test_ids_are_of_their_form_and_never_equal():
    ids = {new_fire_id(0.0) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"19700101-000000-[0-9a-f]{10}", i) for i in ids)


@given(st.integers(0, 4_000_000_000), st.integers(1, 10_000_000))
def test_ids_sort_by_time(start, later):
    assert new_fire_id(start) < new_fire_id(start + later)


@pytest.mark.parametrize(
    ("now", "shown"), [(0.0, "1970-01-01T00:00:00.000Z"), (1796075055.123, "2026-11-30T21:44:15.123Z")]
)
def test_times_are_utc_with_milliseconds(now, shown):
    assert utc_now(now)[:19] == shown[:19]
    assert abs(int(utc_now(now)[20:23]) - int(shown[20:23])) <= 1, "the double may hold a hair less"
