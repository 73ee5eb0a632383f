"""Single facts of a fire as words, shared by page, terminal and summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firetower.core.bits import read_bits
from firetower.core.codec import encode
from firetower.core.errors import BitsError
from firetower.core.records import Fire, Phase, TensorSummary
from firetower.fires.handin import UNKNOWN_STEP
from firetower.fires.page import KIND_NAMES, arithmetic_of

PRIVATE = frozenset(
    [
        "prompt",
        "messages",
        "message",
        "text",
        "content",
        "output",
        "outputs",
        "completion",
        "sample",
        "token_ids",
        "tokens",
        "input_ids",
        "tools",
        "tool_calls",
        "arguments",
        "images",
        "image",
        "system",
        "user",
        "reasoning",
        "answer",
        "response",
        "query",
        "request_body",
        "body",
    ]
)
"""Keys of ``extra`` that may hold what somebody wrote or a model answered; shown only when asked for."""


def headline(fire: Fire) -> str:
    """``NaN first at layer 12 down``."""
    return f"{KIND_NAMES[fire.first.kind]} first at {fire.origin.name}"


def when(fire: Fire) -> str:
    """``step 3, decode``; ``unknown`` where neither is."""
    parts = [f"step {fire.step}"] if fire.step != UNKNOWN_STEP else []
    parts += [str(fire.phase)] if fire.phase is not Phase.UNKNOWN else []
    return ", ".join(parts) or "unknown"


def place(fire: Fire) -> str:
    """Where in the tensor, and whose row it is."""
    b = fire.first
    parts = [f"row {b.row}, column {b.column}"]
    names = (("sequence", b.sequence), ("token", b.token), ("position", b.position))
    parts += [f"{name} {value:,}" for name, value in names if value is not None]
    parts += ["a pad row" if b.is_pad else "a real row"] if b.is_pad is not None else []
    return ", ".join(parts)


def shape(dims: tuple[int, ...]) -> str:
    """``5 x 1024``."""
    return " x ".join(map(str, dims)) or "scalar"


def bits_sentences(fire: Fire) -> tuple[str, ...]:
    """What the bits say, or why they cannot be read."""
    b = fire.first
    try:
        reading = read_bits(b.bits, b.dtype, arithmetic_of(fire.device))
    except BitsError as e:
        return (f"They cannot be read ({e}).",)
    if reading.kind is not b.kind:
        seen = KIND_NAMES[reading.kind] if reading.kind else f"the finite value {reading.value!r}"
        return (f"They are {seen}, yet the record says {KIND_NAMES[b.kind]}: one of the two is wrong.",)
    return reading.sentences


def findings(fire: Fire) -> list[str]:
    """Notes, and what the record says in fields."""
    found = list(fire.notes)
    # a watch writes these two as notes itself
    if fire.pad_before_real and not any("pad row was bad" in n for n in found):
        found.append("a pad row was bad before any real row: shared scales or tiles may have leaked it")
    if fire.laundered and not any("laundered" in n for n in found):
        found.append("laundered: the bad value is gone again in the logits, so the answer looks healthy")
    return found


def tensor_state(t: TensorSummary) -> str:
    """``3 NaN`` or ``finite``."""
    counts = ((t.num_nan, "NaN"), (t.num_pos_inf, "+Inf"), (t.num_neg_inf, "-Inf"))
    return ", ".join(f"{n:,} {name}" for n, name in counts if n) or "finite"


def without_content(extra: Mapping[str, Any], with_content: bool) -> tuple[dict[str, Any], int]:
    """``extra`` without the keys that may hold content, at any depth, and how many were left out."""
    if with_content:
        return dict(extra), 0
    kept, left_out = _strip(extra)
    return kept, left_out


def _strip(value: Any) -> tuple[Any, int]:
    if isinstance(value, Mapping):
        kept, count = {}, 0
        for key, inner in value.items():
            if str(key).lower() in PRIVATE:
                count += 1
                continue
            kept[key], below = _strip(inner)
            count += below
        return kept, count
    if isinstance(value, list | tuple):
        pairs = [_strip(v) for v in value]
        return [v for v, _ in pairs], sum(n for _, n in pairs)
    return value, 0


def shown(value: Any) -> str:
    """A plain value in one line."""
    return value if isinstance(value, str) else str(encode(value))


def environment(fire: Fire) -> list[tuple[str, str]]:
    """Model, engine, device and whose request."""
    facts = (
        ("model", fire.model),
        ("runtime", fire.runtime),
        ("device", fire.device),
        ("source", fire.source),
        ("request", fire.request or ""),
    )
    return [(name, value) for name, value in facts if value]


def coverage(fire: Fire) -> str:
    """``210 of 213 declared signals ran``; empty where it was not reported."""
    ran, declared = fire.coverage
    return f"{ran} of {declared} declared signals ran" if declared else ""


def not_testable(parts: tuple[str, ...]) -> list[str]:
    """``part: why`` of a verdict, grouped by why: ``the subject has no such part: weights, states``."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        name, _, why = part.partition(": ")
        groups.setdefault(why or "no reason given", []).append(name)
    return [f"{why}: {', '.join(names)}" for why, names in groups.items()]
