"""``firetower run`` from the outside."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from firetower.cli.main import main
from firetower.engine.runner import Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model of Transformers, without a tokenizer."""
    from firetower.drills import hosts

    path = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = hosts.small_qwen35_moe(seed=4, hidden_size=64, vocab_size=160, num_experts=8, moe_intermediate_size=32)
        host.save_pretrained(path)
    return str(path)


def test_an_answer_and_its_figures(folder, capsys):
    args = ["run", folder, "5,6,7", "--ids", "--max-tokens", "6", "--max-model-len", "64", "--ignore-eos"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 6
    assert "3 tokens read" in err
    assert "6 written at" in err
    assert "ended by length" in err
    assert "0 fires" in err
    assert main([*args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["completion"]["token_ids"] == [int(t) for t in out.split()]
    assert (document["completion"]["finish_reason"], document["fires"]) == ("length", [])


def test_a_seed_repeats_the_answer(folder, capsys):
    args = ["run", folder, "5,6,7", "--ids", "--max-tokens", "8", "--max-model-len", "64", "--temperature", "1.5"]
    answers = []
    for seed in ("1", "1", "2"):
        assert main([*args, "--seed", seed]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "1,2", "--ids"], "is no folder"),
        (["{folder}", "1,x", "--ids"], "must be token ids"),
        (["{folder}", "text"], "has no tokenizer"),
        (["{folder}", "999", "--ids"], "token 999"),
        (["{folder}", "1", "2", "--ids"], "put the prompt in quotes"),
        (["{folder}", "1", "--ids", "--max-tokens", "0"], "max_tokens=0"),
        (["{folder}", "1", "--ids", "--window", "9"], "max_window=9"),
        (["{folder}", "1,2", "--ids", "--max-tokens", "64", "--max-model-len", "64"], "must be at most 64 together"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_is_wrong_is_said_in_one_line(folder, args, message, capsys):
    assert main(["run", *(a.format(folder=folder) for a in args)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_fire_is_stored_and_ends_with_3(folder, capsys, monkeypatch):
    launch = Runner.launch_window

    def with_a_bad_state(self, rows, seats, drafts, **options):
        if rows.position[0] == 6:
            with torch.inference_mode():
                self.state.slots["state"][0, :, 0, 0, 0, 0] = float("nan")
        return launch(self, rows, seats, drafts, **options)

    monkeypatch.setattr(Runner, "launch_window", with_a_bad_state)
    args = ["run", folder, "5,6,7", "--ids", "--max-tokens", "9", "--max-model-len", "64", "--window", "1"]
    assert main([*args, "--ignore-eos"]) == 3
    out, err = capsys.readouterr()
    assert len(out.split()) == 4
    assert "layer 0 recurrent_state" in err
    assert "ended by burned" in err
    assert main(["fires", "list"]) == 0
    assert "recurrent_state" in capsys.readouterr().out
