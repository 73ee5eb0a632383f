"""One request to an OpenAI-compatible server over HTTP(S), its answer judged as it streams in.

``http.client`` only. Redirects are not followed and proxies are not used: the key goes to the host that the user
named, and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from firetower.core.errors import ReplayError
from firetower.detect import DetectConfig, SseReader
from firetower.detect.bodies import detect_response, events_of, parse_json
from firetower.lab.replay.judge import AnswerJudge, Result, lost, sign_of
from firetower.lab.replay.records import TryEnd
from firetower.lab.replay.request import ReplayRequest

KEY_VARIABLE = "FIRETOWER_API_KEY"
MAX_BODY_BYTES = 256 << 20
MAX_LINE_BYTES = 16 << 20
MAX_BUSY_WAITS = 5
_READ_BYTES = 1 << 16
_CONNECT_S = 30.0
_MESSAGE_CHARS = 400
_FATAL = {
    401: f"the server wants a key: put it into {KEY_VARIABLE}",
    403: f"the server refuses the key: check {KEY_VARIABLE}",
    404: "the server has no such path or model: check --target and --model",
    405: "the server does not take this method there: check --target",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go: scheme, host, port and the path that the user gave."""

    scheme: str
    host: str
    port: int
    path: str

    def path_for(self, kind: str, captured_path: str) -> str:
        """Path of the endpoint that answers ``kind``: the user's path as far as it goes, then the usual rest."""
        end = "/chat/completions" if kind == "chat.completions" else "/completions"
        base = self.path.rstrip("/")
        if base.endswith(("/chat/completions", "/completions")):
            return base
        if base:
            return base + end
        return captured_path if captured_path.endswith(end) else f"/v1{end}"

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_url(text: str) -> Endpoint:
    """Take a server's URL apart.

    Raises:
        ReplayError: no http(s) URL, or one with a user, a query or a fragment: a command line is no place for secrets.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise ReplayError(f"target: {e}; give http://HOST:PORT or https://HOST/v1") from e
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ReplayError("target: must be http://HOST:PORT or https://HOST/v1")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ReplayError(f"target={_shown(parts)}: give no user, query or fragment; a key goes into {KEY_VARIABLE}")
    default = 443 if parts.scheme == "https" else 80
    return Endpoint(scheme=parts.scheme, host=parts.hostname, port=port or default, path=parts.path)


def _shown(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.hostname}{parts.path}"


class Client:
    """Sends requests to one server; safe to use from several threads.

    Args:
        endpoint: where to.
        config: limits of the detectors.
        ca_file: certificates to trust, instead of the system's.
        cuts: end the answer once it is a fire, so that nobody waits for 30,000 tokens of ``!``.
        counts_errors: a 5xx, or a connection that breaks within an answer, is a fire.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        config: DetectConfig | None = None,
        ca_file: str | None = None,
        cuts: bool = True,
        counts_errors: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._config = config
        self._cuts = cuts
        self._counts_errors = counts_errors
        self._tls = _tls(ca_file) if endpoint.scheme == "https" else None
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._is_aborted = threading.Event()

    def send(self, request: ReplayRequest) -> Result:
        """Send one request and judge the answer; every failure is a lost try, never an exception."""
        started = time.monotonic()
        deadline = started + request.timeout_s
        path = self.endpoint.path_for(request.kind, request.path)
        for wait in range(MAX_BUSY_WAITS + 1):
            result, busy_s = self._once(request, path, started, deadline)
            if busy_s is None or wait == MAX_BUSY_WAITS or time.monotonic() + busy_s >= deadline:
                break
            self._is_aborted.wait(busy_s)
        return result

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, Any] | None:
        """(status, parsed JSON or None) of a GET; None where no answer came."""
        try:
            with self._connection(timeout_s) as connection:
                connection.request("GET", path, headers=self._headers())
                response = connection.getresponse()
                return response.status, parse_json(response.read(1 << 20))
        except (OSError, http.client.HTTPException):
            return None

    def abort(self) -> None:
        """Break every answer that is under way; their tries are lost."""
        self._is_aborted.set()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _once(self, request: ReplayRequest, path: str, started: float, deadline: float) -> tuple[Result, float | None]:
        """(result, seconds to wait where the server is busy)."""
        has_begun = False
        try:
            with self._connection(min(request.idle_s, request.timeout_s)) as connection:
                body = json.dumps(_wire_body(request), ensure_ascii=False).encode("utf-8", "surrogatepass")
                connection.request("POST", path, body, self._headers())
                response = connection.getresponse()
                has_begun = True
                if response.status == 429 or (response.status == 503 and response.getheader("Retry-After")):
                    return lost(_status(response), seconds=time.monotonic() - started), _retry_after(response)
                reader = _Reader(connection, response, deadline, request.idle_s)
                return self._judge(request, response, reader, started), None
        except TimeoutError:
            limit = "in all" if time.monotonic() >= deadline else "without a byte"
            return lost(f"timed out {limit}", seconds=time.monotonic() - started), None
        except ssl.SSLCertVerificationError as e:
            why = f"the server's certificate cannot be trusted: {e.verify_message}; see --ca-file"
            return lost("certificate not trusted", seconds=time.monotonic() - started, fatal=why), None
        except (OSError, http.client.HTTPException) as e:
            return self._broken(e, has_begun, started), None

    def _judge(
        self,
        request: ReplayRequest,
        response: http.client.HTTPResponse,
        reader: _Reader,
        started: float,
    ) -> Result:
        if response.status >= 300:
            return self._judge_refusal(response, reader, started)
        is_stream = "text/event-stream" in (response.getheader("Content-Type") or "").lower()
        judge = AnswerJudge(self._config, is_streamed=is_stream, is_canary=request.is_canary)
        problem = self._feed_stream(judge, reader) if is_stream else _feed_body(judge, reader)
        result = judge.result(seconds=time.monotonic() - started, http_status=response.status)
        if problem and result.end is not TryEnd.FIRE:
            end = TryEnd.FIRE if self._counts_errors else TryEnd.LOST
            return dataclasses.replace(result, end=end, detail=problem)
        has_error = any(s.kind == "error text" for s in result.signs)
        if has_error and result.end is not TryEnd.FIRE:
            end = TryEnd.FIRE if self._counts_errors else TryEnd.LOST
            return dataclasses.replace(result, end=end, detail="an error inside the answer")
        return result

    def _feed_stream(self, judge: AnswerJudge, reader: _Reader) -> str:
        """Feed every line; returns what is wrong with the stream, or nothing."""
        sse = SseReader()
        try:
            for line in reader.lines():
                if judge.feed(sse.feed(line)) and self._cuts:
                    return ""
                if line.rstrip() == b"data: [DONE]":
                    break  # not every server ends the connection after its last word
        except TimeoutError:
            if judge.is_fire:
                return ""
            raise
        except (OSError, http.client.HTTPException) as e:
            return f"the stream broke off after {judge.num_events:,} events: {_reason(e)}"
        if not sse.is_done:
            return f"the stream ended without an end after {judge.num_events:,} events"
        return "" if judge.num_events else "the stream holds no answer"

    def _judge_refusal(self, response: http.client.HTTPResponse, reader: _Reader, started: float) -> Result:
        raw = reader.all()
        findings = detect_response(raw)
        is_fire = any(f.severity == "fire" for f in findings)
        is_fire = is_fire or (self._counts_errors and response.status >= 500)
        return Result(
            end=TryEnd.FIRE if is_fire else TryEnd.LOST,
            seconds=time.monotonic() - started,
            signs=tuple(map(sign_of, findings)),
            http_status=response.status,
            detail=_status(response),
            message=self._without_key(raw[:4096].decode("utf-8", "replace"))[:_MESSAGE_CHARS],
            fatal="" if is_fire else _FATAL.get(response.status, ""),
        )

    def _broken(self, error: Exception, has_begun: bool, started: float) -> Result:
        detail = f"{'the answer broke off' if has_begun else 'no answer'}: {_reason(error)}"
        is_fire = has_begun and self._counts_errors and not self._is_aborted.is_set()
        result = lost(detail, seconds=time.monotonic() - started)
        return dataclasses.replace(result, end=TryEnd.FIRE) if is_fire else result

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        at = self.endpoint
        connect_s = min(_CONNECT_S, timeout_s)
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(at.host, at.port, timeout=connect_s, context=self._tls)
        else:
            connection = http.client.HTTPConnection(at.host, at.port, timeout=connect_s)
        with self._lock:
            self._open.add(connection)
        try:
            if self._is_aborted.is_set():
                raise ConnectionAbortedError("the campaign was stopped")
            connection.connect()
            connection.sock.settimeout(timeout_s)
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        return headers | {"User-Agent": "firetower"}

    def _without_key(self, text: str) -> str:
        key = os.environ.get(KEY_VARIABLE)
        return text.replace(key, "[key]") if key else text


