"""The short form of a fire that another engine hands in, completed to the whole record.

Four facts are required: ``origin.stage``, ``first.dtype``, ``first.bits`` and the place of the value. The
rest has defaults that say that it is not known (docs/reference/fire-schema.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from firetower.core.errors import BitsError, RecordError
from firetower.core.formats import classify, find_format, parse_bits
from firetower.core.records import Outcome, Phase, utc_now

UNKNOWN_STEP = -1
"""``step`` of a fire whose engine did not say which step it was."""

DEFAULTS: dict[str, Any] = {
    "source": "import",
    "runtime": "unknown",
    "model": "unknown",
    "device": "unknown",
    "phase": Phase.UNKNOWN.value,
    "step": UNKNOWN_STEP,
    "outcome": Outcome.IMPORTED.value,
}
"""Fields that a hand-in may leave out, beside ``id`` and ``created_at``, and what stands for them."""


def complete(data: Any) -> dict[str, Any]:
    """The whole JSON form of a fire from a short one; a whole one comes back as it is.

    Without ``id`` it is made from the content, so that the same line handed in twice is one fire. Without
    ``created_at`` it is now. Bits may be a number or hexadecimal digits.

    Raises:
        RecordError: not an object, or a place or bits that are missing or impossible.
    """
    if not isinstance(data, Mapping):
        raise RecordError(f"fire={data!r}: must be a JSON object")
    fire = {**DEFAULTS, **data}
    if "id" not in data:
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
        fire["id"] = f"imported-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"
    fire.setdefault("created_at", utc_now())
    if "first" in fire:
        fire["first"] = _complete_value(fire["first"], "fire.first")
    for name in ("bad_signals", "burned"):
        if isinstance(fire.get(name), list):
            fire[name] = [_complete_entry(e, f"fire.{name}[{i}]") for i, e in enumerate(fire[name])]
    return fire


def _complete_entry(entry: Any, where: str) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    done = {
        name: _complete_value(entry[name], f"{where}.{name}")
        for name in ("first", "first_pad")
        if entry.get(name) is not None
    }
    return {**entry, **done}


def _complete_value(first: Any, where: str) -> Any:
    if not isinstance(first, Mapping):
        return first
    for name in ("flat_index", "row", "column"):
        if _is_int(first.get(name)) and first[name] < 0:
            raise RecordError(f"{where}.{name}={first[name]}: must not be negative")
    return _with_place(_with_bits(dict(first), where), where)


def _with_bits(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Read hexadecimal bits, short type names, and the class that the bits of a known type have."""
    for name in ("bits", "dtype"):
        if name not in value:
            raise RecordError(f"{where}.{name}: missing")
    if isinstance(value["bits"], str):
        try:
            value["bits"] = parse_bits(value["bits"]).bits
        except BitsError as e:
            raise RecordError(f"{where}.{e}") from e
    if not (_is_int(value["bits"]) and isinstance(value["dtype"], str)):
        return value
    try:
        value["dtype"] = find_format(value["dtype"]).name
    except BitsError as e:
        return _with_foreign_dtype(value, where, e)
    try:
        kind = classify(value["bits"], value["dtype"])
    except BitsError as e:
        raise RecordError(f"{where}.{e}") from e
    if "kind" not in value:
        if kind is None:
            raise RecordError(
                f"{where}.bits={value['bits']:#x}: is finite in {value['dtype']}, must be NaN or Inf"
            )
        value["kind"] = kind.value
    return value


def _with_foreign_dtype(value: dict[str, Any], where: str, error: BitsError) -> dict[str, Any]:
    if "kind" not in value:
        raise RecordError(f"{where}.{error}, or give kind (nan, +inf, -inf) yourself")
    if not 0 <= value["bits"] < 1 << 64:
        raise RecordError(f"{where}.bits={value['bits']:#x}: must fit 64 bits")
    return value


def _with_place(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Fill ``flat_index`` from row and column, or these from it, where the shape is known."""
    shape = value.get("shape")
    width = shape[-1] if isinstance(shape, list) and shape and _is_int(shape[-1]) and shape[-1] > 0 else None
    if "flat_index" not in value and _is_int(value.get("row")) and _is_int(value.get("column")):
        if width is None:
            # one row needs no width
            if value["row"] != 0:
                raise RecordError(f"{where}.flat_index: missing; give it, or the shape")
            width = value["column"] + 1
        if value["column"] >= width:
            raise RecordError(
                f"{where}.column={value['column']}: must be below the last dimension of shape, {width}"
            )
        value["flat_index"] = value["row"] * width + value["column"]
    elif _is_int(value.get("flat_index")) and width is not None:
        value.setdefault("row", value["flat_index"] // width)
        value.setdefault("column", value["flat_index"] % width)
    if not {"flat_index", "row", "column"} <= value.keys():
        raise RecordError(
            f"{where}: place missing; give row, column and shape, flat_index and shape, or all but shape"
        )
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
