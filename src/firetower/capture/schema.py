"""A capture as JSON documents, and back. What is read is checked field by field: a capture may come from anyone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from firetower.capture.records import (
    CAPTURE_SCHEMA,
    KINDS,
    Capture,
    Environment,
    FileHash,
    ModelInfo,
    Output,
    Redaction,
    Request,
)
from firetower.core.codec import decode, encode, fire_from_dict, fire_to_dict
from firetower.core.errors import CaptureError, RecordError
from firetower.core.records import Fire

T = TypeVar("T")

CAPTURE, REQUEST, CONTENT, FIRE = "capture.json", "request.json", "content.json", "fire.json"
DOCUMENTS = (CAPTURE, REQUEST, CONTENT, FIRE)
"""JSON files of a capture. What is private is in ``request.json`` and ``content.json`` only."""


def to_documents(capture: Capture) -> dict[str, Any]:
    """JSON-ready data of every document, by file name.

    Raises:
        CaptureError: a value that JSON cannot hold.
    """
    request = dataclasses.replace(capture.request, body={})
    head = {f.name: getattr(capture, f.name) for f in dataclasses.fields(capture) if f.name not in _ELSEWHERE}
    head["request"] = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "body"}
    fire = capture.fire
    content = {name: getattr(capture, name) for name in ("prompt_token_ids", "outputs", "findings")}
    content["fire_token_ids"] = None if fire is None else fire.token_ids
    try:
        documents = {CAPTURE: encode(head), REQUEST: encode(capture.request.body), CONTENT: encode(content)}
        if fire is not None:
            documents[FIRE] = fire_to_dict(dataclasses.replace(fire, token_ids=None))
    except (RecordError, RecursionError) as e:
        raise CaptureError(f"capture: {e or 'nested too deeply'}") from e
    return documents


_ELSEWHERE = {"request", "prompt_token_ids", "outputs", "findings", "fire", "tensors"}
_CONTENT_FIELDS = {"prompt_token_ids", "outputs", "findings", "fire_token_ids"}


def dump_document(data: Any, *, indent: int | None = None) -> bytes:
    """One document as bytes: ASCII (so that every string round-trips), ending in a line end."""
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(data, indent=indent, separators=separators, allow_nan=False, ensure_ascii=True)
    return f"{text}\n".encode("ascii")


def parse_document(raw: bytes, name: str) -> dict[str, Any]:
    """Parse one document.

    Raises:
        CaptureError: no JSON object.
    """
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise CaptureError(f"file={name!r}: is not JSON; the capture is damaged") from e
    if not isinstance(data, dict):
        raise CaptureError(f"file={name!r}: must hold a JSON object")
    return data


def from_documents(documents: Mapping[str, dict[str, Any]]) -> Capture:
    """Build a capture, without its tensors.

    Raises:
        CaptureError: a missing, unknown or wrongly typed field, or a newer schema; names file and field.
    """
    head = documents.get(CAPTURE)
    if head is None:
        raise CaptureError(f"file={CAPTURE!r}: missing; this is no capture")
    check_schema(head.get("schema"), CAPTURE)
    content = _known(documents.get(CONTENT, {}), _CONTENT_FIELDS, CONTENT)
    fields = _known(head, {f.name for f in dataclasses.fields(Capture)} - _ELSEWHERE | {"request"}, CAPTURE)
    try:
        return _capture(fields, content, decode(documents.get(REQUEST, {})), documents.get(FIRE))
    except RecordError as e:
        raise CaptureError(f"capture: {e}") from e


def check_schema(version: Any, name: str) -> None:
    """Refuse a version that this firetower does not know.

    Raises:
        CaptureError: not a whole number from 1, or newer.
    """
    if type(version) is not int or version < 1:
        raise CaptureError(f"file={name!r}: schema={version!r}: must be a whole number from 1 to {CAPTURE_SCHEMA}")
    if version > CAPTURE_SCHEMA:
        raise CaptureError(f"schema={version}: newer than this firetower reads ({CAPTURE_SCHEMA}); upgrade firetower")


def _capture(head: dict[str, Any], content: dict[str, Any], body: Any, fire: dict[str, Any] | None) -> Capture:
    prompts = content.get("prompt_token_ids")
    return Capture(
        id=_is(head.get("id"), str, "id"),
        created_at=_is(head.get("created_at"), str, "created_at"),
        request=_request(head.get("request"), body),
        prompt_token_ids=None if prompts is None else _list(prompts, "prompt_token_ids", _ids),
        seeds=_map(head.get("seeds", {}), int, "seeds"),
        engine_settings=decode(_is(head.get("engine_settings", {}), dict, "engine_settings")),
        model=_model(head.get("model", {})),
        environment=_record(Environment, head.get("environment", {}), "environment", _ENVIRONMENT),
        fire=None if fire is None else _fire(fire, content.get("fire_token_ids")),
        findings=_list(content.get("findings", []), "findings", lambda v, w: decode(_is(v, dict, w))),
        outputs=_list(content.get("outputs", []), "outputs", _output),
        left_out=_list(head.get("left_out", []), "left_out", _text),
        redaction=None if head.get("redaction") is None else _redaction(head["redaction"]),
        schema=head["schema"],
    )


_Convert = Callable[[Any, str], Any]


def _request(data: Any, body: Any) -> Request:
    request = _record(Request, data, "request", _REQUEST, body=_is(body, dict, REQUEST))
    if request.kind not in KINDS:
        raise CaptureError(f"request.kind={request.kind!r}: must be one of {', '.join(KINDS)}")
    return request


def _fire(data: dict[str, Any], token_ids: Any) -> Fire:
    return dataclasses.replace(fire_from_dict(data), token_ids=_optional_ids(token_ids, "fire_token_ids"))


def _model(data: Any) -> ModelInfo:
    return _record(ModelInfo, data, "model", _MODEL)


def _output(data: Any, where: str) -> Output:
    return _record(Output, data, where, _OUTPUT)


def _redaction(data: Any) -> Redaction:
    return _record(Redaction, data, "redaction", _REDACTION)


def _file(data: Any, where: str) -> FileHash:
    return _record(FileHash, data, where, {"name": _text, "num_bytes": _int, "sha256": _text})


def _record(cls: type[T], data: Any, where: str, fields: Mapping[str, _Convert], **more: Any) -> T:
    """Build a flat record: every key known, every value converted; missing required ones are named."""
    table = _known(_is(data, dict, where), set(fields), where)
    required = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in table:
            raise CaptureError(f"{where}.{name}: missing")
    return cls(**{k: fields[k](v, f"{where}.{k}") for k, v in table.items()}, **more)


def _known(data: dict[str, Any], names: set[str], where: str) -> dict[str, Any]:
    unknown = sorted(set(data) - names)
    if unknown:
        raise CaptureError(f"{where}: field {unknown[0][:80]!r} is unknown; known: {', '.join(sorted(names))}")
    return data


def _is(value: Any, kind: type[T], where: str) -> T:
    if type(value) is not kind:
        raise CaptureError(f"{where}: must be {_WORDS[kind]}, is {type(value).__name__}")
    return value


_WORDS: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    dict: "an object",
    list: "a list",
    bool: "true or false",
}


def _text(value: Any, where: str) -> str:
    return _is(value, str, where)


def _int(value: Any, where: str) -> int:
    return _is(value, int, where)


def _optional_bool(value: Any, where: str) -> bool | None:
    return None if value is None else _is(value, bool, where)


def _optional_text(value: Any, where: str) -> str | None:
    return None if value is None else _is(value, str, where)


def _optional_int(value: Any, where: str) -> int | None:
    return None if value is None else _is(value, int, where)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    return _list(value, where, _int)


def _optional_ids(value: Any, where: str) -> tuple[int, ...] | None:
    return None if value is None else _ids(value, where)


def _list(value: Any, where: str, convert: Callable[[Any, str], T]) -> tuple[T, ...]:
    return tuple(convert(v, where) for v in _is(value, list, where))


def _map(value: Any, kind: type[T], where: str) -> dict[str, T]:
    return {k: _is(v, kind, f"{where}.{k[:80]}") for k, v in _is(value, dict, where).items()}


def _texts(value: Any, where: str) -> tuple[str, ...]:
    return _list(value, where, _text)


def _text_map(value: Any, where: str) -> dict[str, str]:
    return _map(value, str, where)


_REQUEST: dict[str, _Convert] = {
    "kind": _text,
    "method": _text,
    "path": _text,
    "headers": _text_map,
    "dropped": _texts,
}
_MODEL: dict[str, _Convert] = {
    "name": _text,
    "files": lambda v, w: _list(v, w, _file),
    "vocabulary_size": _optional_int,
    "special_ids": _ids,
}
_ENVIRONMENT: dict[str, _Convert] = {
    "device": _text,
    "platform": _text,
    "python": _text,
    "versions": _text_map,
    "variables": _text_map,
}
_OUTPUT: dict[str, _Convert] = {
    "choice": _int,
    "text": _text,
    "reasoning": _text,
    "token_ids": _optional_ids,
    "finish_reason": _optional_text,
}
_REDACTION: dict[str, _Convert] = {
    "seed": _int,
    "vocabulary_size": _int,
    "num_replaced": _int,
    "num_kept_special": _int,
    "original_kind": _text,
    "dropped": _texts,
    "still_fires": _optional_bool,
}
