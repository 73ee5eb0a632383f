"""Tokens do not depend on how they were computed: batch, drafts, chunks, overlap, order; and they are Transformers'."""

from __future__ import annotations

import warnings

import pytest
import torch

from firetower.engine.drafts import DraftConfig
from firetower.engine.request import FinishReason, Sampling

LENGTHS = (1, 2, 63, 64, 65, 130, 30, 7)
ANSWER = 16

# after one token already: many drafts, most of them wrong
EAGER = DraftConfig(longest=3, shortest=1, least_accepted_frac=0.0)

WAYS = {
    "batch of 8": {"max_batch": 8, "max_window": 1},
    "batch of 3": {"max_batch": 3, "max_window": 1},
    "drafts": {"max_batch": 8, "max_window": 5, "drafts": EAGER},
    "long drafts, batch of 2": {"max_batch": 2, "max_window": 8, "drafts": EAGER},
    "overlap": {"max_batch": 8, "max_window": 1, "overlap": True},
    "overlap and drafts": {"max_batch": 5, "max_window": 4, "drafts": EAGER, "overlap": True},
    "fault node": {"max_batch": 8, "max_window": 3, "drafts": EAGER, "inject": True},
}

SAMPLINGS = {
    "greedy": Sampling(max_tokens=ANSWER),
    "temperature": Sampling(max_tokens=ANSWER, temperature=1.5, seed=7),
    "filters": Sampling(max_tokens=ANSWER, temperature=2.0, seed=8, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": Sampling(
        max_tokens=ANSWER, temperature=1.0, seed=9, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "bias": Sampling(max_tokens=ANSWER, logit_bias={3: 4.0, 5: float("-inf")}),
}


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    # texts that repeat, so that drafts are made and some of them are right
    return [*made, [5, 6, 7] * 20, [9] * 30]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each request by itself, one token a step."""
    from firetower.engine.engine import Engine

    found = {}
    for name, sampling in SAMPLINGS.items():
        with Engine(model, max_batch=1, max_window=1, max_model_len=256, prefill_chunk=64, store=False) as one:
            found[name] = [one.generate(p, sampling)[0].token_ids for p in prompts]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_each_request_alone(engine, alone, prompts, way, name):
    made = engine(**WAYS[way])
    completions = made.generate(prompts, SAMPLINGS[name])
    assert [c.token_ids for c in completions] == alone[name]
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
    status = made.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
    assert made.fires == ()


def test_mixed_requests_in_one_batch(engine, alone, prompts):
    names = [list(SAMPLINGS)[i % len(SAMPLINGS)] for i in range(len(prompts))]
    found = engine(max_window=5, drafts=EAGER).generate(prompts, [SAMPLINGS[name] for name in names])
    assert [c.token_ids for c in found] == [alone[name][i] for i, name in enumerate(names)]


def test_the_ways_do_what_they_say(engine, prompts):
    drafting = engine(max_window=5, drafts=EAGER)
    drafting.generate(prompts, Sampling(max_tokens=ANSWER))
    assert drafting.status().num_draft_tokens > 20
    chained = engine(max_window=1, overlap=True)
    chained.generate(prompts, Sampling(max_tokens=ANSWER))
    assert chained.status().num_chained > 10


def test_drafts_are_accepted_where_a_text_repeats(engine, tiny):
    own = tiny(layer_scale=1.0)
    plain = engine(own, max_window=1)
    drafting = engine(own, max_window=8)
    sampling = Sampling(max_tokens=60)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    [expected], [found] = plain.generate(prompt, sampling), drafting.generate(prompt, sampling)
    assert found.token_ids == expected.token_ids
    assert found.num_accepted_tokens > 20
    assert drafting.status().num_windows < plain.status().num_windows / 2


def test_seeds_name_the_answer(engine, prompts):
    made = engine()
    one, two = (made.generate(prompts[:3], Sampling(max_tokens=12, temperature=2.0, seed=s)) for s in (1, 2))
    assert [c.token_ids for c in one] != [c.token_ids for c in two]
    [drawn] = made.generate(prompts[0], Sampling(max_tokens=12, temperature=2.0))
    [again] = made.generate(prompts[0], Sampling(max_tokens=12, temperature=2.0, seed=drawn.seed))
    assert drawn.token_ids == again.token_ids


@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_chunks_change_nothing_but_rounding(engine, prompts, chunk):
    # the argmax of this model is far from a tie: what the chunks change in the last bits does not show
    expected = engine(prefill_chunk=256).generate(prompts[5], Sampling(max_tokens=ANSWER))
    assert engine(prefill_chunk=chunk).generate(prompts[5], Sampling(max_tokens=ANSWER))[0].token_ids == (
        expected[0].token_ids
    )


@pytest.mark.parametrize("options", [{"max_window": 1}, {"max_window": 5}], ids=["plain", "drafts"])
def test_greedy_tokens_are_those_of_transformers(engine, tmp_path, options):
    from firetower.drills import hosts
    from firetower.models.checkpoint import read_weights
    from firetower.models.config import read_config
    from firetower.models.hybrid import HybridModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = hosts.small_qwen35_moe(seed=4, hidden_size=64, vocab_size=160, num_experts=8, moe_intermediate_size=32)
        with torch.no_grad():
            for x in host.parameters():
                if x.ndim >= 2:
                    x.mul_(4.0)
        host.save_pretrained(tmp_path)
        config = read_config(tmp_path)
        own = HybridModel(config, read_weights(tmp_path, config), num_positions=256)
        generator = torch.Generator().manual_seed(2)
        prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (3, 64, 100)] + [[7, 8, 9] * 12]
        expected = [
            host.generate(
                torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=30,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(p) :].tolist()
            for p in prompts
        ]  # fmt: skip
    found = engine(own, **options).generate(prompts, Sampling(max_tokens=30, ignore_eos=True))
    assert [list(c.token_ids) for c in found] == expected
    assert len({t for tokens in expected for t in tokens}) > 20
