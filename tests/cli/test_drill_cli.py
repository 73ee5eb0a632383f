"""`firetower drill`: what it prints, what it exits with."""

from __future__ import annotations

import dataclasses
import json

import pytest

from firetower.cli.main import main
from firetower.drills import all_drills, find_drills


def test_list_names_every_drill(capsys):
    assert main(["drill", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(d.name in out for d in all_drills())
    assert "refuted by" in out


def test_list_as_json(capsys):
    assert main(["drill", "--list", "--json", "M1", "T1"]) == 0
    listed = json.loads(capsys.readouterr().out)["drills"]
    assert [d["name"] for d in listed] == ["bad-weight", "rope-position", "rounded-positions"]
    assert "conv_state" in listed[0]["stages"]


def test_exact_board_exits_0_and_counts(capsys):
    assert main(["drill", "M1", "G1", "--host", "pure", "--variants", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.count("exact") == 4
    assert out.count("silent") == 4
    assert "4 of 4 origins exact, 4 of 4 twins silent" in err


def test_json_holds_what_was_planted_and_seen(capsys):
    assert main(["drill", "M1", "--host", "pure", "--json", "--seed", "7"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seed"] == 7
    for result in document["results"]:
        assert result["exact"] is True
        assert result["expected"]["column"] == result["seen"]["column"]
        assert result["seen"]["kind"] == "nan"
        assert result["twin"] is None


def _replace_drill(monkeypatch, change):
    drill = find_drills(["M1"])[0]

    def variants(seed):
        return [
            dataclasses.replace(v, build=lambda fault, v=v: change(v, fault))
            for v in drill.variants(seed)
            if v.host == "pure"
        ]

    changed = dataclasses.replace(drill, variants=variants)
    monkeypatch.setattr("firetower.drills.find_drills", lambda names: (changed,))


def test_misplaced_origin_exits_3_and_names_the_field(monkeypatch, capsys):
    def elsewhere(variant, fault):
        case = variant.build(fault)
        wrong = case.expected and dataclasses.replace(case.expected, row=case.expected.row + 1)
        return dataclasses.replace(case, expected=wrong)

    _replace_drill(monkeypatch, elsewhere)
    assert main(["drill"]) == 3
    out, err = capsys.readouterr()
    assert "WRONG row" in out
    assert "0 of 2 origins exact, 2 of 2 twins silent" in err


def test_missed_fault_exits_3(monkeypatch, capsys):
    def without(variant, fault):
        expected = variant.build(True).expected
        return dataclasses.replace(variant.build(False), expected=expected if fault else None)

    _replace_drill(monkeypatch, without)
    assert main(["drill"]) == 3
    assert "NOTHING" in capsys.readouterr().out


def test_twin_that_fires_exits_3(monkeypatch, capsys):
    _replace_drill(monkeypatch, lambda variant, fault: variant.build(True))
    assert main(["drill"]) == 3
    assert "FIRED at" in capsys.readouterr().out


def test_black_box_that_breaks_is_not_called_silent(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("firetower.attach.watch.Watch.coverage", broken)
    assert main(["drill", "M1", "--host", "pure", "--variants", "1"]) == 3
    out, err = capsys.readouterr()
    assert "BROKEN" in out
    assert "IndexError: tuple index out of range" in err
    assert "0 of 1 origins exact, 0 of 1 twins silent" in err


def test_unknown_drill_is_one_line(capsys):
    assert main(["drill", "no-such"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "name=no-such: no such drill" in err


@pytest.mark.parametrize("number", ["0", "-3"])
def test_number_of_variants_must_be_positive(number, capsys):
    assert main(["drill", "--variants", number]) == 1
    assert "must be at least 1" in capsys.readouterr().err


def test_absent_real_model_is_said_and_the_rest_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FIRETOWER_CACHE", str(tmp_path))
    assert main(["drill", "M1", "--variants", "6"]) == 0
    out, err = capsys.readouterr()
    assert out.count("skipped") == 2
    assert "skipped 2" in err
    assert "make models" in err
    assert main(["drill", "M1", "--host", "smollm2"]) == 1
    assert "make models" in capsys.readouterr().err


def test_a_family_letter_means_all_its_drills(capsys):
    assert main(["drill", "--list", "--json", "s"]) == 0
    listed = json.loads(capsys.readouterr().out)["drills"]
    assert [d["name"] for d in listed] == ["partial-doubled", "partial-missing"]
    assert listed[1]["verdict"] == "S/PARTIAL_MISSING"
    assert listed[1]["refuter"] == "collectives"


def test_a_finite_fault_is_told_by_the_lab(capsys):
    assert main(["drill", "L1", "--host", "pure"]) == 0
    out, err = capsys.readouterr()
    assert "finite: slot" in out
    assert "the hash is that of expert" in out
    assert "2 of 2 origins exact, 2 of 2 twins silent" in err


def test_board_prints_a_line_a_drill_a_matrix_and_the_figures(capsys):
    assert main(["drill", "--all", "K", "S", "--host", "pure"]) == 0
    out, err = capsys.readouterr()
    assert out.count("silent") == 3
    assert "K/WEIGHT_MUTATED" in out
    assert "undecided" in out
    for figure in ("detected", "origin exact", "family right", "refuter flips"):
        assert f"{figure}: 6 of 6 (100.0%)" in err
    assert "twins that fired: 0 of 6" in err
    assert "MISSED" not in err


def test_board_as_json_has_figures_matrix_and_verdicts(capsys):
    assert main(["drill", "--all", "K1", "--host", "pure", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["confusion"] == {"K": {"K": 2, "V": 0}}
    assert all(f["met"] for f in document["figures"])
    first = document["results"][0]
    assert first["judgement"]["said"] == "K/WEIGHT_MUTATED"
    assert (first["detected"], first["placed"], first["family_right"], first["refuter_flips"]) == (True,) * 4


def test_a_family_that_is_misnamed_exits_3_and_says_what_was_said(monkeypatch, capsys):
    drill = dataclasses.replace(find_drills(["K1"])[0], verdict="U/SINGLE_BIT")
    monkeypatch.setattr("firetower.drills.find_drills", lambda names: (drill,))
    assert main(["drill", "--all", "--host", "pure"]) == 3
    out, err = capsys.readouterr()
    assert "0 !" in out
    assert "planted U/SINGLE_BIT, the lab said K/WEIGHT_MUTATED" in err
    assert "family wrong: 2 of 2 (100.0%), bar at most 2%: MISSED" in err


def test_a_twin_that_the_lab_blames_exits_3(monkeypatch, capsys):
    drill = find_drills(["L1"])[0]
    variants = [
        dataclasses.replace(v, build=lambda _, v=v: v.build(True)) for v in drill.variants(0) if v.host == "pure"
    ]
    changed = dataclasses.replace(drill, variants=lambda seed: variants)
    monkeypatch.setattr("firetower.drills.find_drills", lambda names: (changed,))
    assert main(["drill"]) == 3
    assert "FIRED: L/EXPERT_SLOT_MISMATCH" in capsys.readouterr().out


def test_a_place_that_the_lab_does_not_name_exits_3(monkeypatch, capsys):
    drill = find_drills(["L1"])[0]

    def misplaced(variant, fault):
        case = variant.build(fault)
        return dataclasses.replace(case, places=("slot 99",)) if fault else case

    variants = [
        dataclasses.replace(v, build=lambda fault, v=v: misplaced(v, fault))
        for v in drill.variants(0)
        if v.host == "pure"
    ]
    monkeypatch.setattr(
        "firetower.drills.find_drills", lambda names: (dataclasses.replace(drill, variants=lambda _: variants),)
    )
    assert main(["drill"]) == 3
    assert "NOT NAMED by the lab: slot 99" in " ".join(capsys.readouterr().out.split())
