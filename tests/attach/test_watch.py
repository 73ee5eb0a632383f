"""`attach` on whole models: coverage, origins, pads, several watches, detach, failure of the watch itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firetower
from firetower.attach.discover import STAGES
from firetower.core.errors import AttachError, NonFiniteError
from firetower.core.records import Kind, Outcome, Phase, Status
from firetower.drills import hosts

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": hosts.small_llama,
    "qwen3_next": hosts.small_qwen3_next,
    "qwen35_moe": hosts.small_qwen35_moe,
    "qwen4_exp": hosts.small_qwen4_exp,
}


@pytest.fixture(params=FAMILIES, ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]()


@pytest.fixture
def moe() -> Any:
    return hosts.small_qwen35_moe()


def prompt(model: Any, batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, model.config.vocab_size - 5, (batch, length), generator=generator)


def generate(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **kwargs}
    return model.generate(ids, attention_mask=kwargs.pop("attention_mask", torch.ones_like(ids)), **kwargs)


def hook_state(model: nn.Module) -> list[tuple[Any, ...]]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
             "_forward_hooks_always_called")  # fmt: skip
    return [(n, *(len(getattr(m, a)) for a in names), sorted(m.__dict__)) for n, m in model.named_modules()]


def test_every_signal_runs_and_stays_silent(family: Any) -> None:
    ids = prompt(family)
    with firetower.attach(family, store=False) as watch:
        family(input_ids=ids)
        ran, declared = watch.coverage()
        not_covered = {s.signal.stage for s in watch.last.not_covered}
        # without a cache there is no state to read: said, not called clean
        assert not_covered <= {"kv", "conv_state", "recurrent_state"}
        generate(family, ids)
        assert watch.last.phase is Phase.DECODE
        ran, declared = watch.coverage()
        assert (ran, watch.last.is_clean, watch.fires) == (declared, True, [])
        assert watch.status()["failures"] == 0


def test_stages_are_those_of_the_design(family: Any) -> None:
    watch = firetower.attach(family, store=False)
    assert {s.signal.stage for s in watch._hooks.step.reading().signals} <= set(STAGES)
    watch.detach()


def test_watched_tokens_equal_bare_tokens(family: Any) -> None:
    ids = prompt(family)
    bare = generate(family, ids)
    for level in ("logits", "layers"):
        with firetower.attach(family, store=False, level=level):
            assert torch.equal(generate(family, ids), bare)


def test_logits_are_bit_identical_on_and_off(family: Any) -> None:
    ids = prompt(family)
    with torch.no_grad():
        bare = family(input_ids=ids).logits
        with firetower.attach(family, store=False):
            assert torch.equal(family(input_ids=ids).logits, bare)


def test_detach_leaves_the_model_as_before(family: Any) -> None:
    before = hook_state(family)
    watch = firetower.attach(family, store=False)
    assert hook_state(family) != before
    watch.detach()
    watch.detach()
    assert hook_state(family) == before


def test_nan_weight_names_layer_stage_row_column_and_the_weight(moe: Any) -> None:
    weight = moe.model.layers[1].mlp.shared_expert.down_proj.weight
    weight.data[3, 4] = float("nan")
    with firetower.attach(moe, store=False), pytest.raises(NonFiniteError) as caught:
        generate(moe, prompt(moe))
    fire = caught.value.fire
    assert (fire.origin.layer, fire.origin.stage) == (1, "down")
    assert fire.origin.module == "model.layers.1.mlp.shared_expert.down_proj"
    assert (fire.first.row, fire.first.column, fire.first.kind) == (0, 3, Kind.NAN)
    assert (fire.first.sequence, fire.first.token, fire.first.position) == (0, 0, 0)
    assert fire.phase is Phase.PREFILL
    assert fire.outcome is Outcome.RAISED
    assert any("the weight itself is non-finite" in n and "row 3, column 4" in n for n in fire.notes)
    assert fire.weights[0].num_nan == 1
    assert fire.id in str(caught.value)


def test_value_written_between_taps(moe: Any) -> None:
    layer = moe.model.layers[2]
    original = layer.forward

    def poisoned(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(hidden_states, *args, **kwargs)
        if out.shape[1] == 1:
            out = out.clone()
            out[1, 0, 9] = float("-inf")
        return out

    layer.forward = poisoned
    with firetower.attach(moe, store=False, on_fire="record") as watch:
        generate(moe, prompt(moe))
    fire = watch.fires[0]
    assert (fire.origin.stage, fire.origin.layer, fire.first.column) == ("output", 2, 9)
    assert (fire.first.kind, fire.first.sequence, fire.phase) == (Kind.NEG_INF, 1, Phase.DECODE)
    assert fire.first.position == 7
    assert [b.sequence for b in fire.burned] == [1]
    # the sequence is burned in five steps: one incident, counted
    assert len(watch.fires) == 1
    assert fire.count == 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_in_place_write_between_output_and_next_input(moe: Any, mode: Any) -> None:
    """The next layer's input is the last layer's output: a write in between must not be taken for clean."""
    written = moe.model.layers[2]

    def write(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (args[0] if args else kwargs["hidden_states"])[0, 4, 3] = float("inf")

    with firetower.attach(moe, store=False, on_fire="record") as watch:
        handle = written.register_forward_pre_hook(write, with_kwargs=True, prepend=True)
        with mode():
            moe(input_ids=prompt(moe))
        handle.remove()
    fire = watch.fires[0]
    assert (fire.origin.stage, fire.origin.layer, fire.first.token, fire.first.column) == ("input", 2, 4, 3)


def test_left_pads_are_silent_and_told(moe: Any) -> None:
    ids = prompt(moe, 2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with firetower.attach(moe, store=False) as watch:
        moe(input_ids=ids, attention_mask=mask)
        assert watch.last.is_clean
        positions = watch._last.frame.positions
        assert positions[0].tolist() == [0, 0, 0, 0, 1, 2]


class PadLeak(nn.Module):
    """A pad row goes bad in one layer; a shared scale leaks it into every row in the next."""

    def __init__(self, leak: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.first = nn.Identity()
        self.scaled = nn.Identity()
        self.leak = leak

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.first(torch.where(attention_mask[..., None] == 0, float("nan"), x))
        return self.scaled(x / x.abs().amax() if self.leak else x)


@pytest.mark.parametrize("leak", [True, False])
def test_pad_then_real_is_reported(leak: bool) -> None:
    model = PadLeak(leak)
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=ids, attention_mask=mask)
    pads = [s for s in watch.last.signals if s.first_pad is not None]
    assert pads[0].signal.module == "first"
    assert watch.last.is_clean is not leak
    if leak:
        assert watch.fires[0].origin.module == "scaled"
        assert watch.fires[0].pad_before_real
        assert any("pad row" in n for n in watch.fires[0].notes)


class Generic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def test_any_other_model_gets_every_leaf() -> None:
    model = Generic()
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(torch.randn(5, 4))
        assert [s.signal.module for s in watch.last.signals] == ["a", "act", "b", ""]
        assert watch.coverage() == (4, 4)
        with torch.no_grad():
            model.a.bias[6] = float("inf")
        model(torch.randn(5, 4))
    assert (watch.fires[0].origin.module, watch.fires[0].first.column) == ("a", 6)
    assert watch.fires[0].first.kind is Kind.POS_INF


def test_masks_of_an_unknown_model_are_silent_until_they_burn() -> None:
    class Mask(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.mask, self.softmax = nn.Linear(4, 4), Mask(), nn.Softmax(-1)
            self.log_probs = nn.LogSoftmax(-1)

        def forward(self, x: Tensor, *, burn: bool = False) -> Tensor:
            scores = self.mask(self.q(x) @ x.transpose(-1, -2))
            if burn:
                scores[0, 1] = float("-inf")
            self.log_probs(scores * 1e4)
            return self.softmax(scores)

    model = Attention()
    with firetower.attach(model, store=False, on_fire="record") as watch, torch.no_grad():
        model(torch.randn(2, 5, 4))
        assert watch.fires == []
        model(torch.randn(2, 5, 4), burn=True)
    assert (watch.fires[0].origin.module, watch.fires[0].first.row) == ("log_probs", 1)


def test_laundered_value_is_reported() -> None:
    class Launder(Generic):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.nan_to_num(self.act(self.a(x))))

    model = Launder()
    model.a.weight.data[2, 1] = float("nan")
    with firetower.attach(model, store=False, on_fire="record") as watch:
        out = model(torch.randn(2, 4))
    assert torch.isfinite(out).all()
    assert watch.fires[0].origin.module == "a"


def test_masked_logits_are_legal_at_the_output_only() -> None:
    class Masked(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.config = base, base.config

        def forward(self, input_ids: Tensor) -> Tensor:
            logits = self.base(input_ids=input_ids).logits
            logits[..., 3:9] = float("-inf")
            return logits

    model = Masked(hosts.small_llama())
    with firetower.attach(model, store=False) as watch:
        model(prompt(model))
        assert watch.last.is_clean
    model.base.lm_head.weight.data[5] = float("-inf")
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(prompt(model))
    assert (watch.fires[0].origin.module, watch.fires[0].first.column) == ("base.lm_head", 5)


def test_a_head_that_bans_tokens_itself_is_silent() -> None:
    class Head(nn.Module):
        def __init__(self, proj: nn.Module) -> None:
            super().__init__()
            self.proj = proj

        def forward(self, x: Tensor) -> Tensor:
            logits = self.proj(x).clone()
            logits[..., -3:] = float("-inf")
            return logits

    model = hosts.small_llama()
    model.lm_head = Head(model.lm_head)
    with firetower.attach(model, store=False) as watch:
        generate(model, prompt(model))
    assert watch.fires == []


def test_raise_inside_forward_still_stores_the_fire() -> None:
    class Picky(Generic):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if not torch.isfinite(out).all():
                raise RuntimeError("sampler: probability tensor contains nan")
            return out

    model = Picky()
    model.a.weight.data.fill_(float("nan"))
    watch = firetower.attach(model, store=False)
    with pytest.raises(RuntimeError, match="sampler") as caught:
        model(torch.randn(2, 4))
    assert watch.fires[0].origin.module == "a"
    assert watch.fires[0].id in caught.value.__notes__[0]
    watch.detach()


def test_two_watches_and_nested_modules(moe: Any) -> None:
    moe.model.layers[3].mlp.gate.weight.data[0, 0] = float("nan")
    outer = firetower.attach(moe, store=False, on_fire="record")
    inner = firetower.attach(moe.model.layers[3].mlp, store=False, on_fire="record")
    moe(input_ids=prompt(moe))
    assert (outer.fires[0].origin.stage, outer.fires[0].origin.layer) == ("router", 3)
    assert inner.fires[0].origin.module == "gate"
    inner.detach()
    moe(input_ids=prompt(moe))
    assert (len(outer.fires), outer.fires[0].count, len(inner.fires)) == (1, 2, 1)
    outer.detach()


def test_two_models_do_not_mix() -> None:
    good, bad = Generic(), Generic()
    bad.b.weight.data[0, 0] = float("nan")
    with firetower.attach(good, store=False) as one, firetower.attach(bad, store=False, on_fire="record") as two:
        good(bad(torch.randn(2, 4)).nan_to_num().repeat(1, 2)[:, :4])
    assert (len(one.fires), len(two.fires)) == (0, 1)


def test_tied_weights_and_autocast() -> None:
    model = hosts.small_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.weight.data[7, 3] = float("nan")
    ids = prompt(model)
    ids[0, 2] = 7
    with torch.autocast("cpu", dtype=torch.bfloat16), firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=ids)
    fire = watch.fires[0]
    assert (fire.origin.stage, fire.origin.layer, fire.first.token, fire.first.column) == ("input", 0, 2, 3)
    assert any("embed_tokens.weight" in n for n in fire.notes)


def test_training_step_is_left_alone() -> None:
    model = Generic()
    with firetower.attach(model, store=False):
        model(torch.randn(5, 4)).sum().backward()
    assert model.a.weight.grad is not None
    plain = copy.deepcopy(model)
    plain.zero_grad()
    assert hook_state(plain) == hook_state(Generic())


def test_failure_of_the_watch_never_stops_inference(moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        """Stands where every check of a host tensor looks first."""

        def __contains__(self, dtype: object) -> bool:
            raise ValueError("broken sensor")

    ids = prompt(moe)
    bare = generate(moe, ids)
    with firetower.attach(moe, store=False) as watch:
        monkeypatch.setattr("firetower.attach.hooks.SUM_DTYPE", Broken())
        monkeypatch.setattr("firetower.attach.hooks._FLOAT32", None)
        assert torch.equal(generate(moe, ids), bare)
        assert watch.status()["failures"] > 100
        assert "broken sensor" in watch.status()["last_failure"]
        monkeypatch.undo()


def test_submodule_called_on_its_own(moe: Any) -> None:
    moe.model.layers[0].mlp.shared_expert.up_proj.weight.data[1, 1] = float("inf")
    with firetower.attach(moe, store=False, on_fire="record") as watch:
        moe.model.layers[0].mlp(torch.randn(1, 3, moe.config.hidden_size))
        moe(input_ids=prompt(moe))
    assert (watch.fires[0].origin.stage, watch.fires[0].first.column) == ("up", 1)


def test_base_model_called_past_the_root(moe: Any) -> None:
    """``model.model(...)`` runs no hook of the root: bad values are reported all the same, once."""
    moe.model.layers[0].mlp.shared_expert.up_proj.weight.data[1, 1] = float("inf")
    with firetower.attach(moe, store=False, on_fire="record") as watch:
        moe.model(input_ids=prompt(moe))
        assert [(f.origin.stage, f.count) for f in watch.fires] == [("up", 1)]
        assert watch.last.origin.signal.stage == "up"
    with firetower.attach(moe, store=False) as watch, pytest.raises(NonFiniteError) as caught:
        moe.model(input_ids=prompt(moe))
    assert caught.value.fire.origin.stage == "up"
    moe.model.layers[0].mlp.shared_expert.up_proj.weight.data[1, 1] = 0.0
    with firetower.attach(moe, store=False) as watch:
        moe.model(input_ids=prompt(moe))
        assert watch.fires == []
        assert watch.last.is_clean


def test_encoder_decoder_whose_encoder_burns() -> None:
    """generate() calls the encoder on its own, before any step of the root."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model: Any = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(2, 60, (2, 5))
    with firetower.attach(model, store=False) as watch:
        model.generate(ids, max_new_tokens=3, num_beams=2)
        assert watch.fires == []
    model.encoder.block[1].layer[1].DenseReluDense.wi.weight.data[4, 0] = float("nan")
    with firetower.attach(model, store=False), pytest.raises(NonFiniteError) as caught:
        model.generate(ids, max_new_tokens=3)
    assert caught.value.fire.origin.module == "encoder.block.1.layer.1.DenseReluDense.wi"


