"""``firetower diagnose``: as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firetower.cli.main import main
from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal, TensorSummary
from firetower.core.verdict import Verdict
from firetower.fires.store import Store

BUDGET_S = 1.0


def fire(name: str = "fire-1", **fields: object) -> Fire:
    product = TensorSummary(
        name="self", shape=(4, 8), dtype="float16", num_nan=0, num_pos_inf=0, num_neg_inf=0, absmax=300.0,
        zero_frac=0.0, headroom=218.0,
    )  # fmt: skip
    base = Fire(
        id=name,
        created_at="2026-11-30T21:44:15.000Z",
        source="investigate",
        runtime="torch",
        model="tiny",
        device="x86_64",
        phase=Phase.PREFILL,
        step=0,
        origin=Signal(stage="swiglu", layer=2, module="layers.2.mlp", op="aten.mul.Tensor"),
        first=BadValue(flat_index=15, row=1, column=7, bits=0x7C00, dtype="float16", kind=Kind.POS_INF, shape=(4, 8)),
        outcome=Outcome.RECORDED,
        inputs=(product,),
    )
    return dataclasses.replace(base, **fields)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fires.sqlite"
    monkeypatch.setenv("FIRETOWER_STORE", str(path))
    return path


def keep(path: Path, *fires: Fire) -> None:
    with Store(path) as store:
        for f in fires:
            store.add(f)


def test_the_page_says_verdict_evidence_gaps_and_the_next_test(path, capsys):
    keep(path, fire())
    assert main(["diagnose", "fire"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "fire-1: +inf first at layer 2 swiglu (aten.mul.Tensor)"
    assert lines[1] == "Verdict: undecided"
    assert "It looks like A (overflow)" in lines[2]
    assert "17 of 172 public reports" in out
    assert "the test that tells is wider-type" in out
    assert "Next: wider-type" in out
    assert "first_bad_op" in out
    assert err.strip() == "next: firetower fires show fire-1"


def test_json_has_all_of_it(path, capsys):
    keep(path, fire(), fire("other", origin=Signal(stage="router", layer=1), first=fire().first))
    assert main(["diagnose", "fire-1", "other", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["fire"], second["fire"]) == ("fire-1", "other")
    assert Verdict.from_mapping(first["verdict"]).next_test == "wider-type"
    assert first["resembles"][0]["family"] == "A"
    assert first["stored_verdict"] is None


def test_a_verdict_that_came_with_the_fire_is_shown(path, capsys):
    verdict = Verdict(family="A", detail="OVERFLOW_ACTIVATION", decided=True, statement="78,000 > 65,504")
    keep(path, fire(verdict=verdict.to_mapping()))
    assert main(["diagnose", "fire-1"]) == 0
    out = capsys.readouterr().out
    assert "Verdict: A overflow, OVERFLOW_ACTIVATION (17 of 172 public reports)" in out
    assert "78,000 > 65,504" in out


def test_a_verdict_in_words_of_another_engine_does_not_hide_ours(path, capsys):
    keep(path, fire(verdict={"blame": "cosmic rays"}))
    assert main(["diagnose", "fire-1"]) == 0
    assert "It looks like A (overflow)" in capsys.readouterr().out


def test_control_characters_of_a_stored_name_are_shown_and_not_obeyed(path, capsys):
    keep(path, fire(inputs=(dataclasses.replace(fire().inputs[0], name="\x1b[2Jself", num_nan=1),)))
    assert main(["diagnose", "fire-1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2Jself" in out


@pytest.mark.parametrize("name", ["nobody", "fire-"])
def test_an_unknown_or_ambiguous_id_is_one_line(path, capsys, name):
    keep(path, fire(), fire("fire-2", origin=Signal(stage="up", layer=1)))
    assert main(["diagnose", name]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_store_that_is_not_there_is_not_made(path, capsys):
    assert main(["diagnose", "fire-1"]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert not path.exists()


def test_it_answers_within_a_second_and_without_torch(path):
    keep(path, fire())
    code = (
        "import sys; sys.modules['torch'] = None; from firetower.cli.main import main; "
        "sys.exit(main(['diagnose', 'fire-1']))"
    )
    times: list[float] = []
    # the best of three; a busy machine gets as many again before it is called slow
    while len(times) < 3 or (min(times) >= BUDGET_S and len(times) < 6):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < BUDGET_S, f"best of {len(times)}: {min(times):.2f} s"
