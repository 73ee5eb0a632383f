"""Logprobs of one choice: not finite, null, above zero, or flat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from firetower.detect.records import DetectConfig, FindingKind

SAME = 1e-3
"""Two logprobs this near are one value: servers round to float32 or to a few digits."""

TIED = 1e-4
"""Alternatives this near are one value: they come from the same row, so rounding is the same."""

NEAR_UNIFORM = 0.02
"""Relative distance from -ln(vocabulary size) that still counts as uniform."""

PLAUSIBLE_LOG_SIZES = (math.log(1000), math.log(2_000_000))
ABOVE_ZERO = 1e-3
FLAT_EQUAL_TOKENS = 32
"""Tokens in a row on one value that no vocabulary explains, before it warns."""


@dataclasses.dataclass(slots=True)
class Seen:
    """First place and number of one oddity; ``value`` is the logprob there."""

    position: int
    count: int
    value: float | None


class LogprobStream:
    """The logprobs of one choice. ``seen``: the oddities by kind; ``is_uniform``: the flat one is."""

    def __init__(self, config: DetectConfig) -> None:
        self.num_tokens = 0
        self.seen: dict[FindingKind, Seen] = {}
        self.is_uniform = False
        self._config = config
        self._value = math.nan
        self._same = 0
        self._num_flat_tops = 0
        self._num_changes = 0
        size = config.vocabulary_size
        self._uniform = None if size is None else -math.log(size)

    def push(self, logprobs: Sequence[float | None], tops: Sequence[Sequence[float | None]]) -> bool:
        """Take the values of tokens in order; ``tops`` may be shorter. True when `seen` has something new."""
        before = self._num_changes
        for i, value in enumerate(logprobs):
            self._take(value)
            self._take_top(tops[i] if i < len(tops) else ())
            self.num_tokens += 1
        return self._num_changes > before

    def _take(self, value: float | None) -> None:
        if value is None:
            # the first token of an echoed prompt has no logprob, by the API
            if self.num_tokens:
                self._note(FindingKind.LOGPROB_NULL, None)
            self._same = 0
            return
        if not math.isfinite(value):
            self._note(FindingKind.LOGPROB_NONFINITE, value)
            self._same = 0
            return
        if value > ABOVE_ZERO:
            self._note(FindingKind.LOGPROB_ABOVE_ZERO, value)
        if abs(value - self._value) <= SAME:
            self._same += 1
        else:
            self._value, self._same = value, 1
        if self._same >= self._config.flat_tokens:
            self._take_flat()

    def _take_flat(self) -> None:
        """The same value again: the uniform distribution of a vocabulary, or one that nothing explains."""
        value = self._value
        if self._uniform is not None:
            is_uniform = abs(value - self._uniform) <= NEAR_UNIFORM * -self._uniform
        else:
            low, high = PLAUSIBLE_LOG_SIZES
            is_uniform = low <= -value <= high
        is_odd = is_uniform or (value < -0.05 and self._same >= FLAT_EQUAL_TOKENS)
        if is_odd:
            self._note_flat(self._same, value, is_uniform)

    def _take_top(self, top: Sequence[float | None]) -> None:
        values = [v for v in top if v is not None]
        bad = [v for v in values if math.isnan(v) or v == math.inf]
        if bad:
            self._note(FindingKind.LOGPROB_NONFINITE, bad[0])
        is_tied = len(values) > 1 and not bad and max(values) - min(values) <= TIED
        # two alternatives of a half each are a tie that a healthy model can show
        is_flat = is_tied and values[0] < -math.log(2) - SAME
        self._num_flat_tops = self._num_flat_tops + 1 if is_flat else 0
        if self._num_flat_tops >= self._config.flat_tokens:
            self._note_flat(self._num_flat_tops, values[0], True)

    def _note_flat(self, count: int, value: float, is_uniform: bool) -> None:
        seen = self.seen.get(FindingKind.LOGPROB_FLAT)
        if seen is None:
            position = self.num_tokens - count + 1
            self.seen[FindingKind.LOGPROB_FLAT] = Seen(position, count, value)
            self._num_changes += 1
        else:
            seen.count = max(seen.count, count)
        if is_uniform and not self.is_uniform:
            self.is_uniform = True
            self._num_changes += 1

    def _note(self, kind: FindingKind, value: float | None) -> None:
        seen = self.seen.get(kind)
        if seen is None:
            self.seen[kind] = Seen(self.num_tokens, 1, value)
            self._num_changes += 1
            return
        seen.count += 1
        if seen.value == -math.inf and value is not None and value != -math.inf:
            # a NaN says more than the -inf seen before it
            seen.position, seen.value = self.num_tokens, value
            self._num_changes += 1
