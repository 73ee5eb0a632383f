"""A fire, and captures of it, as the tests of this room need them."""

from __future__ import annotations

from typing import Any

import pytest

from firetower.capture import Capture, Environment, ModelInfo, Output, RawTensor, freeze_call, freeze_request
from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal

ENVIRONMENT = Environment(device="test device", platform="Linux", python="3.11", versions={"torch": "2.13"})


def make_fire(**fields: Any) -> Fire:
    """A fire at layer 12 down, as attach stores it."""
    base: dict[str, Any] = {
        "id": "20261130-214415-3f9a2c41d7",
        "created_at": "2026-11-30T21:44:15.123Z",
        "source": "attach",
        "runtime": "transformers 5.24",
        "model": "SmolLM2",
        "device": "x86_64",
        "phase": Phase.DECODE,
        "step": 3,
        "origin": Signal(stage="down", layer=12, module="model.layers.12.mlp.down_proj"),
        "first": BadValue(flat_index=10, row=0, column=10, bits=0x7FC00000, dtype="float32", kind=Kind.NAN),
        "outcome": Outcome.RAISED,
        "token_ids": (777001, 777002),
    }
    return Fire(**(base | fields))


def make_capture(**fields: Any) -> Capture:
    """A capture of a call in process, with everything that a capture may have."""
    base: dict[str, Any] = {
        "prompt_token_ids": [1, 5, 9, 2],
        "sampling": {"max_new_tokens": 16, "do_sample": False, "temperature": 0.7},
        "seeds": {"torch": 7},
        "engine_settings": {"level": "layers", "dtype": "float32", "num_threads": 1},
        "model": ModelInfo(name="SmolLM2", vocabulary_size=1000, special_ids=(0, 1, 2)),
        "environment": ENVIRONMENT,
        "outputs": [Output(text="private words", token_ids=(11, 12))],
        "tensors": {"layer 12 down": RawTensor(dtype="float16", shape=(1, 2), data=b"\x00\x7e\x00\x3c")},
    }
    fire = fields.pop("fire", make_fire())
    return freeze_call(fire, **(base | fields))


def make_http_capture(**fields: Any) -> Capture:
    """A capture of a chat request with images, tools and a key in it."""
    body = {
        "model": "qwen",
        "messages": [
            {"role": "system", "content": "private system words"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "private user words"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,cHJpdmF0ZQ=="}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "private_tool", "parameters": {"type": "object"}}}],
        "temperature": 0.5,
        "max_tokens": 100,
        "seed": 3,
        "api_key": "sk-abcdefghijklmnopqrstuvwxyz",
        "user": "private-user",
    }
    base: dict[str, Any] = {
        "headers": {"Authorization": "Bearer abcdefgh12345678", "Content-Type": "application/json"},
        "environment": ENVIRONMENT,
        "model": ModelInfo(name="qwen", vocabulary_size=1000),
        "prompt_token_ids": [[5, 6, 7]],
        "findings": [{"kind": "character run", "severity": "fire", "reason": "r", "sample": "private sample"}],
    }
    return freeze_request(body, **(base | fields))


@pytest.fixture
def capture() -> Capture:
    return make_capture()


@pytest.fixture
def http_capture() -> Capture:
    return make_http_capture()
