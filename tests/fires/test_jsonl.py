"""Export and import: private content stays, nothing half done, errors name the line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from firetower.core.errors import FiretowerError, RecordError, StoreError
from firetower.fires import Store
from firetower.fires.files import write_lines
from firetower.fires.jsonl import read_lines, to_line, to_lines

SHORT = '{"origin": {"stage": "down"}, "first": {"dtype": "float16", "bits": "7e00", "row": 0, "column": 3}}'


def _read(text: str | bytes) -> list[Any]:
    return read_lines(io.BytesIO(text.encode() if isinstance(text, str) else text), "in.jsonl")


def test_token_ids_are_exported_only_on_request(make_fire: Any) -> None:
    fire = make_fire(extra={"note": "x\u2028y\n"})
    assert "777001" not in to_line(fire)
    assert json.loads(to_line(fire))["token_ids"] is None
    assert _read(to_line(fire)) == [dataclasses.replace(fire, token_ids=None)]
    assert _read(to_line(fire, with_content=True)) == [fire]


def test_an_export_is_ascii_one_line_a_fire(make_fire: Any) -> None:
    lines = list(to_lines([make_fire(model="é\u2028\x85\udc80\n"), make_fire()]))
    assert all(line.isascii() and line.endswith("\n") and len(line.splitlines()) == 1 for line in lines)


def test_import_skips_and_counts_ids_that_are_there(store: Store, make_fire: Any) -> None:
    fires = [make_fire() for _ in range(3)]
    store.add(fires[1])
    text = "".join(to_lines([*fires, fires[2]], with_content=True))
    assert store.add_many(_read(text)) == ((fires[0].id, fires[2].id), 2)
    assert sorted(store, key=lambda f: f.id) == fires


def test_blank_lines_and_a_byte_order_mark_are_passed_over(make_fire: Any) -> None:
    fire = make_fire(token_ids=None)
    text = "\ufeff\r\n" + to_line(fire) + "\r\n\n   \n"
    assert _read(text) == [fire]
    assert _read("") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"fire=\[\]: must be a JSON object"),
        ("null", "must be a JSON object"),
        ("\x1b[2J", r"is not JSON"),
        ("{}", r"fire\.(origin|first): missing"),
        (SHORT.replace("origin", "orgin"), r"fire\.orgin: unknown field; known: id,"),
        (SHORT.replace("0,", "NaN,"), "value=NaN: is not JSON; write"),
        (SHORT.replace("0,", "1e999,"), "value=1e999: does not fit a float64"),
        (SHORT.replace("0,", '0, "row": 1,'), "row: is given twice in one object"),
        (SHORT.replace("0,", "9" * 5000 + ","), "is not JSON"),
        (SHORT.replace("0,", "-1,"), r"first\.row=-1: must not be negative"),
        (SHORT.replace("7e00", "17e00"), r"first\.bits=0x17e00: must fit the 16 bits of float16"),
        (SHORT.replace("7e00", "7exx"), r"first\.bits='7exx': must be hexadecimal"),
        (SHORT.replace("7e00", "3c00"), r"first\.bits=0x3c00: is finite in float16, must be NaN or Inf"),
        (SHORT.replace('"bits": "7e00", ', ""), r"first\.bits: missing"),
        (SHORT.replace("float16", "q4_1"), r"dtype='q4_1': must be one of float64, .* or give kind"),
        (SHORT.replace(', "row": 0, "column": 3', ""), "place missing; give row, column and shape"),
        (SHORT.replace('"row": 0', '"row": 2'), r"flat_index: missing; give it, or the shape"),
        (
            SHORT.replace('"row"', '"shape": [2, 3], "row"'),
            r"column=3: must be below the last dimension of shape, 3",
        ),
        (SHORT[:-1] + ', "id": "a b"}', r"id='a b': must be 1 to 128 of letters"),
        (SHORT[:-1] + ', "created_at": "now"}', r"created_at='now': must be an ISO 8601 time"),
        (SHORT[:-1] + ', "count": 0}', "count=0: must be from 1"),
        (SHORT[:-1] + ', "schema": 2}', "schema=2: newer than this firetower reads"),
        (SHORT[:-1] + ', "extra": {"a": ' + "[" * 60_000 + "]" * 60_000 + "}}", "nested too deep"),
        (SHORT[:-1] + ', "extra": "' + "x" * 5000 + '"}', r"fire\.extra='xxx.* \.\.\. .*must be an object"),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)
def test_a_bad_line_is_named_and_nothing_of_its_file_is_taken(
    make_fire: Any, line: str, message: str
) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        _read(to_line(make_fire()) + "\n\n" + line + "\n" + to_line(make_fire()))
    text = str(caught.value)
    assert text.startswith("in.jsonl:3: ")
    assert text.endswith("; nothing of this file was imported")
    assert text.isprintable()
    assert len(text) < 600


def test_bytes_that_are_not_utf_8_are_a_bad_line() -> None:
    with pytest.raises(RecordError, match=r"in.jsonl:2: byte 1: is not UTF-8"):
        _read(SHORT.encode() + b"\n{\xff}")


def test_2000_mutations_of_an_export_are_read_or_refused_in_one_line(make_fire: Any) -> None:
    draw = random.Random(0)
    original = to_line(make_fire(extra={"x": float("nan")}), with_content=True).encode()
    refusals = []
    for _ in range(2000):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 30)]
                case 2:
                    data[at:at] = draw.choice([b"{", b"]", b"null", b'"', b"-", b"e9", b"\n", b",", b"1"])
                case _:
                    data[at:at] = data[draw.randrange(len(data)) :][: draw.randint(1, 40)]
        try:
            _read(bytes(data))
        except FiretowerError as e:
            refusals.append(str(e))
    assert len(refusals) > 1000
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.parametrize("there", ["nothing", "a file", "a folder", "a pipe"])
@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
def test_an_export_replaces_a_file_only_when_forced(tmp_path: Path, there: str, force: bool) -> None:
    path = tmp_path / "out.jsonl"
    make = {
        "nothing": lambda: None,
        "a file": lambda: path.write_text("mine"),
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
    }
    make[there]()
    if there == "nothing" or (there == "a file" and force):
        assert write_lines(path, ["a\n", "b\n"], force=force) == 2
        assert path.read_text() == "a\nb\n"
        assert path.stat().st_mode & 0o777 == 0o600
    else:
        with pytest.raises(
            StoreError, match="not a regular file" if there != "a file" else "exists; use --force"
        ):
            write_lines(path, ["a\n"], force=force)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failing_export_leaves_the_old_file_and_no_other(tmp_path: Path, make_fire: Any) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine")

    def lines() -> Any:
        yield "a\n"
        raise StoreError("the store went away")

    with pytest.raises(StoreError, match="went away"):
        write_lines(path, lines(), force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    assert path.read_text() == "mine"


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"output=.*: No such file or directory; choose another file"):
        write_lines(tmp_path / "no" / "out.jsonl", ["a\n"], force=False)
