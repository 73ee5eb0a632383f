"""Fires as JSON Lines: one fire a line, ASCII, losing no bit; token ids only on request."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from firetower.core.codec import fire_from_dict, fire_to_dict
from firetower.core.errors import RecordError
from firetower.core.records import Fire
from firetower.fires.handin import complete
from firetower.fires.rows import to_row
from firetower.fires.text import visible

MAX_LINE_BYTES = 64 << 20
"""Longest line that is read; a fire with a million token ids has about 8 MB."""

_MAX_MESSAGE = 400


def to_line(fire: Fire, *, with_content: bool = False) -> str:
    """One line of JSON without its line end; ``token_ids`` is null unless ``with_content``."""
    if not with_content:
        fire = dataclasses.replace(fire, token_ids=None)
    return json.dumps(fire_to_dict(fire), allow_nan=False, separators=(",", ":"))


def to_lines(fires: Iterable[Fire], *, with_content: bool = False) -> Iterator[str]:
    """`to_line` of each fire, with line ends."""
    return (to_line(fire, with_content=with_content) + "\n" for fire in fires)


def read_lines(file: BinaryIO, name: str) -> list[Fire]:
    """Read every line of a file, whole or short fires; blank lines and a byte order mark are passed over.

    Raises:
        RecordError: the first line that is not a fire, as ``name:line: what, rule``.
    """
    fires = []
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        try:
            fire = _read_line(line, first=number == 1)
        except RecordError as e:
            message = visible(str(e))
            if len(message) > _MAX_MESSAGE:
                message = message[: _MAX_MESSAGE // 2] + " ... " + message[-_MAX_MESSAGE // 2 :]
            raise RecordError(
                f"{visible(name)}:{number}: {message}; nothing of this file was imported"
            ) from e
        if fire is not None:
            fires.append(fire)
    return fires


def _read_line(line: bytes, *, first: bool) -> Fire | None:
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"line: must not be longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as e:
        raise RecordError(f"byte {e.start}: is not UTF-8") from e
    if not text:
        return None
    try:
        fire = fire_from_dict(complete(_parse(text)))
        to_row(fire)  # what the store would refuse is refused with its line number
    except RecursionError as e:
        raise RecordError("line: is nested too deep") from e
    return fire


def _parse(text: str) -> Any:
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except RecordError:
        raise
    except ValueError as e:
        raise RecordError(f"line: is not JSON ({e})") from e


def _refuse_constant(name: str) -> float:
    raise RecordError(f'value={name}: is not JSON; write {{"nonfinite": "nan", "bits": "7ff8000000000000"}}')


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RecordError(
            f'value={text}: does not fit a float64; write {{"nonfinite": "+inf", "bits": "7ff0000000000000"}}'
        )
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"{twice}: is given twice in one object")
    return data
