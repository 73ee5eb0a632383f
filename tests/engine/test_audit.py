"""The state audit: each planted fault is found and named, and clean twins are silent."""

from __future__ import annotations

import math
import random

import pytest
import torch

from firetower.core.records import Status
from firetower.engine.audit import BLOCK_WORDS, Audit, Holder, block_sums
from firetower.engine.drafts import DraftConfig
from firetower.engine.dump import read_dump
from firetower.engine.inject import Place
from firetower.engine.request import FinishReason, Sampling
from firetower.models.config import HybridConfig
from firetower.models.state import new_state

NAN = 0x7FC00000
EAGER = DraftConfig(longest=2, shortest=1, least_accepted_frac=0.0)
WAYS = {
    "plain": {"max_window": 1},
    "overlap": {"max_window": 1, "overlap": True},
    "drafts": {"max_window": 4, "drafts": EAGER},
}
INTS = {2: torch.int16, 4: torch.int32}


@pytest.fixture
def prompts(prompt):
    return [prompt(n, n) for n in (3, 7, 70, 65, 9)]


def decoding(faults, prompts, **options):
    one = faults(**options)
    sequences = one.submit(prompts, Sampling(max_tokens=20))
    one.until_decoding(sequences, extra_steps=3)
    return one, sequences


def bad_of(fire):
    return fire.extra["audit"]["bad"]


# weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flipped_bit_is_found_and_named_wherever_it_is(tiny, dtype):
    model = tiny(3)
    if dtype is not torch.float32:
        from firetower.models.hybrid import HybridModel
        from firetower.models.weights import random_weights

        model = HybridModel(model.config, random_weights(model.config, dtype, "cpu", 3))
    state = new_state(model.config, num_pages=1, num_slots=1, dtype=dtype)
    audit = Audit(model, state, weights_every_s=0.0)
    [clean] = audit.weights()
    assert clean.status is Status.CLEAN
    rng = random.Random(5)
    for name, x in model.weights.named_tensors():
        place = [rng.randrange(n) for n in x.shape]
        bit = rng.randrange(8 * x.element_size())
        one = x[tuple(place)].reshape(1)
        before = int(one.view(INTS[x.element_size()])) & ((1 << 8 * x.element_size()) - 1)
        kind = INTS[x.element_size()]
        raw = x.view(kind) if x.is_contiguous() else x.t().view(kind).t()
        flip = (1 << bit) if bit + 1 < 8 * x.element_size() else -(1 << bit)
        raw[tuple(place)] ^= flip
        [item] = audit.weights()
        assert (item.status, item.place["tensor"], item.place["element"]) == (Status.BAD, name, place)
        width = 2 * x.element_size()
        assert item.place["bits_at_load"] == f"{before:0{width}x}"
        assert item.place["bits"] == f"{before ^ (1 << bit):0{width}x}"
        assert item.first.startswith(f"{name}{place}: bits ")
        raw[tuple(place)] ^= flip
        assert audit.weights()[0].status is Status.CLEAN


def test_several_changes_name_the_block(tiny):
    model = tiny(3, vocab_size=997)
    audit = Audit(model, new_state(model.config, num_pages=1, num_slots=1, dtype=torch.float32), weights_every_s=0.0)
    x = model.weights.embedding
    assert x.numel() > BLOCK_WORDS
    x[700] += 1.0
    [item] = audit.weights()
    assert item.status is Status.BAD
    assert "several words differ from the load" in item.first
    assert item.place["begin"] <= [700, 0] <= [700, 31] <= item.place["end"]
    assert item.place["num_bad_blocks"] == 1
    x[0] += 1.0
    assert audit.weights()[0].place["num_bad_blocks"] == 2


def test_sums_are_of_every_byte():
    for count in (1, 3, BLOCK_WORDS * 2, BLOCK_WORDS * 2 + 1, 5 * BLOCK_WORDS - 3):
        x = torch.zeros(count, dtype=torch.bfloat16)
        before = block_sums(x)
        assert before.shape == (math.ceil(math.ceil(count / 2) / BLOCK_WORDS), 2)
        x[-1] = 1.0
        assert (block_sums(x) != before).any(1).sum() == 1


def test_a_look_that_was_just_taken_is_not_called_clean(model):
    now = [100.0]
    state = new_state(model.config, num_pages=1, num_slots=1, dtype=torch.float32)
    audit = Audit(model, state, weights_every_s=10.0, clock=lambda: now[0])
    assert audit.weights()[0].status is Status.CLEAN
    now[0] += 2.5
    [item] = audit.weights()
    assert (item.status, item.reason) == (Status.NOT_COVERED, "looked at 2.5 s before: all were clean")
    now[0] += 10
    assert audit.weights()[0].status is Status.CLEAN


