"""Fires to compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from firetower.core.records import BadValue, Fire, Kind, Outcome, Phase, Signal


@pytest.fixture
def make_fire() -> Callable[..., Fire]:
    """Fires that differ by id; ``first`` takes fields of a BadValue, everything else fields of a Fire."""
    numbers = itertools.count()

    def make(first: dict[str, Any] | None = None, **fields: Any) -> Fire:
        n = next(numbers)
        value: dict[str, Any] = {
            "flat_index": 1034,
            "row": 1,
            "column": 10,
            "bits": 0x7E00,
            "dtype": "float16",
            "kind": Kind.NAN,
        }
        defaults: dict[str, Any] = {
            "id": f"fire-{n}",
            "created_at": "2026-11-30T21:44:15.000Z",
            "source": "attach",
            "runtime": "torch 2.13.0",
            "model": "tiny",
            "device": "x86_64",
            "phase": Phase.DECODE,
            "step": n,
            "origin": Signal(stage="down", layer=12),
            "first": BadValue(**(value | (first or {}))),
            "outcome": Outcome.RAISED,
        }
        return Fire(**(defaults | fields))

    return make
