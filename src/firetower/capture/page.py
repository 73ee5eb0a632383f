"""A capture as a page for people: what is in it, what is not, without its content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firetower.capture.folder import ManifestFile, Seen
from firetower.capture.records import Capture, Output, Redaction
from firetower.capture.tensors import TensorEntry
from firetower.core.records import Kind

KIND_NAMES = {Kind.NAN: "NaN", Kind.POS_INF: "+Inf", Kind.NEG_INF: "-Inf"}
"""Classes of bad values as people write them."""

MAX_ROWS = 20


def capture_page(
    capture: Capture,
    *,
    digest: str,
    files: Mapping[str, ManifestFile],
    tensors: list[TensorEntry],
    seen: Seen | None = None,
    with_content: bool = False,
) -> Iterator[str]:
    """The page, line by line. Lines hold text from the request as it is: escape them before a terminal sees them."""
    yield from _title(capture, digest, seen)
    yield from _section("Request", _request(capture))
    yield from _section("Findings in the answer", (str(f.get("reason", f.get("kind"))) for f in capture.findings))
    yield from _section("Outputs so far", (_output(o, with_content) for o in capture.outputs))
    yield from _section("Model", _model(capture))
    yield from _section("Ran on", _environment(capture))
    yield from _section("Settings", (f"{k} = {v}" for k, v in capture.engine_settings.items()))
    yield from _section("Tensors", _tensors(tensors))
    yield from _section("Left out", (*capture.request.dropped, *capture.left_out))
    if capture.redaction is not None:
        yield from _section("Redacted", _redaction(capture.redaction))
    if with_content:
        yield from _section("Content", _content(capture))
    yield from _section("Files", (f"{f.name:20} {f.num_bytes:>14,} bytes  {f.sha256[:16]}" for f in files.values()))


def _title(capture: Capture, digest: str, seen: Seen | None) -> Iterator[str]:
    fire = capture.fire
    if fire is None:
        yield f"Capture of {'an answer' if capture.findings else 'a request'} that no sensor saw from inside"
    else:
        first = fire.first
        yield f"Capture of {KIND_NAMES[first.kind]} first at {fire.origin.name} ({first.bits_hex} {first.dtype})"
    yield f"  id       {capture.id}"
    yield f"  created  {capture.created_at}"
    yield f"  digest   {digest}"
    if seen is not None:
        yield f"  seen     {seen.count:,} times, last {seen.last_seen}; only the first was captured"


def _request(capture: Capture) -> Iterator[str]:
    request = capture.request
    yield f"{request.kind}{f' ({request.method} {request.path})' if request.path else ''}"
    if request.messages:
        yield f"{_counted(len(request.messages), 'message')}, {_counted(len(request.tools), 'tool')}"
    rows, total = capture.prompt_token_ids, capture.num_prompt_tokens
    if rows is None:
        yield "prompt token ids unknown: it can be sent again, but not redacted"
    else:
        yield f"{_counted(total or 0, 'prompt token')}{f' in {len(rows):,} rows' if len(rows) > 1 else ''}"
    if request.sampling:
        yield "sampling " + ", ".join(f"{k}={v}" for k, v in request.sampling.items())
    if request.extra:
        yield "other fields " + ", ".join(request.extra)
    if capture.seeds:
        yield "seeds " + ", ".join(f"{k}={v}" for k, v in capture.seeds.items())


def _output(output: Output, with_content: bool) -> str:
    tokens = "" if output.token_ids is None else f", {len(output.token_ids):,} tokens"
    end = f", ended by {output.finish_reason}" if output.finish_reason else ""
    text = f": {output.reasoning}{output.text}" if with_content else ""
    return f"choice {output.choice}: {len(output.reasoning) + len(output.text):,} characters{tokens}{end}{text}"


def _model(capture: Capture) -> Iterator[str]:
    model = capture.model
    if model.name:
        yield model.name
    if model.vocabulary_size is not None:
        yield f"vocabulary {model.vocabulary_size:,}, {len(model.special_ids):,} special ids"
    for file in model.files[:MAX_ROWS]:
        yield f"{file.name}: {file.num_bytes:,} bytes, sha256 {file.sha256[:16]}"
    if len(model.files) > MAX_ROWS:
        yield f"and {len(model.files) - MAX_ROWS:,} more files"
    if not model.files:
        yield "files not hashed: whether a replay runs the same weights cannot be checked"


def _environment(capture: Capture) -> Iterator[str]:
    env = capture.environment
    yield from (v for v in (env.device, env.platform, f"Python {env.python}" if env.python else "") if v)
    if env.versions:
        yield ", ".join(f"{k} {v}" for k, v in env.versions.items())
    if env.variables:
        yield ", ".join(f"{k}={v}" for k, v in env.variables.items())


def _tensors(tensors: list[TensorEntry]) -> Iterator[str]:
    for t in tensors[:MAX_ROWS]:
        yield f"{t.name}: {'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}"
    if len(tensors) > MAX_ROWS:
        yield f"and {len(tensors) - MAX_ROWS:,} more"


def _redaction(redaction: Redaction) -> Iterator[str]:
    kept = f", {redaction.num_kept_special:,} special ids kept" if redaction.num_kept_special else ""
    yield f"{redaction.num_replaced:,} token ids replaced by random ones below {redaction.vocabulary_size:,}{kept}"
    if redaction.original_kind != "call":
        yield f"was a {redaction.original_kind} request, is a completions request now"
    answer = {None: "not measured", True: "yes (measured)", False: "no (measured)"}[redaction.still_fires]
    yield f"still fires: {answer}"
    if redaction.dropped:
        yield "dropped " + ", ".join(redaction.dropped)


def _content(capture: Capture) -> Iterator[str]:
    yield from (f"body.{k} = {_short(v)}" for k, v in capture.request.body.items())
    for i, row in enumerate(capture.prompt_token_ids or ()):
        yield f"prompt token ids, row {i}: {_short(list(row))}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _short(value: Any, limit: int = 2000) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text):,} characters; --json has all)"


def _section(title: str, lines: Any) -> Iterator[str]:
    rows = list(lines)
    if rows:
        yield ""
        yield title
        yield from (f"  {row}" for row in rows)
