"""The scheduler by itself: who is admitted, which chunks run, what comes back to the pools."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.engine.errors import QueueFullError
from firetower.engine.pool import Pool
from firetower.engine.request import Request, Sampling
from firetower.engine.scheduler import Scheduler
from firetower.engine.sequence import Sequence, Stage


def make(pages: int = 8, batch: int = 2, chunk: int = 64, queue: int = 100) -> Scheduler:
    return Scheduler(
        max_queue=queue, max_batch=batch, prefill_chunk=chunk, page_size=64, pages=Pool(pages, "page"),
        slots=Pool(batch, "slot"),
    )  # fmt: skip


def request(number: int, length: int, answer: int = 1) -> Sequence:
    made = Request(id=str(number), token_ids=(1,) * length, sampling=Sampling(max_tokens=answer))
    return Sequence(made, number=number, seed=0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([64, 128, 256]),
    st.booleans(),
)
def test_every_prompt_is_read_once_in_order_and_all_is_given_back(sizes, batch, chunk, with_windows):
    scheduler = make(pages=10, batch=batch, chunk=chunk)
    sequences = [request(i, *size) for i, size in enumerate(sizes)]
    for sequence in sequences:
        scheduler.submit(sequence)
    decoding: list[Sequence] = []
    read: dict[int, list[tuple[int, int]]] = {s.number: [] for s in sequences}
    admitted = []
    for _ in range(10_000):
        admitted += scheduler.admit()
        assert scheduler.num_running <= batch
        step = scheduler.next_chunk(num_decoding=len(decoding))
        if step is not None:
            read[step.sequence.number].append((step.begin, step.end))
            scheduler.chunk_launched(step)
            if step.is_last:
                decoding.append(step.sequence)
        elif decoding:
            scheduler.window_launched()
            done = decoding.pop(0)
            done.stage = Stage.ENDED
            assert scheduler.release(done) == ([], [])
        else:
            break
        if with_windows:
            scheduler.window_launched()
    assert [s.number for s in admitted] == list(range(len(sizes)))
    for sequence in sequences:
        length = len(sequence.prompt)
        edges = [*range(0, length, chunk), length]
        assert read[sequence.number] == list(itertools.pairwise(edges))
    assert (scheduler.pages.num_free, scheduler.slots.num_free) == (10, batch)


def test_a_long_prompt_lets_windows_in_between_its_chunks():
    scheduler = make(pages=20, chunk=64)
    scheduler.submit(request(0, 300))
    scheduler.admit()
    order = []
    for _ in range(8):
        step = scheduler.next_chunk(num_decoding=1)
        order.append("window" if step is None else step.begin)
        if step is None:
            scheduler.window_launched()
        else:
            scheduler.chunk_launched(step)
    assert order == [0, "window", 64, "window", 128, "window", 192, "window"]


def test_a_request_that_does_not_fit_waits_and_holds_back_those_behind_it():
    scheduler = make(pages=3, batch=4)
    for i, length in enumerate((100, 150, 10)):
        scheduler.submit(request(i, length))
    assert [s.number for s in scheduler.admit()] == [0]
    assert scheduler.admit() == []
    first = scheduler.prefilling[0]
    scheduler.drop(first)
    first.stage = Stage.ENDED
    scheduler.release(first)
    assert [s.number for s in scheduler.admit()] == [1]


def test_what_a_burned_request_held_is_not_given_out_again():
    scheduler = make(pages=2, batch=1)
    scheduler.submit(request(0, 100))
    [sequence] = scheduler.admit()
    scheduler.drop(sequence)
    sequence.is_burned = True
    assert scheduler.release(sequence) == ([0, 1], [0])
    scheduler.submit(request(1, 100))
    assert scheduler.admit() == []
    scheduler.pages.release_quarantined([0, 1])
    scheduler.slots.release_quarantined([0])
    assert len(scheduler.admit()) == 1


def test_the_queue_is_bounded_but_not_for_those_who_start_again():
    scheduler = make(queue=2)
    scheduler.submit(request(0, 1))
    scheduler.submit(request(1, 1))
    with pytest.raises(QueueFullError, match="max_queue=2"):
        scheduler.submit(request(2, 1))
    scheduler.requeue(request(3, 1))
    assert [s.number for s in scheduler.queue] == [3, 0, 1]


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (2, 1), (65, 1), (66, 2), (129, 2), (130, 3)])
def test_the_last_token_needs_no_page(length, pages):
    assert make().pages_for_length(length) == pages


@pytest.mark.parametrize("chunk", [0, 32, 100])
def test_chunks_that_states_cannot_be_cut_at_are_refused(chunk):
    with pytest.raises(ConfigError, match=f"prefill_chunk={chunk}: must be a multiple of 64"):
        make(chunk=chunk)
