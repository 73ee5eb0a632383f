"""OpenAI-compatible answers: whole bodies, chunks, event streams, and whatever else a server may send."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.detect import (
    DetectConfig,
    Detector,
    FindingKind,
    Severity,
    SseReader,
    StreamEvent,
    detect_response,
    detect_sse,
    events_of,
)

K, S = FindingKind, Severity


def chat(content, finish="stop", tokens=5, **choice):
    message = {"role": "assistant", "content": content} | choice.pop("message", {})
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}],
        "usage": {"prompt_tokens": 3, "completion_tokens": tokens},
    }


def kinds(findings):
    return {f.kind: f.severity for f in findings}


def test_a_healthy_answer_has_no_findings():
    logprobs = {"content": [{"token": "Hi", "logprob": -0.2, "top_logprobs": [{"token": "Hi", "logprob": -0.2}]}]}
    assert detect_response(chat("Hi there", logprobs=logprobs)) == []


def test_the_nan_answers_of_known_servers():
    # vLLM by default: 200, all ids 0, "length"; with logprobs: 400
    assert kinds(detect_response(chat("!" * 500, "length", 500)))[K.CHARACTER_RUN] is S.FIRE
    ids = chat("!" * 20, "length", 20, token_ids=[0] * 20)
    assert kinds(detect_response(ids)) == {K.TOKEN_ZERO: S.WARN}
    error = {"error": {"message": "Out of range float values are not JSON compliant: nan", "code": 400}}
    assert kinds(detect_response(error)) == {K.ERROR_TEXT: S.FIRE}
    # llama.cpp with a NaN block scale: empty text, "stop"; here with the tokens counted
    assert kinds(detect_response(chat("", "stop", 64))) == {K.EMPTY: S.FIRE}
    assert kinds(detect_response(chat(None, "length", None))) == {K.EMPTY: S.WARN}
    # FastAPI's own error form
    assert kinds(detect_response({"detail": "logits contain NaN"})) == {K.ERROR_TEXT: S.FIRE}
    assert kinds(detect_response({"object": "error", "message": "NaN in logits"})) == {K.ERROR_TEXT: S.FIRE}


def test_bare_nan_and_nan_strings_in_logprobs_are_read():
    body = json.dumps(chat("Hi", logprobs={"content": [{"token": "Hi", "logprob": math.nan}]}))
    assert "NaN" in body
    assert kinds(detect_response(body)) == {K.LOGPROB_NONFINITE: S.FIRE}
    assert kinds(detect_response(body.replace("NaN", '"NaN"').encode())) == {K.LOGPROB_NONFINITE: S.FIRE}
    assert kinds(detect_response(body.replace("NaN", "1" + "0" * 400))) == {K.LOGPROB_NONFINITE: S.FIRE}


def test_legacy_completions():
    def legacy(values, tops=None, tokens=None):
        logprobs = {"token_logprobs": values, "top_logprobs": tops, "tokens": tokens}
        return {"choices": [{"index": 0, "text": "some text", "logprobs": logprobs, "finish_reason": "stop"}]}

    assert detect_response(legacy([None, -0.5, -0.25], [None, {"a": -0.5}, {"b": -0.25}])) == []
    assert kinds(detect_response(legacy([-0.5, math.nan]))) == {K.LOGPROB_NONFINITE: S.FIRE}
    assert kinds(detect_response(legacy([-0.5], [{"a": -0.5, "b": math.nan}]))) == {K.LOGPROB_NONFINITE: S.FIRE}
    assert kinds(detect_response(legacy([-0.5] * 16, None, ["token_id:0"] * 16))) == {K.TOKEN_ZERO: S.WARN}
    # one token that is not an id: no ids at all, rather than wrong places
    assert detect_response(legacy([-0.5] * 17, None, ["x", *["token_id:0"] * 16])) == []


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"reasoning_content": "!" * 200}, "reasoning"),
        ({"reasoning": "!" * 200}, "reasoning"),
        ({"refusal": "!" * 200}, "refusal"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "!" * 200}}]}, "tool_calls[0].arguments"),
        ({"function_call": {"name": "f", "arguments": "!" * 200}}, "function_call.arguments"),
        ({"content": [{"type": "text", "text": "!" * 100}, {"type": "text", "text": "!" * 100}]}, "content"),
    ],
)
def test_every_text_of_a_message_is_judged(message, field):
    [finding] = detect_response(chat("fine" if "content" not in message else None, message=message))
    assert (finding.field, finding.count) == (field, 200)


def test_reasoning_under_both_names_counts_once():
    message = {"reasoning_content": "!" * 100, "reasoning": "!" * 100}
    assert detect_response(chat("fine", message=message)) == []


def test_every_choice_is_judged():
    body = {"choices": [chat("fine")["choices"][0], {"index": 1, "message": {"content": "!" * 200}}]}
    [finding] = detect_response(body)
    assert finding.choice == 1


def sse(*chunks, done=True):
    lines = [f"data: {json.dumps(c)}\n" for c in chunks]
    return [": keep-alive\n", *lines, *(["data: [DONE]\n"] if done else [])]


def delta(text, finish=None, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]}


def test_a_stream_finds_what_the_whole_body_finds():
    text = "Fine so far. " + "!" * 300
    stream = sse(*(delta(c) for c in text), delta("", "length"))
    whole = detect_response(chat(text, "length"))
    assert detect_sse(stream) == whole
    assert detect_sse([line.encode() for line in stream]) == whole
    assert kinds(whole) == {K.CHARACTER_RUN: S.FIRE}


def test_usage_in_the_last_chunk_tells_of_an_empty_answer():
    usage = {"choices": [], "usage": {"completion_tokens": 32}}
    assert kinds(detect_sse(sse(delta(None, "length"), usage))) == {K.EMPTY: S.FIRE}


def test_an_error_event_inside_a_stream():
    error = {"error": {"message": "probability tensor contains either `inf`, `nan` or element < 0"}}
    assert kinds(detect_sse(sse(delta("He"), error, done=False))) == {K.ERROR_TEXT: S.FIRE}


def test_a_stream_that_breaks_off_is_said():
    assert kinds(detect_sse(sse(delta("He"), done=False))) == {K.BROKEN_STREAM: S.ADVISORY}
    assert kinds(detect_sse([])) == {K.BROKEN_STREAM: S.ADVISORY}
    [finding] = detect_sse([*sse(delta("He", "stop")), "data: {nonsense\n"])
    assert "1 lines" in finding.reason


def test_the_reader_gives_events_while_they_come():
    reader = SseReader()
    [event] = reader.feed('data: {"choices":[{"index":2,"delta":{"content":"a"},"token_ids":[7]}]}')
    assert (event.choice, event.text, event.token_ids) == (2, "a", (7,))
    assert not reader.is_done
    assert reader.feed("event: ping") == []
    reader.feed(b"data: [DONE]\r\n")
    assert reader.is_done


def test_a_body_that_is_no_json_is_said_or_read_as_an_error():
    assert kinds(detect_response("<html>502</html>")) == {K.BROKEN_STREAM: S.ADVISORY}
    assert kinds(detect_response(b"ValueError: Out of range float values are not JSON compliant")) == {
        K.ERROR_TEXT: S.FIRE
    }
    assert kinds(detect_response({})) == {K.BROKEN_STREAM: S.ADVISORY}
    assert kinds(detect_response("[" * 100_000)) == {K.BROKEN_STREAM: S.ADVISORY}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "index",
                    "message",
                    "delta",
                    "content",
                    "text",
                    "logprobs",
                    "token_logprobs",
                    "top_logprobs",
                    "logprob",
                    "tokens",
                    "token_ids",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "usage",
                    "completion_tokens",
                    "error",
                    "finish_reason",
                    "detail",
                    "audio",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(_JSON)
@settings(max_examples=150, deadline=None)
def test_no_body_breaks_it(body):
    detect_response(body)
    detect_response({"choices": [body, {"message": body, "delta": body, "logprobs": body, "usage": body}]})
    detector = Detector(DetectConfig(vocabulary_size=5))
    for event in events_of({"choices": [{"logprobs": {"content": [body, {"logprob": body}]}}]}):
        assert isinstance(event, StreamEvent)
        detector.feed(event)
    detect_sse([f"data: {json.dumps(body)}"])
