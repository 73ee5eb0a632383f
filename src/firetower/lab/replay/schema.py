"""Campaigns as JSON and back; what is read is checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from firetower.capture.files import replace_file
from firetower.core.codec import build_record as _checked
from firetower.core.codec import encode
from firetower.core.errors import CaptureError, RecordError, ReplayError
from firetower.lab.replay.records import CAMPAIGN_SCHEMA, Campaign

R = TypeVar("R")

MAX_CAMPAIGN_BYTES = 256 << 20


def campaign_to_dict(campaign: Campaign) -> dict[str, Any]:
    """The documented JSON form (docs/reference/replay.md)."""
    data = encode(campaign)
    assert isinstance(data, dict)
    return data


def campaign_from_dict(data: Mapping[str, Any]) -> Campaign:
    """Build a campaign from its JSON form.

    Raises:
        RecordError: a missing, unknown or wrongly typed field, or a newer schema; names field and rule.
    """
    check_schema(data.get("schema"))
    return record_from_dict(Campaign, data, "campaign")


def record_from_dict(cls: type[R], data: Any, where: str) -> R:
    """Build any frozen record of this folder from its JSON form.

    Raises:
        RecordError: names the field, from ``where`` on, and the rule.
    """
    return _checked(cls, data, where)


def check_schema(version: Any) -> None:
    """Refuse a version that this firetower does not know.

    Raises:
        RecordError: no whole number from 1, or newer.
    """
    if type(version) is not int or version < 1:
        raise RecordError(f"schema={version!r}: must be a whole number from 1 to {CAMPAIGN_SCHEMA}")
    if version > CAMPAIGN_SCHEMA:
        raise RecordError(f"schema={version}: newer than this firetower reads ({CAMPAIGN_SCHEMA}); upgrade firetower")


def write_campaign(campaign: Campaign, path: Path, *, force: bool = True) -> None:
    """Write the campaign file (0600), whole or not at all.

    Raises:
        ReplayError: it exists and ``force`` is not given, or it cannot be written.
    """
    text = json.dumps(campaign_to_dict(campaign), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, [text.encode()], force=force)
    except (CaptureError, OSError) as e:
        raise ReplayError(str(e)) from e


def read_campaign(path: Path) -> Campaign:
    """Read a campaign file.

    Raises:
        ReplayError: it cannot be read, or is no campaign.
    """
    try:
        if path.stat().st_size > MAX_CAMPAIGN_BYTES:
            raise ReplayError(f"file={str(path)!r}: over {MAX_CAMPAIGN_BYTES >> 20} MiB, no campaign is that large")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ReplayError(f"file={str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise ReplayError(f"file={str(path)!r}: is not JSON; give the .json file of a campaign") from e
    if not isinstance(data, dict):
        raise ReplayError(f"file={str(path)!r}: must hold a JSON object; give the .json file of a campaign")
    try:
        return campaign_from_dict(data)
    except RecordError as e:
        raise ReplayError(f"file={str(path)!r}: {e}") from e
