"""A burned request burns alone: all others have the bits of a run without the fault; what it held is clean again."""

from __future__ import annotations

import random

import pytest
import torch

from firetower.core.records import Kind, Outcome, Phase
from firetower.engine.drafts import DraftConfig
from firetower.engine.errors import BurnedError
from firetower.engine.inject import Place
from firetower.engine.request import FinishReason, Sampling
from firetower.models.signals import NOT_KEPT, STAGES
from firetower.models.state import pages_clean, slots_clean

NAN, INF, NEG_INF, ODD_NAN = 0x7FC00000, 0x7F800000, 0xFF800000, 0xFFD6E000
KEPT = [s for s in STAGES if s not in NOT_KEPT]
ANSWER = Sampling(max_tokens=10)
NO_BREAKER = {"max_per_minute": 10**6, "breaker_fires": 10**6}


@pytest.fixture(scope="module")
def pool():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 97, (3 + 5 * (i % 17),), generator=generator).tolist() for i in range(32)]


@pytest.fixture(scope="module")
def expected(model, pool):
    """Tokens of every prompt in a run without a fault, with the fault node in it."""
    from firetower.engine.engine import Engine

    with Engine(model, max_batch=8, max_model_len=256, prefill_chunk=64, store=False, inject=True) as twin:
        return [c.token_ids for c in twin.generate(pool, ANSWER)]


def check_others(completions, expected, burned):
    for i, completion in enumerate(completions):
        if i in burned:
            assert completion.finish_reason is FinishReason.BURNED
            assert isinstance(completion.error, BurnedError)
            assert completion.token_ids == expected[i][: len(completion.token_ids)]
        else:
            assert completion.finish_reason is FinishReason.LENGTH, completion.error
            assert completion.token_ids == expected[i]


def check_all_is_back(engine):
    status = engine.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
    assert (status.num_quarantined, status.num_running) == (0, 0)


@pytest.mark.parametrize("stage", KEPT)
def test_a_bad_value_in_any_stage_ends_its_request_alone_and_is_named(faults, pool, expected, stage):
    run = faults(max_batch=4, max_window=1)
    sequences = run.submit(pool[:4], ANSWER)
    run.until_decoding(sequences, 2)
    signal = run.signal(stage)
    rows, columns = run.shapes[signal]
    per_token = rows // 4
    at = 2 * per_token + per_token - 1
    before = len(sequences[2].answer)
    run.step_with(Place(signal=signal, row=at, column=columns - 1, bits=ODD_NAN))
    completions = run.finish(sequences)
    check_others(completions, expected, {2})
    [fire] = run.engine.fires
    error = completions[2].error
    assert (error.fire.id, error.request, error.is_retriable) == (fire.id, sequences[2].request.id, True)
    assert fire.origin == run.engine.model.signals[signal]
    assert (fire.request, fire.phase, fire.outcome) == (sequences[2].request.id, Phase.DECODE, Outcome.ISOLATED)
    first = fire.first
    assert (first.row, first.column, first.bits, first.kind) == (at, columns - 1, ODD_NAN, Kind.NAN)
    assert (first.sequence, first.token, first.is_pad, first.dtype) == (2, 0, False, "float32")
    assert first.position == len(pool[2]) + before - 1
    assert fire.extra["backend"].endswith("/torch, eager, 4 x 1")
    assert fire.token_ids == (*pool[2], *expected[2][:before])
    check_all_is_back(run.engine)