def test_a_flipped_weight_bit_is_in_the_fire_that_it_makes(faults, tiny, prompts, tmp_path):
    model = tiny(4)
    one, sequences = decoding(faults, prompts, own=model, record_windows=2, dumps=tmp_path / "dumps", max_window=1)
    # the exponent's high bit of one weight: large enough to overflow somewhere behind
    w = model.weights.layers[1].moe.down_proj
    flat = int((w.abs() > 0.5).reshape(-1).to(torch.uint8).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), w.shape)]
    w.view(torch.int32)[tuple(place)] |= 0x7F800000
    one.finish(sequences)
    assert one.engine.fires, "the weight makes a bad value"
    fire = one.engine.fires[0]
    expected = f"weights differ from the load, layers.1.moe.down_proj{place}: bits "
    assert any(said.startswith(expected) for said in bad_of(fire)), bad_of(fire)
    assert any(note.startswith(f"state audit: {expected}") for note in fire.notes)
    dump = read_dump(tmp_path / "dumps" / fire.id)
    assert [a.place["tensor"] for a in dump.audit if a.what == "weights"] == ["layers.1.moe.down_proj"]


# states


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_nan_in_a_recurrent_state_is_found_and_named(faults, prompts, way, layer):
    one, sequences = decoding(faults, prompts, **way)
    state, slot = one.engine._parts.state, sequences[2].slot
    # both halves: with a window in flight either may be the one that is read next
    state.slots["state"][[0, 2].index(layer), :, slot, 1, 3, 4] = torch.nan
    one.finish(sequences)
    fire = next(f for f in one.engine.fires if f.request == sequences[2].request.id)
    said = f"recurrent of request {fire.request} (burned, kept half) first bad at layer {layer}, part state, head 1"
    assert any(s.startswith(said) and s.endswith("before the step that burned") for s in bad_of(fire)), bad_of(fire)
    others = [s for s in bad_of(fire) if f"request {fire.request} " not in s]
    assert others == [], "neighbours and weights are clean"


def test_a_nan_in_a_pending_token_is_found_and_named(faults, prompts):
    one, sequences = decoding(faults, prompts, max_window=1)
    state, slot = one.engine._parts.state, sequences[2].slot
    state.slots["pending_v"][1, :, slot, 0, 1, 4] = torch.nan
    one.finish(sequences)
    [fire] = one.engine.fires
    said = f"recurrent of request {fire.request} (burned, kept half) first bad at layer 2, part pending_v, token 0"
    assert any(s.startswith(said) and s.endswith("before the step that burned") for s in bad_of(fire)), bad_of(fire)


