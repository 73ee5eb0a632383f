"""A fire as the store's columns, and back: the record as JSON, token ids apart, the count kept by SQL."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NamedTuple

from firetower.core.codec import fire_from_dict, fire_to_dict
from firetower.core.errors import RecordError
from firetower.core.records import Fire
from firetower.fires.times import parse_time

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:-]{0,127}")
_INT64 = 1 << 63


class FireRow(NamedTuple):
    """One row of the table ``fires``, and the private content that goes to the table ``content``."""

    id: str
    created_ms: int
    last_seen_ms: int
    times: int
    source: str
    model: str
    stage: str
    layer: int | None
    kind: str
    phase: str
    outcome: str
    record: str
    token_ids: str | None


COLUMNS = FireRow._fields[:-1]


def to_row(fire: Fire) -> FireRow:
    """Lay a fire out as columns; proves that it can be read back, so that no record can spoil a list.

    Raises:
        RecordError: an id that cannot be typed in a shell, a time that is not ISO 8601, a count below 1, or a
            value that JSON cannot hold.
    """
    check_id(fire.id)
    if not 1 <= fire.count < _INT64:
        raise RecordError(f"count={fire.count}: must be from 1 to 2**63-1")
    created_ms = parse_time(fire.created_at)
    record = _dump(fire_to_dict(dataclasses.replace(fire, token_ids=None, count=1)))
    fire_from_dict(json.loads(record))
    layer = fire.origin.layer
    return FireRow(
        id=fire.id,
        created_ms=created_ms,
        last_seen_ms=created_ms,
        times=fire.count,
        source=plain(fire.source),
        model=plain(fire.model),
        stage=plain(fire.origin.stage),
        layer=layer if layer is not None and -_INT64 <= layer < _INT64 else None,
        kind=str(fire.first.kind),
        phase=str(fire.phase),
        outcome=str(fire.outcome),
        record=record,
        token_ids=None if fire.token_ids is None else _dump(list(fire.token_ids)),
    )


def from_row(record: str, times: int, token_ids: str | None) -> Fire:
    """Build the fire of one row again.

    Raises:
        RecordError: the stored JSON is not a fire that this firetower reads.
    """
    data: dict[str, Any] = json.loads(record)
    data |= {"count": times, "token_ids": None if token_ids is None else json.loads(token_ids)}
    return fire_from_dict(data)


def check_id(fire_id: str) -> None:
    """Refuse an id that would not survive being pasted into a shell.

    Raises:
        RecordError: characters other than letters, digits and ``._:-``, or more than 128 of them.
    """
    if not _ID.fullmatch(fire_id):
        raise RecordError(
            f"id={fire_id[:140]!r}: must be 1 to 128 of letters, digits and ._:-, the first a letter or digit"
        )


def plain(text: str) -> str:
    """Text as a column holds it: unpaired surrogates, which UTF-8 lacks, are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _dump(value: Any) -> str:
    try:
        # ASCII holds any text, also unpaired surrogates (a path that is not UTF-8)
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as e:
        raise RecordError(f"fire: cannot be written as JSON ({e}); shorten its numbers or nesting") from e
