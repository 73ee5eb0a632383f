"""`on_fire="isolate"`: only the burned rows of a generate() batch stop, the others' tokens are those of a clean run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import firetower
from firetower.attach.isolate import RowGuard
from firetower.core.records import Outcome
from firetower.drills import hosts

PAD = 3


@contextlib.contextmanager
def burn(model: Any, layer: int, rows: list[int], at_length: int) -> Iterator[None]:
    """Write NaN into rows of a layer's output once the sequence has ``at_length`` tokens, without any hook."""
    module = model.model.layers[layer]
    original = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and seen["length"] == at_length:
            out = out.clone()
            out[rows, -1, 5] = float("nan")
        return out

    seen = {"length": 0}
    embed = model.model.embed_tokens
    embed_forward = embed.forward

    def count(ids: Tensor) -> Tensor:
        seen["length"] += ids.shape[1]
        return embed_forward(ids)

    module.forward, embed.forward = forward, count
    try:
        yield
    finally:
        del module.forward, embed.forward


def run(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None, **kwargs}
    return model.generate(ids, attention_mask=options.pop("attention_mask", torch.ones_like(ids)), **options)


def prompts(model: Any, batch: int, length: int = 6) -> Tensor:
    return torch.randint(5, model.config.vocab_size - 5, (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture(params=["small_qwen35_moe", "small_llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return getattr(hosts, request.param)()


@pytest.mark.parametrize(
    ("rows", "step"), [([1], 0), ([1], 3), ([0, 3], 2), ([0, 1, 2, 3], 4)], ids=["prefill", "one", "two", "all"]
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_only_burned_rows_stop(model: Any, rows: list[int], step: int, do_sample: bool) -> None:
    ids = prompts(model, 4)
    torch.manual_seed(5)
    bare = run(model, ids, do_sample=do_sample)
    torch.manual_seed(5)
    with burn(model, 2, rows, 6 + step), firetower.attach(model, on_fire="isolate", store=False) as watch:
        out = run(model, ids, do_sample=do_sample)
    for row in range(4):
        if row in rows:
            assert torch.equal(out[row, : 6 + step], bare[row, : 6 + step])
            assert (out[row, 6 + step :] == PAD).all()
        else:
            assert torch.equal(out[row], bare[row])
    assert sorted(b.sequence for f in watch.fires for b in f.burned)[:1] == rows[:1]
    assert watch.fires[0].outcome is Outcome.ISOLATED
    assert sum(f.count for f in watch.fires) >= len(rows)
    if len(rows) == 4:
        assert out.shape[1] == 6 + step


def test_the_fire_names_the_row(model: Any) -> None:
    with burn(model, 1, [2], 8), firetower.attach(model, on_fire="isolate", store=False) as watch:
        run(model, prompts(model, 4))
    fire = watch.fires[0]
    assert (fire.origin.layer, fire.origin.stage) == (1, "output")
    assert (fire.first.sequence, fire.first.column, fire.first.position) == (2, 5, 7)
    assert [b.sequence for b in fire.burned] == [2]


def test_a_clean_batch_is_untouched(model: Any) -> None:
    ids = prompts(model, 3)
    bare = run(model, ids)
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        assert torch.equal(run(model, ids), bare)
    assert watch.fires == []


def test_left_padded_batch(model: Any) -> None:
    ids = prompts(model, 3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    bare = run(model, ids, attention_mask=mask)
    with burn(model, 1, [0], 8), firetower.attach(model, on_fire="isolate", store=False) as watch:
        out = run(model, ids, attention_mask=mask)
    assert torch.equal(out[1:], bare[1:])
    assert (out[0, 8:] == PAD).all()
    assert watch.fires[0].first.position == 3


@pytest.mark.parametrize("num_return", [1, 2])
def test_beams_burn_as_a_group(num_return: int) -> None:
    model = hosts.small_llama()
    ids = prompts(model, 3)
    options = {"num_beams": 3, "num_return_sequences": num_return}
    bare = run(model, ids, **options)
    # rows 3..5 are the beams of prompt 1; one of them burns
    with burn(model, 1, [4], 9), firetower.attach(model, on_fire="isolate", store=False):
        out = run(model, ids, **options)
    kept = [i for i in range(3 * num_return) if i // num_return != 1]
    burned = [i for i in range(3 * num_return) if i // num_return == 1]
    assert torch.equal(out[kept], bare[kept])
    for i in burned:
        assert (out[i, 9:] == PAD).all()
        assert torch.equal(out[i, :6], ids[1])


def test_return_dict_and_own_processors_are_kept(model: Any) -> None:
    from transformers import LogitsProcessorList

    calls = []

    def own(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(input_ids.shape[1])
        return scores

    ids = prompts(model, 2)
    with burn(model, 1, [1], 8), firetower.attach(model, on_fire="isolate", store=False):
        out = run(model, ids, return_dict_in_generate=True, logits_processor=LogitsProcessorList([own]))
    assert (out.sequences[1, 8:] == PAD).all()
    assert calls == [6, 7, 8, 9, 10, 11, 12, 13]


def test_streamer_gets_no_burned_token(model: Any) -> None:
    class Collect:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    ids = prompts(model, 1)
    bare = run(model, ids)
    streamer = Collect()
    with burn(model, 1, [0], 9), firetower.attach(model, on_fire="isolate", store=False):
        out = run(model, ids, streamer=streamer)
    assert out.tolist() == bare[:, :9].tolist()
    assert streamer.tokens == bare[0, :9].tolist()
    assert streamer.ended


def test_generate_can_be_used_again_after_a_fire(model: Any) -> None:
    ids = prompts(model, 2)
    bare = run(model, ids)
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        with burn(model, 1, [0], 7):
            run(model, ids)
        assert torch.equal(run(model, ids), bare)
        assert len(watch.fires) == 1


MODES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[9]], "min_new_tokens": 3},
    "nucleus": {"do_sample": True, "top_p": 0.9, "temperature": 0.7, "renormalize_logits": True},
    "beams that sample": {"num_beams": 2, "do_sample": True},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
    "end tokens": {"eos_token_id": list(range(0, 512, 7))},
    "no invalid values": {"remove_invalid_values": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [1, 3])
def test_every_decoding_mode(mode: str, call: int) -> None:
    """One row of the ``call``-th forward burns at its last token; the others' tokens stay, up to their end."""
    model = hosts.small_llama()
    ids, options = prompts(model, 3), MODES[mode]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    torch.manual_seed(3)
    bare = run(model, ids, attention_mask=mask, **options)
    layer, calls = model.model.layers[2], []
    original = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            out = out.clone()
            out[options.get("num_beams", 1), -1, 5] = float("nan")
        return out

    layer.forward = forward
    torch.manual_seed(3)
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        out = run(model, ids, attention_mask=mask, **options)
    length = min(out.shape[1], bare.shape[1])
    assert torch.equal(out[[0, 2], :length], bare[[0, 2], :length])
    assert (bare[[0, 2], length:] == PAD).all()
    cut = 6 + max(0, call - (2 if mode == "chunks" else 1))
    assert (out[1, cut:] == PAD).all()
    assert torch.equal(out[1, :cut], bare[1, :cut])
    if mode != "no cache":
        assert len(watch.fires) == 1
    assert (watch.fires[0].outcome, watch.status()["failures"]) == (Outcome.ISOLATED, 0)


def test_a_fire_of_the_guidance_call_stops_its_row() -> None:
    """A processor calls the model once more before a token is chosen: neither step's fire may be lost."""
    model = hosts.small_llama()
    ids = prompts(model, 3)
    bare = run(model, ids, guidance_scale=1.5)
    for call in (1, 2):
        layer, calls = model.model.layers[3], []
        original = layer.forward

        def forward(*args: Any, calls: Any = calls, at: int = call, original: Any = original, **kw: Any) -> Tensor:
            out = original(*args, **kw)
            calls.append(1)
            if len(calls) == at:
                out = out.clone()
                out[1, -1, 5] = float("nan")
            return out

        layer.forward = forward
        with firetower.attach(model, on_fire="isolate", store=False):
            out = run(model, ids, guidance_scale=1.5)
        del layer.forward
        assert torch.equal(out[[0, 2]], bare[[0, 2]])
        assert (out[1, 6:] == PAD).all()


def test_scores_are_as_many_as_the_tokens_that_are_left() -> None:
    model = hosts.small_llama()
    with burn(model, 2, [0, 1], 8), firetower.attach(model, on_fire="isolate", store=False):
        out = run(model, prompts(model, 2), return_dict_in_generate=True, output_scores=True)
    assert out.sequences.shape == (2, 8)
    assert len(out.scores) == 2
    assert torch.isfinite(model.compute_transition_scores(out.sequences, out.scores)).all()


def test_arguments_by_position() -> None:
    from transformers import GenerationConfig, LogitsProcessorList

    model = hosts.small_llama()
    ids = prompts(model, 3)
    config = GenerationConfig(max_new_tokens=8, num_beams=3, pad_token_id=PAD, do_sample=False)
    bare = model.generate(ids, config, LogitsProcessorList([]))
    with burn(model, 1, [4], 9), firetower.attach(model, on_fire="isolate", store=False):
        out = model.generate(ids, config, LogitsProcessorList([]))
    assert torch.equal(out[[0, 2]], bare[[0, 2]])
    assert (out[1, 9:] == PAD).all()
    with firetower.attach(model, store=False), pytest.raises(TypeError, match="multiple values"):
        model.generate(ids, inputs=ids)


def test_outside_generate_a_fire_is_only_recorded() -> None:
    model = hosts.small_llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        model(input_ids=prompts(model, 2))
    assert watch.fires[0].outcome is Outcome.RECORDED


class OwnLoop(torch.nn.Module):
    """A ``generate`` of the user's own that knows nothing of processors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))

    def generate(self, ids: Tensor, num_tokens: int) -> Tensor:
        for _ in range(num_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def test_a_loop_of_the_users_own_runs_and_says_that_it_cannot_isolate(caplog: pytest.LogCaptureFixture) -> None:
    model = OwnLoop()
    model.head.bias.data[3] = float("nan")
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        assert model.generate(torch.ones(2, 3, dtype=torch.long), 4).shape == (2, 7)
    assert watch.fires[0].outcome is Outcome.RECORDED
    assert "fires are recorded, not isolated" in caplog.text


def test_rows_that_cannot_be_told_apart_are_left_alone() -> None:
    """Scores of 4 rows from a model step of 2: which of them burned is not known, and none is stopped by guess."""
    told: list[BaseException] = []
    guard = RowGuard(1, lambda: ({1}, 2), isolate=True, on_failure=told.append)
    scores = torch.randn(4, 7)
    assert torch.equal(guard.process(torch.ones(4, 3), scores), scores)
    assert (guard.cut_at, guard.isolate) == ({}, False)
    assert "cannot tell which row burned" in str(told[0])


def test_threads_isolate_each_their_own_rows() -> None:
    import threading

    model = hosts.small_llama()
    clean, burning = prompts(model, 2), prompts(model, 2, 7)
    bare = [run(model, clean), run(model, burning)]
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        if out.shape[1] == 7:
            out = out.clone()
            out[1, -1, 5] = float("nan")
        return out

    layer.forward = forward
    results: dict[int, Tensor] = {}
    with firetower.attach(model, on_fire="isolate", store=False) as watch:
        jobs = {i: threading.Thread(target=lambda i=i, x=x: results.update({i: run(model, x)})) for i, x in
                enumerate((clean, burning))}  # fmt: skip
        for job in jobs.values():
            job.start()
        for job in jobs.values():
            job.join()
        assert watch.status()["failures"] == 0
    assert torch.equal(results[0], bare[0])
    assert torch.equal(results[1][0], bare[1][0])
    assert (results[1][1, 7:] == PAD).all()
