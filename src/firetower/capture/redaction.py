"""Redaction: what a stranger may have. Random token ids of the same length, no content, and whether it still fires."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from firetower.capture.folder import read_capture, write_capture
from firetower.capture.records import SAMPLING_KEYS, Capture, Environment, ModelInfo, Redaction, Request
from firetower.core.errors import CaptureError
from firetower.core.records import Fire

StillFires = Callable[[Capture], bool]
"""Runs a capture again and says whether it fires; the lab's replay gives one."""

SHOWN_OF_A_FIRE = (
    "id", "created_at", "source", "runtime", "device", "phase", "step", "origin", "first", "outcome", "bad_signals",
    "burned", "coverage", "pad_before_real", "laundered", "inputs", "output", "weights", "count",
)  # fmt: skip
"""Fields of a fire that a redacted capture shows as they are. A field that is not named here is left out."""

_FINDING_KEYS = ("kind", "severity", "choice", "field", "position", "unit", "count")
_MAX_NAME_CHARS = 200


def redact(
    capture: Capture,
    *,
    seed: int = 0,
    vocabulary_size: int | None = None,
    special_ids: Sequence[int] | None = None,
    keep_special: bool = False,
    also_dropped: Sequence[str] = (),
    still_fires: StillFires | None = None,
) -> Capture:
    """Make a capture that shows nothing of what was said, and measure whether it still fires.

    Every prompt token id becomes a random one, each drawn alone, so that no pattern of repeats is left. Text, images,
    tool schemas, outputs, tensors, headers, request ids and free-form fields are dropped; sampling numbers, engine
    settings that are numbers or switches, versions and hashes stay. An HTTP request becomes a ``completions`` request
    with the ids as its prompt.

    Args:
        capture: what to redact; it is not changed.
        seed: of the random ids; the same seed gives the same ids.
        vocabulary_size: of the model, where the capture does not say.
        special_ids: ids never drawn; the capture's own when omitted.
        keep_special: leave special ids of the prompt in place (turn marks, begin of text). Shows where turns were.
        also_dropped: what the caller knows of and did not read (``tensors``), to be marked as dropped.
        still_fires: runs the redacted capture; its answer is recorded. None: "not measured".

    Raises:
        CaptureError: no token ids to replace, an unknown vocabulary size, or nothing left to draw from.
    """
    rows = capture.prompt_token_ids
    if rows is None:
        raise CaptureError(
            f"capture={capture.id!r}: has no prompt token ids to replace; capture with them "
            "(a server that returns prompt_token_ids, or a call in process)"
        )
    size = vocabulary_size if vocabulary_size is not None else capture.model.vocabulary_size
    special = frozenset(capture.model.special_ids if special_ids is None else special_ids)
    draw = _drawer(seed, size, special)
    kept = special if keep_special else frozenset()
    new_rows = tuple(tuple(i if i in kept else draw() for i in row) for row in rows)
    num_kept = sum(i in kept for row in rows for i in row)
    request, dropped = _request(capture, new_rows)
    assert size is not None
    redaction = Redaction(
        seed=seed,
        vocabulary_size=size,
        num_replaced=sum(map(len, rows)) - num_kept,
        num_kept_special=num_kept,
        original_kind=capture.request.kind,
        dropped=(*dropped, *also_dropped),
    )
    result = _shell(capture, request, new_rows, redaction)
    if still_fires is not None:
        result = with_measurement(result, still_fires(result))
    return result


def with_measurement(capture: Capture, still_fires: bool) -> Capture:
    """The redacted capture with the answer to "does it still fire" in it.

    Raises:
        CaptureError: it is not redacted.
    """
    if capture.redaction is None:
        raise CaptureError(f"capture={capture.id!r}: is not redacted; there is nothing to record")
    redaction = dataclasses.replace(capture.redaction, still_fires=still_fires)
    return dataclasses.replace(capture, redaction=redaction)


def record_measurement(folder: str | PurePath, output: str | PurePath, still_fires: bool) -> None:
    """Read a redacted capture, and write it to a new folder with the answer in it.

    Raises:
        CaptureError: not a redacted capture, or ``output`` exists.
    """
    write_capture(with_measurement(read_capture(str(folder)), still_fires), str(output))


def _drawer(seed: int, size: int | None, special: frozenset[int]) -> Callable[[], int]:
    if size is None:
        raise CaptureError("vocabulary_size: unknown to this capture; give it with --vocabulary-size")
    if size < 1 or not any(i not in special for i in range(min(size, len(special) + 1))):
        raise CaptureError(f"vocabulary_size={size}: leaves no id that is not special; check both")
    rng = random.Random(seed)

    def draw() -> int:
        while (token := rng.randrange(size)) in special:
            pass
        return token

    return draw


def _request(capture: Capture, rows: tuple[tuple[int, ...], ...]) -> tuple[Request, tuple[str, ...]]:
    """(the request without content, names of what was dropped)."""
    old = capture.request
    body = {k: v for k, v in old.body.items() if k in SAMPLING_KEYS and _is_plain(v)}
    if isinstance(old.body.get("stream"), bool):
        body["stream"] = old.body["stream"]
    name = _base_name(capture.model.name)
    dropped = [f"body.{k[:80]}" for k in old.body if k not in body and not (k == "model" and name)]
    dropped += [name for name in ("headers",) if old.headers]
    dropped += [name for name in ("outputs", "tensors", "findings") if getattr(capture, name)]
    if old.kind == "call":
        return Request(kind="call", body=body), tuple(dropped)
    prompt: Any = list(rows[0]) if len(rows) == 1 else [list(row) for row in rows]
    body = ({"model": name} if name else {}) | {"prompt": prompt} | body
    return Request(kind="completions", method="POST", path="/v1/completions", body=body), tuple(dropped)


def _shell(capture: Capture, request: Request, rows: tuple[tuple[int, ...], ...], redaction: Redaction) -> Capture:
    """A new capture of what may be shown. Built up, not cut down: a field added later stays out until named here."""
    env, model = capture.environment, capture.model
    return Capture(
        id=f"{capture.id[:110]}-redacted",
        created_at=capture.created_at,
        request=request,
        prompt_token_ids=rows,
        seeds=capture.seeds,
        engine_settings=_plain_settings(capture.engine_settings),
        model=ModelInfo(
            name=_base_name(model.name),
            files=model.files,
            vocabulary_size=redaction.vocabulary_size,
            special_ids=model.special_ids,
        ),
        environment=Environment(device=env.device, platform=env.platform, python=env.python, versions=env.versions),
        fire=None if capture.fire is None else _fire(capture.fire),
        findings=tuple({k: f[k] for k in _FINDING_KEYS if k in f} for f in capture.findings),
        redaction=redaction,
    )


def _fire(fire: Fire) -> Fire:
    """The incident without token ids, request id and free-form parts; places and bits stay."""
    shown = {name: getattr(fire, name) for name in SHOWN_OF_A_FIRE}
    return Fire(**shown, model=_base_name(fire.model))


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and switches of the settings; text may be a path, a name or a prompt."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            result[name] = _plain_settings(value)
        elif _is_plain(value):
            result[name] = value
    return result


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _base_name(name: str) -> str:
    """A model's name without the folders that a local path has: they may name a user."""
    is_path = name.startswith(("/", "~", ".")) or "\\" in name
    return (name.replace("\\", "/").rstrip("/").rpartition("/")[2] if is_path else name)[:_MAX_NAME_CHARS]
