"""A Transformers model as target, under the watch: a small Qwen3.5-MoE some of whose token embeddings are NaN."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from firetower.capture import Capture, ModelInfo, write_capture
from firetower.capture.records import Request
from firetower.core.errors import ReplayError
from firetower.fires.store import Store
from firetower.lab.replay.campaign import open_campaign
from firetower.lab.replay.records import CampaignEnd, Isolation, SeedMode, TryEnd
from firetower.lab.replay.targets import open_runner, parse_target

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPT = (5, 17, 42, 8, 99, 23)
BAD_TOKENS = range(475, 499)
"""Not among those that the canary's greedy answers hold, else nothing but the canary would burn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that burns when it samples one of `BAD_TOKENS`: about one try in three."""
    from firetower.drills.hosts import small_qwen35_moe

    model = small_qwen35_moe(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[list(BAD_TOKENS)] = float("nan")
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def call(tmp_path) -> Path:
    """A captured in-process call."""
    capture = Capture(
        id="call-1",
        created_at="2026-01-01T00:00:00.000Z",
        request=Request(kind="call", body={"max_new_tokens": 8, "do_sample": True}),
        prompt_token_ids=(PROMPT,),
        model=ModelInfo(name="small"),
    )
    return write_capture(capture, tmp_path / "call")


def run(folder, settings):
    opened = open_campaign(folder, settings)
    try:
        return opened.run()
    finally:
        opened.close()


def test_fires_are_what_the_guard_says_with_origin_bits_and_place(folder, call, settings):
    campaign = run(call, settings(str(folder), 12, isolation=Isolation.NONE, seed_mode=SeedMode.FRESH))
    fires = [t for t in campaign.tries if t.end is TryEnd.FIRE]
    assert 0 < len(fires) < 12
    assert campaign.target_kind == "model"
    # the burned token is the input of layer 0 in the step after it was sampled, so never the first
    assert {t.origin for t in fires} == {"layer 0 input"}
    assert all(t.bits == "7fc00000" and t.ignition is not None and t.ignition >= 1 for t in fires)
    assert all(t.num_tokens == 8 for t in campaign.tries if t.end is TryEnd.CLEAN)
    assert [c.persists for c in campaign.canaries] == [False] * (1 + len(fires))


def test_ignition_is_the_token_that_follows_the_bad_one(folder, call, settings):
    from firetower.capture import read_capture
    from firetower.lab.replay.arms import Arm
    from firetower.lab.replay.plan import fresh_seed
    from firetower.lab.replay.request import Edits, RequestMaker

    runner = open_runner(parse_target(str(folder), store=""))
    maker = RequestMaker(read_capture(call), Edits(), seed_mode=SeedMode.FRESH)
    results = {}
    for number in range(12):
        request = maker.request_for(Arm(name="a"), number, 1)
        results[number] = runner.run(request)
    runner.close()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert {r.end for r in results.values()} == {TryEnd.CLEAN, TryEnd.FIRE}
    for number, result in results.items():
        tokens = sampled_tokens(model, fresh_seed(0, number, 1))
        bad = next((i for i, t in enumerate(tokens) if t in BAD_TOKENS), None)
        burned = bad is not None and bad < 7
        assert (result.end is TryEnd.FIRE) is burned
        assert result.ignition == (bad + 1 if burned else None)


def sampled_tokens(model, seed) -> list[int]:
    """What the bare model samples; it ends where its sampler meets the NaN."""
    torch.manual_seed(seed)
    ids = torch.tensor([PROMPT])
    tokens: list[int] = []

    def note(input_ids, scores):
        tokens.append(int(input_ids[0, -1]))
        return torch.zeros(1, dtype=torch.bool)

    with torch.inference_mode(), contextlib.suppress(RuntimeError):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=True, stopping_criteria=[note]
        )
    return tokens


def test_every_try_as_captured_gets_its_own_random_state(folder, call):
    from firetower.capture import read_capture
    from firetower.lab.replay.arms import Arm
    from firetower.lab.replay.request import Edits, RequestMaker

    runner = open_runner(parse_target(str(folder), store=""))
    request = RequestMaker(read_capture(call), Edits()).request_for(Arm(name="a"), 0, 1)
    seeds = []
    for _ in range(3):
        torch.manual_seed(0)
        runner.run(request)
        seeds.append(torch.initial_seed())
    runner.close()
    assert request.seed is None
    assert len(set(seeds)) == 3


def test_a_model_that_always_burns_needs_no_captured_request(folder, call, settings, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("inf")
    model.save_pretrained(tmp_path / "bad")
    campaign = run(call, settings(str(tmp_path / "bad"), 4, isolation=Isolation.NONE, recover_wait_s=0.1))
    assert campaign.ended is CampaignEnd.POISONED
    assert campaign.saw_fire
    assert campaign.tries == ()


def test_fires_are_stored_under_the_id_that_the_try_names(folder, call, settings, tmp_path):
    import dataclasses

    how = settings(str(folder), 12, isolation=Isolation.NONE, seed_mode=SeedMode.FRESH)
    how = dataclasses.replace(how, target=dataclasses.replace(how.target, store=str(tmp_path / "fires.sqlite")))
    campaign = run(call, how)
    named = {t.fire for t in campaign.tries if t.fire}
    assert named
    with Store(tmp_path / "fires.sqlite") as store:
        stored = {store.get(i).id: store.get(i).count for i in named}
    assert set(stored) == named
    assert sum(stored.values()) >= sum(t.end is TryEnd.FIRE for t in campaign.tries)


def test_a_folder_that_is_no_model_is_a_clear_error(tmp_path, call, settings):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReplayError, match="cannot be loaded"):
        run(call, settings(str(tmp_path / "empty"), 1, isolation=Isolation.NONE))


@pytest.mark.slow
def test_a_child_process_says_the_same(folder, call, settings):
    here = run(call, settings(str(folder), 6, isolation=Isolation.NONE, seed_mode=SeedMode.FRESH))
    child = run(call, settings(str(folder), 6, isolation=Isolation.RESTART, seed_mode=SeedMode.FRESH))
    assert [(t.end, t.ignition, t.bits) for t in here.tries] == [(t.end, t.ignition, t.bits) for t in child.tries]
    fires = sum(t.end is TryEnd.FIRE for t in child.tries)
    assert len({t.process for t in child.tries}) == fires + (child.tries[-1].end is not TryEnd.FIRE)
