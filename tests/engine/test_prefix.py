"""The prefix cache: the same tokens with it and without, only what is new is read, a bad block ends with its fire."""

from __future__ import annotations

import random

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.core.records import Outcome
from firetower.engine.drafts import DraftConfig
from firetower.engine.errors import BurnedError
from firetower.engine.inject import Place
from firetower.engine.prefix import PrefixConfig, Reuse, bad_pages, chain
from firetower.engine.recovery import OnFire, RecoveryConfig
from firetower.engine.request import FinishReason, Sampling
from firetower.models.state import new_state

NAN = 0x7FC00000
CHUNK = 64
EAGER = DraftConfig(longest=3, shortest=1, least_accepted_frac=0.0)
EXACT, TURNS = PrefixConfig(reuse=Reuse.EXACT), PrefixConfig(reuse=Reuse.TURNS)
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 5},
    "filters and penalties": {"temperature": 2.0, "seed": 6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
}
WAYS = {
    "plain": {"max_window": 1},
    "overlap": {"max_window": 1, "overlap": True},
    "drafts": {"max_window": 5, "drafts": EAGER},
    "overlap and drafts": {"max_batch": 3, "max_window": 4, "drafts": EAGER, "overlap": True},
}


def check_back(engine):
    """Once the cache has been emptied everything is free, and clean where it was bad."""
    cache = engine.status().prefix
    assert engine.status().num_free_pages == engine.status().num_pages - cache.num_pages
    engine.clear_caches()
    status = engine.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)
    assert (status.num_quarantined, status.prefix.num_pages, status.prefix.num_bytes) == (0, 0, 0)


def talks(seed, count=3, turns=4):
    """Random conversations: what is said in each turn; all begin with one of two system prompts."""
    rng = random.Random(seed)
    systems = [[rng.randrange(97) for _ in range(n)] for n in (64, 150)]
    for _ in range(count):
        said = [[rng.randrange(97) for _ in range(rng.randint(1, 90))] for _ in range(turns)]
        said[0] = [*rng.choice(systems), *said[0]]
        yield said, [rng.randint(1, 50) for _ in range(turns)]


def converse(engine, seed, sampling):
    """All conversations side by side, turn by turn: the answers."""
    found = []
    running = [[[], said, lengths] for said, lengths in talks(seed)]
    for turn in range(4):
        prompts, asked = [], []
        for talk in running:
            talk[0] = [*talk[0], *talk[1][turn]]
            prompts.append(talk[0])
            asked.append(Sampling(max_tokens=talk[2][turn], **sampling))
        completions = engine.generate(prompts, asked)
        assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
        for talk, completion in zip(running, completions, strict=True):
            talk[0] = [*talk[0], *completion.token_ids]
        found.append([c.token_ids for c in completions])
    return found


@pytest.fixture(scope="module")
def plain(model):
    """Answers of an engine without a cache."""
    from firetower.engine.engine import Engine

    found = {}
    for name, sampling in SAMPLINGS.items():
        with Engine(model, max_batch=4, max_model_len=768, prefill_chunk=CHUNK, store=False) as one:
            found[name] = converse(one, len(name), sampling)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reuse", [EXACT, TURNS], ids=["exact", "turns"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_without_the_cache(engine, plain, name, reuse, way):
    options = {"max_batch": 4, "max_model_len": 768, "prefill_chunk": CHUNK} | WAYS[way]
    made = engine(prefix=reuse, **options)
    assert converse(made, len(name), SAMPLINGS[name]) == plain[name]
    cache = made.status().prefix
    assert cache.num_hits >= 9
    assert cache.num_hits + cache.num_misses == 12
    assert made.fires == ()
    check_back(made)


