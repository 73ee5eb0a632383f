"""A burned call is captured: what was asked, how, from which random state; nothing where nothing is stored."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import firetower
from firetower.capture.folder import read_capture
from firetower.capture.store import CaptureFolder, captures_path
from firetower.drills import hosts


@pytest.fixture
def burning() -> Any:
    model = hosts.small_llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    return model


def burn(model: Any, **kwargs: Any) -> firetower.Watch:
    ids = torch.tensor([[3, 3, 7, 8], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    watch = firetower.attach(model, on_fire="isolate", **kwargs)
    torch.manual_seed(11)
    model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=True, top_k=4, pad_token_id=0)
    watch.detach()
    return watch


def test_a_generate_call_is_frozen_with_its_fire(burning: Any) -> None:
    watch = burn(burning)
    [stored] = CaptureFolder().captures()
    capture = read_capture(stored.path)
    assert capture.id == watch.fires[0].id
    assert capture.fire is not None
    assert capture.fire.origin == watch.fires[0].origin
    assert capture.prompt_token_ids == ((7, 8), (5, 6, 7, 8))
    assert capture.request.body["top_k"] == 4
    assert capture.request.body["max_new_tokens"] == 2
    assert "attention_mask" not in capture.request.body
    assert capture.seeds["torch"] == 11
    torch.manual_seed(11)
    assert capture.tensors["torch_rng_state"].data == bytes(torch.get_rng_state().tolist())
    assert capture.model.vocabulary_size == burning.config.vocab_size
    for file in stored.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_one_capture_for_each_origin(burning: Any) -> None:
    burn(burning)
    burn(burning)
    assert len(CaptureFolder().captures()) == 1


def test_captures_stand_beside_a_store_given_by_path(burning: Any, tmp_path: Path) -> None:
    burn(burning, store=tmp_path / "mine.sqlite")
    assert len(CaptureFolder(tmp_path / "mine.sqlite.captures").captures()) == 1
    assert not captures_path().exists()


@pytest.mark.parametrize("options", [{"store": False}, {"captures": False}], ids=["no store", "no captures"])
def test_nothing_is_captured_where_nothing_is_kept(burning: Any, options: dict[str, Any]) -> None:
    burn(burning, **options)
    assert not captures_path().exists()


def test_a_forward_call_is_frozen_by_its_ids(burning: Any, tmp_path: Path) -> None:
    with firetower.attach(burning, on_fire="record", captures=tmp_path):
        burning(input_ids=torch.tensor([[5, 6, 7]]))
    [stored] = CaptureFolder(tmp_path).captures()
    assert read_capture(stored.path).prompt_token_ids == ((5, 6, 7),)


def test_a_capture_that_fails_never_stops_inference(burning: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    watch = burn(burning, captures=blocked / "folder")
    assert watch.fires
    assert watch.status()["capture_failures"] == 1
