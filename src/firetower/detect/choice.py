"""One choice of an answer: its texts, token ids and logprobs, and what they mean together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from firetower.detect.episode import Episode
from firetower.detect.logprobs import LogprobStream, Seen
from firetower.detect.records import DetectConfig, Finding, FindingKind, Severity, StreamEvent, Usage
from firetower.detect.text import SAMPLE_CHARS, TextStream
from firetower.detect.tokens import TokenStream

MAX_FIELDS = 64
"""Texts judged in one choice (content, reasoning, each tool call's arguments)."""

_CUT = frozenset({"length", "max_tokens", "incomplete"})
"""Finish reasons that mean: the token limit, not the model, ended it."""


class Choice:
    """Everything seen of one choice. `take` says whether `findings` may have changed."""

    def __init__(self, index: int, config: DetectConfig) -> None:
        self._index = index
        self._config = config
        self._texts: dict[str, TextStream] = {}
        self._tokens = TokenStream(config)
        self._logprobs = LogprobStream(config)
        self._finish_reason: str | None = None
        self._empty: Finding | None = None
        self._has_text = False
        self._has_more_fields = False
        self._is_finished = False

    def take(self, event: StreamEvent) -> bool:
        """Take an event of this choice."""
        is_changed = False
        if event.text:
            self._has_text = True
            stream = self._texts.get(event.field)
            if stream is None:
                stream = self._new_text(event.field)
            is_changed = stream is not None and stream.push(event.text)
        if event.token_ids:
            is_changed |= self._tokens.push(event.token_ids)
        if event.logprobs:
            is_changed |= self._logprobs.push(event.logprobs, event.top_logprobs)
        if event.finish_reason is not None:
            self._finish_reason = event.finish_reason
        return is_changed

    def finish(self, usage: Usage | None, *, has_error: bool) -> None:
        """End the choice; ``usage`` is None where its own tokens are not known from it."""
        for stream in self._texts.values():
            stream.finish()
        self._is_finished = True
        if not self._has_text and not has_error:
            self._empty = self._judge_empty(usage)

    def findings(self) -> list[Finding]:
        """Everything found so far, by place."""
        signs = self._second_signs()
        found = [
            *self._logprob_findings(),
            *self._token_findings(signs),
            *(f for name, text in self._texts.items() for f in self._text_findings(name, text, signs)),
        ]
        if self._empty is not None:
            found.append(self._empty)
        if self._has_more_fields:
            reason = f"more than {MAX_FIELDS} texts in one choice: the others were not judged"
            found.append(self._finding(FindingKind.BROKEN_STREAM, Severity.ADVISORY, reason))
        return sorted(found, key=lambda f: (f.unit, f.field, f.position, f.kind))

    def _new_text(self, field: str) -> TextStream | None:
        if len(self._texts) >= MAX_FIELDS:
            self._has_more_fields = True
            return None
        return self._texts.setdefault(field, TextStream(self._config))

    def _second_signs(self) -> list[str]:
        """What, beside repetition, speaks against this choice; words for the reason."""
        signs = [
            words
            for kind, words in (
                (FindingKind.LOGPROB_NONFINITE, "logprobs are not finite"),
                (FindingKind.LOGPROB_NULL, "logprobs are null"),
                (FindingKind.LOGPROB_FLAT, "logprobs are flat"),
            )
            if kind in self._logprobs.seen
        ]
        if self._tokens.outside is not None:
            signs.append("a token id is outside the vocabulary")
        edges = {e.kind for e in self._tokens.episodes.all() if e.warns}
        if FindingKind.TOKEN_ZERO in edges:
            signs.append("the tokens are id 0")
        if FindingKind.TOKEN_EDGE in edges:
            signs.append("the tokens are the last id of the vocabulary")
        return signs

    def _rated(self, episode: Episode, signs: list[str]) -> tuple[Severity, str] | None:
        """Severity of a stretch of repetition and the second sign that raised it."""
        if episode.fires:
            return Severity.FIRE, f"{self._config.fire_repeats:,} repeats are a fire by themselves"
        if episode.is_sign and (second := self._second_sign(episode, signs)):
            return Severity.FIRE, second
        if episode.warns:
            return Severity.WARN, "repetition alone is no proof: healthy models loop too"
        return None

    def _second_sign(self, episode: Episode, signs: list[str]) -> str | None:
        if signs:
            return "and " + ", ".join(signs)
        if episode.is_special:
            return "and the piece is the text of a special token"
        # healthy small models loop over words until the limit; one glyph or token until then is another thing
        is_token = episode.kind is FindingKind.TOKEN_RUN
        is_long_run = is_token or (episode.is_one_glyph and episode.warns)
        if self._is_finished and is_long_run and episode.is_open and self._finish_reason in _CUT:
            return "and it went on until the token limit"
        return None

    def _text_findings(self, field: str, text: TextStream, signs: list[str]) -> Iterator[Finding]:
        for e in text.episodes.all():
            if (rated := self._rated(e, signs)) is None:
                continue
            if e.kind is FindingKind.CHARACTER_RUN:
                what = f"one character ({_glyph(e.sample)}) {e.count:,} times in a row"
            else:
                what = f"a piece of {e.period:,} characters {e.count:,} times on end"
            reason = f"{what} in {field} from character {e.start:,}; {rated[1]}"
            yield self._finding(e.kind, rated[0], reason, field=field, position=e.start, count=e.count, sample=e.sample)

    def _token_findings(self, signs: list[str]) -> Iterator[Finding]:
        if (outside := self._tokens.outside) is not None:
            count = self._tokens.num_outside
            reason = f"token id {outside[1]} is outside the vocabulary: {count:,} such tokens"
            yield self._token_finding(FindingKind.TOKEN_EDGE, Severity.FIRE, reason, outside[0], count)
        for e in self._tokens.episodes.all():
            if e.kind is not FindingKind.TOKEN_RUN:
                is_zero = e.kind is FindingKind.TOKEN_ZERO
                meaning = "what an arg-max over NaN gives" if is_zero else "the edge of the vocabulary"
                reason = f"token id {e.sample} {e.count:,} times in a row from token {e.start:,}: {meaning}"
                yield self._token_finding(e.kind, Severity.WARN, reason, e.start, e.count, e.sample)
            elif (rated := self._rated(e, signs)) is not None:
                reason = f"one token id {e.count:,} times in a row from token {e.start:,}; {rated[1]}"
                yield self._token_finding(e.kind, rated[0], reason, e.start, e.count, e.sample)

    def _logprob_findings(self) -> Iterator[Finding]:
        for kind, seen in self._logprobs.seen.items():
            severity, words = self._judge_logprob(kind, seen)
            yield self._token_finding(kind, severity, words, seen.position, seen.count)

    def _judge_logprob(self, kind: FindingKind, seen: Seen) -> tuple[Severity, str]:
        place = f"from token {seen.position:,}, {seen.count:,} in all"
        if kind is FindingKind.LOGPROB_NONFINITE:
            if seen.value == -math.inf:
                return Severity.WARN, f"a chosen token has probability 0 (logprob -inf), {place}"
            name = "NaN" if seen.value is not None and math.isnan(seen.value) else "+inf"
            return Severity.FIRE, f"a logprob is {name}, {place}"
        if kind is FindingKind.LOGPROB_NULL:
            return Severity.WARN, f"a logprob is null, {place}: some servers write NaN so"
        if kind is FindingKind.LOGPROB_ABOVE_ZERO:
            return Severity.WARN, f"a logprob is above 0 ({seen.value:.6g}), {place}: a probability over 1"
        assert seen.value is not None
        if self._logprobs.is_uniform:
            size = math.exp(min(-seen.value, 30.0))
            reason = f"logprobs are flat at {seen.value:.4f}, as over {size:,.0f} equally likely tokens"
            return Severity.FIRE, f"{reason}, {place}"
        return Severity.WARN, f"logprobs stay at {seen.value:.4f}, {place}"

    def _judge_empty(self, usage: Usage | None) -> Finding | None:
        tokens = self._tokens.num_tokens or None
        if tokens is None and usage is not None:
            tokens = max(0, usage.completion_tokens - usage.reasoning_tokens)
            if not tokens and usage.reasoning_tokens:
                return None  # all of it went into hidden reasoning
        is_cut = self._finish_reason in _CUT
        severity = Severity.WARN if self._config.hides_reasoning else Severity.FIRE
        if tokens is not None and tokens >= self._config.empty_tokens:
            reason = f"no text in any field, yet {tokens:,} tokens were made"
            return self._finding(FindingKind.EMPTY, severity, reason, count=tokens)
        if is_cut:
            reason = "no text in any field, yet the token limit ended it"
            return self._finding(FindingKind.EMPTY, Severity.WARN, reason)
        return self._finding(FindingKind.EMPTY, Severity.ADVISORY, "no text in any field")

    def _finding(
        self,
        kind: FindingKind,
        severity: Severity,
        reason: str,
        *,
        field: str = "",
        position: int = -1,
        count: int = 1,
        sample: str = "",
    ) -> Finding:
        return Finding(
            kind=kind,
            severity=severity,
            reason=reason,
            choice=self._index,
            field=field,
            position=position,
            count=count,
            sample=sample[:SAMPLE_CHARS],
        )

    def _token_finding(
        self, kind: FindingKind, severity: Severity, reason: str, position: int, count: int, sample: str = ""
    ) -> Finding:
        return Finding(
            kind=kind,
            severity=severity,
            reason=reason,
            choice=self._index,
            position=position,
            unit="token",
            count=count,
            sample=sample,
        )


def _glyph(character: str) -> str:
    """A character as a person can name it: ``'!', U+0021``."""
    code = f"U+{ord(character):04X}"
    return f"{character!r}, {code}" if character.isprintable() else code
