from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_model import evaluate, prompts, train
from small_model.checkpoint import weights_sha256
from small_model.net import CONFIG
from small_model.tokens import UNSUPERVISED
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5MoeForCausalLM


def arguments(work, out, monkeypatch, **more):
    options = {
        "data": work,
        "out": out,
        "seconds": 25,
        "rows": 2,
        "length": 128,
        "chat-shards": 1,
        "workers": 1,
        **more,
    }
    monkeypatch.setattr(sys, "argv", ["train", *(x for k, v in options.items() for x in (f"--{k}", str(v)))])


@pytest.mark.parametrize(
    ("progress", "rate"), [(0.0, 0.0), (0.015, 1.5e-3), (0.03, 3e-3), (0.515, 1.515e-3), (1.0, 3e-5), (1.2, 3e-5)]
)
def test_the_rate_follows_the_clock(progress, rate):
    assert train.rate_at(progress) == pytest.approx(rate)


def test_batches_hold_both_kinds_in_a_fixed_order(work, tmp_path, monkeypatch):
    arguments(work, tmp_path, monkeypatch, rows=5)
    args = train.parse()
    text = np.load(work / "text_train.npy")
    shards = [np.full((4, 129), UNSUPERVISED + i, dtype=np.uint16) for i in (1, 2)]
    batches = train.Batches(text, iter(shards), args, "cpu")
    drawn = [next(batches) for _ in range(7)]
    assert all(b.shape == (5, 129) for b in drawn)
    assert all((b[:3] < UNSUPERVISED).all() for b in drawn)
    # two shards of four rows, two rows a batch, then the same again
    assert [int(b[3:].max()) - UNSUPERVISED for b in drawn] == [1, 1, 2, 2, 1, 1, 2]
    again = train.Batches(text, iter(shards), args, "cpu")
    assert torch.equal(drawn[0], next(again))


def test_prompts_are_not_learned():
    hidden, weight = torch.randn(2, 4, 8), torch.randn(16, 8)
    targets, learned = torch.randint(16, (2, 4)), torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 0]])
    nats, _ = train.head_loss(hidden, weight, targets, learned)
    expected = -(hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(nats, (expected * learned).sum(-1))


@pytest.mark.slow
def test_from_a_work_folder_to_figures(work, tmp_path, monkeypatch, capsys):
    arguments(work, tmp_path, monkeypatch, every=5)
    train.main()
    record = json.loads((tmp_path / "training.json").read_text())
    first, last = record["curve"][0], record["curve"][-1]
    assert last["held_out_chat_nats"] < 8.3 > first["train_nats"]
    assert last["held_out_chat_nats"] < first["held_out_chat_nats"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - no mapping

    model, info = Qwen3_5MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), Qwen3_5MoeForCausalLM)
    assert model.config.layer_types == CONFIG["layer_types"]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id in model.config.eos_token_id

    monkeypatch.setattr(prompts, "NUM_PROMPTS", 3)
    monkeypatch.setattr(evaluate, "MAX_NEW_TOKENS", 4)
    names = {"data": work, "model": tmp_path, "out": tmp_path / "evaluation.json"}
    monkeypatch.setattr(sys, "argv", ["evaluate", *(x for k, v in names.items() for x in (f"--{k}", str(v)))])
    evaluate.main()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["tools"]["prompts"] == 3
    assert result["tools"]["parse"] == 0
    # twenty seconds teach little, but more than nothing: the uniform model needs 12 bits a token
    tokens, num_bytes = np.load(work / "text_held_out.npy"), json.loads((work / "corpus.json").read_text())
    uniform = 12 * (tokens != tokens[-1]).sum() / num_bytes["held_out_bytes"]
    assert 0 < result["ngram"]["bits_a_byte"] < uniform
    assert 0 < result["text"]["bits_a_byte"] < uniform * 1.05
    assert result["weights_sha256"] == record["weights_sha256"] == weights_sha256(tmp_path)


def test_a_reply_is_judged():
    tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]
    good = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    assert evaluate.judge(good, tools, ("f", {"n": "3"})) == (True, True, "")
    parsed, exact, fault = evaluate.judge(good, tools, ("f", {"n": "4"}))
    assert (parsed, exact) == (True, False)
    assert "asked for" in fault
    assert evaluate.judge(good.replace("3", "x"), tools, ("f", {"n": "3"}))[0] is False


def test_figures_of_other_weights_are_not_added_to(tmp_path):
    file = tmp_path / "evaluation.json"
    assert evaluate.begin_result(file, "a") == {"weights_sha256": "a"}
    file.write_text(json.dumps({"weights_sha256": "a", "text": {}}))
    assert evaluate.begin_result(file, "a") == {"weights_sha256": "a", "text": {}}
    with pytest.raises(SystemExit, match="remove it"):
        evaluate.begin_result(file, "b")


def test_ends_of_documents_are_no_text():
    nats, tokens = np.array([np.log(2), 5.0, np.log(4)]), np.array([1, 0, 2])
    assert evaluate.bits_a_byte(nats, tokens, 0, 6) == pytest.approx(0.5)
