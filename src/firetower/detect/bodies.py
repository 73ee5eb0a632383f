"""OpenAI-compatible answers turned into events: whole bodies, streamed chunks, lines of an event stream.

Nothing here trusts the server: a part of the wrong type is left out, never an exception.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from firetower.detect.detector import Detector
from firetower.detect.records import DetectConfig, Finding, FindingKind, Severity, StreamEvent, Usage

_TOKEN_AS_ID = re.compile(r"token_id:(-?\d{1,12})\Z")
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def detect_response(body: Any, config: DetectConfig | None = None) -> list[Finding]:
    """Judge one whole answer of an OpenAI-compatible server.

    Args:
        body: the parsed JSON, or its text or bytes. A bare ``NaN`` in the text is read as the number it is.
        config: limits; the default ones when omitted.

    Returns:
        every finding at its final severity. A body that is no JSON object gives one advisory ``broken
        stream``, or what its text says where it is an error message.
    """
    detector = Detector(config)
    if isinstance(body, str | bytes | bytearray):
        parsed = parse_json(body)
        if parsed is None:
            return _judge_no_json(detector, body)
        body = parsed
    events = list(events_of(body))
    for event in events:
        detector.feed(event)
    detector.finish()
    return detector.findings if events else [_broken("the answer has no choices and no error")]


def detect_sse(lines: Iterable[str | bytes], config: DetectConfig | None = None) -> list[Finding]:
    """Judge a streamed answer from the lines of its event stream (``data: {...}``, ``data: [DONE]``).

    Returns:
        every finding at its final severity; a stream that ends without ``[DONE]`` and without a finish reason
        is an advisory.
    """
    detector = Detector(config)
    reader = SseReader()
    num_events = 0
    for line in lines:
        for event in reader.feed(line):
            num_events += 1
            detector.feed(event)
    detector.finish()
    findings = detector.findings
    if not num_events and not reader.is_done:
        findings.append(_broken("the stream holds no events"))
    elif not reader.is_done:
        findings.append(_broken("the stream ended without a finish reason and without [DONE]"))
    if reader.num_unreadable:
        count = reader.num_unreadable
        findings.append(_broken(f"{count:,} lines of the stream are no JSON", count))
    return findings


class SseReader:
    """Turns lines of an event stream into events, for callers that judge while they forward.

    ``is_done`` once a finish reason, an error or ``[DONE]`` came; ``num_unreadable`` counts data lines that
    are no JSON.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.num_unreadable = 0

    def feed(self, line: str | bytes) -> list[StreamEvent]:
        """Take one line, with or without its end."""
        text = line if isinstance(line, str) else line.decode("utf-8", "replace")
        if not text.startswith("data:"):
            return []
        data = text[5:].strip()
        if data == "[DONE]":
            self.is_done = True
            return []
        chunk = parse_json(data)
        if chunk is None:
            self.num_unreadable += 1
            return []
        events = list(events_of(chunk))
        self.is_done = self.is_done or any(e.finish_reason is not None or e.error is not None for e in events)
        return events


