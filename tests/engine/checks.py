"""Checks of the engine on a device, without pytest: for `test_device.py`, and for `benchmarks/engine.py`.

Each takes a device and raises AssertionError. They run on the CPU as well, where nothing is captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from firetower.engine.drafts import DraftConfig
from firetower.engine.engine import Engine
from firetower.engine.inject import Place
from firetower.engine.prefix import PrefixConfig, Reuse, bad_pages
from firetower.engine.recovery import OnFire, RecoveryConfig
from firetower.engine.request import FinishReason, Sampling
from firetower.models.config import FULL, LINEAR, HybridConfig
from firetower.models.hybrid import HybridModel
from firetower.models.weights import random_weights

VOCAB = 512
EAGER = DraftConfig(longest=3, shortest=1, least_accepted_frac=0.0)
PATTERNS = {torch.float32: (0x7FC00000, 0x7F800000, 0xFFD6E000), torch.bfloat16: (0x7FC0, 0x7F80, 0xFFD7)}


def model_on(device: str, dtype: torch.dtype) -> HybridModel:
    """Three layers of sizes that every kernel takes."""
    config = HybridConfig(
        family="qwen3_5_moe", vocab_size=VOCAB, hidden_size=128, num_layers=3, layer_types=(LINEAR, FULL, LINEAR),
        num_heads=4, num_kv_heads=2, head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, num_k_heads=2,
        num_v_heads=4, head_k_dim=64, head_v_dim=64, num_experts=16, top_k=4, moe_width=64, shared_width=64,
        max_position_embeddings=1024,
    )  # fmt: skip
    weights = random_weights(config, dtype, device, 0)
    for _, x in weights.named_tensors():
        if x.ndim >= 2:
            x.mul_(6.0)
    return HybridModel(config, weights)


def prompts() -> list[list[int]]:
    """Of many lengths, two of them texts that repeat."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 2, 63, 64, 65, 130, 300, 7)]
    return [*made, [5, 6, 7] * 20, [9] * 30]


def engine_of(model: HybridModel, **options: Any) -> Engine:
    """Small limits; memory for what the checks need."""
    options = {"max_batch": 8, "max_model_len": 512, "prefill_chunk": 128, "store": False, "num_pages": 96} | options
    return Engine(model, **options)


def tokens_of(model: HybridModel, sampling: Sampling, **options: Any) -> list[tuple[int, ...]]:
    """Answers to all prompts; no fire, everything given back."""
    with engine_of(model, **options) as engine:
        found = engine.generate(prompts(), sampling)
        status = engine.status()
        assert engine.fires == (), engine.fires[0]
        assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
        assert {c.finish_reason for c in found} == {FinishReason.LENGTH}
        return [c.token_ids for c in found]


def check_tokens_do_not_depend_on_how(device: str) -> None:
    """Alone, in batches, with drafts, graphs, overlap: the same tokens."""
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    samplings = (
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, temperature=1.5, seed=7),
        Sampling(max_tokens=24, temperature=1.5, seed=8, top_k=40, top_p=0.9, min_p=0.01),
        Sampling(max_tokens=24, temperature=1.0, seed=9, repetition_penalty=1.3, frequency_penalty=0.2),
    )
    ways: tuple[dict[str, Any], ...] = (
        {"max_batch": 8, "max_window": 1, "graphs": False, "overlap": False},
        {"max_batch": 8, "max_window": 1, "graphs": True, "overlap": True},
        {"max_batch": 3, "max_window": 5, "drafts": EAGER, "graphs": True},
        {"max_batch": 8, "max_window": 8, "drafts": EAGER, "graphs": False},
        {"max_batch": 8, "max_window": 3, "drafts": EAGER, "graphs": True, "inject": True},
    )
    for dtype in dtypes:
        model = model_on(device, dtype)
        for sampling in samplings:
            alone = tokens_of(model, sampling, max_batch=1, max_window=1, graphs=False, overlap=False)
            for way in ways:
                assert tokens_of(model, sampling, **way) == alone, f"{dtype}, {sampling}, {way}"


def check_graphs_stay_within_their_budget(device: str) -> None:
    """Without memory nothing is captured; with it, windows of one come first; the report says what was left out."""
    model = model_on(device, torch.float32)
    with engine_of(model, graph_bytes=0) as engine:
        status = engine.status()
        assert status.num_graphs == 0
        assert engine.generate([1, 2, 3], Sampling(max_tokens=4))[0].finish_reason is FinishReason.LENGTH
    if device != "cuda":
        return
    with engine_of(model, max_window=4) as engine:
        report = engine._parts.loop.runner.graphs.report
        assert [s.window for s in report.captured[:4]] == [1, 1, 1, 1]
        assert not report.left_out, report.left_out
        engine.generate(prompts(), Sampling(max_tokens=8))
        dropped = engine._parts.loop.runner.graphs.drop()
        assert dropped == len(report.captured)
        assert engine.generate([1, 2, 3], Sampling(max_tokens=4))[0].finish_reason is FinishReason.LENGTH


def check_overlap_chains_windows(device: str) -> None:
    """With overlap most windows are launched before the last one is read."""
    with engine_of(model_on(device, torch.float32), max_window=1, overlap=True) as engine:
        engine.generate(prompts()[:8], Sampling(max_tokens=40))
        status = engine.status()
        assert status.num_chained > status.num_windows / 2, status