def test_a_copy_of_a_watched_model_runs_itself() -> None:
    model = hosts.small_llama()
    ids = prompt(model)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        twin = copy.deepcopy(model)
        twin.lm_head.weight = nn.Parameter(torch.full_like(model.lm_head.weight, float("nan")))
        bare = generate(model, ids)
        assert watch.fires == []
        generate(twin, ids)
        assert watch.fires[0].origin.stage == "logits"
        assert torch.equal(generate(model, ids), bare)


def test_detaching_the_inner_of_two_watches_first() -> None:
    model = hosts.small_llama()
    ids = prompt(model)
    bare = generate(model, ids)
    before = hook_state(model)
    first = firetower.attach(model, store=False, on_fire="isolate")
    second = firetower.attach(model, store=False, on_fire="isolate")
    first.detach()
    assert torch.equal(generate(model, ids), bare)
    second.detach()
    assert hook_state(model) == before


def test_fire_goes_to_the_default_store(moe: Any) -> None:
    moe.model.layers[1].input_layernorm.weight.data[0] = float("nan")
    with firetower.attach(moe, name="tiny") as watch, pytest.raises(NonFiniteError) as caught:
        moe(input_ids=prompt(moe), use_cache=False)
    with firetower.Store() as store:
        stored = store.get(caught.value.fire.id)
    assert stored == watch.fires[0]
    assert (stored.model, stored.origin.stage, stored.origin.layer) == ("tiny", "attention", 1)


