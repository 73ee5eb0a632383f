"""Drafts from a sequence's own past: what followed the last time its latest tokens stood there.

A drafter counts what its drafts bring. One that brings too little turns itself off, and tries again later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from firetower.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """When to draft.

    Attributes:
        longest, shortest: tokens of the suffix that is looked up, the longest match first.
        least_accepted_frac: share of drafts that must be accepted.
        trial_drafts: drafts after which the share is judged.
        trial_misses: tokens in a row without a draft after which a drafter pauses: the next window can then be launched
            before the last one is read.
        pause_tokens: tokens for which a drafter stays off the first time; doubled each time, up to 16 times that.
    """

    longest: int = 4
    shortest: int = 2
    least_accepted_frac: float = 0.3
    trial_drafts: int = 24
    trial_misses: int = 32
    pause_tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 16:
            raise ConfigError(
                f"shortest={self.shortest}, longest={self.longest}: must be 1 <= shortest <= longest <= 16"
            )
        if not 0 <= self.least_accepted_frac <= 1:
            raise ConfigError(f"least_accepted_frac={self.least_accepted_frac}: must be from 0 to 1")
        for name in ("trial_drafts", "trial_misses", "pause_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")


class SuffixDrafter:
    """Drafts for one sequence.

    Attributes:
        num_drafted, num_accepted: since the start.
        is_on: whether it drafts now.
    """

    def __init__(self, config: DraftConfig, tokens: Sequence[int]) -> None:
        """Start from a prompt; ``tokens`` is not kept."""
        self._config = config
        self._tokens: list[int] = []
        # for each length of suffix: its tokens -> where what followed it begins
        self._after: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(config.longest, config.shortest - 1, -1)
        }
        self.num_drafted = self.num_accepted = 0
        self.is_on = True
        self._trial_drafted = self._trial_accepted = self._misses = 0
        self._length = 1 << 30
        self._pause = config.pause_tokens
        self._resumes_at = 0
        self._num_indexed = 0
        self.extend(tokens)

    @property
    def accepted_frac(self) -> float | None:
        """Share of all drafts that were right; None before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence went on."""
        self._tokens.extend(tokens)
        if not self.is_on and len(self._tokens) >= self._resumes_at:
            self.is_on = True
            self._trial_drafted = self._trial_accepted = self._misses = 0

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` drafts of the next tokens; none where the suffix is new, or while off."""
        if not self.is_on or most < 1:
            return []
        self._index()
        for n, after in self._after.items():
            at = after.get(tuple(self._tokens[-n:]))
            if at is not None:
                self._misses = 0
                return self._copy(at, min(most, self._length))
        self._misses += 1
        if self._misses >= self._config.trial_misses:
            self._turn_off()
        return []

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts, ``num_accepted`` were right."""
        if num_drafts < 1:
            return
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        # one more than was right the last time: a text that stops repeating stops costing
        self._length = 1 << 30 if num_accepted == num_drafts else num_accepted + 1
        self._trial_drafted += num_drafts
        self._trial_accepted += num_accepted
        if self._trial_drafted < self._config.trial_drafts:
            return
        if self._trial_accepted < self._config.least_accepted_frac * self._trial_drafted:
            self._turn_off()
        else:
            self._pause = self._config.pause_tokens
        self._trial_drafted = self._trial_accepted = 0

    def _turn_off(self) -> None:
        self.is_on = False
        self._resumes_at = len(self._tokens) + self._pause
        self._pause = min(2 * self._pause, 16 * self._config.pause_tokens)

    def _index(self) -> None:
        """Note what followed each suffix; the last one has no successor yet."""
        tokens = self._tokens
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for n, after in self._after.items():
                if end >= n:
                    after[tuple(tokens[end - n : end])] = end
        self._num_indexed = len(tokens)

    def _copy(self, at: int, count: int) -> list[int]:
        """``count`` tokens from ``at`` on; past the end the copy reads itself, as a repeated text does."""
        period = len(self._tokens) - at
        return [self._tokens[at + i % period] for i in range(count)]
