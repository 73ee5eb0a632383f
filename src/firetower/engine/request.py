"""What is asked of the engine and what it answers: `Sampling`, `Request`, `Completion`, `Delta`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum

from firetower.core.errors import FiretowerError
from firetower.engine.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 64


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A token or a string that ends it."""
    LENGTH = "length"
    """``max_tokens``, or the longest sequence that the engine was made for."""
    REPEATED = "repeated"
    """One token ``max_repeats`` times in a row: a sign of a fault that no sensor saw, or of a stuck model."""
    BURNED = "burned"
    """A bad value in its own rows; ``error`` is a `BurnedError`."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """``error`` says what; a bad value it was not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when to end.

    Attributes:
        temperature: 0 is greedy.
        top_k: the k most likely; 0 is off. top_p: share of the probability that is kept; 1 is off.
        min_p: share of the largest probability that a token must have; 0 is off.
        repetition_penalty: of tokens of prompt and answer; 1 is off.
        frequency_penalty, presence_penalty: of tokens of the answer; 0 is off.
        logit_bias: added to the logits of single tokens; -Inf bans one.
        seed: of the random numbers; None: a new one, named in the completion. The same seed gives the same tokens in
            any batch, with drafts or without, on the same build and device.
        max_tokens: most tokens of the answer.
        stop: strings that end the answer, which ends before them; needs a tokenizer.
        stop_token_ids: tokens that end the answer, beside those of the model.
        ignore_eos: go on past the model's own end tokens.
        num_logprobs: None: none; n: of the token itself, and of the n most likely.
        max_repeats: end with `FinishReason.REPEATED` at this many equal tokens in a row; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    max_repeats: int = 512

    def __post_init__(self) -> None:
        finite_from_0 = "must be finite, 0 or more"
        fraction = "must be from 0 to 1"
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, f"{finite_from_0}; 0 is greedy"),
            ("top_k", self.top_k >= 0, "must be 0 or more; 0 is off"),
            ("top_p", 0 <= self.top_p <= 1, f"{fraction}; 1 is off"),
            ("min_p", 0 <= self.min_p <= 1, f"{fraction}; 0 is off"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be finite, above 0; 1 is off"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "must be finite; 0 is off"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "must be finite; 0 is off"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "must be from 0 to 2**63 - 1, or None"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("max_repeats", self.max_repeats == 0 or self.max_repeats >= 2, "must be 2 or more, or 0 for off"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "must be a tuple of strings, none empty"),
            (
                "num_logprobs",
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_TOP_LOGPROBS,
                f"must be from 0 to {MAX_TOP_LOGPROBS}, or None",
            ),
        )
        for name, is_fine, rule in rules:
            if not is_fine:
                raise RequestError(f"{name}={getattr(self, name)!r}: {rule}")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias):
                raise RequestError(f"logit_bias[{token}]={bias}: must be a number; -inf bans a token")

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's score depends on the tokens before it, or on a bias of its own: no drafts then."""
        penalties = (self.repetition_penalty - 1.0, self.frequency_penalty, self.presence_penalty)
        return any(penalties) or bool(self.logit_bias)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it. ``token_ids`` are the prompt's; ``id`` names it in fires and logs."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of a running request; the last one has ``finish_reason``, and ``error`` where it has one.

    ``text`` is None without a tokenizer. It may lag behind the tokens: half a character is held back.
    """

    request: str
    token_ids: tuple[int, ...]
    text: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: FiretowerError | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that ended.

    Attributes:
        request: its id. seed: of its random numbers, also where none was asked for.
        token_ids: the answer, a stop token included. text: the same without it, None without a tokenizer.
        finish_reason: why it ended; `error` is set where it ended badly.
        num_prompt_tokens, num_draft_tokens, num_accepted_tokens: tokens of the prompt; drafts tried, drafts accepted.
        num_recoveries: how often work was done again because of a fire.
        time_to_first_token_s, time_s: since it was submitted.
    """

    request: str
    seed: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    text: str | None = None
    error: FiretowerError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_prompt_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_recoveries: int = 0
    time_to_first_token_s: float | None = None
    time_s: float = 0.0
