"""Retry and heal through the engine: the client gets the tokens of a run without the fault, or a clear error."""

from __future__ import annotations

import random

import pytest
import torch

from firetower.core.records import Outcome
from firetower.engine.drafts import DraftConfig
from firetower.engine.errors import BurnedError
from firetower.engine.inject import Place
from firetower.engine.recovery import OnFire, RecoveryConfig
from firetower.engine.request import FinishReason, Sampling

NAN = 0x7FC00000
ANSWER = Sampling(max_tokens=12)
SAMPLED = Sampling(max_tokens=12, temperature=1.5, seed=3, repetition_penalty=1.2)
EAGER = DraftConfig(longest=2, shortest=1, least_accepted_frac=0.0)

# tokens that a fault is put in, of the five rows; a window is redone in the first row, which must not meet it again
TOKENS = {"plain": range(1, 5), "overlap": range(1, 5), "drafts": range(4, 12)}

WAYS = {
    "plain": {"max_window": 1},
    "overlap": {"max_window": 1, "overlap": True},
    "drafts": {"max_window": 4, "drafts": EAGER},
}


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(21)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (5, 70, 33, 9)] + [[4, 5, 6] * 9]


@pytest.fixture(scope="module")
def expected(model, prompts):
    from firetower.engine.engine import Engine

    with Engine(model, max_batch=8, max_model_len=256, prefill_chunk=64, store=False) as twin:
        samplings = {"greedy": ANSWER, "sampled": SAMPLED}
        return {name: [c.token_ids for c in twin.generate(prompts, s)] for name, s in samplings.items()}


def config(on_fire: OnFire, **limits) -> RecoveryConfig:
    return RecoveryConfig(on_fire=on_fire, **({"breaker_fires": 1000, "max_per_minute": 1000} | limits))


def check_back(engine):
    status = engine.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)


@pytest.mark.parametrize("on_fire", [OnFire.RETRY, OnFire.HEAL])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_client_sees_nothing_of_a_passing_fault(faults, prompts, expected, way, on_fire, kind):
    sampling = ANSWER if kind == "greedy" else SAMPLED
    want = expected[kind]
    run = faults(max_batch=5, recovery=config(on_fire), **WAYS[way])
    streams: dict[str, list[int]] = {}

    def sink(delta):
        streams.setdefault(delta.request, []).extend(delta.token_ids)

    sequences = [run.engine.submit(p, sampling, sink=sink) for p in prompts]
    run.until_decoding(sequences, 2)
    for _ in range(2):
        signal = run.signal("down", 2)
        rows = [token * run.per_token[signal] for token in TOKENS[way][::3]]
        run.step_with(*(Place(signal=signal, row=row, column=0, bits=NAN) for row in rows))
    completions = run.finish(sequences)
    assert [c.token_ids for c in completions] == want
    assert [tuple(streams[s.request.id]) for s in sequences] == want
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
    assert sum(c.num_recoveries for c in completions) >= 1
    assert {f.outcome for f in run.engine.fires} == {Outcome.RECORDED}
    results = {(f.extra["recovery"], f.extra.get("result")) for f in run.engine.fires}
    assert results == ({("heal", "transient")} if on_fire is OnFire.HEAL else {("retry", None)})
    check_back(run.engine)


@pytest.mark.parametrize("on_fire", [OnFire.RETRY, OnFire.HEAL])
def test_a_fault_in_a_prompt(faults, prompts, expected, on_fire):
    run = faults(max_batch=2, max_window=1, recovery=config(on_fire))
    sequences = run.submit(prompts[:2], ANSWER)
    run.engine.step()
    run.step_with(Place(signal=run.signal("residual"), row=3, column=0, bits=NAN))
    assert sequences[1].num_recoveries == 1
    completions = run.finish(sequences)
    assert [c.token_ids for c in completions] == expected["greedy"][:2]
    check_back(run.engine)


def test_a_fault_that_comes_back_on_the_reference_path_is_persistent(faults, prompts, expected):
    run = faults(max_batch=4, max_window=1, recovery=config(OnFire.HEAL))
    sequences = run.submit(prompts[:3], ANSWER)
    run.until_decoding(sequences, 1)
    # row 0 is the row that the window is redone in as well
    run.step_with(Place(signal=run.signal("output", 0), row=0, column=4, bits=NAN))
    completions = run.finish(sequences)
    error = completions[0].error
    assert isinstance(error, BurnedError)
    assert not error.is_retriable
    assert "It came back when the work was done again" in str(error)
    assert "Sending it again will not help" in str(error)
    assert (error.fire.outcome, error.fire.extra["result"]) == (Outcome.ISOLATED, "persistent")
    assert "layer 0 output, column 4, bits 7fc00000" in error.fire.extra["second"]
    assert [c.token_ids for c in completions[1:]] == expected["greedy"][1:3]
    check_back(run.engine)


def test_a_state_that_was_bad_before_is_persistent(faults, prompts):
    run = faults(max_batch=2, max_window=1, recovery=config(OnFire.HEAL))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.until_decoding([sequence], 2)
    with torch.inference_mode():
        run.engine._parts.state.slots["state"][0, :, sequence.slot, 0, 0, 0] = float("nan")
    [completion] = run.finish([sequence])
    assert completion.error.fire.extra["result"] == "persistent"
    assert completion.error.fire.origin.stage == "recurrent_state"