def test_states_and_pages_that_were_given_are_those_that_would_have_been_made(engine, prompt):
    text = prompt(200)
    bits = []
    for prefix in (None, EXACT):
        made = engine(prefix=prefix, max_window=1)
        for tokens in ([text[:150], text] if prefix else [text]):
            [sequence] = [made.submit(tokens, Sampling(max_tokens=3))]
            while sequence.stage in ("queued", "prefill"):
                made.step()
            state, slot = made._parts.state, sequence.slot
            side = int(state.side[slot])
            kept = [state.slots["state"][:, side, slot].clone(), state.pages[:, :, sequence.pages[:3]].clone()]
            while made.step():
                pass
        bits.append(kept)
    assert made.status().prefix.num_saved_tokens == 128
    for own, given in zip(*bits, strict=True):
        assert torch.equal(own, given)


def test_the_next_turn_reads_only_what_is_new(engine, prompt):
    made = engine(prefix=TURNS, max_window=1, prefill_chunk=128)
    first = prompt(100)
    [answer] = made.generate([first], Sampling(max_tokens=60))
    text = [*first, *answer.token_ids, *prompt(20, 1)]
    made.generate([text], Sampling(max_tokens=2))
    cache = made.status().prefix
    # 160 tokens were run, and 128 of them are whole pages: 52 of 180 are read
    assert (cache.num_hits, cache.num_saved_tokens) == (1, 128)
    # of the answer one edge is kept, beside the prompt's own and that of the second prompt
    assert sorted(e.num_tokens for e in made._parts.loop.prefix.entries) == [64, 128]


def test_of_an_answer_only_the_latest_edge_is_kept(engine, prompt):
    made = engine(prefix=TURNS, max_window=1, max_model_len=512)
    made.generate([prompt(10)], Sampling(max_tokens=250))
    assert [e.num_tokens for e in made._parts.loop.prefix.entries] == [256]


