"""The measured facts about NaN patterns (`data/nan_bits.json`), read once."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

DEVICES: tuple[str, ...] = ("nvidia", "x86", "amd")
"""Devices whose arithmetic the facts know."""


@lru_cache
def nan_facts() -> dict[str, Any]:
    """The facts as they stand in the file; callers must not change them."""
    text = (Path(__file__).parent / "data" / "nan_bits.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def arithmetic_patterns(device: str, dtype: str) -> tuple[int, ...]:
    """NaN patterns that arithmetic on ``device`` was seen to write; empty where nobody measured that type."""
    patterns = nan_facts()["arithmetic"][device]["patterns"]
    return tuple(int(p, 16) for p in patterns.get(dtype, ()))


def writers(bits: int, dtype: str) -> tuple[str, ...]:
    """Everyone known to write this NaN: ``nvidia arithmetic``, ``torch.nan constant``, ...; may be empty."""
    by_arithmetic = [
        f"{device} arithmetic" for device in DEVICES if bits in arithmetic_patterns(device, dtype)
    ]
    by_others = [
        name
        for name, patterns in nan_facts()["others"].items()
        if bits in (int(p, 16) for p in patterns.get(dtype, ()))
    ]
    return (*by_arithmetic, *by_others)


def integer_twin(bits_hex: str) -> str | None:
    """What the same bits are as an integer, where that integer is a likely rival of the NaN."""
    twin: str | None = nan_facts()["integers"].get(bits_hex)
    return twin