def fault_run(
    model: HybridModel, on_fire: OnFire, expected: list[tuple[int, ...]], rng: random.Random, engine: Engine
) -> tuple[int, int]:
    """One batch with bad values in one step: (requests that ended, recoveries)."""
    node = engine.injector
    assert node is not None
    sampling = Sampling(max_tokens=12)
    sequences = [engine.submit(p, sampling) for p in prompts()[:8]]
    while any(s.stage in ("queued", "prefill") for s in sequences):
        engine.step()
    for _ in range(rng.randint(0, 4)):
        engine.step()
    places = [
        # not the first row: a window is redone there, and must not meet the fault again
        Place(signal=rng.choice(model.kept_signals), row=rng.randrange(1, 24), column=rng.randrange(16),
              bits=rng.choice(PATTERNS[model.dtype]))
        for _ in range(rng.randint(1, 5))
    ]  # fmt: skip
    node.arm(places)
    engine.step()
    node.disarm()
    while not all(s.is_done for s in sequences):
        engine.step()
    while engine.step():
        pass
    ended = 0
    for sequence, want in zip(sequences, expected, strict=True):
        got = tuple(sequence.answer)
        if sequence.finish_reason is FinishReason.BURNED:
            ended += 1
            assert got == want[: len(got)]
        else:
            assert got == want, (sequence.finish_reason, sequence.error, places)
    status = engine.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
    assert status.num_quarantined == 0
    return ended, sum(s.num_recoveries for s in sequences)


def check_a_burned_request_burns_alone(device: str, trials: int = 40) -> None:
    """Random bad values in random steps, by graph: the others' tokens are those of a run without."""
    model = model_on(device, torch.bfloat16 if device == "cuda" else torch.float32)
    limits = RecoveryConfig(max_per_minute=10**6, max_per_request=100, breaker_fires=10**6)
    for on_fire in OnFire:
        recovery = RecoveryConfig(
            on_fire=on_fire, max_per_minute=limits.max_per_minute, max_per_request=limits.max_per_request,
            breaker_fires=limits.breaker_fires,
        )  # fmt: skip
        with engine_of(model, max_window=1, inject=True, recovery=recovery) as engine:
            expected = [c.token_ids for c in engine.generate(prompts()[:8], Sampling(max_tokens=12))]
            rng = random.Random(on_fire.value)
            outcomes = [fault_run(model, on_fire, expected, rng, engine) for _ in range(trials)]
            touched = sum(ended + recovered for ended, recovered in outcomes)
            assert touched > trials / 4, outcomes
            if on_fire is not OnFire.FAIL:
                print(f"{on_fire}: {sum(r for _, r in outcomes)} recoveries, {sum(e for e, _ in outcomes)} ended")


def talk(engine: Engine, sampling: Sampling, turns: int = 3) -> list[tuple[int, ...]]:
    """Conversations that begin alike, each turn the last one, its answer and more: all answers."""
    stem = prompts()[6]
    texts = [[*stem[:128], *stem[200 : 230 + i]] for i in range(4)]
    found = []
    for turn in range(turns):
        answers = engine.generate(texts, sampling)
        assert {c.finish_reason for c in answers} == {FinishReason.LENGTH}
        found += [c.token_ids for c in answers]
        texts = [[*t, *a.token_ids, *stem[turn : 20 + turn]] for t, a in zip(texts, answers, strict=True)]
    return found


def check_a_prefix_cache_changes_no_token(device: str) -> None:
    """Exact reuse: the tokens of an engine without the cache, with graphs, drafts and overlap; all turns hit."""
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    samplings = (Sampling(max_tokens=30), Sampling(max_tokens=30, temperature=1.5, seed=7))
    ways: tuple[dict[str, Any], ...] = ({"max_window": 1}, {"max_window": 5, "drafts": EAGER})
    for dtype in dtypes:
        model = model_on(device, dtype)
        for sampling in samplings:
            with engine_of(model, max_window=1, graphs=False) as engine:
                expected = talk(engine, sampling)
            for way in ways:
                for reuse in Reuse:
                    with engine_of(model, prefix=PrefixConfig(reuse=reuse), **way) as engine:
                        found = talk(engine, sampling)
                        cache = engine.status().prefix
                        assert engine.fires == (), engine.fires[0]
                    assert cache is not None
                    assert cache.num_hits >= 8, cache
                    if reuse is Reuse.EXACT:
                        assert found == expected, f"{dtype}, {sampling}, {way}"
                    else:
                        # the same but for rounding: how many, not that all
                        same = sum(a == b for a, b in zip(found, expected, strict=True))
                        print(f"{dtype}, turns: {same} of {len(found)} answers are the same, {cache}")


def check_sharers_of_a_bad_block_are_redone(device: str) -> None:
    """A bad value in a shared page: who wrote it ends, the others have the tokens of a run without it."""
    model = model_on(device, torch.bfloat16 if device == "cuda" else torch.float32)
    stem, sampling = prompts()[6], Sampling(max_tokens=24)
    texts = [[*stem[:256], *stem[i : 20 + i]] for i in range(4)]
    with engine_of(model, max_window=1) as engine:
        expected = [c.token_ids for c in engine.generate(texts, sampling)]
    for block in range(4):
        with engine_of(model, max_window=1, prefix=PrefixConfig()) as engine:
            sequences = []
            for text in texts:
                sequences.append(engine.submit(text, sampling))
                while sequences[-1].stage in ("queued", "prefill"):
                    engine.step()
            with torch.inference_mode():
                engine._parts.state.pages[0, 1, sequences[0].pages[block], 9, 0, 4] = float("inf")
            while engine.step():
                pass
            assert [s.finish_reason for s in sequences] == [FinishReason.BURNED] + [FinishReason.LENGTH] * 3
            assert [tuple(s.answer) for s in sequences[1:]] == expected[1:], block
            assert [s.num_recoveries for s in sequences] == [0, 1, 1, 1]
            engine.clear_caches()
            status = engine.status()
            assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
            assert bad_pages(engine._parts.state, range(status.num_pages)) == []


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
"""Every check by its name."""