class _Reader:
    """Reads an answer piece by piece, with a limit on silence and one on the whole."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        deadline: float,
        idle_s: float,
    ) -> None:
        # an answer that closes the connection leaves it without its socket
        self._socket = connection.sock
        self._response = response
        self._deadline, self._idle_s = deadline, idle_s

    def pieces(self) -> Iterator[bytes]:
        """The answer's bytes as they come."""
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the whole answer took too long")
            if self._socket is not None:
                self._socket.settimeout(min(self._idle_s, left))
            piece = self._response.read1(_READ_BYTES)
            if not piece:
                if self._response.length:
                    raise http.client.IncompleteRead(b"", self._response.length)
                return
            yield piece

    def lines(self) -> Iterator[bytes]:
        """The answer's lines, without their ends."""
        rest = b""
        for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE_BYTES:
                raise http.client.HTTPException("a line of the stream has no end")
        if rest:
            yield rest

    def all(self) -> bytes:
        """The whole answer."""
        parts, size = [], 0
        for piece in self.pieces():
            parts.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise http.client.HTTPException(f"the answer has over {MAX_BODY_BYTES >> 20} MiB")
        return b"".join(parts)


def _feed_body(judge: AnswerJudge, reader: _Reader) -> str:
    raw = reader.all()
    body = parse_json(raw)
    if not isinstance(body, dict):
        return "the answer is no JSON object"
    judge.feed(events_of(body))
    return "" if judge.num_events else "the answer has no choices"


def _wire_body(request: ReplayRequest) -> dict[str, Any]:
    """The body as a server takes it; a captured in-process call becomes a completion of its token ids."""
    if request.kind != "call":
        return dict(request.body)
    rows = request.prompt_token_ids or ()
    prompt: Any = list(rows[0]) if len(rows) == 1 else [list(r) for r in rows]
    body = {k: v for k, v in request.body.items() if k not in ("max_new_tokens", "do_sample")}
    if "max_new_tokens" in request.body:
        body["max_tokens"] = request.body["max_new_tokens"]
    if request.body.get("do_sample") is False:
        body["temperature"] = 0
    return {"prompt": prompt} | body


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as e:
        raise ReplayError(f"ca_file={ca_file}: {e.strerror or e}; give a file of PEM certificates") from e


def _status(response: http.client.HTTPResponse) -> str:
    return f"HTTP {response.status} {http.client.responses.get(response.status, '')}".rstrip()


def _retry_after(response: http.client.HTTPResponse) -> float:
    text = response.getheader("Retry-After") or ""
    return min(float(text), 60.0) if text.isdigit() else 2.0


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return "the server closed the connection"
    return (getattr(error, "strerror", None) or type(error).__name__).lower()
