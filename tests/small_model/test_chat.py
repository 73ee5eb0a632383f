from __future__ import annotations

import random

import pytest
from small_model.chat import check_call, parse_call, segments
from small_model.mixture import read_mixture
from transformers import AutoTokenizer

CALL = "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "high": {"type": "number"},
                           "dry": {"type": "boolean"}},
            "required": ["city"],
        },
    },
}  # fmt: skip


def call(name="get_weather", **arguments):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return CALL.format(name=name, parameters=parameters)


@pytest.mark.parametrize("kind", ["call", "answer", "missing", "none", "define"])
def test_training_text_is_what_the_template_gives(work, kind):
    tokenizer = AutoTokenizer.from_pretrained(work)
    mixture, rng = read_mixture(work), random.Random(3)
    drawn = iter(lambda: mixture.draw(rng), None)
    for conversation in (c for _, c in zip(range(30), (c for c in drawn if c.kind == kind), strict=False)):
        pieces = list(segments(conversation.messages, [t.signature() for t in conversation.tools]))
        written = tokenizer.apply_chat_template(
            list(conversation.messages), tools=[t.schema() for t in conversation.tools] or None, tokenize=False
        )
        assert "".join(text for text, _ in pieces) == written
        # the generation prompt is what stands before the first piece that is learned
        first = next(i for i, (_, learned) in enumerate(pieces) if learned)
        asked = next(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        prompt = tokenizer.apply_chat_template(
            list(conversation.messages[:asked]), tools=[t.schema() for t in conversation.tools] or None,
            tokenize=False, add_generation_prompt=True, enable_thinking=conversation.thinking,
        )  # fmt: skip
        assert prompt == "".join(text for text, _ in pieces[:first])


def test_a_thought_of_an_earlier_turn_is_left_out(work):
    tokenizer = AutoTokenizer.from_pretrained(work)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nnew\n</think>\n\nd"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "old" not in text
    assert text.endswith("<think>\nnew\n</think>\n\nd<|im_end|>\n")


def test_values_that_are_no_text_are_written_as_json(work):
    tokenizer = AutoTokenizer.from_pretrained(work)
    function = {"name": "f", "arguments": {"n": 3, "on": True, "city": "Oslo"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert parse_call(text.partition("assistant\n")[2].partition("<|im_end|>")[0]) == (
        "f",
        {"n": "3", "on": "true", "city": "Oslo"},
    )


def test_a_call_behind_a_thought_parses():
    reply = "I call <tool_call> now.\n</think>\n\n" + call(city="Rio de\nJaneiro", days="3")
    assert parse_call(reply) == ("get_weather", {"city": "Rio de\nJaneiro", "days": "3"})


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "hello",
        call(city="a") + " more",
        call(city="a") + "\n" + call(city="b"),
        call(city="a").replace("</function>\n", ""),
        call(city="a").replace("\n</parameter>", ""),
        call(city="a").replace("<function=get_weather>", "<function=>"),
        call(city="a")[:-3],
        CALL.format(name="f", parameters="<parameter=a>\n1\n</parameter>\n" * 2),
    ],
)
def test_anything_else_does_not(reply):
    with pytest.raises(ValueError, match=r"one tool call|given twice"):
        parse_call(reply)


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("set_weather", {"city": "a"}, "not on the list"),
        ("get_weather", {"days": "3"}, "city: required"),
        ("get_weather", {"city": "a", "town": "b"}, "town: get_weather has none"),
        ("get_weather", {"city": "a", "days": "3.5"}, "days: '3.5' is no integer"),
        ("get_weather", {"city": "a", "days": "three"}, "no integer"),
        ("get_weather", {"city": "a", "high": "1."}, "no number"),
        ("get_weather", {"city": "a", "dry": "True"}, "no boolean"),
        ("get_weather", {"city": ""}, "no string"),
    ],
)
def test_a_call_that_breaks_the_list_is_named(name, arguments, fault):
    with pytest.raises(ValueError, match=fault):
        check_call(name, arguments, [TOOL])


@pytest.mark.parametrize("arguments", [{"city": "a"}, {"city": "a b", "days": "-3", "high": "2", "dry": "false"}])
def test_a_call_that_keeps_to_it_passes(arguments):
    check_call("get_weather", arguments, [TOOL])
