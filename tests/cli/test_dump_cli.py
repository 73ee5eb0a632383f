from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from firetower.capture.environment import collect_environment
from firetower.capture.tensors import RawTensor
from firetower.cli.main import main
from firetower.core.records import BadValue, Kind, Phase, Reading, Signal, SignalReading, Status
from firetower.engine.dump import (
    TENSORS,
    AuditItem,
    Dump,
    DumpFolder,
    DumpRow,
    DumpSignal,
    DumpStep,
    dumps_path,
    figures,
    read_dump,
)

FIRE = "20261201-141754-79de380b91"


def row(request, position, **changes):
    given = {"request": request, "position": position, "num_real": 2, "accepted": 1, "slot": int(request), "seed": 7}
    return DumpRow(**given | changes)


def step(number, *rows):
    signals = tuple(
        DumpSignal(
            index=index,
            name=name,
            stage=name.split()[-1],
            layer=0,
            rows_per_token=per,
            tensor=f"step {number}/{index:04d} {name}",
            is_neg_inf_legal=name.endswith("decay"),
        )
        for index, name, per in ((3, "layer 0 decay", 1), (5, "layer 0 down", 2))
    )
    return DumpStep(
        number=number, phase=Phase.VERIFY, num_rows=4, window=2, is_graphed=True, rows=rows, signals=signals
    )


def tensors_of(one):
    """Legal and pad values everywhere; the rows of pads hold NaN."""
    made = {}
    for signal in one.signals:
        x = np.full((8 * signal.rows_per_token, 3), 1.5, dtype=np.float32)
        x[4 * signal.rows_per_token :] = np.nan
        if signal.is_neg_inf_legal:
            x[0, 0] = -np.inf
            made[signal.tensor] = RawTensor.from_array(x)
        else:
            x[1, 2] = -40.0
            bits = (x.view(np.uint32) >> 16).astype(np.uint16)
            made[signal.tensor] = RawTensor.from_array(bits, "bfloat16")
    return made


@pytest.fixture
def dump():
    rows = (row("1", 10, pages=(4, 9)), row("2", 30, is_burned=True, pages=(5,)))
    steps = (step(6, *rows), step(7, *rows))
    signal = Signal(stage="down", layer=0)
    first = BadValue(flat_index=18, row=6, column=0, bits=0x7FC1, dtype="bfloat16", kind=Kind.NAN, shape=(16, 3))
    return Dump(
        fire=FIRE,
        created_at="2026-12-01T14:17:54.000Z",
        model="tiny",
        device="cpu",
        environment=collect_environment("cpu"),
        step=steps[1],
        reading=Reading(
            step=7,
            phase=Phase.VERIFY,
            num_tokens=4,
            signals=(SignalReading(signal=signal, status=Status.BAD, first=first),),
        ),
        windows=steps,
        audit=(
            AuditItem(what="weights", role="model"),
            AuditItem(what="kv", role="burned", request="2", status=Status.BAD, first="layer 1", is_older=True),
            AuditItem(what="kv", role="neighbour", request="1", status=Status.NOT_COVERED, reason="it was gone"),
        ),
        left_out=("window of step 5: no room",),
    )


@pytest.fixture
def folder(dump):
    """Its path in the usual place; the burned step has a NaN with a payload in the second row's second token."""
    tensors = tensors_of(dump.windows[0]) | tensors_of(dump.windows[1])
    name = dump.windows[1].signals[1].tensor
    bits = tensors[name].to_array().copy()
    bits[6, 0] = 0x7FC1
    bits[7, 1] = 0x7F80
    tensors[name] = RawTensor.from_array(bits, "bfloat16")
    return DumpFolder().write(dump, tensors, "origin")


def test_the_burned_step_is_shown_signal_by_signal(folder, capsys):
    assert main(["dump", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"dump of fire {FIRE}, 2026-12-01T14:17:54.000Z: tiny on cpu"
    assert lines[1] == "step 7 burned: verify, 2 of 4 rows, window of 2, graph"
    assert lines[2] == "request 2: position 30, 2 tokens, slot 2, 1 page, seed 7, 1 accepted before"
    assert "first bad: layer 0 down, column 0, nan, bits 7fc1" in lines
    assert "state audit: 1 clean, 1 bad, 1 not covered" in lines
    assert "kv of request 2 (burned) first bad at layer 1; older than the step" in lines
    assert "kv of request 1 (neighbour) not covered: it was gone" in lines
    assert "left out: window of step 5: no room" in lines
    assert "6 verify, 2 of 4 rows, window of 2, graph 2 40 0 2" not in out
    assert "6 verify, 2 of 4 rows, window of 2, graph 2 40 0 1" in lines, "the legal -Inf is counted, not called bad"
    assert "7 * verify, 2 of 4 rows, window of 2, graph 2 40 1 2 layer 0 down" in lines
    assert "7 layer 0 decay 8 x 3 float32 1.5 0 1" in lines
    assert "7 layer 0 down 16 x 3 bfloat16 40 1 1 row 6, column 0: bits 7fc1 (request 2, position 31)" in lines
    assert not any(line.startswith("6 layer") for line in lines)


def test_another_step_or_all_of_them(folder, capsys):
    assert main(["dump", "show", str(folder), "--step", "6"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "6 layer 0 down 16 x 3 bfloat16 40 0 0" in lines
    assert not any(line.startswith("7 layer") for line in lines)
    assert main(["dump", "show", str(folder), "--all"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines if " layer 0 d" in f" {line}" and "x 3" in line] == ["6", "6", "7", "7"]


def test_json_has_all_of_it(folder, dump, capsys):
    assert main(["dump", "show", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dump"]["fire"] == FIRE
    assert data["dump"]["step"]["rows"][1]["pages"] == [5]
    assert [(s["step"], s["index"]) for s in data["signals"]] == [(6, 3), (6, 5), (7, 3), (7, 5)]
    assert data["signals"][3]["first_bad"] == {
        "row": 6, "column": 0, "bits": "7fc1", "request": "2", "position": 31,
    }  # fmt: skip
    assert data["signals"][3]["num_pad_bad"] == 8 * 3
    assert data["signals"][0]["first_bad"] is None
    assert read_dump(folder) == dump


def test_the_id_of_the_fire_finds_it_in_the_usual_place(folder, capsys):
    assert folder == dumps_path() / FIRE
    assert main(["dump", "show", FIRE]) == 0
    assert FIRE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "dump='nothing': is no folder; give the folder of a dump, or the id of its fire"),
        ([FIRE, "--step", "5"], "step=5: is not recorded; recorded are 6, 7"),
    ],
)
def test_what_is_not_there_is_one_clear_line(folder, arguments, message, capsys):
    assert main(["dump", "show", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"firetower: {message}\n"


def test_a_damaged_file_is_one_clear_line(folder, capsys):
    path = Path(folder, TENSORS)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["dump", "show", str(folder)]) == 1
    assert "the data ends at" in capsys.readouterr().err


def test_no_action_is_wrong_usage():
    with pytest.raises(SystemExit) as e:
        main(["dump"])
    assert e.value.code == 2


def test_figures_are_those_of_numpy():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 7)).astype(np.float32) * 100
    x[4, 5], x[9, 1] = np.inf, np.nan
    rows = [2, 4, 9, 19]
    found = figures(RawTensor.from_array(x), rows)
    some = x[rows]
    assert found.absmax == float(np.abs(some[np.isfinite(some)]).max())
    assert (found.num_nan, found.num_inf, found.first_bad, found.bits) == (1, 1, (4, 5), "7f800000")
    assert figures(RawTensor.from_array(x), []).first_bad is None