def test_values_of_several_classes_in_several_rows_at_once(faults, pool, expected):
    run = faults(max_batch=8, max_window=1)
    sequences = run.submit(pool[:6], ANSWER)
    run.until_decoding(sequences, 1)
    early, late = run.signal("residual", 0), run.signal("logits")
    run.step_with(
        Place(signal=late, row=0, column=5, bits=INF),
        Place(signal=early, row=3, column=7, bits=NEG_INF),
        Place(signal=early, row=4, column=2, bits=NAN),
    )
    completions = run.finish(sequences)
    check_others(completions, expected, {0, 3, 4})
    burned = {f.request: f for f in run.engine.fires}
    # one origin and class are one fire, counted; the two NaN classes are not one
    by_row = [completions[i].error.fire for i in (0, 3, 4)]
    assert [f.origin.name for f in by_row] == ["logits", "layer 0 residual", "layer 0 residual"]
    assert [(f.first.sequence, f.first.column) for f in by_row] == [(0, 5), (3, 7), (4, 2)]
    assert [f.first.kind for f in by_row[:2]] == [Kind.POS_INF, Kind.NEG_INF]
    # a panel keeps the bits of a signal's first bad row, and the fire says so
    assert by_row[2].extra["own_bits"] is False
    assert "not of this row" in " ".join(by_row[2].notes)
    assert burned


def test_a_bad_draft_row_burns_its_request_and_names_the_position(faults, pool, monkeypatch):
    run = faults(max_batch=2, max_window=4, drafts=DraftConfig(least_accepted_frac=0.0))
    sequences = run.submit([pool[0], pool[1]], Sampling(max_tokens=30))
    run.until_decoding(sequences)
    # every window has three drafts, whatever the model would say
    for sequence in sequences:
        monkeypatch.setattr(sequence.drafter, "propose", lambda most: [3, 4, 5][:most])
    run.engine.step()
    signal = run.signal("output", 1)
    before = len(sequences[0].answer)
    # rows 0 to 3 are the first request's: its committed token, then its drafts
    run.step_with(*(Place(signal=signal, row=row, column=0, bits=NAN) for row in (1, 2, 3)))
    assert run.shapes[signal][0] == 8
    run.finish(sequences)
    [fire] = run.engine.fires
    assert fire.request == sequences[0].request.id
    assert fire.phase is Phase.VERIFY
    assert (fire.first.sequence, fire.first.token) == (0, 1)
    assert fire.first.position == len(pool[0]) + before


def test_pads_alone_burn_nobody_and_are_noted(faults, pool, expected):
    run = faults(max_batch=8, max_window=1)
    sequences = run.submit(pool[:5], ANSWER)
    run.until_decoding(sequences, 1)
    run.step_with(*(Place(signal=run.signal(stage), row=row, column=1, bits=NAN) for stage in ("residual", "output")
                    for row in (5, 6, 7)))  # fmt: skip
    check_others(run.finish(sequences), expected, set())
    status = run.engine.status()
    assert (status.num_fires, status.num_bad_steps) == (0, 0)
    assert status.num_pad_burns > 0
    assert status.last_pad_burn.is_pad
    assert status.last_pad_burn.request is None


def test_a_pad_before_a_real_row_is_said(faults, pool, expected):
    run = faults(max_batch=4, max_window=1)
    sequences = run.submit(pool[:3], ANSWER)
    run.until_decoding(sequences, 1)
    run.step_with(
        Place(signal=run.signal("conv", 0), row=3, column=0, bits=NAN),
        Place(signal=run.signal("attention", 1), row=1, column=0, bits=NAN),
    )
    check_others(run.finish(sequences), expected, {1})
    [fire] = run.engine.fires
    assert fire.pad_before_real
    assert any("a pad row was bad before" in note for note in fire.notes)


@pytest.mark.parametrize("stage", ["residual", "recurrence", "logits"])
def test_a_bad_value_in_a_prompt(faults, pool, expected, stage):
    run = faults(max_batch=4, max_window=1)
    sequences = run.submit(pool[:3], ANSWER)
    signal = run.signal(stage)
    run.engine.step()
    assert sequences[0].answer
    length = 1 if stage == "logits" else len(pool[1])
    run.step_with(Place(signal=signal, row=length - 1, column=3, bits=NAN))
    completions = run.finish(sequences)
    check_others(completions, expected, {1})
    [fire] = run.engine.fires
    assert (fire.phase, fire.request) == (Phase.PREFILL, sequences[1].request.id)
    assert (fire.first.column, fire.first.bits) == (3, NAN)
    assert fire.first.position == len(pool[1]) - 1
    check_all_is_back(run.engine)