def test_nothing_is_committed_before_a_clean_reading(faults, prompt):
    run = faults(max_batch=2, prefix=EXACT, max_window=1, overlap=True)
    [sequence] = run.submit([prompt(130)], Sampling(max_tokens=4))
    run.engine.step()
    # launched and not yet read
    assert len(run.engine._parts.loop.prefix) == 0
    run.engine.step()
    assert len(run.engine._parts.loop.prefix) == 1
    run.finish([sequence])
    run.engine.clear_caches()
    [sequence] = run.submit([prompt(130, 1)], Sampling(max_tokens=4))
    run.step_with(Place(signal=run.signal("residual", 0), row=3, column=0, bits=NAN))
    run.finish([sequence])
    assert sequence.finish_reason is FinishReason.BURNED
    assert len(run.engine._parts.loop.prefix) == 0
    check_back(run.engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("on_fire", OnFire)
@pytest.mark.parametrize("steps", range(1, 8))
def test_an_answer_is_not_committed_before_a_clean_reading(faults, prompt, steps, on_fire, overlap):
    run = faults(max_batch=2, prefix=TURNS, max_window=1, overlap=overlap, recovery=recovery(on_fire))
    # the first row is where a window is redone, and must not meet the fault again
    other, sequence = run.submit([prompt(10, 1), prompt(60)], Sampling(max_tokens=12))
    run.until_decoding([other, sequence], steps)
    run.step_with(Place(signal=run.signal("residual", 0), row=1, column=0, bits=NAN))
    if overlap:
        # launched with the fault, and read now: one more has been launched since
        run.engine.step()
    assert (sequence.finish_reason is FinishReason.BURNED) == (on_fire is OnFire.FAIL)
    run.finish([other, sequence])
    # what was committed before the fire was dropped, and nothing that was launched before it counts
    assert len(run.engine._parts.loop.prefix) == 0
    check_back(run.engine)
    run.finish(run.submit([prompt(60)], Sampling(max_tokens=12)))
    assert len(run.engine._parts.loop.prefix) == 1


def test_the_budget_holds_and_the_least_recently_used_go_first(engine, prompt):
    probe = engine(prefix=EXACT)._parts.loop.prefix.snapshot_bytes
    made = engine(prefix=PrefixConfig(max_bytes=2 * probe), max_window=1)
    cache = made._parts.loop.prefix
    one = Sampling(max_tokens=1)
    texts = [prompt(100, seed) for seed in range(3)]
    made.generate(texts[0], one)
    made.generate(texts[1], one)
    made.generate(texts[0], one)
    made.generate(texts[2], one)
    status = made.status().prefix
    assert (status.num_hits, status.num_entries, status.num_evicted) == (1, 2, 1)
    assert status.num_bytes == cache.num_bytes == 2 * probe
    saved = status.num_saved_tokens
    made.generate(texts[1], one)
    assert made.status().prefix.num_saved_tokens == saved
    made.generate(texts[2], one)
    assert made.status().prefix.num_saved_tokens == saved + 64
    check_back(made)


def test_a_long_prompt_spaces_its_edges(engine, prompt):
    probe = engine(prefix=EXACT)._parts.loop.prefix.snapshot_bytes
    made = engine(prefix=PrefixConfig(max_bytes=8 * probe), max_model_len=768)
    made.generate(prompt(700), Sampling(max_tokens=1))
    assert sorted(e.num_tokens for e in made._parts.loop.prefix.entries) == [256, 512, 640]
    made.generate(prompt(700)[:600], Sampling(max_tokens=1))
    assert made.status().prefix.num_saved_tokens == 512


def test_pages_are_given_up_for_requests_that_need_them(engine, prompt):
    made = engine(prefix=EXACT, num_pages=6, max_window=1)
    plain = engine(num_pages=6, max_window=1)
    for seed in range(6):
        text = prompt(200, seed)
        [found], [expected] = (e.generate(text, Sampling(max_tokens=5)) for e in (made, plain))
        assert found.token_ids == expected.token_ids
    assert made.status().prefix.num_evicted > 3
    check_back(made)


def test_keys_name_the_whole_text_before_an_edge():
    text = list(range(200))
    keys = chain([], text, 64)
    assert len(keys) == 3
    assert chain(keys[:1], text, 64) == keys
    assert chain([], text[:130], 64) == keys[:2]
    other = chain([], [9, *text[1:]], 64)
    assert not set(other) & set(keys)
    assert chain([], [*text[64:128], *text[64:128]], 64)[1] != keys[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda e: e(prefix=PrefixConfig(max_bytes=1)), "max_bytes=1: one snapshot of this model takes"),
        (lambda e: e(prefix=PrefixConfig(max_bytes=0)), "max_bytes=0: must be above 0"),
        (lambda e: e(prefix=PrefixConfig(reuse="all")), "reuse='all': must be one of exact, turns"),
        (lambda e: e(prefix=EXACT, page_size=128), "prefill_chunk=64: must be a multiple of page_size=128"),
    ],
    ids=["small", "none", "reuse", "pages"],
)
def test_what_is_refused(engine, make, message):
    with pytest.raises(ConfigError, match=message):
        make(engine)


# fires


SHARED = 128
ANSWER = Sampling(max_tokens=20)


def recovery(on_fire):
    return RecoveryConfig(on_fire=on_fire, breaker_fires=1000, max_per_minute=1000)


@pytest.fixture(scope="module")
def shared_texts():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 97, (400,), generator=generator).tolist()
    common = tokens[:SHARED]
    return [[*common, *tokens[200:230]], [*common, *tokens[240:300]], [*common, *tokens[300:301]], tokens[310:390]]


@pytest.fixture(scope="module")
def expected(model, shared_texts):
    from firetower.engine.engine import Engine

    with Engine(model, max_batch=8, max_model_len=256, prefill_chunk=CHUNK, store=False) as twin:
        return [c.token_ids for c in twin.generate(shared_texts, ANSWER)]


def spoil(engine, page):
    """A bad value in a key of a page."""
    with torch.inference_mode():
        engine._parts.state.pages[0, 0, page, 5, 0, 3] = float("nan")


