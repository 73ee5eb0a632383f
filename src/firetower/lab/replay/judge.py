"""One answer judged: detectors' findings, how many tokens came, and at which of them the first sign stands."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from firetower.detect import DetectConfig, Detector, Finding, Severity, StreamEvent
from firetower.detect.records import RANK
from firetower.lab.replay.records import Sign, TryEnd

MAX_SIGNS = 16
"""Signs kept of one try, fires first."""

CANARY_LIMITS = DetectConfig(
    fire_repeats=12,
    run_warn=6,
    run_sign=4,
    token_run_warn=12,
    token_run_sign=4,
    token_zero_warn=8,
    edge_warn=4,
    loop_sign_chars=12,
    loop_warn_chars=24,
    flat_tokens=4,
    empty_tokens=4,
)
"""Limits for answers of 24 tokens, which the usual ones never reach. Used only beside a healthy answer that passed
them: models with random weights repeat themselves when well."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one request gave, before anything is known of the process. Fields as `records.Try`.

    Attributes:
        message: what the server or the worker said, for the user's eyes; it may hold content and is never stored.
        fatal: why no further try can do better (wrong key, no such model); empty where one can.
        text: what was answered, of canaries only.
        is_odd: a canary's answer that breaks `CANARY_LIMITS`.
    """

    end: TryEnd
    seconds: float = 0.0
    num_tokens: int | None = None
    ignition: int | None = None
    signs: tuple[Sign, ...] = ()
    fire: str | None = None
    origin: str | None = None
    bits: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    detail: str = ""
    message: str = ""
    fatal: str = ""
    text: str = ""
    is_odd: bool = False


def lost(detail: str, *, seconds: float = 0.0, message: str = "", fatal: str = "") -> Result:
    """A try without an answer that can be judged."""
    return Result(end=TryEnd.LOST, seconds=seconds, detail=detail, message=message, fatal=fatal)


class AnswerJudge:
    """Takes the events of one answer; `result` judges them.

    Args:
        config: limits of the detectors.
        is_streamed: each event is about one token where it does not say otherwise; False for a whole answer.
        is_canary: keep the answer, and hold it against `CANARY_LIMITS` as well.
    """

    def __init__(self, config: DetectConfig | None = None, *, is_streamed: bool, is_canary: bool = False) -> None:
        self._detector = Detector(config)
        self._tight = Detector(CANARY_LIMITS) if is_canary else None
        self._is_streamed = is_streamed
        self._text: list[str] = []
        self._tokens: dict[int, int] = defaultdict(int)
        self._places: dict[tuple[int, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._usage: int | None = None
        self._error_at: int | None = None
        self._finish_reason: str | None = None
        self.num_events = 0

    @property
    def is_fire(self) -> bool:
        """Whether what came so far is a fire already."""
        return self._detector.is_fire

    def feed(self, events: Iterable[StreamEvent]) -> bool:
        """Take events in order; returns whether one of them made it a fire."""
        has_news = False
        for event in events:
            self.num_events += 1
            self._follow(event)
            if self._tight is not None:
                self._tight.feed(event)
            has_news |= any(f.severity is Severity.FIRE for f in self._detector.feed(event))
        return has_news

    def result(self, *, seconds: float, http_status: int | None = None) -> Result:
        """End the answer and judge it: clean or fire."""
        self._detector.finish()
        if self._tight is not None:
            self._tight.finish()
        findings = sorted(self._detector.findings, key=lambda f: -RANK[f.severity])
        fires = [f for f in findings if f.severity is Severity.FIRE]
        positions = [p for p in map(self._token_of, fires) if p is not None]
        counted = sum(self._tokens.values()) or None
        return Result(
            end=TryEnd.FIRE if fires else TryEnd.CLEAN,
            seconds=seconds,
            num_tokens=self._usage if self._usage is not None else counted,
            ignition=min(positions, default=None),
            signs=tuple(map(sign_of, findings[:MAX_SIGNS])),
            http_status=http_status,
            finish_reason=self._finish_reason,
            text="".join(self._text),
            is_odd=self._tight is not None and self._tight.is_fire,
        )

    def _follow(self, event: StreamEvent) -> None:
        if event.usage is not None:
            self._usage = event.usage.completion_tokens
        if event.error is not None:
            if self._is_streamed and self._error_at is None:
                self._error_at = self._tokens[event.choice]
            return
        self._finish_reason = event.finish_reason or self._finish_reason
        if event.text:
            lengths, tokens = self._places[event.choice, event.field]
            lengths.append((lengths[-1] if lengths else 0) + len(event.text))
            tokens.append(self._tokens[event.choice])
            if self._tight is not None:
                self._text.append(event.text)
        self._tokens[event.choice] += self._num_tokens(event)

    def _num_tokens(self, event: StreamEvent) -> int:
        shown = len(event.token_ids) or len(event.logprobs)
        return shown or int(self._is_streamed and bool(event.text))

    def _token_of(self, finding: Finding) -> int | None:
        """Token of the answer at which a finding stands; None where it cannot be told."""
        if finding.position < 0:
            return self._error_at if finding.kind == "error text" else None
        if finding.unit == "token":
            return finding.position
        if not self._is_streamed:
            return None
        lengths, tokens = self._places[finding.choice, finding.field]
        index = bisect.bisect_right(lengths, finding.position)
        return tokens[index] if index < len(tokens) else None


def sign_of(finding: Finding) -> Sign:
    """A finding without its sample, which is content."""
    fields = {f.name: getattr(finding, f.name) for f in dataclasses.fields(Sign)}
    return Sign(**fields | {"kind": str(finding.kind), "severity": str(finding.severity)})
