"""Logits against Transformers' own classes, in float32 on the CPU: prompts whole and in parts, windows, batches."""

from __future__ import annotations

import random

import pytest
import torch

FAMILIES = ("qwen3_5_moe", "qwen3_next")
RTOL, ATOL = 1e-4, 1e-4
"""Logits of these models are of the order of 1: the bar is 1e-4 of that. What is left is the order of sums."""


def check(reference, actual):
    torch.testing.assert_close(actual, reference, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 200])
def test_a_prompt_in_one_call(saved, driver, tokens, family, length):
    model, prompt = saved(family), tokens(length)
    check(model.logits(prompt), driver(model.load()).prefill({0: prompt}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_a_thousand(saved, driver, tokens, family):
    model, prompt = saved(family), tokens(1000)
    check(model.logits(prompt), driver(model.load(), pages=16).prefill({0: prompt}))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_four_thousand_in_chunks_of_512(saved, driver, tokens, family):
    model, prompt = saved(family), tokens(4000)
    run = driver(model.load(), pages=64)
    parts = [run.prefill({0: prompt[at : at + 512]}) for at in range(0, 4000, 512)]
    check(model.logits(prompt), torch.cat(parts))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [100, 192])
def test_a_prompt_in_chunks_of_64(saved, driver, tokens, family, length):
    model, prompt = saved(family), tokens(length)
    run = driver(model.load())
    parts = [run.prefill({0: prompt[at : at + 64]}) for at in range(0, length, 64)]
    check(model.logits(prompt), torch.cat(parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_prompts_in_one_call_some_behind_a_prefix(saved, driver, tokens, family):
    model = saved(family)
    run, prompts = driver(model.load()), {i: tokens(n, seed=i) for i, n in enumerate((130, 1, 77, 190))}
    run.prefill({0: prompts[0][:64], 3: prompts[3][:128]})
    rest = {0: prompts[0][64:], 1: prompts[1], 2: prompts[2], 3: prompts[3][128:]}
    out = run.prefill(rest).split([len(p) for p in rest.values()])
    for i, part in enumerate(out):
        check(model.logits(prompts[i])[-len(part) :], part)


def test_only_the_last_tokens_logits(saved, driver, tokens):
    model = saved()
    prompts = {i: tokens(n, seed=i) for i, n in enumerate((70, 3))}
    every = driver(model.load()).prefill(prompts)
    last = driver(model.load()).prefill(prompts, all_logits=False)
    check(every[[69, 72]], last)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_at_a_time_behind_a_prompt(saved, driver, tokens, family):
    model, text = saved(family), tokens(90)
    run = driver(model.load())
    run.prefill({0: text[:60]})
    out = torch.cat([run.step([(0, [t])])[0] for t in text[60:]])
    check(model.logits(text)[60:], out)


def test_a_sequence_may_begin_with_windows_alone(saved, driver, tokens):
    model, text = saved(), tokens(20)
    run = driver(model.load())
    out = torch.cat([run.step([(0, text[at : at + 4])])[0] for at in range(0, 20, 4)])
    check(model.logits(text), out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [2, 5, 8])
def test_windows_whose_drafts_are_rejected(saved, driver, tokens, family, window):
    """Each window has the right token first, then drafts: some right, the rest not, as an engine would accept them."""
    model, text = saved(family), tokens(120)
    run, draw = driver(model.load()), random.Random(window)
    run.prefill({0: text[:70]})
    reference, at, num_rejected = model.logits(text), 70, 0
    while at < 120 - window:
        right = draw.randint(1, window)
        wrong = [(t + 1) % 160 for t in text[at + right : at + window]]
        out = run.step([(0, text[at : at + right] + wrong)], accept=[right])[0]
        check(reference[at : at + right], out[:right])
        at, num_rejected = at + right, num_rejected + window - right
    assert num_rejected > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_sequences_of_all_lengths_with_pads(saved, driver, tokens, family):
    model = saved(family)
    run, texts = driver(model.load()), [tokens(n, seed=n) for n in (1, 40, 64, 150)]
    for i, text in enumerate(texts):
        run.prefill({i: text})
    draw = random.Random(5)
    for _ in range(6):
        rows = [(i, tokens(draw.randint(1, 4), seed=draw.randint(0, 999))) for i in range(4)]
        draw.shuffle(rows)
        rows.insert(draw.randint(0, 4), None)
        out = run.step(rows, window=4)
        for (i, new), part in zip([r for r in rows if r is not None], out, strict=True):
            texts[i] = texts[i] + new
            check(model.logits(texts[i])[-len(new) :], part)


def test_a_tied_embedding_makes_the_logits(saved, driver, tokens):
    model, prompt = saved("qwen3_5_moe", tie_word_embeddings=True), tokens(30)
    loaded = model.load()
    assert loaded.weights.lm_head is loaded.weights.embedding
    check(model.logits(prompt), driver(loaded).prefill({0: prompt}))


def test_weights_of_chosen_experts_that_are_not_divided(saved, driver, tokens):
    model, prompt = saved("qwen3_next", norm_topk_prob=False), tokens(30)
    check(model.logits(prompt), driver(model.load()).prefill({0: prompt}))


@pytest.mark.parametrize("layers", [("full_attention",) * 2, ("linear_attention",) * 2], ids=["full", "linear"])
def test_models_of_one_kind_of_layer(saved, driver, tokens, layers):
    model, text = saved("qwen3_5_moe", num_layers=2, layer_types=list(layers)), tokens(75)
    run = driver(model.load())
    out = [run.prefill({0: text[:70]})] + [run.step([(0, text[at : at + 5])])[0] for at in (70,)]
    check(model.logits(text), torch.cat(out))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
def test_8_bit_pages_stay_near(saved, driver, tokens, kv_dtype):
    """One quarter of the layers reads rounded keys and values: near, and measurably not the same."""
    model, text = saved(), tokens(140)
    run = driver(model.load(), kv_dtype=kv_dtype)
    out = [run.prefill({0: text[:64]}), run.prefill({0: text[64:130]}), run.step([(0, text[130:135])])[0]]
    reference = model.logits(text)[:135]
    share = (torch.cat(out) - reference).norm() / reference.norm()
    assert 1e-4 < share < {torch.int8: 0.02, torch.float8_e4m3fn: 0.05}[kv_dtype], share


def test_8_bit_pages_read_the_same_in_parts(saved, driver, tokens):
    model, text = saved(), tokens(150)
    whole = driver(model.load(), kv_dtype=torch.int8).prefill({0: text})
    run = driver(model.load(), kv_dtype=torch.int8)
    parts = torch.cat([run.prefill({0: text[at : at + 64]}) for at in range(0, 150, 64)])
    check(whole, parts)


def test_an_id_that_is_no_token_burns_its_own_row(saved, driver, tokens):
    run = driver(saved().load())
    for i in range(2):
        run.prefill({i: tokens(10, seed=i)})
    one, other = run.step([(0, [-1]), (1, [5])])
    assert one.isnan().all()
    assert other.isfinite().all()