def test_broken_store_never_stops_inference(moe: Any, tmp_path: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    moe.lm_head.weight.data[0, 0] = float("nan")
    with firetower.attach(moe, on_fire="record", store=folder) as watch:
        moe(input_ids=prompt(moe))
        assert watch.fires
        assert watch.status()["store_failures"] == 1
        assert str(folder) in str(watch.status()["store_last_error"])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({"level": "deep"}, "level='deep'"), ({"on_fire": "explode"}, "on_fire='explode'")],
)
def test_bad_options_are_clear(kwargs: dict[str, str], words: str) -> None:
    with pytest.raises(AttachError, match=words):
        firetower.attach(Generic(), **kwargs)
    with pytest.raises(AttachError, match=r"must be a torch\.nn\.Module"):
        firetower.attach("gpt2")


def test_reading_before_any_step_is_an_error() -> None:
    with firetower.attach(Generic(), store=False) as watch:
        assert watch.last is None
        assert watch.coverage() == (0, 4)
        with pytest.raises(AttachError, match="run the model first"):
            watch.read()


def test_skipped_branch_is_not_covered_rather_than_clean() -> None:
    class Branch(Generic):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    with firetower.attach(Branch(), store=False) as watch:
        watch.model(torch.randn(1, 4))
    assert {s.signal.module: s.status for s in watch.last.signals} == {
        "a": Status.CLEAN,
        "act": Status.NOT_COVERED,
        "b": Status.NOT_COVERED,
        "": Status.CLEAN,
    }
    assert all(s.reason for s in watch.last.not_covered)


