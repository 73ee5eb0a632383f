"""The client and the judge, request by request; TLS; places of signs in an answer; the canary."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from firetower.core.errors import ReplayError
from firetower.detect import StreamEvent
from firetower.lab.replay.canary import CanaryProbe
from firetower.lab.replay.client import Client, parse_url
from firetower.lab.replay.judge import AnswerJudge, Result, lost
from firetower.lab.replay.records import TryEnd
from firetower.lab.replay.request import ReplayRequest


def request(**more):
    body = {"messages": [{"role": "user", "content": "agent"}]} | more
    return ReplayRequest(kind="chat.completions", body=body, timeout_s=10, idle_s=5)


@pytest.mark.parametrize(
    ("url", "kind", "captured", "path"),
    [
        ("http://h:1", "chat.completions", "/v1/chat/completions", "/v1/chat/completions"),
        ("http://h:1", "chat.completions", "/api/v3/chat/completions", "/api/v3/chat/completions"),
        ("http://h:1", "call", "", "/v1/completions"),
        ("https://h/v1", "chat.completions", "/v1/chat/completions", "/v1/chat/completions"),
        ("https://h/v1/", "completions", "/v1/completions", "/v1/completions"),
        ("https://h/p/chat/completions", "chat.completions", "/v1/chat/completions", "/p/chat/completions"),
    ],
)
def test_the_path_is_the_users_as_far_as_it_goes(url, kind, captured, path):
    assert parse_url(url).path_for(kind, captured) == path


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "http://user:pw@h", "http://h?key=abc", "http://h#x", "http://h:99999"]
)
def test_urls_that_are_none_or_hold_secrets_are_refused(url):
    with pytest.raises(ReplayError) as error:
        parse_url(url)
    assert "pw" not in str(error.value)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_answers_are_read_either_way(stream, burning_server):
    with burning_server("bangs", 1.0) as server:
        burned = Client(parse_url(server.url)).send(request(stream=stream))
        server.probability = 0
        healthy = Client(parse_url(server.url)).send(request(stream=stream))
    assert (burned.end, healthy.end) == (TryEnd.FIRE, TryEnd.CLEAN)
    assert healthy.num_tokens == 57
    assert healthy.finish_reason == "stop"


def test_a_burned_answer_is_cut_short_unless_it_is_read_in_full(burning_server, monkeypatch):
    with burning_server("flat", 1.0) as server:
        cut = Client(parse_url(server.url)).send(request(stream=True))
        whole = Client(parse_url(server.url), cuts=False).send(request(stream=True))
    assert cut.end is whole.end is TryEnd.FIRE
    assert cut.num_tokens < whole.num_tokens == 57
    assert cut.ignition == 0


def test_an_answer_of_unknown_form_is_lost_not_clean():
    class Odd(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>" if self.path.startswith("/html") else b'{"hello": 1}')

        def log_message(self, *args):
            pass

    with _serve(Odd) as url:
        assert Client(parse_url(f"{url}/html")).send(request()).detail == "the answer is no JSON object"
        assert Client(parse_url(f"{url}/json")).send(request()).detail == "the answer has no choices"


def test_a_busy_server_is_asked_again_and_the_try_is_not_lost():
    class Busy(BaseHTTPRequestHandler):
        num = 0

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            Busy.num += 1
            if Busy.num < 3:
                self.send_response(429)
                self.send_header("Retry-After", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}')

        def log_message(self, *args):
            pass

    with _serve(Busy) as url:
        assert Client(parse_url(url)).send(request()).end is TryEnd.CLEAN
    assert Busy.num == 3


def test_a_redirect_is_not_followed():
    class Redirect(BaseHTTPRequestHandler):
        seen = ()

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            Redirect.seen += (self.path,)
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args):
            pass

    with _serve(Redirect) as url:
        result = Client(parse_url(url)).send(request())
    assert (result.end, result.detail) == (TryEnd.LOST, "HTTP 307 Temporary Redirect")
    assert Redirect.seen == ("/v1/chat/completions",)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_is_checked(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip

    class Fine(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}')

        def log_message(self, *args):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with _serve(Fine, context) as url:
        secure = url.replace("http://127.0.0.1", "https://localhost")
        distrusted = Client(parse_url(secure)).send(request())
        trusted = Client(parse_url(secure), ca_file=str(certificate)).send(request())
    assert distrusted.end is TryEnd.LOST
    assert "--ca-file" in distrusted.fatal
    assert trusted.end is TryEnd.CLEAN


class _serve:  # noqa: N801 - used as a function
    def __init__(self, handler, context=None):
        self.http = HTTPServer(("127.0.0.1", 0), handler)
        self.http.handle_error = lambda *args: None
        if context is not None:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def __exit__(self, *exc):
        self.http.shutdown()
        self.http.server_close()


def test_where_a_sign_stands_is_told_in_tokens():
    judge = AnswerJudge(is_streamed=True)
    judge.feed(StreamEvent(text=t) for t in ["The ", "tower ", "stands"])
    judge.feed(StreamEvent(text="!") for _ in range(2100))
    result = judge.result(seconds=1.0)
    assert (result.end, result.ignition, result.num_tokens) == (TryEnd.FIRE, 3, 2103)


def test_an_error_inside_a_stream_stands_where_the_answer_ended():
    judge = AnswerJudge(is_streamed=True)
    judge.feed([StreamEvent(text="a"), StreamEvent(text="b"), StreamEvent(error="logits contain nan")])
    assert judge.result(seconds=1.0).ignition == 2


def test_a_whole_answer_does_not_pretend_to_know_the_token():
    judge = AnswerJudge(is_streamed=False)
    judge.feed([StreamEvent(text="!" * 3000, finish_reason="length")])
    assert judge.result(seconds=1.0).ignition is None


def probe():
    return CanaryProbe(kind="chat.completions", fields={})


def answer(text="", **more):
    judge = AnswerJudge(is_streamed=False, is_canary=True)
    judge.feed([StreamEvent(text=text, finish_reason="length")])
    return judge.result(seconds=0.1)


def test_a_canary_tells_a_short_burned_answer_from_the_healthy_one():
    canary = probe()
    assert canary.look(lambda r: answer("Red, green and blue. " + r.body["messages"][0]["content"])).persists is False
    assert canary.look(lambda r: answer("!" * 24 + r.body["messages"][0]["content"])).persists is True


def test_a_model_that_repeats_itself_when_well_is_not_called_poisoned():
    canary = probe()
    babble = iter(["x" * 24, "a" * 24] * 2)
    first = canary.look(lambda r: answer(next(babble)))
    assert (first.persists, "repeats itself" in first.detail) == (False, True)
    assert canary.look(lambda r: answer(next(babble))).persists is False


def test_one_character_for_both_prompts_is_poison_even_at_first_sight():
    assert probe().look(lambda r: answer("!" * 24)).persists is True


def test_a_server_without_logprobs_is_asked_without():
    asked = []

    def send(r):
        asked.append(r.body.get("logprobs"))
        if r.body.get("logprobs"):
            return Result(end=TryEnd.LOST, http_status=400, detail="HTTP 400 Bad Request")
        return answer("fine")

    canary = probe()
    assert canary.look(send).persists is False
    assert asked == [True, True, None, None]


def test_no_answer_to_the_canary_decides_nothing():
    assert probe().look(lambda r: lost("timed out")).persists is None
