"""Records to JSON and back, losing nothing: no JSON ``NaN``, no ``null`` standing for a number.

A non-finite float becomes ``{"nonfinite": "nan", "bits": "7ff8000000000000"}`` (the 64 bits Python holds).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from firetower.core.errors import RecordError
from firetower.core.records import SCHEMA_VERSION, Fire

R = TypeVar("R")


def encode(value: Any) -> Any:
    """Turn a record, or a container of plain values, into JSON-ready data.

    Raises:
        RecordError: a value of a type that JSON cannot hold, or a mapping key that is not a string.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _encode_nonfinite(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecordError(f"key={key!r}: must be a string to be stored as JSON")
        if value.keys() == {"nonfinite", "bits"}:
            raise RecordError("keys nonfinite and bits alone: reserved for a float; rename one of them")
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    raise RecordError(f"value of type {type(value).__name__}: not storable; use numbers, strings, lists, mappings")


def _encode_nonfinite(value: float) -> dict[str, str]:
    kind = "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf"
    return {"nonfinite": kind, "bits": struct.pack(">d", value).hex()}


def decode(value: Any) -> Any:
    """Undo `encode` for plain values: restores non-finite floats, bit for bit."""
    if isinstance(value, dict):
        if value.keys() == {"nonfinite", "bits"}:
            return _decode_nonfinite(value)
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    return value


def _decode_nonfinite(value: dict[str, Any]) -> float:
    try:
        number: float = struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
    except (TypeError, ValueError, struct.error) as e:
        raise RecordError(f"bits={value['bits']!r}: must be 16 hexadecimal digits of a float64") from e
    if math.isfinite(number):
        raise RecordError(f"bits={value['bits']!r}: is a finite float64, yet marked nonfinite")
    return number


def fire_to_dict(fire: Fire) -> dict[str, Any]:
    """The documented JSON form of a fire (docs/reference/fire-schema.md)."""
    data = encode(fire)
    assert isinstance(data, dict)
    return data


def fire_from_dict(data: Mapping[str, Any]) -> Fire:
    """Build a fire from its JSON form.

    Raises:
        RecordError: a missing, unknown or wrongly typed field, or a newer schema; names field and rule.
    """
    schema = data.get("schema", SCHEMA_VERSION)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RecordError(f"schema={schema!r}: must be a whole number from 1 to {SCHEMA_VERSION}")
    if schema > SCHEMA_VERSION:
        raise RecordError(f"schema={schema}: newer than this firetower reads ({SCHEMA_VERSION}); upgrade firetower")
    return build_record(Fire, data, "fire")


def dumps(value: Any) -> str:
    """`encode` to one line of JSON; refuses to write NaN."""
    return json.dumps(encode(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def build_record(cls: type[R], data: Any, where: str) -> R:
    """Build any frozen record from its JSON form, field by field.

    Args:
        cls: the dataclass.
        data: what `encode` made of one.
        where: name of the record in error messages.

    Raises:
        RecordError: a missing, unknown or wrongly typed field.
    """
    if not isinstance(data, Mapping):
        raise RecordError(f"{where}={data!r}: must be an object")
    fields: Callable[[Any], tuple[dict[str, Any], tuple[str, ...]]] = _fields
    hints, required = fields(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise RecordError(f"{where}.{unknown[0]}: unknown field; known: {', '.join(hints)}")
    missing = [name for name in required if name not in data]
    if missing:
        raise RecordError(f"{where}.{missing[0]}: missing")
    return cls(**{k: _convert(hints[k], v, f"{where}.{k}") for k, v in data.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    required = tuple(
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return hints, required


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise RecordError(f"{where}={value!r}: must be an object")
        return decode(dict(value))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build_record(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError as e:
            raise RecordError(f"{where}={value!r}: must be one of {', '.join(hint)}") from e
    return _convert_plain(hint, value, where)


def _convert_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RecordError(f"{where}={value!r}: must be a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(args):
        raise RecordError(f"{where}={value!r}: must have {len(args)} items")
    return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    value = decode(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise RecordError(f"{where}={value!r}: must be {hint.__name__}")
    return value