def test_layers_offloaded_to_disk_by_accelerate(tmp_path: Any) -> None:
    """A device map keeps some weights away until their module runs: hooks of both sides must live together."""
    from accelerate import dispatch_model

    model = hosts.small_llama()
    ids = prompt(model)
    bare = model(input_ids=ids).logits
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(model.model.layers))}
    model.model.layers[1].mlp.up_proj.weight.data[2, 0] = float("nan")
    model = dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    with firetower.attach(model, store=False, on_fire="record") as watch:
        out = model(input_ids=ids).logits
        assert watch.status()["failures"] == 0
    assert out.shape == bare.shape
    assert (watch.fires[0].origin.stage, watch.fires[0].origin.layer, watch.fires[0].first.column) == ("up", 1, 2)


def test_threads_keep_their_steps_apart() -> None:
    import threading

    model = hosts.small_llama()
    good, bad = prompt(model, 1, 5), prompt(model, 1, 9)
    mlp = model.model.layers[2].mlp
    original = mlp.forward

    def forward(x: Tensor) -> Tensor:
        out = original(x)
        if x.shape[1] == 9:
            out = out.clone()
            out[0, 3, 4] = float("inf")
        return out

    mlp.forward = forward
    barrier = threading.Barrier(2)

    def run(ids: Tensor) -> None:
        for _ in range(20):
            barrier.wait()
            with torch.no_grad():
                model(input_ids=ids)

    with firetower.attach(model, store=False, on_fire="record") as watch:
        threads = [threading.Thread(target=run, args=(ids,)) for ids in (good, bad)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert watch.status()["failures"] == 0
    assert [(f.origin.stage, f.first.token, f.first.shape[1]) for f in watch.fires] == [("output", 3, 9)]
    assert watch.fires[0].count == 20
