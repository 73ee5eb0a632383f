"""The engine from outside: errors, bounds, finish reasons, streams, memory."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.engine.engine import Engine
from firetower.engine.errors import CancelledError, DeviceMemoryError, QueueFullError, RequestError, SamplingError
from firetower.engine.request import FinishReason, Sampling

SHORT = Sampling(max_tokens=5)


class Letters:
    """A tokenizer of 97 characters."""

    def encode(self, text):
        return [ord(c) - 30 for c in text]

    def decode(self, token_ids):
        return "".join(chr(30 + t) for t in token_ids)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], None, "the prompt has no tokens"),
        ([1] * 300, None, "300 tokens and max_tokens=128: must be at most 256 together"),
        ([1] * 250, SHORT, None),
        ([1] * 252, SHORT, "252 tokens and max_tokens=5: must be at most 256"),
        ([97], SHORT, "token 97: must be a whole number from 0 to 96"),
        ([-1], SHORT, "token -1"),
        ([1.5], SHORT, "token 1.5"),
        ("text", SHORT, "prompt: is text, and the engine has no tokenizer"),
        ([1], Sampling(stop=("x",), max_tokens=5), "stop strings need a tokenizer"),
        ([1], Sampling(logit_bias={97: 1.0}, max_tokens=5), r"logit_bias\[97\]: must be a token from 0 to 96"),
    ],
    ids=["empty", "long", "just fits", "one too long", "vocabulary", "negative", "float", "text", "stop", "bias"],
)
def test_prompts_are_refused_with_the_value_and_the_rule(engine, prompt, sampling, message):
    made = engine(max_batch=2)
    if message is None:
        assert made.generate(prompt, sampling)[0].finish_reason is FinishReason.LENGTH
        return
    with pytest.raises(RequestError, match=message):
        made.submit(prompt, sampling)
    assert made.is_idle


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 1.5},
        {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"frequency_penalty": math.nan}, {"presence_penalty": math.inf},
        {"seed": -1}, {"seed": 2**63}, {"max_tokens": 0}, {"max_repeats": 1}, {"stop": "abc"}, {"stop": ("",)},
        {"num_logprobs": 65}, {"logit_bias": {1: math.nan}},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_that_is_refused(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0: must be from 1 to 256"),
        ({"max_window": 9}, "max_window=9: must be from 1 to 8"),
        ({"page_size": 32}, "page_size=32: must be a multiple of 64"),
        ({"on_fire": "hope"}, "on_fire='hope': must be one of fail, retry, heal"),
        ({"speed": 9}, "speed: no such option"),
        ({"max_model_len": 5000}, "max_model_len=5000: the model has 1024 positions"),
        ({"memory_bytes": 1000}, "memory_bytes=1,000: states of max_batch=8 requests"),
        ({"prefill_chunk": 100}, "prefill_chunk=100: must be a multiple of 64"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_options_that_are_refused(engine, options, message):
    with pytest.raises(ConfigError, match=message):
        engine(**options)


def test_a_model_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        Engine(tmp_path / "nothing", store=False)


def test_a_request_larger_than_the_cache_is_refused_at_once(engine):
    with pytest.raises(RequestError, match="needs 3 pages, there are 2"):
        engine(num_pages=2).submit([1] * 150, SHORT)


def test_ten_thousand_prompts_run_through_a_short_queue(engine, monkeypatch):
    made = engine(max_queue=16)
    longest = 0
    submit = made.submit

    def watched(*args, **kwargs):
        nonlocal longest
        sequence = submit(*args, **kwargs)
        longest = max(longest, len(made._parts.loop.scheduler.queue))
        return sequence

    monkeypatch.setattr(made, "submit", watched)
    found = made.generate([[1, 2, 3]] * 60, Sampling(max_tokens=2))
    assert len({c.token_ids for c in found}) == 1
    assert (len(found), longest) == (60, 16)


def test_a_full_queue_refuses_and_keeps_nothing(engine):
    made = engine(max_queue=100)
    for _ in range(100):
        made.submit([1], SHORT)
    for _ in range(9_900):
        with pytest.raises(QueueFullError, match="100 requests wait already, max_queue=100"):
            made.submit([1], SHORT)
    assert made.status().num_submitted == 100


def test_end_tokens_and_lengths(engine, tiny):
    own = tiny(eos_token_ids=(72,))
    made = engine(own)
    [free] = made.generate([90, 52, 92], Sampling(max_tokens=20, ignore_eos=True))
    assert 72 in free.token_ids
    [ended] = made.generate([90, 52, 92], Sampling(max_tokens=20))
    at = free.token_ids.index(72)
    assert (ended.finish_reason, ended.token_ids) == (FinishReason.STOP, free.token_ids[: at + 1])
    third = free.token_ids[3]
    [stopped] = made.generate([90, 52, 92], Sampling(max_tokens=20, ignore_eos=True, stop_token_ids=(third,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]


def test_one_token_for_ever_ends_with_a_reason_of_its_own(engine):
    made = engine()
    [completion] = made.generate([1, 2], Sampling(max_tokens=50, max_repeats=7, logit_bias={11: 1e9}))
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.REPEATED, (11,) * 7)


def test_a_request_that_no_token_is_left_for(engine):
    made = engine()
    bans = dict.fromkeys(range(97), -math.inf)
    bad, good = made.generate([[1, 2], [3, 4]], [Sampling(max_tokens=5, logit_bias=bans), SHORT])
    assert bad.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, SamplingError)
    assert "EMPTY_MASK" in str(bad.error)
    assert good.finish_reason is FinishReason.LENGTH
    assert made.fires == ()


def test_log_probabilities(engine, prompt):
    made = engine(max_window=3)
    [completion] = made.generate(prompt(9), Sampling(max_tokens=6, num_logprobs=4))
    assert len(completion.logprobs) == 6
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.top[0] == (token, entry.logprob)
        assert len(entry.top) == 4
        assert all(a[1] >= b[1] for a, b in zip(entry.top, entry.top[1:], strict=False))
    [plain] = made.generate(prompt(9), Sampling(max_tokens=6))
    assert (plain.token_ids, plain.logprobs) == (completion.token_ids, ())


def test_text_in_and_out_and_stop_strings(engine):
    made = engine()
    made.tokenizer = Letters()
    [whole] = made.generate("hello", Sampling(max_tokens=20))
    assert whole.text == Letters().decode(whole.token_ids)
    stop = whole.text[7:9]
    [cut] = made.generate("hello", Sampling(max_tokens=20, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, stop in cut.text) == (FinishReason.STOP, False)


def test_cancelling_gives_everything_back(engine, prompt):
    made = engine(max_batch=2)
    queued = [made.submit(prompt(5, i), Sampling(max_tokens=50)) for i in range(4)]
    for _ in range(5):
        made.step()
    for sequence in queued:
        made.cancel(sequence)
    while made.step():
        pass
    status = made.status()
    assert {s.finish_reason for s in queued} == {FinishReason.CANCELLED}
    assert all(isinstance(s.error, CancelledError) for s in queued)
    assert (status.num_free_pages, status.num_free_slots, status.num_queued) == (status.num_pages, 2, 0)


def test_a_closed_engine_says_so(engine):
    made = engine()
    sequence = made.submit([1], SHORT)
    made.close()
    assert sequence.finish_reason is FinishReason.CANCELLED
    with pytest.raises(RequestError, match="is closed"):
        made.submit([1], SHORT)


def no_memory(*_: object, **__: object):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_step_that_finds_no_memory_is_tried_again_without_caches(engine, prompt, monkeypatch):
    made = engine(max_batch=2)
    want = made.generate([prompt(5), prompt(6)], SHORT)
    runner = made._parts.loop.runner
    launch, calls, released = runner.launch_window, [], []

    def sometimes(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            no_memory()
        return launch(*args, **kwargs)

    monkeypatch.setattr(runner, "launch_window", sometimes)
    made._parts.loop.release_caches.append(lambda: released.append(1))
    found = made.generate([prompt(5), prompt(6)], SHORT)
    assert [c.token_ids for c in found] == [c.token_ids for c in want]
    assert (len(released), made.status().num_out_of_memory) == (1, 1)


def test_a_prompt_that_never_finds_memory_fails_alone(engine, prompt, monkeypatch):
    made = engine(max_batch=3)
    want = made.generate([prompt(5), prompt(70)], SHORT)
    runner = made._parts.loop.runner
    launch = runner.launch_chunk
    monkeypatch.setattr(runner, "launch_chunk", lambda c: no_memory() if len(c.sequence.prompt) == 66 else launch(c))
    found = made.generate([prompt(5), prompt(66), prompt(70)], SHORT)
    assert isinstance(found[1].error, DeviceMemoryError)
    assert found[1].finish_reason is FinishReason.ERROR
    assert [found[i].token_ids for i in (0, 2)] == [c.token_ids for c in want]
    status = made.status()
    assert status.num_free_pages == status.num_pages


def test_streams_at_once(engine, prompt):
    made = engine(max_batch=3)
    made.tokenizer = Letters()
    want = made.generate([prompt(5, i) for i in range(6)], SHORT)

    async def read(i):
        deltas = [d async for d in made.stream(prompt(5, i), SHORT, request_id=f"stream {i}")]
        assert {d.request for d in deltas} == {f"stream {i}"}
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        return tuple(t for d in deltas for t in d.token_ids), "".join(d.text for d in deltas), deltas[-1]

    async def all_of_them():
        return await asyncio.gather(*(read(i) for i in range(6)))

    for (tokens, text, last), completion in zip(asyncio.run(all_of_them()), want, strict=True):
        assert (tokens, text) == (completion.token_ids, completion.text)
        assert last.finish_reason is FinishReason.LENGTH


def test_a_stream_that_is_left_cancels_its_request(engine):
    made = engine(max_batch=2)

    async def leave():
        stream = made.stream([1, 2, 3], Sampling(max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    status = made.status()
    assert (status.num_running, status.num_ended) == (0, 1)


def test_a_stream_of_a_bad_prompt_raises(engine):
    made = engine()

    async def read():
        return [d async for d in made.stream([], SHORT)]

    with pytest.raises(RequestError, match="no tokens"):
        asyncio.run(read())


def test_an_error_of_the_program_reaches_every_stream(engine, monkeypatch):
    made = engine()

    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(made._parts.loop.runner, "launch_window", broken)

    async def read():
        return [d async for d in made.stream([1, 2], SHORT)][-1]

    last = asyncio.run(read())
    assert last.finish_reason is FinishReason.CANCELLED
    assert "ZeroDivisionError: oops" in str(last.error)
    with pytest.raises(RequestError, match="is closed"):
        made.submit([1])
