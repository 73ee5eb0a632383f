"""Freezing: from a request over HTTP, or a call in this process, to a capture without secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from firetower.capture.environment import collect_environment
from firetower.capture.records import Capture, Environment, ModelInfo, Output, Request
from firetower.capture.secrets import allowed_headers, scrub
from firetower.capture.tensors import RawTensor
from firetower.core.errors import CaptureError
from firetower.core.records import Fire, new_fire_id, utc_now

_KIND_OF_PATH = (
    ("chat/completions", "chat.completions"),
    ("completions", "completions"),
    ("responses", "responses"),
    ("messages", "messages"),
)

TokenRows = Sequence[int] | Sequence[Sequence[int]]


def freeze_request(
    body: Mapping[str, Any],
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    fire: Fire | None = None,
    findings: Sequence[Mapping[str, Any]] = (),
    prompt_token_ids: TokenRows | None = None,
    outputs: Sequence[Output] = (),
    engine_settings: Mapping[str, Any] | None = None,
    model: ModelInfo | None = None,
    environment: Environment | None = None,
    tensors: Mapping[str, RawTensor] | None = None,
) -> Capture:
    """Freeze a request that came over HTTP.

    Args:
        body: its JSON, taken over word for word but for secrets.
        path: of the endpoint; host and query are dropped.
        method: of HTTP.
        headers: kept by the allow-list of `allowed_headers`.
        fire: the incident, where the engine's own guard saw it.
        findings: what the detectors said, as JSON (`dataclasses.asdict` of a Finding).
        prompt_token_ids: where known; a prompt that is given as ids in the body is found there.
        outputs: what was answered so far.
        engine_settings: of the server, as JSON; scrubbed as the body is.
        model: name, hashes, vocabulary; the body's ``model`` when omitted.
        environment: `collect_environment` of this machine when omitted.
        tensors: states or intermediates by name.

    Raises:
        CaptureError: token ids that are no whole numbers.
    """
    route = urlsplit(path).path
    kept, dropped_headers = allowed_headers(headers or {})
    clean = scrub(dict(body), "body")
    request = Request(
        kind=next((kind for end, kind in _KIND_OF_PATH if route.rstrip("/").endswith(end)), "other"),
        body=clean.value,
        method=method,
        path=route,
        headers=kept,
        dropped=(*dropped_headers, *clean.dropped),
    )
    name, seed = body.get("model"), body.get("seed")
    return _capture(
        request,
        fire=fire,
        findings=findings,
        prompt_token_ids=body.get("prompt") if prompt_token_ids is None else prompt_token_ids,
        seeds={"request": seed} if type(seed) is int else {},
        engine_settings=engine_settings,
        model=model or ModelInfo(name=name if isinstance(name, str) else ""),
        environment=environment or collect_environment(),
        outputs=outputs,
        tensors=tensors,
        is_lenient=prompt_token_ids is None,
    )


def freeze_call(
    fire: Fire,
    *,
    prompt_token_ids: TokenRows | None,
    sampling: Mapping[str, Any] | None = None,
    seeds: Mapping[str, int] | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    model: ModelInfo | None = None,
    environment: Environment | None = None,
    outputs: Sequence[Output] = (),
    tensors: Mapping[str, RawTensor] | None = None,
) -> Capture:
    """Freeze a call of a model in this process, under the fire's id.

    Args:
        fire: the incident.
        prompt_token_ids: one row, or one for each sequence of the batch, pads left out; plain ints or what turns
            into them by ``int`` (numpy). ``tensor.tolist()`` gives them.
        sampling: keyword arguments of the call that JSON can hold: ``max_new_tokens``, ``do_sample``, ...
        seeds: by what they seed.
        engine_settings: level of the watch, dtype, attention implementation, ...
        model: name, hashes (`hash_model`), vocabulary; the fire's model name when omitted.
        environment: `collect_environment` with the fire's device when omitted.
        outputs: rows produced so far.
        tensors: states or intermediates by name.

    Raises:
        CaptureError: token ids that are no whole numbers.
    """
    clean = scrub(dict(sampling or {}), "sampling")
    return _capture(
        Request(kind="call", body=clean.value, dropped=clean.dropped),
        fire=fire,
        findings=(),
        prompt_token_ids=prompt_token_ids,
        seeds=dict(seeds or {}),
        engine_settings=engine_settings,
        model=model or ModelInfo(name=fire.model),
        environment=environment or collect_environment(fire.device or None),
        outputs=outputs,
        tensors=tensors,
        is_lenient=False,
    )


def _capture(
    request: Request,
    *,
    fire: Fire | None,
    findings: Sequence[Mapping[str, Any]],
    prompt_token_ids: Any,
    engine_settings: Mapping[str, Any] | None,
    outputs: Sequence[Output],
    tensors: Mapping[str, RawTensor] | None,
    is_lenient: bool,
    **fields: Any,
) -> Capture:
    settings = scrub(dict(engine_settings or {}), "engine_settings")
    return Capture(
        id=new_fire_id() if fire is None else fire.id,
        created_at=utc_now(),
        request=request,
        prompt_token_ids=_rows(prompt_token_ids, is_lenient=is_lenient),
        engine_settings=settings.value,
        fire=fire,
        findings=tuple(findings),
        outputs=tuple(outputs),
        tensors=dict(tensors or {}),
        left_out=tuple(f"{place}: a secret" for place in settings.dropped),
        **fields,
    )


def _rows(ids: Any, *, is_lenient: bool) -> tuple[tuple[int, ...], ...] | None:
    """Token ids as rows. Lenient: a prompt that is text, or a list of texts, has none."""
    if ids is None or (is_lenient and not _are_ids(ids)):
        return None
    try:
        is_one_row = all(_is_number(i) for i in ids)
        rows = [ids] if is_one_row else ids
        if not all(_is_number(i) for row in rows for i in row):
            raise TypeError
        return tuple(tuple(int(i) for i in row) for row in rows)
    except TypeError:
        raise CaptureError("prompt_token_ids: must be whole numbers, in one row or in rows; use tolist()") from None


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    rows = value if isinstance(value[0], list) else [value]
    return all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows)


def _is_number(value: Any) -> bool:
    # an array has __index__ too, for the case of one element
    return hasattr(value, "__index__") and not hasattr(value, "__len__") and not isinstance(value, bool)
