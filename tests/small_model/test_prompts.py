from __future__ import annotations

from small_model.mixture import read_mixture
from small_model.prompts import NUM_PROMPTS, draw_prompts, read_prompts, write_prompts
from transformers import AutoTokenizer


def test_prompts_are_unseen_and_name_their_tools(work):
    prompts = draw_prompts(work, AutoTokenizer.from_pretrained(work))
    assert len(prompts) == NUM_PROMPTS
    seen = read_mixture(work).grammar
    for prompt in prompts:
        name, arguments = prompt.expected
        assert name not in seen.names
        [function] = [t["function"] for t in prompt.tools if t["function"]["name"] == name]
        assert set(function["parameters"]["required"]) <= set(arguments) <= set(function["parameters"]["properties"])
    assert sum(p.text.endswith("<think>\n") for p in prompts) == NUM_PROMPTS / 2


def test_tools_are_read_back_as_they_were_listed(work):
    tokenizer = AutoTokenizer.from_pretrained(work)
    for prompt in draw_prompts(work, tokenizer)[:20]:
        user = prompt.text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        again = tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tools=prompt.tools, tokenize=False, add_generation_prompt=True
        )
        listed = again.partition("<tools>")[2].partition("</tools>")[0]
        assert listed in prompt.text


def test_prompts_come_back_from_their_file(work, tmp_path):
    prompts = draw_prompts(work, AutoTokenizer.from_pretrained(work))
    write_prompts(prompts, tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.jsonl") == prompts
