from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from firetower.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "bits.md"
TRANSCRIPTS = re.findall(r"```\n\$ firetower (bits .*)\n((?:.*\n)*?)```\n", PAGE.read_text(encoding="utf-8"))


def test_the_page_has_transcripts():
    assert len(TRANSCRIPTS) >= 4


@pytest.mark.parametrize(("arguments", "shown"), TRANSCRIPTS, ids=[a for a, _ in TRANSCRIPTS])
def test_the_page_shows_what_the_command_prints(arguments, shown, capsys):
    assert main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == shown


def test_several_patterns_are_separate_paragraphs_in_order(capsys):
    assert main(["bits", "7fd6e000", "0x7FFFFFFF"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("7fd6e000 read as float32 is a quiet NaN")
    assert second.startswith("7fffffff read as float32 is a quiet NaN")
    assert "nvidia arithmetic" in second


def test_json_has_every_pattern_in_hexadecimal(capsys):
    assert main(["bits", "7fd6e000", "--device", "x86", "--json"]) == 0
    [reading] = json.loads(capsys.readouterr().out)
    assert (reading["bits"], reading["dtype"], reading["kind"]) == ("7fd6e000", "float32", "nan")
    assert (reading["payload"], reading["quiet"], reading["device"]) == ("16e000", True, "x86")
    assert reading["widenings"] == [
        {
            "dtype": "float16",
            "bits": "7eb7",
            "num_zero_bits": 13,
            "rival": "two adjacent 16-bit fields, high 7fd6 low e000",
        }
    ]
    assert reading["value"] == {"nonfinite": "nan", "bits": "7ff8000000000000"}
    assert reading["sentences"][-1] == "Bits are one piece of evidence, never the verdict."


def test_json_of_a_finite_value_is_a_number(capsys):
    assert main(["bits", "3f800000", "--json"]) == 0
    [reading] = json.loads(capsys.readouterr().out)
    assert (reading["value"], reading["kind"], reading["whose"]) == (1.0, None, [])


def test_json_of_64_bits_survives_readers_that_hold_doubles(capsys):
    assert main(["bits", "7ff0000000000001", "--json"]) == 0
    [reading] = json.loads(capsys.readouterr().out, parse_int=float)
    assert int(reading["bits"], 16) == 0x7FF0000000000001
    assert reading["quiet"] is False


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16"])
def test_types_are_taken_by_the_names_people_use(dtype, capsys):
    assert main(["bits", "7fc0", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert "read as bfloat16" in out
    assert "read as float16" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zz"], "bits='zz': must be hexadecimal digits such as 7fd6e000 or 0x7fff"),
        (["7fd6e"], "bits='7fd6e': has 5 hexadecimal digits, must be 2 (float8)"),
        (
            ["7fd6e000", "--dtype", "float16"],
            "bits=0x7fd6e000: must fit the 16 bits of float16; name a wider dtype",
        ),
        (["7fff", "--dtype", "float17"], "dtype='float17': must be one of float64, float32"),
        (["1" * 17], "at most 16 (64 bits)"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(arguments, message, capsys):
    assert main(["bits", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("firetower: ")
    assert captured.err.count("\n") == 1


def test_a_typo_among_several_prints_no_half_answer(capsys):
    assert main(["bits", "7fffffff", "oops"]) == 1
    assert capsys.readouterr().out == ""


def test_an_unknown_device_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as e:
        main(["bits", "7fff", "--device", "cuda"])
    assert e.value.code == 2
    assert "nvidia" in capsys.readouterr().err
