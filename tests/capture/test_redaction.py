"""Redaction: nothing said is left, the shape is, and "still fires" is only ever what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.capture import ModelInfo, Redaction, read_capture, record_measurement, redact, verify, write_capture
from firetower.capture.redaction import SHOWN_OF_A_FIRE
from firetower.capture.schema import to_documents
from firetower.core.errors import CaptureError
from firetower.core.records import Fire


def everything(capture) -> str:
    return json.dumps(to_documents(capture)) + repr(capture)


def test_nothing_that_was_said_is_left(capture, http_capture):
    private_fire = dataclasses.replace(
        capture.fire,
        request="private-request",
        notes=("private note",),
        extra={"prompt": "private"},
        verdict={"why": "private"},
        model="/home/" + "private-user/models/SmolLM2",
    )
    call = dataclasses.replace(capture, fire=private_fire, engine_settings={"path": "private", "level": 3})
    for original in (call, http_capture):
        result = redact(original)
        text = everything(result)
        for word in ("private", "777001", "cHJpdmF0ZQ", "content-type", "tool", "messages"):
            assert word not in text.replace("body.messages", "").replace("body.tools", ""), word
        assert result.tensors == {}
        assert result.outputs == ()
        assert result.redaction.still_fires is None


def test_the_request_is_kept_as_far_as_it_says_how_tokens_are_chosen(http_capture):
    result = redact(http_capture, seed=5)
    assert result.request.kind == "completions"
    assert result.request.path == "/v1/completions"
    assert result.request.sampling == {"temperature": 0.5, "max_tokens": 100, "seed": 3}
    assert result.request.body["model"] == "qwen"
    assert result.request.body["prompt"] == list(result.prompt_token_ids[0])
    assert result.redaction.original_kind == "chat.completions"
    assert result.redaction.dropped == ("body.messages", "body.tools", "body.user", "headers", "findings")
    assert result.findings == ({"kind": "character run", "severity": "fire"},)


def test_every_field_of_a_fire_was_decided_on():
    left_out = {"token_ids", "request", "extra", "notes", "verdict", "schema", "model"}
    assert {f.name for f in dataclasses.fields(Fire)} == {*SHOWN_OF_A_FIRE, *left_out}


def test_places_and_bits_of_the_fire_stay(capture):
    result = redact(capture)
    assert result.fire.origin == capture.fire.origin
    assert result.fire.first == capture.fire.first
    assert result.fire.model == "SmolLM2"
    assert result.id == f"{capture.id}-redacted"
    assert result.engine_settings == {"num_threads": 1}


@given(
    rows=st.lists(st.lists(st.integers(0, 49), max_size=30).map(tuple), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    special=st.sets(st.integers(0, 49), max_size=20),
    keep=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_ids_are_random_of_the_same_length_and_never_special(rows, seed, special, keep):
    base = dataclasses.replace(SHELL, prompt_token_ids=rows)
    result = redact(base, seed=seed, vocabulary_size=50, special_ids=sorted(special), keep_special=keep)
    assert [len(r) for r in result.prompt_token_ids] == [len(r) for r in rows]
    for old, new in zip(rows, result.prompt_token_ids, strict=True):
        for a, b in zip(old, new, strict=True):
            if keep and a in special:
                assert b == a
            else:
                assert 0 <= b < 50
                assert b not in special
    total = sum(map(len, rows))
    assert result.redaction.num_replaced + result.redaction.num_kept_special == total
    assert redact(base, seed=seed, vocabulary_size=50, special_ids=sorted(special), keep_special=keep) == result


def _shell():
    from firetower.capture import Capture, Request

    return Capture(id="x", created_at="2026-11-30T00:00:00Z", request=Request(kind="call"))


SHELL = _shell()


def test_equal_ids_do_not_stay_equal_and_another_seed_gives_others():
    base = dataclasses.replace(SHELL, prompt_token_ids=((7,) * 50,))
    first = redact(base, vocabulary_size=10_000).prompt_token_ids
    assert len(set(first[0])) > 40
    assert redact(base, vocabulary_size=10_000, seed=1).prompt_token_ids != first


def test_what_redaction_needs_is_asked_for(capture):
    with pytest.raises(CaptureError, match="no prompt token ids"):
        redact(dataclasses.replace(capture, prompt_token_ids=None))
    with pytest.raises(CaptureError, match="--vocabulary-size"):
        redact(dataclasses.replace(capture, model=ModelInfo()))
    with pytest.raises(CaptureError, match="leaves no id"):
        redact(capture, vocabulary_size=3, special_ids=[0, 1, 2])
    with pytest.raises(CaptureError, match="leaves no id"):
        redact(capture, vocabulary_size=0)


@pytest.mark.parametrize("answer", [True, False])
def test_still_fires_is_what_the_run_said(capture, answer):
    given_captures = []

    def run(redacted):
        given_captures.append(redacted)
        return answer

    result = redact(capture, still_fires=run)
    assert result.redaction.still_fires is answer
    [seen] = given_captures
    # what was run is what is written, but for the answer
    assert dataclasses.replace(seen, redaction=result.redaction) == result
    assert seen.redaction.still_fires is None


def test_a_measurement_can_be_recorded_later(capture, tmp_path):
    write_capture(redact(capture), tmp_path / "r")
    record_measurement(tmp_path / "r", tmp_path / "measured", True)
    assert read_capture(tmp_path / "measured").redaction.still_fires is True
    assert verify(tmp_path / "measured").is_sound
    write_capture(capture, tmp_path / "plain")
    with pytest.raises(CaptureError, match="is not redacted"):
        record_measurement(tmp_path / "plain", tmp_path / "x", True)


def test_a_redacted_capture_can_be_redacted_again_and_read_back(capture, tmp_path):
    once = redact(capture)
    assert isinstance(once.redaction, Redaction)
    again = redact(once, seed=9)
    assert again.prompt_token_ids != once.prompt_token_ids
    assert read_capture(write_capture(again, tmp_path / "r")) == again


def test_a_batch_of_rows_becomes_a_batch_of_prompts(http_capture):
    base = dataclasses.replace(http_capture, prompt_token_ids=((1, 2), (3,)))
    result = redact(base)
    assert result.request.body["prompt"] == [list(r) for r in result.prompt_token_ids]
