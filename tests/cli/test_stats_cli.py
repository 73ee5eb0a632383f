from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from firetower.cli.main import main
from firetower.core.codec import decode

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stats.md"
TRANSCRIPTS = re.findall(r"```\n\$ firetower (stats .*)\n((?:.*\n)*?)```\n", PAGE.read_text(encoding="utf-8"))


def answer(arguments: str, capsys) -> str:
    assert main(["stats", *shlex.split(arguments)]) == 0
    return capsys.readouterr().out


def data(arguments: str, capsys) -> dict:
    return decode(json.loads(answer(f"{arguments} --json", capsys)))


def test_the_page_has_a_transcript_of_every_question():
    shown = " ".join(arguments for arguments, _ in TRANSCRIPTS)
    assert len(TRANSCRIPTS) >= 8
    for option in ("4/34", "--rounds", "--clean", "--rate", "--plan", "--positions", "--watching"):
        assert option in shown


@pytest.mark.parametrize(("arguments", "shown"), TRANSCRIPTS, ids=[a for a, _ in TRANSCRIPTS])
def test_the_page_shows_what_the_command_prints(arguments, shown, capsys):
    assert main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == shown


def test_a_sentence_comes_first(capsys):
    first = answer("4/34", capsys).splitlines()[0]
    assert first.startswith("4 fires in 34 tries: rate .118, about 1 in 8.5; 95% .033-.275 (exact binomial")


def test_the_incident(capsys):
    text = answer("--rounds 6,18,1,9", capsys)
    assert "rate .118" in text
    assert "95% .033-.243" in text
    result = data("--rounds 6,18,1,9", capsys)
    assert [round(result["rate"][k], 3) for k in ("rate", "lower", "upper")] == [0.118, 0.033, 0.243]
    assert (result["fixed"]["at_point"], result["fixed"]["at_lower"]) == (24, 90)
    assert result["dispersion"]["index"] == pytest.approx(0.8)


def test_eight_clean_tries_at_an_eighteenth(capsys):
    text = answer("--clean 8 --rate 1/18", capsys)
    assert text.startswith("53 clean tries in a row needed to exclude a rate of .056 at 95%.")
    assert "8 clean tries so far exclude rates above .312 at 95%" in text


@pytest.mark.parametrize("rate", ["1/18", "0.05555555555555555", "5.555555555555555%"])
def test_rates_are_taken_as_people_write_them(rate, capsys):
    assert data(f"--rate {rate}", capsys)["needed"]["tries"] == 53


def test_a_count_without_fires_says_what_it_excludes(capsys):
    result = data("0/24", capsys)
    assert result.keys() == {"rate", "clean"}
    assert result["clean"]["excludes_above"] == pytest.approx(1 - 0.05 ** (1 / 24))


def test_rounds_with_a_plus_are_censored_and_a_cap_can_be_given(capsys):
    read_off, given = (
        data("--rounds 6,18,1,9,40+", capsys)["rate"],
        data("--rounds 6,18,1,9,40+ --cap 50", capsys)["rate"],
    )
    assert (read_off["fires"], read_off["tries"]) == (4, 74)
    assert "at 40 tries" in read_off["method"]
    assert "at 50 tries" in given["method"]
    assert given["lower"] != read_off["lower"]


def test_rounds_of_counts_are_pooled_and_their_scatter_judged(capsys):
    result = data("--rounds 1/40,0/40,9/40", capsys)
    assert (result["rate"]["fires"], result["rate"]["tries"]) == (10, 120)
    assert result["dispersion"]["p_value"] < 0.01
    assert "depend on each other" in result["dispersion"]["sentence"]


def test_one_round_is_judged_without_scatter(capsys):
    assert "dispersion" not in data("--rounds 6", capsys)
    assert "dispersion" not in data("--rounds 1/40", capsys)


