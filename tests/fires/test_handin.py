"""The short form that any engine can write, and the C example that does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firetower.core.codec import fire_from_dict, fire_to_dict
from firetower.core.records import Kind, Outcome, Phase, Signal
from firetower.fires import Store
from firetower.fires.handin import complete

FIRST = {"dtype": "float32", "bits": "7fd6e000", "row": 2, "column": 5, "shape": [4, 3, 8]}
SHORT: dict[str, Any] = {"origin": {"stage": "down"}, "first": FIRST}
ROOT = Path(__file__).parents[2]


def test_four_facts_are_enough_and_the_rest_says_unknown() -> None:
    fire = fire_from_dict(complete(SHORT))
    assert fire.origin == Signal(stage="down")
    assert (fire.first.bits, fire.first.kind, fire.first.flat_index) == (0x7FD6E000, Kind.NAN, 21)
    assert (fire.source, fire.runtime, fire.model, fire.device) == ("import", "unknown", "unknown", "unknown")
    assert (fire.phase, fire.step, fire.outcome) == (Phase.UNKNOWN, -1, Outcome.IMPORTED)
    assert fire.created_at > "2026"


@pytest.mark.parametrize(
    "place",
    [
        {"row": 2, "column": 5, "shape": [4, 8]},
        {"flat_index": 21, "shape": [4, 8]},
        {"row": 2, "column": 5, "flat_index": 21},
        {"row": 2, "column": 5, "flat_index": 21, "shape": [4, 8]},
    ],
    ids=lambda p: "+".join(p),
)
def test_each_way_to_give_the_place_says_the_same(place: dict[str, Any]) -> None:
    first = fire_from_dict(complete({**SHORT, "first": {"dtype": "f32", "bits": 0x7FD6E000, **place}})).first
    assert (first.flat_index, first.row, first.column, first.dtype) == (21, 2, 5, "float32")


@pytest.mark.parametrize(
    ("dtype", "bits", "kind"),
    [
        ("bf16", "ff80", Kind.NEG_INF),
        ("float16", "0x7C00", Kind.POS_INF),
        ("torch.float8_e4m3fn", "ff", Kind.NAN),
        ("float64", "7ff0000000000001", Kind.NAN),
    ],
)
def test_class_follows_from_bits(dtype: str, bits: str, kind: Kind) -> None:
    first = {"dtype": dtype, "bits": bits, "row": 0, "column": 0}
    assert fire_from_dict(complete({**SHORT, "first": first})).first.kind is kind


def test_a_type_that_firetower_does_not_know_needs_its_class() -> None:
    first = {"dtype": "q4_1", "bits": "7e00", "kind": "nan", "row": 0, "column": 0}
    assert fire_from_dict(complete({**SHORT, "first": first})).first.dtype == "q4_1"


def test_the_same_content_gets_the_same_id_whatever_its_layout() -> None:
    reordered = json.loads(json.dumps({"first": dict(reversed(FIRST.items())), "origin": {"stage": "down"}}))
    assert complete(SHORT)["id"] == complete(reordered)["id"]
    assert complete(SHORT)["id"] != complete({**SHORT, "request": "2"})["id"]
    assert complete({**SHORT, "id": "mine"})["id"] == "mine"


def test_a_whole_fire_is_left_as_it_is(make_fire: Any) -> None:
    data = fire_to_dict(make_fire())
    assert complete(data) == data


def test_the_short_form_is_taken_in_bad_signals_and_burned_rows_too() -> None:
    signal = {"stage": "down", "layer": 3}
    entry = {"signal": signal, "status": "bad", "first": FIRST, "first_pad": None}
    fire = fire_from_dict(
        complete(
            {**SHORT, "bad_signals": [entry], "burned": [{"sequence": 1, "signal": signal, "first": FIRST}]}
        )
    )
    assert fire.bad_signals[0].first == fire.burned[0].first == fire.first


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_c_example_hands_in_a_fire(tmp_path: Path) -> None:
    source, program, store = ROOT / "examples" / "handin.c", tmp_path / "handin", tmp_path / "fires.sqlite"
    assert len(source.read_text().splitlines()) <= 20
    subprocess.run(
        ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True, timeout=60
    )
    handed_in = subprocess.run([program], capture_output=True, check=True, timeout=10).stdout
    command = [sys.executable, "-m", "firetower.cli.main", "fires", "import", "-", "--store", str(store)]
    done = subprocess.run(command, input=handed_in, capture_output=True, check=True, timeout=60)
    with Store(store, readonly=True) as opened:
        (fire,) = opened.list()
    assert done.stdout.decode().split() == [fire.id]
    assert fire.origin == Signal(stage="swiglu", layer=12)
    assert (fire.first.bits, fire.first.kind, fire.first.row, fire.first.column) == (
        0x7F800000,
        Kind.POS_INF,
        1,
        1,
    )
    assert fire.runtime == "my-engine 1.0"
