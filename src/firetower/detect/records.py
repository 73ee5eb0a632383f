"""What goes into a detector and what comes out: events, findings, and the limits that are judged by."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from firetower.core.errors import ConfigError


class Severity(StrEnum):
    """How much a finding says by itself."""

    FIRE = "fire"
    WARN = "warn"
    ADVISORY = "advisory"


RANK: dict[Severity, int] = {Severity.ADVISORY: 0, Severity.WARN: 1, Severity.FIRE: 2}
"""Severities in order; a finding is reported again only when it rises."""


class FindingKind(StrEnum):
    """What was seen; each is described in docs/reference/detect.md."""

    CHARACTER_RUN = "character run"
    TOKEN_RUN = "token run"
    LOOP = "loop"
    TOKEN_ZERO = "token zero"
    TOKEN_EDGE = "token edge"
    EMPTY = "empty output"
    LOGPROB_NONFINITE = "logprob not finite"
    LOGPROB_NULL = "logprob null"
    LOGPROB_FLAT = "logprob flat"
    LOGPROB_ABOVE_ZERO = "logprob above zero"
    ERROR_TEXT = "error text"
    BROKEN_STREAM = "broken stream"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that the server says it made, over all choices; ``reasoning_tokens`` of them were hidden."""

    completion_tokens: int
    reasoning_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One piece of an answer, as it came.

    Attributes:
        choice: index of the choice; each is judged by itself.
        field: which text grows: ``content``, ``reasoning``, ``text``, ``tool_calls[0].arguments``, ...
        text: the piece; empty where the event brings none.
        token_ids: ids of the piece, where the server shows them.
        logprobs: natural log of each chosen token's probability; None is a JSON ``null``.
        top_logprobs: for each token the alternatives' values, where shown.
        finish_reason: the server's word, with the last event of a choice.
        usage: token counts, where the server tells them.
        error: text of an error that came instead of an answer, or inside a stream.
    """

    choice: int = 0
    field: str = "content"
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[tuple[float | None, ...], ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a healthy answer does not show.

    ``reason`` is one sentence without content of the answer, but for a single repeated character; ``sample``
    is the repeated piece itself (at most 80 characters) and private. ``position`` counts characters of
    ``field``, or tokens of the choice where ``unit`` is ``token``, from 0; -1 where the finding has no place.
    ``count`` says how many times, where that means something, else 1.
    """

    kind: FindingKind
    severity: Severity
    reason: str
    choice: int = 0
    field: str = ""
    position: int = -1
    unit: str = "character"
    count: int = 1
    sample: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig:
    """Limits of the detectors.

    Attributes:
        vocabulary_size: of the model, where known; makes ids at the edge and flat logprobs exact.
        fire_repeats: repeats of anything that are a fire without a second sign.
        run_warn: one character in a row that warns; fill characters (space, ``=``, ``0``, ...) never do
            below ``fire_repeats``.
        run_sign: one character in a row that is a fire together with a second sign.
        token_run_warn: one token id in a row that warns.
        token_run_sign: one token id in a row that is a fire together with a second sign.
        token_zero_warn: token id 0 in a row that warns.
        edge_warn: the last id of the vocabulary in a row that warns.
        loop_sign_chars: characters inside one loop (at least 4 repeats) that are a fire with a second sign.
        loop_warn_chars: characters inside one loop (at least 8 repeats) that warn.
        flat_tokens: logprobs in a row on one value that make them flat.
        empty_tokens: tokens spent on an empty answer that make it a fire.
        hides_reasoning: the server thinks without showing or counting it; an empty answer then only warns.

    Raises:
        ConfigError: a limit below 1, or a vocabulary below 2.
    """

    vocabulary_size: int | None = None
    fire_repeats: int = 2048
    run_warn: int = 128
    run_sign: int = 32
    token_run_warn: int = 512
    token_run_sign: int = 64
    token_zero_warn: int = 16
    edge_warn: int = 8
    loop_sign_chars: int = 512
    loop_warn_chars: int = 2048
    flat_tokens: int = 8
    empty_tokens: int = 8
    hides_reasoning: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool):
                continue
            least = 2 if f.name == "vocabulary_size" else 1
            if value is not None and value < least:
                raise ConfigError(f"{f.name}={value}: must be at least {least}")
