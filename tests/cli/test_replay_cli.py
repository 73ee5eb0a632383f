"""``firetower replay``: what it prints, its exit codes, its files, and what it refuses before anything is sent."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from firetower.capture import RawTensor, freeze_request, read_capture, redact, write_capture
from firetower.cli.main import main
from firetower.lab.replay.records import CampaignEnd
from firetower.lab.replay.schema import read_campaign

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def burning_server() -> Any:
    """The example's class `BurningServer`."""
    spec = importlib.util.spec_from_file_location("example_burning_server_cli", EXAMPLES / "burning_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.BurningServer


@pytest.fixture
def capture(tmp_path: Path) -> str:
    body = {"model": "tower-1", "messages": [{"role": "user", "content": "agent PRIVATE"}], "max_tokens": 400}
    return str(write_capture(freeze_request(body | {"stream": True}), tmp_path / "capture"))


def test_a_fire_exits_with_3_and_says_where_the_result_is(burning_server, capture, capsys, tmp_path):
    with burning_server("bangs", 0.5) as server:
        code = main(["replay", capture, "--target", server.url, "--tries", "6", "-o", str(tmp_path / "c.json")])
    out, err = capsys.readouterr()
    assert code == 3
    assert "exact binomial interval" in out
    assert "fire in try" in out
    assert f"Wrote {tmp_path / 'c.json'}" in err
    assert "6 of 6 tries" not in out
    campaign = read_campaign(tmp_path / "c.json")
    assert campaign.ended is CampaignEnd.PLANNED
    assert stat.S_IMODE((tmp_path / "c.json").stat().st_mode) == 0o600
    assert "PRIVATE" not in out + err + (tmp_path / "c.json").read_text()


def test_a_clean_campaign_exits_with_0_and_says_what_it_excludes(burning_server, capture, capsys):
    with burning_server("bangs", 0.0) as server:
        code = main(["replay", capture, "--target", server.url, "--tries", "8", "--exclude-rate", "1/18"])
    out = capsys.readouterr().out
    assert code == 0
    assert "8 clean tries exclude rates above .312 at 95%; 45 more needed to exclude a rate of .056." in out


def test_json_is_the_campaign_alone(burning_server, capture, capsys):
    with burning_server("bangs", 0.5) as server:
        main(["replay", capture, "--target", server.url, "--tries", "4", "--arm", "a:temperature=0", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [a["name"] for a in data["arms"]] == ["as captured", "a"]
    assert len(data["tries"]) == 8
    assert data["comparisons"][0]["test"] == "boschloo"


def test_a_finished_campaign_is_shown_again_and_another_one_is_made_on_request(burning_server, capture, capsys):
    with burning_server("bangs", 0.5) as server:
        command = ["replay", capture, "--target", server.url, "--tries", "5", "--seed", "fresh"]
        main(command)
        first = capsys.readouterr().out
        num_requests = len(server.bodies)
        main(command)
        out, err = capsys.readouterr()
        assert out == first
        assert "--again makes another one" in err
        assert len(server.bodies) == num_requests
        main([*command, "--again"])
        assert "--order-seed 1" in capsys.readouterr().err
        seeds = [b["seed"] for b in server.bodies if "PRIVATE" in json.dumps(b)]
    assert len(set(seeds)) == 10


def test_resume_wants_something_to_resume(burning_server, capture, capsys, own_data_folder):
    with burning_server("bangs", 0.0) as server:
        command = ["replay", capture, "--target", server.url, "--tries", "2"]
        assert main([*command, "--resume"]) == 1
        assert "no campaign" in capsys.readouterr().err
        assert not list((own_data_folder / "campaigns").glob("*.jsonl"))
        assert main(command) == 0


def test_an_interrupted_campaign_exits_with_130(burning_server, capture, capsys, monkeypatch):
    from firetower.lab.replay import progress

    real = progress.Progress.__call__

    def interrupt(self, campaign, in_flight):
        real(self, campaign, in_flight)
        if len(campaign.state.counted) == 2:
            raise KeyboardInterrupt

    with burning_server("bangs", 0.0) as server:
        command = ["replay", capture, "--target", server.url, "--tries", "5"]
        monkeypatch.setattr(progress.Progress, "__call__", interrupt)
        assert main(command) == 130
        assert "The same command goes on" in capsys.readouterr().out
        monkeypatch.setattr(progress.Progress, "__call__", real)
        assert main([*command, "--resume"]) == 0
    assert "Going on: 2 tries count already." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([], "target: missing"),
        (["--target", "nowhere"], "must be a URL"),
        (["--target", "http://u:pw@h"], "give no user"),
        (["--target", "http://h", "--tries", "0"], "tries=0"),
        (["--target", "http://h", "--max-tokens", "0"], "max_tokens=0"),
        (["--target", "http://h", "--arm", "x"], "must be NAME:SETTING=VALUE"),
        (["--target", "http://h", "--arm", "x:api_key=hush"], "FIRETOWER_API_KEY"),
        (["--target", "http://h", "--set", "token=hush"], "FIRETOWER_API_KEY"),
        (["--target", "http://h", "--isolate-tries", "restart"], "--restart-command"),
        (["--target", "http://h", "--stop-after-fires", "1"], "--watch"),
        (["--target", "http://h", "--exclude-rate", "2"], "exclude_rate=2"),
        (["--target", "os:getcwd", "--isolate-tries", "none", "--concurrency", "2"], "one try at a time"),
        (["--target", "os:getcwd", "--arm", "x:url=http://h"], "needs a server"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, rule, capture, capsys, own_data_folder):
    assert main(["replay", capture, *arguments]) == 1
    err = capsys.readouterr().err
    assert rule in err
    assert err.count("\n") == 1
    assert "hush" not in err
    assert "pw" not in err
    assert not own_data_folder.exists()


def test_an_output_that_exists_is_refused_before_the_first_try(burning_server, capture, capsys, tmp_path):
    (tmp_path / "c.json").write_text("mine")
    with burning_server("bangs", 0.0) as server:
        command = ["replay", capture, "--target", server.url, "--tries", "1", "-o", str(tmp_path / "c.json")]
        assert main(command) == 1
        assert server.bodies == []
        assert main([*command, "--force"]) == 0
    assert (tmp_path / "c.json").read_text() != "mine"


def test_short_answers_come_with_a_hint(burning_server, capture, capsys):
    with burning_server("bangs", 0.0) as server:
        main(["replay", capture, "--target", server.url, "--tries", "1", "--max-tokens", "40"])
    assert "--set logprobs=true" in capsys.readouterr().err


def test_a_key_in_the_clear_is_warned_about(capture, capsys, monkeypatch):
    monkeypatch.setenv("FIRETOWER_API_KEY", "hush-hush-hush")
    main(["replay", capture, "--target", "http://unreachable.invalid", "--tries", "1"])
    err = capsys.readouterr().err
    assert "in the clear" in err
    assert "hush" not in err


def test_a_redacted_capture_is_measured_and_recorded(burning_server, capture, capsys, tmp_path):
    import dataclasses

    known = dataclasses.replace(read_capture(capture), prompt_token_ids=((1, 2, 3),))
    write_capture(redact(known, vocabulary_size=100), tmp_path / "redacted")
    with burning_server("bangs", 1.0) as server:
        code = main(
            ["replay", str(tmp_path / "redacted"), "--target", server.url, "--tries", "2",
             "--record", str(tmp_path / "measured")]
        )  # fmt: skip
        assert [len(b["prompt"]) for b in server.bodies if isinstance(b["prompt"], list)] == [3, 3]
    assert code == 0
    assert "did not fire" in capsys.readouterr().err
    assert read_capture(tmp_path / "measured").redaction.still_fires is False


def test_an_example_callable_burns(capture, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    command = ["replay", capture, "--target", "replay_target:overflow", "--seed", "fresh", "--tries", "8"]
    code = main([*command, "--isolate-tries", "none", "--set", "probability=0.5"])
    assert code == 3
    assert "inf among the numbers" in capsys.readouterr().out


def test_an_op_is_replayed_without_a_target(tmp_path, capsys):
    pytest.importorskip("torch")
    import numpy as np

    call = {"name": "aten.mul.Tensor", "args": [{"tensor": "gate"}, {"tensor": "up"}]}
    capture = freeze_request(
        {"prompt": "x"},
        path="/v1/completions",
        engine_settings={"op": call},
        tensors={
            "gate": RawTensor.from_array(np.full(4, 300, np.float16)),
            "up": RawTensor.from_array(np.array([1, 2, 300, 4], np.float16)),
        },
    )
    folder = str(write_capture(capture, tmp_path / "op"))
    assert main(["replay", folder, "--op", "--tries", "3"]) == 3
    out = capsys.readouterr().out
    assert "index 2, bits 7c00" in out
    assert "the range of float16 is to blame" in out
    assert main(["replay", folder, "--op", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["runs"][0]["num_pos_inf"] == 1
