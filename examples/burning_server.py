"""An OpenAI-compatible server that burns now and then, to try `firetower replay` on. Standard library only.

    python examples/burning_server.py --kind poison --probability 0.2 --port 8000

It answers chat completions, streamed or not. A request whose text holds the word "agent" burns with the given
probability; all others are healthy. Kinds:

    bangs        the whole answer is "!"
    flat         logprobs on one value, as over a vocabulary of equals
    not-json     HTTP 400 "Out of range float values are not JSON compliant: nan"
    error-500    HTTP 500 that says nothing
    disconnect   the stream breaks off
    slow         a token every second
    poison       bangs, and from then on every request burns, until POST /restart
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = ("bangs", "flat", "not-json", "error-500", "disconnect", "slow", "poison")
HEALTHY = "The tower stands on the hill and the watch looks out over the dry woods all day long ."
NUM_BANGS = 200
TRIGGER = "agent"


class BurningServer:
    """The server in threads of this process; a context manager.

    Args:
        kind: one of `KINDS`, what a burned answer looks like.
        probability: that a request which holds `TRIGGER` burns.
        seed: of the coin.
        key: that requests must bring, or None.
        delay_s: before each answer.
        port: 0 takes a free one.
    """

    def __init__(
        self,
        kind: str = "bangs",
        probability: float = 0.5,
        *,
        seed: int = 0,
        key: str | None = None,
        delay_s: float = 0.0,
        port: int = 0,
    ) -> None:
        self.kind, self.probability, self.key, self.delay_s = kind, probability, key, delay_s
        self.is_poisoned = False
        self.num_restarts = 0
        self.max_in_flight = 0
        self.bodies: list[dict[str, Any]] = []
        self._in_flight = 0
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> BurningServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def wait(self) -> None:
        """Serve until interrupted."""
        self._thread.join()

    def restart(self) -> None:
        """As a real restart would, cure the poison."""
        self.is_poisoned = False
        self.num_restarts += 1

    def enter(self, body: dict[str, Any]) -> bool:
        """Note a request; returns whether it burns."""
        with self._lock:
            self.bodies.append(body)
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            text = json.dumps(body.get("messages", body.get("prompt", "")))
            burns = self.is_poisoned or (TRIGGER in text and self._rng.random() < self.probability)
            self.is_poisoned |= burns and self.kind == "poison"
            return burns

    def leave(self) -> None:
        """A request was answered."""
        with self._lock:
            self._in_flight -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: BurningServer) -> None:
        super().__init__(address, _Handler)
        self.owner = owner

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event here."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self._send_json(200, {"object": "list", "data": [{"id": "tower-1", "object": "model"}]})

    def do_POST(self) -> None:
        owner = self.server.owner
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/restart":
            owner.restart()
            self._send_json(200, {})
            return
        sent = self.headers.get("Authorization", "")
        if owner.key is not None and sent != f"Bearer {owner.key}":
            self._send_json(401, {"error": {"message": f"Incorrect API key provided: {sent}"}})
            return
        body = json.loads(raw)
        burns = owner.enter(body)
        try:
            time.sleep(owner.delay_s)
            self._answer(body, owner.kind if burns else "")
        finally:
            owner.leave()

    def _answer(self, body: dict[str, Any], kind: str) -> None:
        if kind == "not-json":
            message = "Out of range float values are not JSON compliant: nan"
            self._send_json(400, {"object": "error", "message": message, "code": 400})
        elif kind == "error-500":
            self._send_json(500, {"error": {"message": "Internal Server Error"}})
        else:
            tokens = [f"{word} " for word in HEALTHY.split()] * 3
            if kind in ("bangs", "poison"):
                tokens = ["!"] * NUM_BANGS
            tokens = tokens[: body.get("max_tokens") or len(tokens)]
            logprob = -11.93 if kind == "flat" else None
            if body.get("stream"):
                self._stream(tokens, kind, logprob)
            else:
                self._whole(tokens, kind, logprob, with_logprobs=bool(body.get("logprobs")))

    def _whole(self, tokens: list[str], kind: str, logprob: float | None, *, with_logprobs: bool) -> None:
        finish = "length" if "!" in tokens else "stop"
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(tokens)},
            "finish_reason": finish,
        }
        if with_logprobs or logprob is not None:
            choice["logprobs"] = {"content": _logprobs(tokens, logprob)}
        usage = {"prompt_tokens": 9, "completion_tokens": len(tokens), "total_tokens": 9 + len(tokens)}
        answer = {"id": "cmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage}
        if kind == "slow":
            time.sleep(len(tokens))
        if kind == "disconnect":
            self._send_cut(json.dumps(answer).encode())
            return
        self._send_json(200, answer)

    def _stream(self, tokens: list[str], kind: str, logprob: float | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for i, token in enumerate(tokens):
                if kind == "disconnect" and i == 5:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if kind == "slow":
                    time.sleep(1)
                choice: dict[str, Any] = {"index": 0, "delta": {"content": token}, "finish_reason": None}
                if logprob is not None:
                    choice["logprobs"] = {"content": _logprobs([token], logprob)}
                self._chunk({"choices": [choice]})
            finish = "length" if "!" in tokens else "stop"
            self._chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            self._raw_chunk(b"data: [DONE]\n\n")
            self._raw_chunk(b"")

    def _chunk(self, data: dict[str, Any]) -> None:
        self._raw_chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _raw_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send_json(self, status: int, data: dict[str, Any]) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _send_cut(self, raw: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[: len(raw) // 2])
        self.wfile.flush()
        self.close_connection = True


def _logprobs(tokens: list[str], value: float | None) -> list[dict[str, Any]]:
    return [
        {"token": t, "logprob": -0.1 - 0.01 * (i % 7) if value is None else value, "top_logprobs": []}
        for i, t in enumerate(tokens)
    ]


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="bangs")
    parser.add_argument("--probability", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with BurningServer(args.kind, args.probability, seed=args.seed, port=args.port) as server:
        print(f"listening on {server.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()


if __name__ == "__main__":
    main()
