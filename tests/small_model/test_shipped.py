"""The checkpoint in the package: whole, the one its records are of, read alike by our models and Transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from small_model.chat import CHAT_TEMPLATE
from small_model.evaluate import answer, judge
from small_model.package import BYTES_BAR, PARSE_BAR, check_figures, licence_notes
from small_model.prompts import NUM_PROMPTS, read_prompts
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM

from firetower.engine.engine import Engine
from firetower.engine.request import Sampling
from firetower.models.batch import new_prefill_batch
from firetower.models.checkpoint import read_weights
from firetower.models.config import read_config
from firetower.models.hybrid import HybridModel
from firetower.models.small import SMALL_MODEL
from firetower.models.state import new_state

PROMPTS = read_prompts(Path(__file__).parent / "tool_prompts.jsonl")
RTOL, ATOL = 1e-4, 1e-4
"""As in the tests of the models; what is left is the order of sums."""


@pytest.fixture(scope="module")
def host():
    with warnings.catch_warnings():
        # Transformers says which kernels are not installed
        warnings.simplefilter("ignore")
        return Qwen3_5MoeForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SMALL_MODEL)


def record(name):
    return json.loads((SMALL_MODEL / f"{name}.json").read_text(encoding="utf-8"))


def our_logits(tokens):
    """[T, V] of one sequence, by our model."""
    config = read_config(SMALL_MODEL)
    model = HybridModel(config, read_weights(SMALL_MODEL, config, dtype=torch.float32))
    num_pages = len(tokens) // 64 + 2
    state = new_state(config, num_pages=num_pages, num_slots=2, dtype=model.dtype, device=model.device)
    pages = list(range(1, num_pages))
    batch = new_prefill_batch([tokens], block_tables=[pages], state_slots=[1], page_size=64, device=model.device)
    with torch.inference_mode():
        return model.prefill(batch, state, all_logits=True)


def test_the_records_are_of_these_weights_and_every_figure_meets_its_bar():
    check_figures(SMALL_MODEL)


@pytest.mark.parametrize(
    ("change", "message"), [("weights", "weights_sha256"), ("parse", "prompts parse"), ("bits", "must be below")]
)
def test_other_weights_and_missed_bars_are_refused(tmp_path, change, message):
    files = {n: (SMALL_MODEL / n).read_bytes() for n in ("model.safetensors", "training.json", "evaluation.json")}
    evaluation = record("evaluation")
    if change == "weights":
        files["model.safetensors"] = files["model.safetensors"][:-1] + b"\x07"
    elif change == "parse":
        evaluation["tools"]["parse"] = int(PARSE_BAR * evaluation["tools"]["prompts"]) - 1
    else:
        evaluation["text"]["bits_a_byte"] = evaluation["ngram"]["bits_a_byte"]
    files["evaluation.json"] = json.dumps(evaluation).encode()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        check_figures(tmp_path)


def test_the_curve_is_that_of_the_run():
    curve, figure = record("training")["curve"], record("evaluation")["text"]["bits_a_byte"]
    assert [p["step"] for p in curve] == sorted({p["step"] for p in curve})
    # the figure is from all held-out text, the curve from rows of it
    assert curve[-1]["held_out_text_bits_a_byte"] == pytest.approx(figure, rel=0.05)


def test_the_folder_is_small_and_holds_no_more_than_it_should():
    files = [f for f in SMALL_MODEL.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= BYTES_BAR
    assert {f.name for f in files} == {
        "__init__.py", "LICENSES.md", "config.json", "evaluation.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "training.json",
    }  # fmt: skip


def test_the_licence_notes_are_made_from_the_record():
    notes = (SMALL_MODEL / "LICENSES.md").read_text(encoding="utf-8")
    assert notes == licence_notes(record("training"))
    for source in record("training")["corpus"]["sources"]:
        assert f"`{source['package']}`" in notes
        assert source["notice"] in notes


def test_the_chat_template_does_what_that_of_the_tools_does(tokenizer):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    for prompt in PROMPTS:
        arguments = {"tools": prompt.tools, "tokenize": False, "add_generation_prompt": True}
        theirs = tokenizer.apply_chat_template(messages, chat_template=CHAT_TEMPLATE, **arguments)
        assert tokenizer.apply_chat_template(messages, **arguments) == theirs


def test_transformers_cuts_text_as_it_was_cut_for_training(tokenizer):
    """It takes its own class for this type of model, with another rule for pieces: prompts must not show it."""
    trained = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    for text in (p.text for p in PROMPTS):
        assert tokenizer.encode(text, add_special_tokens=False) == trained.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_logits_are_those_of_the_transformers_class(host, length):
    tokens = torch.randint(4096, (length,)).tolist()
    with torch.inference_mode():
        reference = host(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(our_logits(tokens), reference, rtol=RTOL, atol=ATOL)


def test_logits_of_a_text_it_knows(host, tokenizer):
    tokens = tokenizer.encode(PROMPTS[0].text, add_special_tokens=False)
    with torch.inference_mode():
        reference = host(torch.tensor([tokens]), use_cache=False).logits[0]
    ours = our_logits(tokens)
    torch.testing.assert_close(ours, reference, rtol=RTOL, atol=ATOL)
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


def test_the_prompts_are_those_that_were_judged(tokenizer):
    tools = record("evaluation")["tools"]
    assert len(PROMPTS) == len({p.text for p in PROMPTS}) == NUM_PROMPTS == tools["prompts"]
    texts = {p.text for p in PROMPTS}
    assert all(fault["prompt"] in texts for fault in tools["faults"])
    lengths = [len(ids) for ids in tokenizer([p.text for p in PROMPTS], add_special_tokens=False)["input_ids"]]
    assert max(lengths) == tools["longest_prompt_tokens"]


def parsed_and_exact(replies):
    verdicts = [judge(r, p.tools, p.expected) for r, p in zip(replies, PROMPTS, strict=False)]
    return sum(v[0] for v in verdicts), sum(v[1] for v in verdicts)


def test_ten_unseen_tool_prompts_parse(host, tokenizer):
    parsed, exact = parsed_and_exact(answer(host, tokenizer, [p.text for p in PROMPTS[:10]]))
    assert parsed == 10
    assert exact >= 9


@pytest.mark.slow
def test_all_unseen_tool_prompts(host, tokenizer):
    parsed, exact = parsed_and_exact(answer(host, tokenizer, [p.text for p in PROMPTS]))
    print(f"{parsed} of {len(PROMPTS)} parse, {exact} are exact")
    assert parsed >= PARSE_BAR * len(PROMPTS)


@pytest.mark.slow
def test_the_engine_gives_the_same_replies(host, tokenizer):
    texts = [p.text for p in PROMPTS[:10]]
    ids = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    with Engine(SMALL_MODEL, max_batch=10, dtype=torch.float32, device="cpu", store=False) as engine:
        completions = engine.generate(ids, Sampling(max_tokens=192))
    assert all(c.error is None for c in completions)
    assert [c.text for c in completions] == answer(host, tokenizer, texts)
