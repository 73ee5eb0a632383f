from __future__ import annotations

import random
import re

import pytest
from small_model.chat import check_call, parse_call, segments
from small_model.grammar import Grammar, is_held_out


@pytest.fixture(params=[False, True], ids=["training", "held-out"])
def grammar(request, words):
    return Grammar(words, held_out=request.param)


def test_the_two_sides_share_no_function_and_no_word(words):
    training, held_out = (Grammar(words, held_out=side) for side in (False, True))
    assert not set(training.names) & set(held_out.names)
    assert not set(training.words) & set(held_out.words)
    assert 0.15 < len(held_out.names) / (len(training.names) + len(held_out.names)) < 0.25


def test_every_listed_function_is_of_its_side(grammar):
    rng = random.Random(1)
    names = {t.name for _ in range(300) for t in grammar.conversation(rng).tools}
    assert {is_held_out(name, 5) for name in names} == {grammar.held_out}
    assert len(names) > 300


def test_the_reply_of_a_call_is_the_expected_one_and_keeps_to_the_list(grammar):
    rng = random.Random(2)
    for _ in range(300):
        drawn = grammar.conversation(rng, "call")
        *_, (reply, learned), _ = segments(drawn.messages, [t.signature() for t in drawn.tools])
        assert learned
        found = parse_call(reply.removesuffix("<|im_end|>"))
        assert found == drawn.expected
        check_call(*found, [t.schema() for t in drawn.tools])


def test_every_value_stands_in_the_request(grammar):
    rng = random.Random(3)
    for _ in range(300):
        drawn = grammar.conversation(rng, "call")
        request = next(m["content"] for m in drawn.messages if m["role"] == "user")
        assert all(value in request for value in drawn.expected[1].values()), request


def test_a_missing_parameter_is_asked_for(grammar):
    drawn = grammar.conversation(random.Random(4), "missing")
    asked = re.fullmatch(r"Which (.+) should I use\?", drawn.messages[-1]["content"])
    assert asked
    required = {p.name.replace("_", " ") for t in drawn.tools for p in t.parameters if p.required}
    assert asked[1] in required
    assert drawn.expected is None


def test_where_no_tool_fits_the_wanted_one_is_not_listed(grammar):
    rng = random.Random(5)
    for _ in range(50):
        drawn = grammar.conversation(rng, "none")
        verb, noun = re.fullmatch(r"I have no tool to (\w+) the (\w+)\.", drawn.messages[-1]["content"]).groups()
        assert f"{verb}_{noun}" not in {t.name for t in drawn.tools}
        assert drawn.tools


def test_the_same_seed_draws_the_same(grammar):
    assert grammar.conversation(random.Random(6)) == grammar.conversation(random.Random(6))
    assert grammar.conversation(random.Random(6)) != grammar.conversation(random.Random(7))