def test_a_nan_in_a_convolution_is_found_and_named(faults, prompts):
    one, sequences = decoding(faults, prompts, max_window=1)
    state, slot = one.engine._parts.state, sequences[1].slot
    state.conv_storage[1, 2 * slot : 2 * slot + 2, 1, 7] = torch.nan
    one.finish(sequences)
    [fire] = one.engine.fires
    said = f"conv of request {fire.request} (burned, kept half) first bad at layer 2, tap 1, channel 7: nan"
    assert any(s.startswith(said) for s in bad_of(fire)), bad_of(fire)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_nan_in_a_page_is_found_and_named(faults, prompts, way, kv_dtype):
    one, sequences = decoding(faults, prompts, kv_dtype=kv_dtype, **way)
    state, pages = one.engine._parts.state, sequences[2].pages
    position = 66
    page, offset = pages[position // state.page_size], position % state.page_size
    if kv_dtype is torch.int8:
        state.page_scales[0, 1, page, offset, 0] = torch.nan
    elif kv_dtype is None:
        state.pages[0, 1, page, offset, 0, 9] = torch.nan
    else:
        state.pages.view(torch.uint8)[0, 1, page, offset, 0, 9] = 0x7F
    one.finish(sequences)
    fire = next(f for f in one.engine.fires if f.request == sequences[2].request.id)
    part = "value scale" if kv_dtype is torch.int8 else "value"
    said = f"kv of request {fire.request} (burned) first bad at layer 1, part {part}, position 66, page {page}, head 0"
    assert any(s.startswith(said) and s.endswith("before the step that burned") for s in bad_of(fire)), bad_of(fire)
    assert [s for s in bad_of(fire) if f"request {fire.request} " not in s] == []


def test_a_bad_neighbour_is_named_as_one(faults, prompts):
    """A value in a page of a neighbour that its masked attention never reads would burn nobody: the audit sees it."""
    one, sequences = decoding(faults, prompts, max_window=1)
    state, other = one.engine._parts.state, sequences[3]
    one.node.arm([Place(signal=one.signal("attention", 1), row=2, column=5, bits=NAN)])
    # between launch and reading: the neighbour's own step did not see it
    launch = one.engine._parts.loop.runner._window

    def planting(*args, **kwargs):
        flight = launch(*args, **kwargs)
        state.pages[0, 0, other.pages[0], 4, 0, 2] = torch.inf
        return flight

    one.engine._parts.loop.runner._window = planting
    one.engine.step()
    one.engine._parts.loop.runner._window = launch
    [fire] = one.engine.fires
    said = f"kv of request {other.request.id} (neighbour) first bad at layer 1, part key, position 4, page"
    assert [s for s in bad_of(fire) if "neighbour" in s and s.startswith(said)], bad_of(fire)
    one.node.disarm()
    one.finish(sequences)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("stage", ["input", "conv", "recurrence", "down", "logits"])
def test_what_the_step_itself_wrote_is_not_called_older(faults, prompts, way, stage):
    """The clean twin: the same fires from values that no state held before; only the written half may be bad."""
    one, sequences = decoding(faults, prompts, **way)
    for _ in range(3):
        one.step_with(Place(signal=one.signal(stage), row=1, column=3, bits=NAN))
    done = one.finish(sequences)
    assert one.engine.fires
    assert [c.finish_reason for c in done].count(FinishReason.BURNED) >= 1
    for fire in one.engine.fires:
        audit = fire.extra["audit"]
        assert audit["num_clean"] >= 5
        for said in audit["bad"]:
            assert said.endswith("written by or after it"), said
            assert f"of request {fire.request} (burned" in said, said
            assert "kept half" not in said, said
    assert one.engine.status().num_evidence_failures == 0


def test_prompts_that_burn_are_audited_too(faults, prompts):
    one = faults(prefill_chunk=64)
    sequences = one.submit(prompts, Sampling(max_tokens=4))
    one.step_with(Place(signal=one.signal("conv", 0), row=1, column=0, bits=NAN))
    one.finish(sequences)
    fire = one.engine.fires[0]
    assert fire.phase == "prefill"
    assert fire.extra["audit"]["num_clean"] >= 1
    assert all("written by or after it" in s for s in bad_of(fire))
    assert one.engine.status().num_evidence_failures == 0


def test_only_what_counts_is_looked_at(model):
    state = new_state(model.config, num_pages=3, num_slots=2, page_size=64, dtype=torch.float32)
    audit = Audit(model, state)
    state.slots["pending_g"][:, 0, 1, 0] = -torch.inf
    state.slots["pending_k"][:, 0, 1, 2] = torch.nan
    state.pages[:, :, 2, 10] = torch.nan
    # an empty slot has NaN behind its committed columns
    assert bool(state.conv_storage[:, 2, 3:].isnan().all())
    state.conv_storage[:, 2, 3:5] = 0.0

    def statuses(**changes):
        given = {"request": "a", "role": "burned", "slot": 1, "pages": (0, 2), "num_tokens": 74, "begin": 73}
        return {i.what: i.status for i in audit.holder(Holder(**given | {"num_kept": 2} | changes))}

    assert set(statuses().values()) == {Status.CLEAN}
    assert statuses(num_tokens=75)["kv"] is Status.BAD
    assert statuses(num_kept=3) == {"recurrent": Status.BAD, "conv": Status.BAD, "kv": Status.CLEAN}
    assert set(statuses(slot=-1).values()) == {Status.NOT_COVERED}


def test_it_can_be_turned_off(faults, prompts):
    one, sequences = decoding(faults, prompts, audit=False)
    one.step_with(Place(signal=one.signal("logits"), row=1, column=3, bits=NAN))
    one.finish(sequences)
    assert "audit" not in one.engine.fires[0].extra
    assert isinstance(one.engine.model.config, HybridConfig)


def test_an_audit_that_fails_is_said_and_stops_nothing(faults, prompts):
    one, sequences = decoding(faults, prompts, max_window=1)
    one.engine._parts.evidence.audit.weights = lambda: 1 / 0
    one.step_with(Place(signal=one.signal("logits"), row=1, column=3, bits=NAN))
    done = one.finish(sequences)
    assert [c.finish_reason for c in done].count(FinishReason.LENGTH) == 4
    assert one.engine.fires[0].extra["evidence_failure"].startswith("ZeroDivisionError")
    assert one.engine.status().num_evidence_failures == 1
    assert "ZeroDivisionError" in one.engine.status().evidence_error
