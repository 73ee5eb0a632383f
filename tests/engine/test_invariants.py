"""What stays as it is for too long is told once, and a token that repeats ends its request where that is asked for."""

from __future__ import annotations

import random

import pytest

from firetower.core.errors import ConfigError
from firetower.engine.advance import advance
from firetower.engine.drafts import DraftConfig
from firetower.engine.invariants import InvariantConfig, Invariants
from firetower.engine.request import FinishReason, Request, Sampling
from firetower.engine.sequence import Sequence

EAGER = DraftConfig(longest=3, shortest=1, least_accepted_frac=0.0)


def judged(verdicts, most=10):
    watched = Invariants(InvariantConfig(stuck_drafts=most))
    for step, (drafts, accepted) in enumerate(verdicts):
        watched.judge(drafts, accepted, step=step)
    return watched


@pytest.mark.parametrize(
    ("verdicts", "value", "step"),
    [
        # behind a rejected draft none was judged: each window counts once
        ([(4, 0)] * 9 + [(1, 0)], 0.0, 9),
        ([(2, 2)] * 4 + [(3, 2)], 1.0, 4),
        ([(4, 1)] * 3 + [(2, 2)] * 5, 1.0, 7),
    ],
    ids=["rejected", "accepted, the last window ends it", "after others"],
)
def test_a_stretch_is_told_once(verdicts, value, step):
    for more in range(3):
        watched = judged([*verdicts, *[(1, int(value))] * (0 if len(verdicts) == 5 else more)])
        [record] = watched.records
        assert (record.name, record.value, record.length, record.step) == ("acceptance", value, 10, step)
        assert f"stuck at {value} for 10 drafts" in record.message
    assert not judged(verdicts[:-1]).records


def test_a_new_stretch_is_told_again():
    watched = judged([(5, 5)] * 3 + [(1, 0)] + [(5, 5)] * 3)
    assert [r.step for r in watched.records] == [1, 5]
    assert watched.num_records == 2


def test_any_verdicts_against_the_plain_rule():
    rng = random.Random(4)
    for _ in range(200):
        verdicts = [(n := rng.randint(0, 4), rng.choice([0, n, rng.randint(0, n)])) for _ in range(40)]
        # one letter a judged draft
        text = "".join("a" * a + "r" * (a < d) for d, a in verdicts)
        runs, last = [], ""
        for letter in text:
            if letter == last:
                runs[-1][1] += 1
            else:
                runs.append([letter, 1])
            last = letter
        expected = [1.0 if letter == "a" else 0.0 for letter, count in runs if count >= 5]
        assert [r.value for r in judged(verdicts, 5).records] == expected


def test_off_and_refused():
    assert not judged([(4, 0)] * 100, most=0).records
    with pytest.raises(ConfigError, match="stuck_drafts=-1: must be above 0, or 0 for off"):
        InvariantConfig(stuck_drafts=-1)


def test_an_engine_warns_of_acceptance_that_is_stuck(engine, tiny):
    own = tiny(layer_scale=1.0)
    # such a model soon goes in a circle, and every draft is right
    made = engine(own, max_window=5, drafts=EAGER, invariants=InvariantConfig(stuck_drafts=60))
    made.generate([3, 1, 4, 1, 5], Sampling(max_tokens=200))
    [record] = made.warnings
    assert (record.name, record.value, record.request) == ("acceptance", 1.0, None)
    assert record.length >= 60
    status = made.status()
    assert (status.num_warnings, status.last_warning) == (1, record)
    quiet = engine(own, max_window=5, drafts=EAGER)
    quiet.generate([3, 1, 4, 1, 5], Sampling(max_tokens=200))
    assert quiet.warnings == ()
    assert quiet.status().last_warning is None


@pytest.mark.parametrize("options", [{"max_window": 1}, {"max_window": 1, "overlap": True}], ids=["plain", "overlap"])
def test_a_token_that_repeats_ends_its_request_alone(engine, options, prompt):
    made = engine(**options)
    # of the first one the token is forced
    samplings = [Sampling(max_tokens=50, max_repeats=7, logit_bias={11: 1e9}), Sampling(max_tokens=50, max_repeats=7)]
    stuck, other = made.generate([[1, 2], prompt(20)], samplings)
    assert (stuck.token_ids, stuck.finish_reason, stuck.error) == ((11,) * 7, FinishReason.REPEATED, None)
    assert other.finish_reason is FinishReason.LENGTH
    [record] = made.warnings
    assert (record.name, record.value, record.length, record.request) == ("repeated", 11.0, 7, stuck.request)


def test_the_backstop_is_generous_and_can_be_off(engine):
    forced = {"logit_bias": {11: 1e9}, "ignore_eos": True}
    made = engine(max_model_len=1024)
    [stuck] = made.generate([1, 2], Sampling(max_tokens=600, **forced))
    assert (len(stuck.token_ids), stuck.finish_reason) == (512, FinishReason.REPEATED)
    [free] = made.generate([1, 2], Sampling(max_tokens=600, max_repeats=0, **forced))
    assert (len(free.token_ids), free.finish_reason) == (600, FinishReason.LENGTH)
    assert made.status().num_warnings == 1


def test_tokens_of_a_window_behind_the_last_that_counts_are_not_taken():
    sampling = Sampling(max_tokens=50, max_repeats=5)
    sequence = Sequence(Request(id="a", token_ids=(2, 2), sampling=sampling), number=0, seed=0)
    # what the prompt ends with does not count
    assert advance(sequence, [2, 1, 2], []) == (None, None)
    assert advance(sequence, [2, 2, 2, 2, 7], []) == (FinishReason.REPEATED, None)
    assert sequence.answer == [2, 1, 2, 2, 2, 2, 2]
