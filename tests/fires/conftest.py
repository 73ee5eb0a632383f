"""Fires to store, and a store in an empty folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal
from firetower.fires import Store

MakeFire = Callable[..., Fire]


@pytest.fixture
def make_fire() -> MakeFire:
    """Fires that differ by id, one second apart, with token ids that no other bytes of a store resemble."""
    numbers = itertools.count()

    def make(**fields: Any) -> Fire:
        n = next(numbers)
        defaults: dict[str, Any] = {
            "id": f"20261130-{n // 3600:02d}{n // 60 % 60:02d}{n % 60:02d}-{n:010x}",
            "created_at": f"2026-11-30T{n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}.000Z",
            "source": "attach",
            "runtime": "torch 2.13.0",
            "model": "SmolLM2-135M-Instruct",
            "device": "x86_64",
            "phase": Phase.DECODE,
            "step": n,
            "origin": Signal(stage="down", layer=12, module="model.layers.12.mlp.down_proj"),
            "first": BadValue(
                flat_index=1034,
                row=1,
                column=10,
                bits=0x7E00,
                dtype="float16",
                kind=Kind.NAN,
                shape=(5, 1024),
            ),
            "outcome": Outcome.RAISED,
            "token_ids": (777001, 777002, 777003),
        }
        return Fire(**(defaults | fields))

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may be made, in a folder that is not there yet."""
    return tmp_path / "data" / "fires.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened
