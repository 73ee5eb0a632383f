"""What is sent: plan, arms, edits, seeds, and the refusal of secrets on a command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.capture import freeze_request
from firetower.core.errors import ReplayError
from firetower.lab.replay.arms import REMOVED, Arm, parse_arms, parse_fields, set_fields
from firetower.lab.replay.plan import fresh_seed, make_plan
from firetower.lab.replay.records import SeedMode
from firetower.lab.replay.request import Edits, RequestMaker, without_images

CHAT = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {"role": "user", "content": [{"type": "input_image", "image": "y"}]},
        {"role": "assistant", "content": "plain"},
    ],
}


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.integers(1, 30), st.integers())
def test_a_plan_is_balanced_in_every_block_and_the_same_again(arms, tries, seed):
    plan = make_plan(arms, tries, seed)
    assert [p.number for p in plan] == list(range(len(arms) * tries))
    for block in range(tries):
        assert sorted(p.arm for p in plan if p.round == block) == sorted(arms)
    assert plan == make_plan(arms, tries, seed)


def test_plans_of_other_seeds_have_another_order():
    orders = {tuple(p.arm for p in make_plan(["a", "b", "c"], 20, seed)) for seed in range(10)}
    assert len(orders) == 10


def test_the_order_within_blocks_is_even():
    firsts = [p.arm for p in make_plan(["a", "b"], 4000, 1)][::2]
    assert 1850 < firsts.count("a") < 2150  # five standard errors


def test_fresh_seeds_differ_by_try_and_attempt_and_fit_31_bits():
    seeds = {fresh_seed(0, n, a) for n in range(300) for a in range(1, 4)}
    assert len(seeds) == 900
    assert all(0 <= s < 1 << 31 for s in seeds)


def test_settings_of_one_name_are_one_arm_and_a_lone_arm_is_held_against_the_capture():
    arms = parse_arms(["cold:temperature=0", 'cold:stop=["a"]', "cold:url=http://h:1", "cold:env.X=1", "cold:seed="])
    assert arms == (
        Arm(name="as captured"),
        Arm(
            name="cold",
            fields={"temperature": 0, "stop": ["a"], "seed": REMOVED},
            url="http://h:1",
            variables={"X": "1"},
        ),
    )
    assert [a.name for a in parse_arms(["b:", "a:x=1"])] == ["b", "a"]
    assert [a.name for a in parse_arms([])] == ["as captured"]


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["temperature=0"], "must be NAME:SETTING=VALUE"),
        (["a:temperature"], "must be SETTING=VALUE"),
        (["a:x=1", "a:x=2"], "twice"),
        (["a:x=1", "b:x=1"], "arms must differ"),
        (["a:api_key=abc"], "FIRETOWER_API_KEY"),
        (["a:env.HF_TOKEN=abc"], "looks like a secret"),
        (["a:extra.authorization=abc"], "looks like a secret"),
        (["a:temperature=NaN"], "no JSON number"),
        (["a:env.1X=abc"], "names no environment variable"),
    ],
)
def test_arms_that_cannot_be_are_refused(texts, rule):
    with pytest.raises(ReplayError, match=rule) as error:
        parse_arms(texts)
    assert "abc" not in str(error.value)


def test_fields_go_into_objects_without_touching_the_original():
    body = {"a": {"b": 1}, "c": 2}
    assert set_fields(body, {"a.x": 3, "d.e": 4, "c": REMOVED}) == {"a": {"b": 1, "x": 3}, "d": {"e": 4}}
    assert body == {"a": {"b": 1}, "c": 2}
    with pytest.raises(ReplayError, match="no object"):
        set_fields(body, {"c.x": 1})


def test_images_are_taken_out_and_counted():
    body, count = without_images(CHAT)
    assert count == 2
    assert [m["content"] for m in body["messages"]] == [[{"type": "text", "text": "see"}], "", "plain"]
    assert len(CHAT["messages"][0]["content"]) == 2


def test_without_edits_the_request_is_the_captured_one():
    body = CHAT | {"temperature": 0.7, "tools": [{"type": "function"}], "x_extra": {"y": [1]}, "seed": 7}
    request = RequestMaker(freeze_request(body), Edits()).request_for(Arm(name="a"), 5, 1)
    assert dict(request.body) == body
    assert list(request.body) == list(body)
    assert request.seed == 7


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, {"max_tokens": 9}),
        ({"max_completion_tokens": 5}, {"max_completion_tokens": 9}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 9, "max_completion_tokens": 9}),
    ],
)
def test_the_limit_goes_where_the_request_has_it(limits, expected):
    maker = RequestMaker(freeze_request(CHAT | limits), Edits(max_tokens=9, model="other"))
    body = maker.request_for(Arm(name="a"), 0, 1).body
    assert {k: v for k, v in body.items() if "max" in k} == expected
    assert body["model"] == "other"


def test_an_arm_that_sets_the_seed_keeps_it():
    maker = RequestMaker(freeze_request(CHAT), Edits(), seed_mode=SeedMode.FRESH)
    assert maker.request_for(Arm(name="a", fields={"seed": 3}), 0, 1).body["seed"] == 3


def test_requests_that_cannot_be_judged_are_refused():
    with pytest.raises(ReplayError, match="cannot be judged"):
        RequestMaker(freeze_request({"input": "x"}, path="/v1/responses"), Edits())
    with pytest.raises(ReplayError, match="nothing to send"):
        RequestMaker(freeze_request({"model": "m"}), Edits())


def test_fields_of_every_request_come_before_those_of_an_arm():
    maker = RequestMaker(freeze_request(CHAT), Edits(fields=parse_fields(["a=1", "b=2"])))
    body = maker.request_for(Arm(name="x", fields={"b": 3}), 0, 1).body
    assert (body["a"], body["b"]) == (1, 3)