def parse_json(text: str | bytes | bytearray) -> Any:
    """JSON as servers write it: a bare ``NaN`` or ``Infinity`` is taken. None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def events_of(body: Any) -> Iterator[StreamEvent]:
    """Events of one parsed body or streamed chunk: errors, choices in order, then the usage."""
    if not isinstance(body, Mapping):
        return
    if (error := body.get("error")) is not None or body.get("object") == "error":
        yield StreamEvent(error=_error_text(error if error is not None else body.get("message")))
    choices = body.get("choices")
    for i, choice in enumerate(choices if isinstance(choices, list) else ()):
        if isinstance(choice, Mapping):
            yield from _choice_events(choice, i)
    if (usage := _usage(body.get("usage"))) is not None:
        yield StreamEvent(choice=_first_index(choices), usage=usage)
    if "choices" not in body and "error" not in body and isinstance(body.get("detail"), str | list):
        yield StreamEvent(error=_error_text(body["detail"]))


def _choice_events(choice: Mapping[str, Any], default_index: int) -> Iterator[StreamEvent]:
    raw_index = choice.get("index")
    index = raw_index if type(raw_index) is int and raw_index >= 0 else default_index
    logprobs, tops, token_ids = _logprobs(choice.get("logprobs"))
    if (ids := _token_ids(choice.get("token_ids"))) is not None:
        token_ids = ids
    reason = choice.get("finish_reason")
    texts = list(_texts(choice))
    # ids and logprobs belong to the tokens of all texts together: they ride with the first
    field, text = texts[0] if texts else ("content", "")
    yield StreamEvent(
        choice=index,
        field=field,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        top_logprobs=tops,
        finish_reason=reason if isinstance(reason, str) else None,
    )
    for field, text in texts[1:]:
        yield StreamEvent(choice=index, field=field, text=text)


def _texts(choice: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if text := _text(choice.get("text")):
        yield "text", text
    for name in ("message", "delta"):
        if isinstance(message := choice.get(name), Mapping):
            yield from _message_texts(message)


def _message_texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # one of the two names: servers that send both send the same text twice
    for name in _REASONING_FIELDS:
        if text := _text(message.get(name)):
            yield "reasoning", text
            break
    if text := _content(message.get("content")):
        yield "content", text
    if text := _text(message.get("refusal")):
        yield "refusal", text
    if isinstance(audio := message.get("audio"), Mapping) and (text := _text(audio.get("transcript"))):
        yield "audio.transcript", text
    if isinstance(call := message.get("function_call"), Mapping):
        yield from _call_texts("function_call", call)
    calls = message.get("tool_calls")
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            raw = call.get("index")
            yield from _call_texts(f"tool_calls[{raw if type(raw) is int else i}]", call["function"])


def _call_texts(field: str, function: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("name", "arguments"):
        if text := _text(function.get(name)):
            yield f"{field}.{name}", text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(value: Any) -> str:
    """Text of a message: a string, or the text parts of a list."""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value if isinstance(part, Mapping))
    return _text(value)


_Values = tuple[float | None, ...]


def _logprobs(raw: Any) -> tuple[_Values, tuple[_Values, ...], tuple[int, ...]]:
    """(logprob of each token, of its alternatives, token ids where the server writes them as tokens)."""
    if not isinstance(raw, Mapping):
        return (), (), ()
    if isinstance(content := raw.get("content"), list):
        tokens = [t for t in content if isinstance(t, Mapping)]
        tops = tuple(_values(a.get("logprob") for a in _mappings(t.get("top_logprobs"))) for t in tokens)
        return _values(t.get("logprob") for t in tokens), tops, _ids_of(t.get("token") for t in tokens)
    if isinstance(values := raw.get("token_logprobs"), list):
        alternatives, names = raw.get("top_logprobs"), raw.get("tokens")
        tops = tuple(
            _values(t.values()) if isinstance(t, Mapping) else ()
            for t in (alternatives if isinstance(alternatives, list) else ())
        )
        return _values(values), tops, _ids_of(names if isinstance(names, list) else ())
    return (), (), ()


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def _values(raw: Iterable[Any]) -> _Values:
    return tuple(_value(v) for v in raw)


def _value(raw: Any) -> float | None:
    if isinstance(raw, str):
        # servers that keep to JSON write "NaN" as a string
        return {"nan": math.nan, "inf": math.inf, "infinity": math.inf}.get(raw.lower().lstrip("+"))
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    try:
        return float(raw)
    except OverflowError:
        return math.inf


def _ids_of(tokens: Iterable[Any]) -> tuple[int, ...]:
    """Ids of tokens written as ``token_id:0``; empty unless all are."""
    matches = [_TOKEN_AS_ID.match(t) if isinstance(t, str) else None for t in tokens]
    return tuple(int(m[1]) for m in matches if m is not None) if all(matches) else ()


def _token_ids(raw: Any) -> tuple[int, ...] | None:
    return tuple(raw) if isinstance(raw, list) and all(type(t) is int for t in raw) else None


def _usage(raw: Any) -> Usage | None:
    if not isinstance(raw, Mapping) or type(raw.get("completion_tokens")) is not int:
        return None
    details = raw.get("completion_tokens_details")
    hidden = details.get("reasoning_tokens") if isinstance(details, Mapping) else 0
    num_hidden = hidden if type(hidden) is int else 0
    return Usage(completion_tokens=raw["completion_tokens"], reasoning_tokens=num_hidden)


def _first_index(choices: Any) -> int:
    first = choices[0] if isinstance(choices, list) and choices else None
    index = first.get("index") if isinstance(first, Mapping) else 0
    return index if type(index) is int and index >= 0 else 0


def _error_text(error: Any) -> str:
    if isinstance(error, Mapping) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else repr(error)


def _judge_no_json(detector: Detector, body: str | bytes | bytearray) -> list[Finding]:
    text = body if isinstance(body, str) else bytes(body).decode("utf-8", "replace")
    detector.feed(StreamEvent(error=text))
    if any(f.severity is not Severity.ADVISORY for f in detector.findings):
        return detector.findings
    return [_broken("the answer is no JSON object")]


def _broken(reason: str, count: int = 1) -> Finding:
    return Finding(kind=FindingKind.BROKEN_STREAM, severity=Severity.ADVISORY, reason=reason, count=count)