def test_a_bad_state_is_named_as_the_state(faults, pool, expected):
    run = faults(max_batch=4, max_window=1)
    sequences = run.submit(pool[:3], ANSWER)
    run.until_decoding(sequences, 2)
    state = run.engine._parts.state
    slot = sequences[1].slot
    with torch.inference_mode():
        state.slots["state"][1, :, slot, 1, 2, 3] = float("nan")
    completions = run.finish(sequences)
    check_others(completions, expected, {1})
    [fire] = run.engine.fires
    assert (fire.origin.stage, fire.origin.layer) == ("recurrent_state", 2)
    # the bad element of the state reaches its whole column, head 1, value 3, with the next key: row 0 of it is first
    assert fire.first.column == (1 * 16 + 0) * 16 + 3
    check_all_is_back(run.engine)


def test_bad_keys_are_named_where_they_are_read(faults, pool, expected):
    run = faults(max_batch=4, max_window=1)
    sequences = run.submit(pool[:3], ANSWER)
    run.until_decoding(sequences, 1)
    state = run.engine._parts.state
    with torch.inference_mode():
        state.pages[0, 0, sequences[2].pages[0], 1, 0, 0] = float("nan")
    check_others(run.finish(sequences), expected, {2})
    [fire] = run.engine.fires
    assert (fire.origin.stage, fire.origin.layer) == ("context", 1)


def test_what_a_burned_request_held_is_cleared_before_it_is_used_again(faults, pool, expected):
    run = faults(max_batch=2, max_window=1, num_pages=2)
    state = run.engine._parts.state
    sequences = run.submit(pool[:2], ANSWER)
    run.until_decoding(sequences, 1)
    slot, pages = sequences[0].slot, list(sequences[0].pages)
    run.step_with(Place(signal=run.signal("conv", 0), row=0, column=0, bits=NAN))
    assert sequences[0].is_done
    assert bool(slots_clean(state, torch.tensor([slot])).all())
    assert bool(pages_clean(state, torch.tensor(pages)).all())
    again = run.submit(pool[2:6], ANSWER)
    completions = run.finish([*sequences, *again])
    assert [c.token_ids for c in completions[2:]] == expected[2:6]
    assert run.engine.status().num_cleared == 2


def test_what_cannot_be_cleared_is_never_used_again(faults, pool, expected, monkeypatch):
    from firetower.engine import isolate

    monkeypatch.setattr(isolate, "slots_clean", lambda state, slots: torch.zeros(len(slots), dtype=torch.bool))
    run = faults(max_batch=2, max_window=1)
    sequences = run.submit(pool[:2], ANSWER)
    run.until_decoding(sequences, 1)
    run.step_with(Place(signal=run.signal("conv", 0), row=0, column=0, bits=NAN))
    slot = sequences[1].slot
    more = run.submit(pool[2:5], ANSWER)
    while not all(s.is_done for s in more):
        run.engine.step()
        assert all(s.slot in (-1, slot) for s in more)
    assert run.engine.status().num_quarantined == 1


def test_a_bad_value_that_no_row_owns_burns_every_row(faults, pool, monkeypatch):
    run = faults(max_batch=2, max_window=1)
    sequences = run.submit(pool[:2], ANSWER)
    run.until_decoding(sequences, 1)
    node = run.node
    mark = node._mark

    def without_rows(signal, ghost):
        node._row_ids, kept = None, node._row_ids
        panel = node._panel
        from firetower.sensors.marks import Mark, mark_rows

        rows = panel.numel() - 3 * node.num_signals - 1
        mark_rows(ghost, Mark(panel=panel, slot=signal, num_signals=node.num_signals, num_rows=rows))
        node._row_ids = kept

    monkeypatch.setattr(node, "_mark", without_rows)
    # what is written to the last hidden states reaches nothing: no other signal names the row
    run.step_with(Place(signal=run.signal("hidden"), row=0, column=0, bits=NAN))
    monkeypatch.setattr(node, "_mark", mark)
    completions = run.finish(sequences)
    assert [c.finish_reason for c in completions] == [FinishReason.BURNED] * 2


