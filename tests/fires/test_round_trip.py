"""No bit is lost, through store and JSON Lines: every field, every 8- and 16-bit pattern, any wider one."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from firetower.core.codec import fire_to_dict
from firetower.core.formats import classify
from firetower.core.records import (
    DTYPE_BITS,
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
from firetower.fires import Store
from firetower.fires.jsonl import read_lines, to_lines

# unpaired surrogates included: that is what Python makes of a path that is not UTF-8
texts = st.text(st.characters(exclude_categories=()), max_size=12)
floats = st.one_of(
    st.floats(), st.integers(0, 2**64 - 1).map(lambda b: struct.unpack(">d", b.to_bytes(8, "big"))[0])
)
naturals = st.integers(0, 2**63)
shapes = st.lists(naturals, max_size=3).map(tuple)


def _optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def _records(cls: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = {f.name for f in dataclasses.fields(cls)} - {"schema"}
    assert set(fields) == names, f"{cls.__name__}: a field that this test leaves out"
    return st.builds(cls, **fields)


signals = _records(
    Signal,
    stage=texts,
    layer=_optional(st.integers()),
    module=texts,
    legal=st.sampled_from(Legal),
    op=_optional(texts),
    source=_optional(texts),
)
bad_values = st.sampled_from(sorted(DTYPE_BITS)).flatmap(
    lambda dtype: _records(
        BadValue,
        flat_index=naturals,
        row=naturals,
        column=naturals,
        bits=st.integers(0, 2 ** DTYPE_BITS[dtype] - 1),
        dtype=st.just(dtype),
        kind=st.sampled_from(Kind),
        shape=shapes,
        sequence=_optional(st.integers()),
        token=_optional(st.integers()),
        position=_optional(st.integers()),
        is_pad=_optional(st.booleans()),
    )
)
readings = _records(
    SignalReading,
    signal=signals,
    status=st.sampled_from(Status),
    first=_optional(bad_values),
    first_pad=_optional(bad_values),
    reason=_optional(texts),
)
burned = _records(
    BurnedRow,
    sequence=st.integers(),
    signal=signals,
    token=_optional(st.integers()),
    column=_optional(st.integers()),
    first=_optional(bad_values),
)
summaries = _records(
    TensorSummary,
    name=texts,
    shape=shapes,
    dtype=texts,
    num_nan=naturals,
    num_pos_inf=naturals,
    num_neg_inf=naturals,
    absmax=_optional(floats),
    zero_frac=floats,
    headroom=_optional(floats),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(texts, values, max_size=3)


def _tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=2).map(tuple)


fires = _records(
    Fire,
    id=st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._:-]{0,127}", fullmatch=True),
    created_at=st.datetimes().map(lambda t: t.isoformat() + "Z"),
    source=texts,
    runtime=texts,
    model=texts,
    device=texts,
    phase=st.sampled_from(Phase),
    step=st.integers(),
    origin=signals,
    first=bad_values,
    outcome=st.sampled_from(Outcome),
    request=_optional(texts),
    bad_signals=_tuples(readings),
    burned=_tuples(burned),
    coverage=st.tuples(st.integers(), st.integers()),
    pad_before_real=st.booleans(),
    laundered=_optional(st.booleans()),
    inputs=_tuples(summaries),
    output=_optional(summaries),
    weights=_tuples(summaries),
    notes=_tuples(texts),
    verdict=_optional(mappings),
    token_ids=_optional(_tuples(st.integers())),
    count=st.integers(1, 2**63 - 1),
    extra=mappings,
)


def _through_everything(folder: Path, given_fires: Iterable[Fire]) -> tuple[list[Fire], list[Fire], str]:
    """The fires as the store gives them, as a second store does after export and import, and the export."""
    with Store(folder / "a.sqlite") as first, Store(folder / "b.sqlite") as second:
        first.add_many(given_fires)
        exported = "".join(to_lines(first, with_content=True))
        second.add_many(read_lines(io.BytesIO(exported.encode("ascii")), "export"))
        return list(first), list(second), exported


def _dicts(some: Iterable[Fire]) -> list[dict[str, Any]]:
    """Comparable bit for bit: NaN equals itself once it is encoded."""
    return [fire_to_dict(f) for f in some]


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} in JSON")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(fire=fires)
def test_any_fire_comes_back_bit_for_bit(fire: Fire) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored, again, exported = _through_everything(Path(folder), [fire])
    assert _dicts(stored) == _dicts([fire])
    assert _dicts(again) == _dicts([fire])
    json.loads(exported, parse_constant=_refuse)


def _with_pattern(fire: Fire, dtype: str, patterns: Sequence[int]) -> Fire:
    """A fire whose first value is the first pattern and whose bad signals hold all of them."""
    bad = [
        BadValue(flat_index=b, row=0, column=b, bits=b, dtype=dtype, kind=classify(b, dtype) or Kind.NAN)
        for b in patterns
    ]
    listed = tuple(SignalReading(signal=fire.origin, status=Status.BAD, first=b) for b in bad)
    return dataclasses.replace(fire, first=bad[0], bad_signals=listed)


NARROW = [d for d, num_bits in DTYPE_BITS.items() if num_bits <= 16]


def _check_patterns(folder: Path, make_fire: Any, dtype: str, patterns: Sequence[int]) -> None:
    chunks = [patterns[i : i + 2048] for i in range(0, len(patterns), 2048)]
    given_fires = [_with_pattern(make_fire(), dtype, chunk) for chunk in chunks]
    stored, again, _ = _through_everything(folder, given_fires)
    assert [r.first.bits for f in stored for r in f.bad_signals if r.first] == list(patterns)
    assert stored == again == given_fires


@pytest.mark.parametrize("dtype", NARROW)
def test_every_nonfinite_pattern_of_the_narrow_types_comes_back(
    tmp_path: Path, make_fire: Any, dtype: str
) -> None:
    patterns = [b for b in range(2 ** DTYPE_BITS[dtype]) if classify(b, dtype)]
    assert patterns
    _check_patterns(tmp_path, make_fire, dtype, patterns)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [d if DTYPE_BITS[d] == 8 else pytest.param(d, marks=pytest.mark.soak) for d in NARROW]
)
def test_every_pattern_of_the_narrow_types_comes_back(tmp_path: Path, make_fire: Any, dtype: str) -> None:
    _check_patterns(tmp_path, make_fire, dtype, range(2 ** DTYPE_BITS[dtype]))


WIDE = {
    "float32": (
        0x7FFFFFFF,
        0xFFC00000,
        0x7FD6E000,
        0x7FA00000,
        0x7F800001,
        0x7F800000,
        0xFF800000,
        0xFFFFFFFF,
    ),
    "float64": (
        0x7FF8000000000000,
        0x7FF0000000000001,
        0xFFFFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0x7FFFFFFF00000000,
    ),
}


@pytest.mark.parametrize("dtype", WIDE)
def test_patterns_of_the_wide_types_come_back(tmp_path: Path, make_fire: Any, dtype: str) -> None:
    num_bits = DTYPE_BITS[dtype]
    drawn = [random.Random(i).getrandbits(num_bits) for i in range(1024)]
    walking = [1 << i for i in range(num_bits)]
    given_fires = [_with_pattern(make_fire(), dtype, [*WIDE[dtype], *walking, *drawn])]
    stored, again, _ = _through_everything(tmp_path, given_fires)
    assert stored == again == given_fires


@given(bits=st.integers(0, 2**64 - 1))
@example(bits=0x7FF0000000000001)
@example(bits=0xFFF8000000000000)
@example(bits=0x8000000000000000)
def test_a_float_among_the_extras_keeps_its_64_bits(bits: int) -> None:
    number: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    first = BadValue(flat_index=0, row=0, column=0, bits=0x7E00, dtype="float16", kind=Kind.NAN)
    fire = Fire(
        id="x",
        created_at="2026-11-30",
        source="s",
        runtime="r",
        model="m",
        device="d",
        phase=Phase.DECODE,
        step=0,
        origin=Signal(stage="down"),
        first=first,
        outcome=Outcome.RAISED,
        extra={"number": number},
    )
    (again,) = read_lines(io.BytesIO("".join(to_lines([fire])).encode()), "export")
    assert struct.pack(">d", again.extra["number"]) == bits.to_bytes(8, "big")
