"""What a fire looks like to a person: page, table, times, and nothing that drives the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from firetower.cli import output
from firetower.core.errors import ConfigError, RecordError
from firetower.core.records import (
    BadValue,
    BurnedRow,
    Kind,
    Phase,
    Signal,
    SignalReading,
    Status,
    TensorSummary,
)
from firetower.fires.listing import fit, table_rows
from firetower.fires.page import arithmetic_of, fire_page
from firetower.fires.text import visible
from firetower.fires.times import format_ms, parse_age, parse_moment, parse_time

COLUMNS = ("ID", "WHERE", "VALUE", "TIMES", "PHASE", "OUTCOME", "CREATED", "MODEL")


def test_a_page_has_the_origin_first_and_every_part(make_fire: Any) -> None:
    signal = Signal(
        stage="swiglu", layer=3, module="layers.3.mlp", op="aten.mul.Tensor", source="m.py:120 in forward"
    )
    first = BadValue(
        flat_index=6,
        row=0,
        column=6,
        bits=0x7FD6E000,
        dtype="float32",
        kind=Kind.NAN,
        shape=(1, 8),
        sequence=2,
        token=0,
        position=17,
        is_pad=False,
    )
    weight = TensorSummary(
        name="w",
        shape=(8, 4),
        dtype="float16",
        num_nan=2,
        num_pos_inf=1,
        num_neg_inf=0,
        absmax=5000.0,
        zero_frac=0.25,
        headroom=13.1,
    )
    later = SignalReading(signal=Signal(stage="logits"), status=Status.BAD, first=first)
    fire = make_fire(
        origin=signal,
        first=first,
        request="chat-1",
        notes=("the weight itself is non-finite",),
        bad_signals=(SignalReading(signal=signal, status=Status.BAD, first=first), *(later,) * 20),
        burned=(BurnedRow(sequence=2, signal=signal, token=0, column=6, first=first),),
        weights=(weight,),
        output=weight,
        coverage=(7, 9),
        pad_before_real=True,
        laundered=True,
        verdict={"family": "M", "retriable": False},
        count=3,
        extra={"slot": 4},
    )
    page = fire_page(fire, last_seen="2026-12-01T00:00:00.000Z")
    assert page[0] == "NaN first at layer 3 swiglu (layers.3.mlp)"
    text = "\n".join(page)
    for part in (
        "aten.mul.Tensor",
        "m.py:120 in forward",
        f"step {fire.step}, decode",
        "First bad value: NaN 7fd6e000 float32",
        "row 0, column 6 (flat index 6)",
        "sequence 2, token 0, position 17, a real row",
        "float16",  # what the bits say: widened from it, or two adjacent fields
        "Findings\n  the weight itself is non-finite\n  a pad row was bad before any real row",
        "laundered: ",
        "Verdict\n  family: M\n  retriable: False",
        "Burned requests\n  sequence 2: layer 3 swiglu, token 0, column 6, NaN 7fd6e000 float32",
        "1. layer 3 swiglu (layers.3.mlp): NaN 7fd6e000 float32 at row 0, column 6",
        "and 9 more (--json has them all)",
        "weight w 8x4 float16: 2 NaN, 1 +Inf, absmax 5000 (13.1x below the type's maximum), 25.0% zeros",
        "3 times, last 2026-12-01T00:00:00.000Z",
        "coverage 7 of 9 signals ran",
        "3 token ids kept (private",
        "slot     4",
        "request  chat-1",
    ):
        assert part in text
    assert "777001" not in text
    assert text.index("swiglu") < text.index("Findings") < text.index("Bad signals") < text.index("Incident")


def test_bits_that_contradict_the_record_or_cannot_be_read_are_said(make_fire: Any) -> None:
    finite = BadValue(flat_index=0, row=0, column=0, bits=0x3C00, dtype="float16", kind=Kind.NAN)
    text = "\n".join(fire_page(make_fire(first=finite)))
    assert "they are the finite value 1.0, yet the record says NaN: one of the two is wrong" in text
    foreign = BadValue(flat_index=0, row=0, column=0, bits=1, dtype="q4_1", kind=Kind.NAN)
    assert "cannot be read (dtype='q4_1'" in "\n".join(fire_page(make_fire(first=foreign)))


def test_a_hand_in_says_unknown_not_minus_one(make_fire: Any) -> None:
    text = "\n".join(fire_page(make_fire(step=-1, phase=Phase.UNKNOWN)))
    assert "when     unknown" in text
    assert "step -1" not in text


@pytest.mark.parametrize(
    ("device", "whose"),
    [
        ("NVIDIA H200", "nvidia"),
        ("cuda:0", "nvidia"),
        ("AMD Instinct MI300X", "amd"),
        ("AMD EPYC 9654", "x86"),
        ("x86_64", "x86"),
        ("AMD64", "x86"),
        ("aarch64", None),
        ("", None),
    ],
)
def test_whose_arithmetic_a_device_is(device: str, whose: str | None) -> None:
    assert arithmetic_of(device) == whose


EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\n\x00\udc80"


def test_no_field_can_drive_the_terminal(make_fire: Any) -> None:
    signal = Signal(stage=EVIL, layer=1, module=EVIL, op=EVIL, source=EVIL)
    first = BadValue(flat_index=0, row=0, column=0, bits=0, dtype=EVIL, kind=Kind.NAN)
    summary = TensorSummary(
        name=EVIL,
        shape=(),
        dtype=EVIL,
        num_nan=1,
        num_pos_inf=0,
        num_neg_inf=0,
        absmax=None,
        zero_frac=0.0,
        headroom=None,
    )
    fire = make_fire(
        origin=signal,
        first=first,
        model=EVIL,
        runtime=EVIL,
        device=EVIL,
        source=EVIL,
        request=EVIL,
        notes=(EVIL,),
        bad_signals=(SignalReading(signal=signal, status=Status.BAD, first=first),),
        burned=(BurnedRow(sequence=0, signal=signal, first=first),),
        inputs=(summary,),
        verdict={EVIL: EVIL, "list": [EVIL]},
        extra={EVIL: EVIL, "list": [EVIL]},
    )
    lines = [*fire_page(fire), *table_rows([fire])[0]]
    assert all(line.isprintable() for line in lines)
    assert sum("\\x1b]0;owned" in line for line in lines) >= 12


@given(text=st.text(st.characters(exclude_categories=())))
def test_visible_text_is_printable_and_plain_text_is_left_alone(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(text) == text or not text.isprintable()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 160])
def test_a_table_never_breaks_an_id(make_fire: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    out = io.StringIO()
    real = Console
    monkeypatch.setattr("rich.console.Console", lambda **kw: real(**(kw | {"file": out, "width": width})))
    fires = [make_fire(model="org/" + "long-model-name-" * 5), make_fire(origin=Signal(stage="logits"))]
    columns, rows = fit(COLUMNS, table_rows(fires), width)
    output.print_table(columns, rows, right=("TIMES",))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 2 + len(fires)
    for fire, line in zip(fires, lines[2:], strict=True):
        assert line.split()[0] == fire.id
    assert columns[0] == "ID"
    assert len(columns) == {30: 1, 40: 2, 60: 3}.get(width, len(columns))
    if width == 160:
        assert tuple(columns) == COLUMNS


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1970-01-01", 0),
        ("1970-01-01T00:00:01.234Z", 1234),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T23:59:59.999Z", -1),
        ("0001-01-01", -62135596800000),
    ],
)
def test_times_are_read_and_written(text: str, milliseconds: int) -> None:
    assert parse_time(text) == milliseconds
    if milliseconds > -10_000:
        assert parse_time(format_ms(milliseconds)) == milliseconds


@pytest.mark.parametrize("text", ["", "now", "2026-13-01", "9999-12-31T23:59:59-23:59:59.9x", "12h"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(RecordError, match="must be an ISO 8601 time"):
        parse_time(text)


def test_ages() -> None:
    assert [parse_age(a, "x") for a in ("90s", "30m", "12h", "7d", "2w")] == [
        90,
        1800,
        43_200,
        604_800,
        1_209_600,
    ]
    assert parse_moment("1h", "since", now=3600.5) == 500
    assert parse_moment("1970-01-02", "since") == 86_400_000
    for text in ("7", "d", "7y", "-7d", "1.5h", "７d"):
        with pytest.raises(ConfigError, match="must be"):
            parse_age(text, "older_than")
        with pytest.raises(ConfigError, match="must be"):
            parse_moment(text + "!", "since")
