"""Log lines by a pattern file: what the lines say becomes an incident, and nothing that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.lab.incident import incident_from_dict
from firetower.lab.incident.logs import MAX_LINE, incident_of_log
from firetower.lab.incident.patterns import read_patterns
from firetower.lab.incident.to_fires import incident_fires

DATA = Path(__file__).parent / "data"
BEGIN = "[[pattern]]\nregex = 'bad (?P<stage>\\w+)'\nbegins = true\n"


def read(name: str):
    lines = (DATA / f"{name}.log").read_text(encoding="utf-8").splitlines(keepends=True)
    return incident_of_log(lines, read_patterns(DATA / f"{name}.toml"), f"{name} log")


def patterns(tmp_path: Path, text: str):
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    return read_patterns(path)


def test_llama_like_lines():
    log = read("llama-like")
    assert log.problems == ()
    assert log.num_lines == 10
    assert log.incident["engine"] == {
        "hidden_size": 2560,
        "device": "NVIDIA GeForce RTX 4090",
        "model": "Qwen3 Next 80B A3B",
    }
    first, second, third = log.incident["fires"]
    assert (first["stage"], first["layer"], first["position"]) == ("routed", 17, 40213)
    assert first["first_routed"] == {"bits": "7fffffff", "dtype": "float32", "row": 3, "column": 812, "slot": 0}
    assert first["facts"]["request"] == "12"
    assert (second["stage"], second["layer"]) == ("attention", 3)
    assert "position" not in second, "the next fire began before its request was named"
    assert third["first_routed"]["bits"] == "ffc00000"


def test_llama_like_fires_can_be_stored():
    incident = incident_from_dict(read("llama-like").incident)
    fires, missing = incident_fires(incident, "server.log")
    assert not missing
    assert [(f.origin.name, f.first.bits_hex, f.first.position) for f in fires] == [
        ("layer 17 routed", "7fffffff", 40213),
        ("layer 3 attention", "7fffffff", None),
        ("layer 21 routed", "ffc00000", 911),
    ]
    assert fires[0].model == "Qwen3 Next 80B A3B"
    assert fires[0].device == "NVIDIA GeForce RTX 4090"


def test_vllm_like_lines_know_neither_bits_nor_place():
    log = read("vllm-like")
    first, second = log.incident["fires"]
    assert first["stage"] == "logits"
    assert first["position"] == 311
    assert first["facts"]["time"] == "11-30 21:44:16"
    assert "position" not in second
    assert "hello" not in str(log.incident), "the prompt in the log is no part of the incident"
    fires, missing = incident_fires(incident_from_dict(log.incident), "vllm.log")
    assert not fires
    assert {lack for _, lack in missing} == {"the first bad value of logits"}


def test_a_number_that_is_none_is_left_out_and_told(tmp_path):
    p = patterns(tmp_path, "[[pattern]]\nregex = 'bad (?P<stage>\\w+) at (?P<layer>\\S+)'\nbegins = true\n")
    log = incident_of_log(["bad down at 12", "bad down at 9e9", "bad down at \u0663"], p, "x")
    assert [f.get("layer") for f in log.incident["fires"]] == [12, None, None]
    assert len(log.problems) == 2
    assert "line 2: layer='9e9' is no whole number" in log.problems[0]


def test_bits_that_fit_no_type_are_left_out_and_told(tmp_path):
    p = patterns(tmp_path, "[[pattern]]\nregex = '(?P<stage>\\w+) (?P<bits>[0-9a-f]+)'\nbegins = true\n")
    log = incident_of_log(["down 7fff", "down 7fffffff", "down 12345678901234567890"], p, "x")
    assert ["first_down" in f for f in log.incident["fires"]] == [False, True, False]
    assert len(log.problems) == 2


def test_the_first_pattern_that_matches_takes_the_line(tmp_path):
    p = patterns(tmp_path, BEGIN + "[[pattern]]\nregex = 'bad'\nset = { phase = 'decode' }\n")
    log = incident_of_log(["bad down", "bad!"], p, "x")
    assert [f.get("phase") for f in log.incident["fires"]] == ["decode"]


def test_a_long_line_is_cut_before_it_is_searched(tmp_path):
    p = patterns(tmp_path, BEGIN)
    log = incident_of_log(["x" * MAX_LINE + "bad down", "x" * 100 + "bad down"], p, "x")
    assert len(log.incident["fires"]) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no"),
        ("pattern = 3", "holds no"),
        ("x = 1", "x: unknown key"),
        ("[[pattern]]\nregex = '('", "cannot be compiled"),
        ("[[pattern]]\nname = 'a'", "has no regex"),
        ("[[pattern]]\nregex = 'a'", "no pattern has begins"),
        ("[[pattern]]\nregex = '(?P<colour>a)'\nbegins = true", "field='colour': unknown"),
        ("[[pattern]]\nregex = 'a'\nbegins = 'yes'", "must be true or false"),
        ("[[pattern]]\nregex = 'a'\nbegins = true\nset = { hue = 1 }", "field='hue'"),
        ("[[pattern]]\nregex = 'a'\nbegins = true\nmap.stage = 3", "must be a table of words"),
        ("[[pattern]\n", "is no TOML"),
    ],
)
def test_a_wrong_pattern_file_is_named(tmp_path, text, complaint):
    with pytest.raises(ConfigError) as e:
        patterns(tmp_path, text)
    assert complaint in str(e.value)


ANY = read_patterns(DATA / "llama-like.toml")


@given(st.lists(st.text(max_size=80) | st.from_regex(r"nan check: [a-z_]+-\d+ row \d+ col \d+ bits 0x[0-9a-f]{8}")))
def test_any_log_gives_an_incident_that_can_be_read(lines):
    log = incident_of_log(lines, ANY, "x")
    incident_from_dict(log.incident)


@pytest.mark.parametrize("name", ["llama-like", "vllm-like"])
def test_the_documented_pattern_files_are_the_tested_ones(name):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "incident-schema.md").read_text(encoding="utf-8")
    assert f"```toml\n{(DATA / f'{name}.toml').read_text(encoding='utf-8').rstrip()}\n```" in page