OPTIONS = {
    "plain": {"max_window": 1},
    "overlap": {"max_window": 1, "overlap": True},
    "drafts": {"max_window": 3, "drafts": DraftConfig(longest=2, shortest=1, least_accepted_frac=0.0)},
}


def random_trial(run, rng, pool, expected):
    """One batch with 1 to 5 bad rows in a random step; returns how many requests burned."""
    # batches of 2 to 32, most of them small: what takes time is reading the prompts
    count = min(len(pool), rng.choice((2, 3, 3, 4, 5, 6, 7, 9, 13, 18, 32)))
    chosen = rng.sample(range(len(pool)), count)
    sequences = run.submit([pool[i] for i in chosen], ANSWER)
    if rng.random() < 0.8:
        run.until_decoding(sequences, rng.randint(0, 5))
    else:
        for _ in range(rng.randint(1, count)):
            run.engine.step()
    places = []
    for _ in range(rng.randint(1, 5)):
        signal = rng.choice(run.engine.model.kept_signals)
        rows, columns = run.shapes[signal]
        bits = rng.choice([NAN, INF, NEG_INF, ODD_NAN])
        if signal in run.node.neg_inf_legal and bits == NEG_INF:
            bits = NAN
        places.append(Place(signal=signal, row=rng.randrange(rows), column=rng.randrange(columns), bits=bits))
    run.step_with(*places)
    completions = run.finish(sequences)
    burned = {i for i, c in enumerate(completions) if c.finish_reason is FinishReason.BURNED}
    check_others(completions, [expected[i] for i in chosen], burned)
    assert len(burned) <= len(places)
    check_all_is_back(run.engine)
    return len(burned), run.engine.status().num_pad_burns


def run_trials(faults, pool, expected, options, trials, seed):
    from firetower.engine.recovery import RecoveryConfig

    run = faults(max_batch=len(pool), recovery=RecoveryConfig(**NO_BREAKER), **options)
    rng = random.Random(seed)
    outcomes = [random_trial(run, rng, pool, expected) for _ in range(trials)]
    assert sum(burned for burned, _ in outcomes) > trials / 2, "most injections hit a real row"
    assert outcomes[-1][1] > 0, "and some a pad"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_random_injections(faults, pool, expected, options):
    run_trials(faults, pool[:9], expected, options, trials=12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_thousand_random_injections(faults, pool, expected, options, seed):
    run_trials(faults, pool, expected, options, trials=84, seed=100 + seed)


def test_a_row_that_burns_after_its_request_has_ended_is_cleared_all_the_same(faults, pool, expected):
    run = faults(max_batch=2, max_window=1, overlap=True)
    at = next(t for t in range(3, 10) if expected[0][t] not in expected[0][:t])
    stop = Sampling(max_tokens=10, stop_token_ids=(expected[0][at],))
    sequences = [run.engine.submit(pool[0], stop), run.engine.submit(pool[1], ANSWER)]
    while len(sequences[0].answer) < at:
        run.engine.step()
    # the window that chooses the stop token is out; the next one is launched before it is read
    assert sequences[0].num_flights == 1
    run.step_with(Place(signal=run.signal("residual", 0), row=0, column=0, bits=NAN))
    completions = run.finish(sequences)
    assert completions[0].finish_reason is FinishReason.STOP
    assert completions[0].token_ids == expected[0][: at + 1]
    assert completions[1].token_ids == expected[1]
    assert run.engine.fires == ()
    assert run.engine.status().num_cleared == 2
    check_all_is_back(run.engine)
