"""Who runs next: a bounded queue, admission by seats, slots and pages, prompts in chunks between windows."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from firetower.core.errors import ConfigError
from firetower.engine.errors import QueueFullError
from firetower.engine.pool import Pool
from firetower.engine.sequence import Sequence, Stage

if TYPE_CHECKING:
    from firetower.engine.prefix import PrefixCache

CHUNK = 64
"""Chunks of a prompt begin at multiples of this."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens ``begin`` to ``end`` of a prompt, to be run next."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here, so that a token comes out."""
        return self.end == len(self.sequence.prompt)


class Scheduler:
    """Queue and prompts; windows are run by whoever asks, over all that are seated.

    A request is admitted with all the pages it can ever need, so that none has to be thrown out to make room: what
    runs goes on to its end, and its bits do not depend on what else came. First come, first admitted.

    Args:
        max_queue: requests that may wait.
        max_batch: requests that may run, prompts included.
        prefill_chunk: tokens of a chunk; a multiple of `CHUNK`. Chunks begin at multiples of it, so that the chunks of
            a prompt depend on the prompt alone.
        page_size: tokens of a page.
        pages, slots: the pools.

    Attributes:
        prefix: the prefix cache, which gives the first pages of a prompt that it knows; None for none.
    """

    def __init__(
        self, *, max_queue: int, max_batch: int, prefill_chunk: int, page_size: int, pages: Pool, slots: Pool
    ) -> None:
        if prefill_chunk < CHUNK or prefill_chunk % CHUNK:
            raise ConfigError(f"prefill_chunk={prefill_chunk}: must be a multiple of {CHUNK}; recurrent states need it")
        if max_queue < 1:
            raise ConfigError(f"max_queue={max_queue}: must be at least 1")
        self.max_queue = max_queue
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.page_size = page_size
        self.pages = pages
        self.slots = slots
        self.prefix: PrefixCache | None = None
        self.queue: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.num_running = 0
        self._tokens_since_window = 0

    def pages_for_length(self, length: int) -> int:
        """Pages of ``length`` tokens, prompt and longest answer; the last one is chosen, never run."""
        return -(-max(1, length - 1) // self.page_size)

    def submit(self, sequence: Sequence) -> None:
        """Add a request to the queue.

        Raises:
            QueueFullError: no room.
        """
        if len(self.queue) >= self.max_queue:
            raise QueueFullError(
                f"queue: {len(self.queue)} requests wait already, max_queue={self.max_queue}; try again later, or make "
                "the engine with a larger max_queue"
            )
        self.queue.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a request that has to start again at the head of the queue; the bound does not count for it."""
        sequence.stage = Stage.QUEUED
        self.queue.appendleft(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a request that is queued or in its prompt."""
        if sequence in self.queue:
            self.queue.remove(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)

    def admit(self) -> list[Sequence]:
        """Give pages and a slot to those at the head of the queue, as long as there is room."""
        admitted = []
        while self.queue and self.num_running < self.max_batch and self.slots.num_free:
            sequence = self.queue[0]
            need = self.pages_for_length(sequence.max_length)
            shared = [] if self.prefix is None else self.prefix.claim(sequence, need)
            if shared is None or need - len(shared) > self.pages.num_free:
                break
            self.queue.popleft()
            sequence.pages = shared + self.pages.take(need - len(shared))
            [sequence.slot] = self.slots.take(1)
            sequence.stage = Stage.PREFILL
            sequence.num_prefilled = len(shared) * self.page_size
            self.num_running += 1
            self.prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def next_chunk(self, *, num_decoding: int) -> Chunk | None:
        """The next chunk of a prompt, or None where windows are due, or nothing is left to read.

        About ``prefill_chunk`` tokens of prompts go between two windows, so that a long prompt holds up those who
        write by one chunk at a time.
        """
        if not self.prefilling or (num_decoding and self._tokens_since_window >= self.prefill_chunk):
            return None
        sequence = self.prefilling[0]
        begin = sequence.num_prefilled
        end = min(len(sequence.prompt), (begin // self.prefill_chunk + 1) * self.prefill_chunk)
        if self.prefix is not None:
            end = self.prefix.cut(sequence, begin, end)
        return Chunk(sequence=sequence, begin=begin, end=end)

    def chunk_launched(self, chunk: Chunk) -> None:
        """A chunk went to the device; the sequence's next one, if any, is now due."""
        self._tokens_since_window += chunk.end - chunk.begin
        chunk.sequence.num_prefilled = chunk.end
        if chunk.is_last:
            self.prefilling.remove(chunk.sequence)

    def window_launched(self) -> None:
        """A window went to the device: prompts may have their turn again."""
        self._tokens_since_window = 0

    def release(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Take pages and slot of a sequence that no step on the device uses any more.

        Returns:
            (pages, slots) that went into quarantine; empty unless the sequence is burned.
        """
        assert sequence.num_flights == 0
        if sequence.slot < 0:
            return [], []
        pages = self.pages.give_back(sequence.pages, is_burned=sequence.is_burned)
        slots = self.slots.give_back([sequence.slot], is_burned=sequence.is_burned)
        sequence.pages, sequence.slot = [], -1
        self.num_running -= 1
        return pages, slots
