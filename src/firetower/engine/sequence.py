"""One request while it runs: its tokens, what it holds on the device, how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from firetower.core.errors import FiretowerError
from firetower.engine.drafts import SuffixDrafter
from firetower.engine.request import Completion, Delta, FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:
    from firetower.engine.choose import OwnPast
    from firetower.engine.text import TextStream

Sink = Callable[[Delta], None]
"""Takes what a request gets, as it gets it; called on the thread that runs the engine, and must not wait."""


class Stage(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Sequence:
    """A request and all that the engine knows of it.

    Attributes:
        request: what was asked. number: in the order of submission. seed: of its random numbers.
        stage: where it stands.
        answer: tokens so far. logprobs: one for each of them, where asked for.
        pages, slot: what it holds; empty and -1 while queued and after the end.
        num_prefilled: tokens of the prompt that pages and state hold.
        num_flights: steps on the device that it is part of; it keeps pages and slot as long.
        seat: its place in `firetower.engine.rows.RowTable`, -1 outside.
        drafter: None where it must not draft. own_past: what penalties and biases need, None without.
        text_stream: None where nobody reads the text as
            it comes; pending_text: of it, not handed on yet. repeats: how often the last token has stood in a row.
        num_recoveries: redone windows and restarts.
        epoch: counts recoveries; what was launched under another one is stale for this sequence.
        replay: answer tokens that a restart has to produce again before new ones are handed on.
        is_burned: pages and slot may hold a bad value.
        is_restarting: goes back to the queue as soon as no step uses what it holds.
        uses_reference: run the prompt on the reference path.
        stop_ids: tokens that end it.
    """

    def __init__(self, request: Request, *, number: int, seed: int, sink: Sink | None = None) -> None:
        self.request = request
        self.number = number
        self.seed = seed
        self.sink = sink
        self.stage = Stage.QUEUED
        self.answer: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.pages: list[int] = []
        self.slot = -1
        self.num_prefilled = 0
        self.num_flights = 0
        self.seat = -1
        self.drafter: SuffixDrafter | None = None
        self.own_past: OwnPast | None = None
        self.text_stream: TextStream | None = None
        self.pending_text = ""
        self.repeats = 0
        self.num_recoveries = 0
        self.epoch = 0
        self.replay: list[int] = []
        self.is_burned = False
        self.is_restarting = False
        self.uses_reference = False
        self.stop_ids: frozenset[int] = frozenset()
        self.finish_reason: FinishReason | None = None
        self.error: FiretowerError | None = None
        self.text: str | None = None
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.ended_at: float | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.request.token_ids

    @property
    def max_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return len(self.prompt) + self.request.sampling.max_tokens

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.stage is Stage.ENDED

    def completion(self) -> Completion:
        """The record of a request that ended."""
        assert self.finish_reason is not None
        ended = self.ended_at if self.ended_at is not None else time.perf_counter()
        first = self.first_token_at
        drafter = self.drafter
        return Completion(
            request=self.request.id,
            seed=self.seed,
            token_ids=tuple(self.answer),
            finish_reason=self.finish_reason,
            text=self.text,
            error=self.error,
            logprobs=tuple(self.logprobs),
            num_prompt_tokens=len(self.prompt),
            num_draft_tokens=drafter.num_drafted if drafter else 0,
            num_accepted_tokens=drafter.num_accepted if drafter else 0,
            num_recoveries=self.num_recoveries,
            time_to_first_token_s=None if first is None else first - self.submitted_at,
            time_s=ended - self.submitted_at,
        )