def test_a_prompt_that_burns_twice_ends(faults, prompts):
    run = faults(max_batch=2, max_window=1, recovery=config(OnFire.HEAL))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.node.arm([Place(signal=run.signal("residual"), row=0, column=0, bits=NAN)])
    [completion] = run.finish([sequence])
    assert completion.finish_reason is FinishReason.BURNED
    assert not completion.error.is_retriable
    assert run.engine.status().num_fires == 2


def test_recoveries_of_a_request_are_bounded(faults, prompts):
    run = faults(max_batch=2, max_window=1, recovery=config(OnFire.RETRY, max_per_request=2))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.node.arm([Place(signal=run.signal("residual"), row=0, column=0, bits=NAN)])
    [completion] = run.finish([sequence])
    assert completion.num_recoveries == 2
    assert completion.error.is_retriable
    assert "2 recoveries of this request are the limit" in str(completion.error)


def test_the_breaker_ends_the_trying_and_says_so(faults, prompts):
    run = faults(max_batch=2, max_window=1, recovery=RecoveryConfig(on_fire=OnFire.RETRY, breaker_fires=3))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.node.arm([Place(signal=run.signal("residual", 0), row=0, column=0, bits=NAN)])
    [completion] = run.finish([sequence])
    assert not completion.error.is_retriable
    assert "the breaker is open: 3 fires at layer 0 residual (nan)" in str(completion.error)
    assert run.engine.status().open_breakers == {"layer 0 residual (nan)": 3}
    run.node.disarm()
    run.engine.reset_breakers()
    assert run.engine.status().open_breakers == {}
    assert run.engine.generate(prompts[0], ANSWER)[0].finish_reason is FinishReason.LENGTH


def test_a_restart_that_takes_another_way_is_an_error(faults, prompts):
    run = faults(max_batch=2, max_window=1, recovery=config(OnFire.RETRY))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.until_decoding([sequence], 3)
    run.step_with(Place(signal=run.signal("residual"), row=0, column=0, bits=NAN))
    sequence.replay[1] = (sequence.replay[1] + 1) % 97
    [completion] = run.finish([sequence])
    assert completion.finish_reason is FinishReason.ERROR
    assert "started again, token 1 is" in str(completion.error)


@pytest.mark.parametrize("on_fire", [OnFire.RETRY, OnFire.HEAL])
@pytest.mark.parametrize("way", WAYS)
def test_random_faults_in_single_steps(faults, prompts, expected, way, on_fire):
    run = faults(max_batch=5, recovery=config(on_fire, max_per_request=100), **WAYS[way])
    rng = random.Random(5)
    recoveries = 0
    for _ in range(6):
        sequences = run.submit(prompts, ANSWER)
        run.until_decoding(sequences, rng.randint(0, 3))
        for _ in range(2):
            signal = rng.choice(run.engine.model.kept_signals)
            row, columns = rng.choice(TOKENS[way]) * run.per_token[signal], run.shapes[signal][1]
            run.step_with(Place(signal=signal, row=row, column=rng.randrange(columns), bits=NAN))
        completions = run.finish(sequences)
        assert [c.token_ids for c in completions] == expected["greedy"]
        recoveries += sum(c.num_recoveries for c in completions)
        check_back(run.engine)
    assert recoveries >= 4


def test_a_redone_window_and_a_restarted_prompt_run_on_the_reference_path(faults, prompts, monkeypatch):
    import contextlib

    from firetower.ops import registry

    inside, seen = [], []

    @contextlib.contextmanager
    def reference_path():
        inside.append(1)
        yield
        inside.pop()

    monkeypatch.setattr(registry, "reference_path", reference_path, raising=False)
    run = faults(max_batch=4, max_window=1, recovery=config(OnFire.HEAL))
    keep = run.node.keep

    def noting(signal, x):
        seen.append((bool(inside), x.shape[0]))
        keep(signal, x)

    run.node.keep = noting
    sequences = run.submit(prompts[:4], ANSWER)
    run.step_with(Place(signal=run.signal("residual"), row=2, column=0, bits=NAN))
    assert not any(is_inside for is_inside, _ in seen)
    run.until_decoding(sequences)
    assert any(is_inside and rows == len(prompts[0]) for is_inside, rows in seen)
    seen.clear()
    run.step_with(Place(signal=run.signal("residual"), row=2, column=0, bits=NAN))
    assert {rows for is_inside, rows in seen if is_inside and rows != 3} == {1}
    assert {is_inside for is_inside, rows in seen if rows == 4} == {False}
    run.finish(sequences)
    assert not inside


def test_closing_ends_what_was_about_to_start_again(faults, prompts):
    run = faults(max_batch=2, max_window=1, overlap=True, recovery=config(OnFire.RETRY))
    [sequence] = run.submit(prompts[:1], ANSWER)
    run.until_decoding([sequence], 2)
    run.step_with(Place(signal=run.signal("residual"), row=0, column=0, bits=NAN))
    run.engine.step()
    assert sequence.is_restarting
    assert sequence.num_flights == 1
    run.engine.close()
    assert sequence.finish_reason is FinishReason.CANCELLED
    check_back(run.engine)