@pytest.mark.parametrize("block", [0, 1], ids=["first block", "second block"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_fire", OnFire)
def test_live_sharers_of_a_bad_block_are_redone_from_the_last_clean_one(
    engine, shared_texts, expected, way, on_fire, block
):
    options = WAYS[way] | {"max_batch": 8}
    made = engine(prefix=EXACT, recovery=recovery(on_fire), **options)
    # the first writes the blocks that the second and the third are given
    owner = made.submit(shared_texts[0], ANSWER)
    while owner.stage in ("queued", "prefill"):
        made.step()
    others = [made.submit(text, ANSWER) for text in shared_texts[1:]]
    while any(s.stage in ("queued", "prefill") for s in others):
        made.step()
    page = owner.pages[block]
    assert [s.pages[block] == page for s in others] == [True, True, False]
    spoil(made, page)
    clear, cleared = made._parts.loop.quarantine.clear, []
    made._parts.loop.quarantine.clear = lambda pages, slots: (cleared.extend(pages), clear(pages, slots))
    while made.step():
        pass
    assert cleared.count(page) == 1
    for sequence, want in zip(others, expected[1:], strict=True):
        assert sequence.finish_reason is FinishReason.LENGTH, sequence.error
        assert tuple(sequence.answer) == want
    assert [s.num_recoveries for s in others] == [1, 1, 0]
    if on_fire is OnFire.FAIL:
        assert owner.finish_reason is FinishReason.BURNED
        assert isinstance(owner.error, BurnedError)
        assert owner.error.is_retriable
    else:
        assert tuple(owner.answer) == expected[0]
    status = made.status()
    # blocks before the bad one are kept, and both were redone from there
    kept = {e.key for e in made._parts.loop.prefix.entries}
    assert [key in kept for key in chain([], shared_texts[0][:SHARED], CHUNK)] == [block == 1, False]
    assert status.prefix.num_dropped == 2 - block
    num_again = 2 if on_fire is OnFire.FAIL else 3
    assert status.prefix.num_saved_tokens == 2 * SHARED + num_again * block * CHUNK
    assert status.prefix.num_redone == 2
    assert bad_pages(made._parts.state, range(status.num_pages)) == []
    check_back(made)


def test_a_sharer_that_is_still_read_starts_again_before_it_burns(faults, shared_texts, expected):
    run = faults(prefix=EXACT, max_batch=8, max_window=1)
    engine = run.engine
    [owner] = run.submit(shared_texts[:1], ANSWER)
    run.until_decoding([owner])
    # the second has one more chunk to go when the first burns
    [other] = run.submit(shared_texts[1:2], ANSWER)
    engine._parts.loop.scheduler.admit()
    engine._parts.loop._begin(other)
    assert other.pages[:2] == owner.pages[:2]
    spoil(engine, owner.pages[1])
    # a window is due before its next chunk
    engine._parts.loop.scheduler._tokens_since_window = 1 << 20
    run.engine.step()
    assert owner.finish_reason is FinishReason.BURNED
    assert (other.num_recoveries, other.stage) == (1, "queued")
    run.finish([other])
    assert tuple(other.answer) == expected[1]
    # its fire is the owner's alone
    assert [f.request for f in engine.fires] == [owner.request.id]
    check_back(engine)


@pytest.mark.parametrize("what", ["page", "states"])
def test_a_bad_entry_burns_nobody_for_long(engine, shared_texts, expected, what):
    made = engine(prefix=EXACT, max_window=1)
    assert made.generate(shared_texts[0], ANSWER)[0].token_ids == expected[0]
    [_, entry] = made._parts.loop.prefix.entries
    with torch.inference_mode():
        if what == "page":
            spoil(made, entry.pages[1])
        else:
            entry.saved.recurrent[1, 0, 2, 3] = float("nan")
    [completion] = made.generate(shared_texts[1], ANSWER)
    assert completion.finish_reason is FinishReason.LENGTH
    assert (completion.token_ids, completion.num_recoveries) == (expected[1], 1)
    [fire] = made.fires
    assert fire.outcome is Outcome.RECORDED
    assert fire.extra["recovery"] == "redone from the last clean block"
    assert made.generate(shared_texts[2], ANSWER)[0].token_ids == expected[2]
    assert made.status().num_fires == 1
    check_back(made)


def test_a_fault_of_one_requests_own_costs_only_its_entries(faults, shared_texts, expected):
    run = faults(prefix=EXACT, max_batch=8, max_window=1)
    run.finish(run.submit(shared_texts[:1], ANSWER))
    sequences = run.submit(shared_texts[1:], ANSWER)
    run.until_decoding(sequences, 1)
    run.step_with(Place(signal=run.signal("residual", 0), row=0, column=0, bits=NAN))
    completions = run.finish(sequences)
    assert completions[0].finish_reason is FinishReason.BURNED
    # no block is bad: the other one that shares them goes on
    assert [c.token_ids for c in completions[1:]] == expected[2:]
    assert [c.num_recoveries for c in completions[1:]] == [0, 0]
    assert [e.num_tokens for e in run.engine._parts.loop.prefix.entries if e.num_tokens == SHARED] == []
    check_back(run.engine)


@pytest.mark.parametrize("reuse", [EXACT, TURNS], ids=["exact", "turns"])
def test_random_faults_with_a_cache(faults, shared_texts, expected, reuse):
    run = faults(prefix=reuse, max_batch=8, max_window=1, recovery=recovery(OnFire.FAIL))
    rng = random.Random(9)
    burned = 0
    for _ in range(10):
        sequences = run.submit(shared_texts, ANSWER)
        run.until_decoding(sequences, rng.randint(0, 5))
        signal = rng.choice(run.engine.model.kept_signals)
        row = rng.randrange(4) * run.per_token[signal]
        run.step_with(Place(signal=signal, row=row, column=rng.randrange(run.shapes[signal][1]), bits=NAN))
        for completion, want in zip(run.finish(sequences), expected, strict=True):
            burned += completion.finish_reason is FinishReason.BURNED
            got = completion.token_ids
            assert got == (want if completion.finish_reason is FinishReason.LENGTH else want[: len(got)])
    assert 3 <= burned <= 10
    check_back(run.engine)


@pytest.mark.parametrize("prefix", [None, EXACT], ids=["without", "with"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_chunk_that_broke_off_leaves_no_trace(faults, prompt, prefix, chunk):
    sampling = Sampling(max_tokens=6, num_logprobs=0)
    run = faults(prefix=prefix, max_window=1)
    engine, text = run.engine, prompt(150)
    [want] = engine.generate(text, sampling)
    engine.clear_caches()
    if prefix is not None:
        # the prompt begins with what is cached: its first chunk has states before it too
        engine.generate(text[:70], Sampling(max_tokens=1))
    keep, late, seen = run.node.keep, max(engine.model.kept_signals) - 1, []

    def breaking_off(signal, x):
        if signal == late:
            seen.append(x.shape[0])
            if len(seen) == chunk - (prefix is not None and chunk > 1):
                raise torch.OutOfMemoryError("CUDA out of memory")
        keep(signal, x)

    run.node.keep = breaking_off
    [found] = engine.generate(text, sampling)
    assert engine.status().num_out_of_memory == 1
    assert (found.token_ids, found.logprobs) == (want.token_ids, want.logprobs)
    engine.clear_caches()
    status = engine.status()
    assert (status.num_free_pages, status.num_free_slots) == (status.num_pages, status.num_slots)


def test_states_that_find_no_memory_are_given_by_the_next_try(engine, prompt, monkeypatch):
    texts = [[*prompt(128), *prompt(20, seed)] for seed in (1, 2, 3)]
    sampling = Sampling(max_tokens=6, num_logprobs=0)
    want = [c.logprobs for c in engine(max_window=1).generate(texts, sampling)]
    made = engine(prefix=EXACT, max_window=1)
    made.generate(texts[0], sampling)
    begin, calls = made._parts.loop.prefix.begin, []

    def sometimes(sequence):
        calls.append(sequence)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin(sequence)

    monkeypatch.setattr(made._parts.loop.prefix, "begin", sometimes)
    assert [c.logprobs for c in made.generate(texts, sampling)] == want
    assert made.status().num_out_of_memory == 1
    check_back(made)


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_bad_values_are_found_in_pages_of_every_type(model, kind):
    dtype = kind if kind.itemsize > 1 else torch.bfloat16
    state = new_state(model.config, num_pages=6, num_slots=1, kv_dtype=kind, dtype=dtype)
    state.pages.view(torch.uint8).random_(0, 0x38)
    assert bad_pages(state, [3, 0, 5, 1]) == []
    assert bad_pages(state, []) == []
    if kind is torch.int8:
        # its values are all finite: the scale is what can be bad
        state.page_scales[0, 1, 5, 63, 0] = float("inf")
    else:
        state.pages[0, 1, 5, 63, 0, 31] = float("nan")
    if state.page_scales is not None:
        state.page_scales[0, 0, 3, 0, 0] = float("nan")
    else:
        state.pages[0, 0, 3, 0, 0, 0] = float("-inf")
    assert bad_pages(state, [3, 0, 5, 1]) == [3, 5]


@pytest.mark.parametrize("reuse", [EXACT, TURNS], ids=["exact", "turns"])
@pytest.mark.parametrize("way", ["overlap", "drafts"])
def test_a_small_pool_with_requests_that_come_and_go(engine, prompt, reuse, way):
    rng = random.Random(way)
    stems = [prompt(130, seed) for seed in range(3)]
    texts = [[*rng.choice(stems)[: rng.choice([64, 100, 130])], *prompt(rng.randint(1, 60), i)] for i in range(30)]
    samplings = [Sampling(max_tokens=rng.randint(1, 40), temperature=1.0, seed=i) for i in range(30)]
    want = [c.token_ids for c in engine(max_window=1).generate(texts, samplings)]
    made = engine(prefix=reuse, num_pages=9, **WAYS[way])
    sequences = [made.submit(text, sampling) for text, sampling in zip(texts, samplings, strict=True)]
    cancelled = set()
    for step in range(5000):
        if not made.step():
            break
        if step % 7 == 0 and (running := [s for s in sequences if not s.is_done]) and len(cancelled) < 8:
            cancelled.add((one := rng.choice(running)).number)
            made.cancel(one)
    for sequence, tokens in zip(sequences, want, strict=True):
        assert sequence.is_done
        got = tuple(sequence.answer)
        assert got == (tokens[: len(got)] if sequence.number in cancelled else tokens)
    status = made.status().prefix
    assert status.num_hits > 3
    assert status.num_evicted > 0
    check_back(made)


@pytest.mark.parametrize(("limit", "reason"), [(1, FinishReason.BURNED), (2, FinishReason.LENGTH)])
def test_what_is_done_again_for_bad_blocks_is_bounded(engine, shared_texts, expected, limit, reason):
    made = engine(prefix=EXACT, max_window=1, recovery=RecoveryConfig(max_per_request=limit, breaker_fires=2))
    made.generate(shared_texts[0], ANSWER)
    cache = made._parts.loop.prefix
    begin = cache.begin

    def spoiling(sequence):
        # the last block of what it is given: two blocks, then one, then none
        begin(sequence)
        given = cache._uses[sequence.number].start
        if given is not None:
            spoil(made, given.pages[-1])

    cache.begin = spoiling
    [completion] = made.generate(shared_texts[1], ANSWER)
    assert (completion.finish_reason, completion.num_recoveries) == (reason, limit)
    if reason is FinishReason.LENGTH:
        assert completion.token_ids == expected[1]
    # what is done again does not count: two fires at one place would have opened it
    assert made.status().open_breakers == {}
    check_back(made)
