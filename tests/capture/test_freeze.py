"""Freezing calls and requests; hashes of models; the device's name."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from firetower.capture import Environment, freeze_request, hash_files, hash_model
from firetower.capture.environment import _device
from firetower.core.errors import CaptureError

HERE = Environment(device="d")


def test_a_call_keeps_its_fire_and_everything_given(capture):
    assert capture.id == capture.fire.id
    assert capture.prompt_token_ids == ((1, 5, 9, 2),)
    assert capture.request.kind == "call"
    assert capture.request.sampling == {"max_new_tokens": 16, "do_sample": False, "temperature": 0.7}
    assert capture.seeds == {"torch": 7}
    assert capture.num_prompt_tokens == 4


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ([[1, 2], [3]], ((1, 2), (3,))),
        (np.array([1, 2]), ((1, 2),)),
        (np.array([[1], [2]]), ((1,), (2,))),
        ([], ((),)),
        (None, None),
    ],
    ids=["rows", "array", "matrix", "empty", "unknown"],
)
def test_prompt_ids_in_every_form(given, rows):
    frozen = freeze_request({}, prompt_token_ids=given, environment=HERE)
    assert frozen.prompt_token_ids == rows
    assert rows is None or all(type(i) is int for row in rows for i in row)


@pytest.mark.parametrize("bad", ["abc", [1.5], [[1], 2], [True], 7, [["a"]]], ids=str)
def test_prompt_ids_that_are_none_are_refused(bad):
    with pytest.raises(CaptureError, match="prompt_token_ids"):
        freeze_request({}, prompt_token_ids=bad, environment=HERE)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "chat.completions"),
        ("https://h/v1/completions/?x=1", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/generate", "other"),
    ],
)
def test_the_kind_comes_from_the_path(path, kind):
    assert freeze_request({}, path=path, environment=HERE).request.kind == kind


def test_a_prompt_given_as_ids_is_found_and_text_is_not_taken_for_ids():
    assert freeze_request({"prompt": [4, 5]}, environment=HERE).prompt_token_ids == ((4, 5),)
    assert freeze_request({"prompt": [[4], [5]]}, environment=HERE).prompt_token_ids == ((4,), (5,))
    for prompt in ("text", ["text"], [], [1, "a"], [True]):
        assert freeze_request({"prompt": prompt}, environment=HERE).prompt_token_ids is None


def test_parts_of_a_request_are_told_apart(http_capture):
    request = http_capture.request
    assert len(request.messages) == 2
    assert request.tools[0]["function"]["name"] == "private_tool"
    assert request.sampling == {"temperature": 0.5, "max_tokens": 100, "seed": 3}
    assert request.extra == {"user": "private-user"}
    assert http_capture.seeds == {"request": 3}
    assert request.headers == {"content-type": "application/json"}


def test_freezing_does_not_change_what_it_is_given():
    body = {"api_key": "x", "messages": [{"role": "user", "content": "c"}]}
    freeze_request(body, environment=HERE)
    assert body == {"api_key": "x", "messages": [{"role": "user", "content": "c"}]}


def test_captures_merge_by_origin_or_by_what_the_answer_showed(capture, http_capture):
    assert capture.merge_key == capture.fire.merge_key
    other = freeze_request({}, environment=HERE, findings=[{"kind": "empty output"}])
    assert other.merge_key != http_capture.merge_key
    assert (
        other.merge_key == freeze_request({"seed": 9}, environment=HERE, findings=[{"kind": "empty output"}]).merge_key
    )


def test_a_model_is_hashed_in_pieces_with_progress(tmp_path):
    (tmp_path / "b.safetensors").write_bytes(b"b" * (3 << 20))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not part of the model")
    seen = []
    hashes = hash_model(tmp_path, lambda name, done, total: seen.append((name, done, total)))
    assert [h.name for h in hashes] == ["b.safetensors", "config.json"]
    assert hashes[0].sha256 == hashlib.sha256(b"b" * (3 << 20)).hexdigest()
    assert hashes[0].num_bytes == 3 << 20
    assert [done for _, done, _ in seen] == [1 << 20, 2 << 20, 3 << 20, (3 << 20) + 2]
    assert {total for _, _, total in seen} == {(3 << 20) + 2}
    assert hash_model(tmp_path / "config.json") == hash_files([tmp_path / "config.json"])


def test_what_cannot_be_hashed_is_said(tmp_path):
    with pytest.raises(CaptureError, match="holds no weights"):
        hash_model(tmp_path)
    with pytest.raises(CaptureError, match="No such file"):
        hash_model(tmp_path / "none.gguf")


def test_the_device_is_read_without_torch(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert _device(tmp_path) == "Some CPU @ 3 GHz"
    for i in range(2):
        gpu = tmp_path / f"driver/nvidia/gpus/{i}"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    assert _device(tmp_path) == "2x NVIDIA H200"