def test_arms_keep_their_names(capsys):
    result = data("before=4/34 after=0/90", capsys)["comparison"]
    assert result["names"] == ["before", "after"]
    assert result["test"] == "boschloo"
    assert result["p_value"] == pytest.approx(0.0058, abs=1e-4)
    assert result["sentence"].startswith("after fires less often than before")
    assert data("4/34 0/90", capsys)["comparison"]["names"] == ["A", "B"]


def test_watching_is_wider_for_rates_rounds_and_arms(capsys):
    for question, part, end in [("4/34", "rate", "upper"), ("--rounds 6,18,1,9", "rate", "upper")]:
        assert data(f"{question} --watching", capsys)[part][end] > data(question, capsys)[part][end]
    watched = data("4/34 0/90 --watching", capsys)["comparison"]
    assert watched["p_value"] > 0.5
    assert "e_value" in watched


def test_json_has_nonfinite_numbers_spelled_out(capsys):
    out = answer("a=0/3 b=0/4 --json", capsys)
    assert "NaN" not in out
    assert json.loads(out)["comparison"]["odds_ratio"]["nonfinite"] == "nan"


def test_positions_become_a_table(capsys):
    text = answer("--positions 88443,87353,88685+", capsys)
    assert text.startswith("2 fires in 3 tries; half had fired by position 88,443")
    assert re.search(r"^\s+87,353\s+3\s+1\s+0\.667", text, re.MULTILINE)
    curve = data("--positions 88443,87353,88685+", capsys)["curve"]
    assert [p["position"] for p in curve["points"]] == [87353, 88443]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("5/3", "5/3: fires must not exceed tries"),
        ("4/34 7/5", "7/5: fires must not exceed tries"),
        ("4-34", "'4-34': must be FIRES/TRIES in whole numbers, such as 4/34"),
        ("=4/34 0/3", "no name before ="),
        ("0/0", "0/0: tries must be at least 1"),
        ("--rounds 6,,9", "rounds='': must be a whole number, + behind it if no fire"),
        ("--rounds 0,4", "tries=0: must be between 1"),
        ("--rounds 50,40+", "must not exceed the longest round without a fire, 40; give the planned --cap"),
        ("--rounds 1/40,x", "'x': must be FIRES/TRIES"),
        ("--clean -3", "clean=-3: must be between 0"),
        ("--rate 0", "rate=0.0: must be above 0 and at most 1"),
        ("--rate 1/0", "rate='1/0': must be a share such as 1/18, .05 or 5%"),
        ("--rate nan", "rate=nan: must be at least 0 and at most 1"),
        ("--rate 1e999999999", "rate=inf: must be at least 0 and at most 1"),
        ("--rate 5%%", "rate='5%%': must be a share"),
        ("--rate 18", "rate=18.0: must be at least 0"),
        (f"1/{'9' * 5000}", "must be FIRES/TRIES in whole numbers"),
        ("--plan .5 .5", "must differ"),
        ("--positions 5,x", "positions='x': must be a whole number"),
        ("4/34 --confidence 95", "confidence=95.0: must be above 0 and below 1"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_line(arguments, message, capsys):
    assert main(["stats", *shlex.split(arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("firetower: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "ask one of FIRES/TRIES, --rounds, --clean/--rate, --plan, --positions"),
        ("4/34 --clean 8", "got FIRES/TRIES and --clean/--rate"),
        ("4/34 --cap 40", "--cap goes with --rounds"),
        ("--rounds 1/40 --cap 40", "--cap goes with rounds that stop at a fire"),
        ("4/34 --power .9", "--power goes with --plan"),
        ("--clean 8 --watching", "--watching goes with FIRES/TRIES or --rounds"),
        ("1/40 0/40 3/40", "two arms are compared at a time; rounds of one arm go into --rounds"),
    ],
)
def test_questions_that_do_not_go_together_are_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as e:
        main(["stats", *shlex.split(arguments)])
    assert e.value.code == 2
    assert message in capsys.readouterr().err
