"""The first look: a file, a server on this machine, a model's folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from firetower.core.errors import FiretowerError, ReplayError
from firetower.lab.triage import Look, TriageSettings, triage

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any] | str]]


class Server:
    """An OpenAI-like server whose answers a test chooses; keeps the headers and bodies it was sent."""

    def __init__(self, answer: Answer, models: tuple[str, ...] = ("tiny",)) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.keys.append(self.headers.get("Authorization"))
                self._send(200, {"data": [{"id": m} for m in models]})

            def do_POST(self) -> None:
                outer.keys.append(self.headers.get("Authorization"))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                self._send(*answer(body))

            def _send(self, status: int, data: Any) -> None:
                text = data if isinstance(data, str) else json.dumps(data)
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if isinstance(data, str) else "application/json")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers; all are closed at the end."""
    servers: list[Server] = []

    def start(answer: Answer, **options: Any) -> Server:
        servers.append(Server(answer, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def whole(text: str, num_tokens: int = 24) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    return {"choices": [choice], "usage": {"completion_tokens": num_tokens}}


def stream(pieces: list[str]) -> str:
    events = [json.dumps({"choices": [{"index": 0, "delta": {"content": p}, "finish_reason": None}]}) for p in pieces]
    events.append(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
    return "".join(f"data: {e}\n\n" for e in [*events]) + "data: [DONE]\n\n"


def well(body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
    text = "Red, green and blue." if "colours" in str(body["messages"]) else "It is Paris, on the Seine."
    return (
        (200, stream(["Once ", "upon a ", "time ", "there was a keeper."]))
        if body.get("stream")
        else (200, whole(text))
    )


def poisoned(body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
    return (200, stream(["!"] * 4000)) if body.get("stream") else (200, whole("!" * 24))


def burns_when_long(body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
    return poisoned(body) if body.get("stream") else well(body)


def test_a_server_that_is_well(serve):
    server = serve(well)
    found = triage(server.url)
    assert not found.is_fire
    assert [c.look for c in found.checks] == [Look.CLEAN] * 3
    assert "not a rare fire" in found.finding
    assert found.next_command == f"firetower replay CAPTURE --target {server.url} --tries 40"
    assert {b["model"] for b in server.bodies} == {"tiny"}


def test_a_poisoned_server(serve):
    found = triage(serve(poisoned).url)
    assert found.is_fire
    assert [c.look for c in found.checks] == [Look.CLEAN, Look.FIRE, Look.FIRE]
    assert "poisoned" in found.finding
    assert found.next_command.startswith("restart the server")


def test_a_server_that_burns_on_longer_answers_only(serve):
    found = triage(serve(burns_when_long).url)
    assert [c.look for c in found.checks] == [Look.CLEAN, Look.CLEAN, Look.FIRE]
    assert "the request burns" in found.finding


def test_an_error_that_says_nan_is_a_fire(serve):
    error = {"error": {"message": "Out of range float values are not JSON compliant: nan", "type": "BadRequestError"}}
    found = triage(serve(lambda body: (400, error)).url)
    assert found.is_fire


def test_a_server_that_refuses_is_not_called_well(serve):
    found = triage(serve(lambda body: (401, {"error": {"message": "no key"}})).url)
    assert not found.is_fire
    assert found.checks[1].look is Look.UNKNOWN
    assert "FIRETOWER_API_KEY" in " ".join(found.checks[1].details)
    assert "no answer that can be judged" in found.finding


def test_a_server_that_is_not_there():
    found = triage("http://127.0.0.1:9", TriageSettings(timeout_s=2))
    assert {c.look for c in found.checks} == {Look.UNKNOWN}


def test_the_key_goes_into_the_header_and_nowhere_else(serve, monkeypatch):
    monkeypatch.setenv("FIRETOWER_API_KEY", "sk-secret-1")
    server = serve(well)
    found = triage(server.url)
    assert set(server.keys) == {"Bearer sk-secret-1"}
    assert "sk-secret" not in str(found)
    assert "sk-secret" not in str(server.bodies)


def test_a_model_that_the_server_does_not_list_is_told(serve):
    found = triage(serve(well).url, TriageSettings(model="other"))
    assert "other is not among them" in found.checks[0].said
    assert found.checks[0].look is Look.WARN


def test_no_url_with_a_key_in_it():
    with pytest.raises(ReplayError, match="FIRETOWER_API_KEY"):
        triage("http://user:secret@127.0.0.1:1")


@pytest.fixture
def weights(tmp_path: Path) -> Callable[..., Path]:
    """A small safetensors file, with a NaN where asked for."""

    def make(bad: bool, name: str = "model.safetensors") -> Path:
        values = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        if bad:
            values[3, 5] = np.nan
        path = tmp_path / name
        save_file({"layers.0.weight": values}, path)
        return path

    return make


def test_a_sound_file(weights):
    found = triage(str(weights(bad=False)))
    assert [c.look for c in found.checks] == [Look.CLEAN]
    assert "sound" in found.finding


def test_a_bad_file(weights):
    found = triage(str(weights(bad=True)))
    assert found.is_fire
    assert "layers.0.weight" in found.checks[0].details[0]
    assert found.next_command == "firetower bits 7fc00000 --dtype float32"


def test_a_path_that_is_not_there():
    with pytest.raises(ReplayError, match="must be a URL"):
        triage("no/such/file")


def test_a_file_that_is_no_weights(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(FiretowerError):
        triage(str(path))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, saved as Transformers saves it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=0,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_sound_model(tiny):
    found = triage(str(tiny), TriageSettings(store=""))
    assert [(c.name, c.look) for c in found.checks] == [("scan", Look.CLEAN), ("watched run", Look.CLEAN)]
    assert "rare fire" in found.finding


def test_a_model_that_overflows_at_run_time(tiny, tmp_path, monkeypatch):
    import shutil

    from safetensors.numpy import load_file

    from firetower.fires import Store

    folder = tmp_path / "hot"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    # finite and not absurd, yet the product of two leaves float16
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] = np.full((64, 32), 900.0, np.float16)
    tensors = {k: v.astype(np.float16) for k, v in tensors.items()}
    tensors["model.layers.1.post_attention_layernorm.weight"] = np.full(32, 50.0, np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    store = tmp_path / "fires.sqlite"
    found = triage(str(folder), TriageSettings(store=str(store)))
    assert found.is_fire
    assert found.checks[0].look is Look.CLEAN
    assert found.fire is not None
    assert found.next_command == f"firetower diagnose {found.fire} --store {store}"
    with Store(store, readonly=True) as opened:
        assert opened.get(found.fire).origin.layer == 1


def test_a_model_with_a_bad_weight_is_not_run(tiny, tmp_path):
    import shutil

    from safetensors.numpy import load_file

    folder = tmp_path / "bad"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = np.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = triage(str(folder), TriageSettings(store=""))
    assert [c.name for c in found.checks] == ["scan"]
    assert found.is_fire
    assert "nothing was run" in found.finding
