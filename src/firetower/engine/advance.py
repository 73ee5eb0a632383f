"""New tokens of a sequence: when to end, what to hand on."""

from __future__ import annotations

import time

from firetower.core.errors import FiretowerError
from firetower.engine.errors import RequestError
from firetower.engine.flight import Flight
from firetower.engine.request import Delta, FinishReason, TokenLogprobs
from firetower.engine.sequence import Sequence


class ReplayError(RequestError):
    """A request that was started again took another way than the tokens that were handed on already."""


def advance(
    sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs]
) -> tuple[FinishReason | None, FiretowerError | None]:
    """Add tokens to the answer, up to the one that ends it.

    Args:
        sequence: whose answer grows.
        tokens: that stand. logprobs: of each of them, or empty.

    Returns:
        (why it ends, the error that it ends with), or (None, None) where it goes on.
    """
    sampling, answer, replay = sequence.request.sampling, sequence.answer, sequence.replay
    if sequence.first_token_at is None:
        sequence.first_token_at = time.perf_counter()
    begin = len(answer)
    reason: FinishReason | None = None
    for i, token in enumerate(tokens):
        sequence.repeats = sequence.repeats + 1 if answer and answer[-1] == token else 1
        answer.append(token)
        if logprobs:
            sequence.logprobs.append(logprobs[i])
        at = len(answer)
        if at <= len(replay) and replay[at - 1] != token:
            return FinishReason.ERROR, ReplayError(
                f"request {sequence.request.id}: started again, token {at - 1} is {token} and was {replay[at - 1]}; "
                "what was handed on cannot be taken back"
            )
        if token in sequence.stop_ids or _push_text(sequence, token, is_new=at > len(replay)):
            reason = FinishReason.STOP
        elif at >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        elif sampling.max_repeats and sequence.repeats >= sampling.max_repeats:
            reason = FinishReason.REPEATED
        if reason is not None:
            break
    if sequence.drafter is not None:
        sequence.drafter.extend(answer[begin:])
    return reason, None


def deliver(sequence: Sequence, begin: int) -> None:
    """Hand on tokens of the answer from ``begin`` on, and the end where it has ended.

    What a restart produces again was handed on before.
    """
    stream, text = sequence.text_stream, sequence.pending_text
    sequence.pending_text = ""
    if sequence.is_done and stream is not None:
        text += stream.finish()
    if sequence.sink is None:
        return
    begin = max(begin, len(sequence.replay))
    tokens = tuple(sequence.answer[begin:])
    if tokens or text or sequence.is_done:
        sequence.sink(
            Delta(
                request=sequence.request.id,
                token_ids=tokens,
                text=None if stream is None else text,
                logprobs=tuple(sequence.logprobs[begin:]),
                finish_reason=sequence.finish_reason,
                error=sequence.error,
            )
        )


def _push_text(sequence: Sequence, token: int, *, is_new: bool) -> bool:
    """Text of one more token; whether a stop string stands in it now."""
    if sequence.text_stream is None or not is_new:
        return False
    sequence.pending_text += sequence.text_stream.push([token])
    return sequence.text_stream.is_stopped


def logprobs_of(flight: Flight, row: int, count: int, asked: int | None) -> list[TokenLogprobs]:
    """Log-probabilities of the first ``count`` tokens of a row; empty where they were not asked for."""
    if asked is None or flight.logprobs is None:
        return []
    first = row * flight.shape.window if flight.chunk is None else 0
    found = []
    for at in range(first, first + count):
        top: tuple[tuple[int, float], ...] = ()
        if asked and flight.top_ids is not None and flight.top_logprobs is not None:
            ids, values = flight.top_ids[at, :asked].tolist(), flight.top_logprobs[at, :asked].tolist()
            top = tuple((i, v) for i, v in zip(ids, values, strict=True) if i >= 0)
        found.append(TokenLogprobs(logprob=float(flight.logprobs[at]), top=top))
    return found
