"""The detector: events in, findings out, no I/O. Severity comes from what is seen together in one choice."""

from __future__ import annotations

from collections.abc import Iterator

from firetower.detect.choice import Choice
from firetower.detect.error_text import judge_error
from firetower.detect.records import RANK, DetectConfig, Finding, FindingKind, Severity, StreamEvent, Usage

MAX_CHOICES = 128
"""Choices judged in one answer; a server that claims more is told of, once."""

_Key = tuple[FindingKind, int, str, int, str]


class Detector:
    """Judges one answer as it streams in.

    Feed every event in order, then call `finish`. `feed` returns what is new: a finding that rises from warn
    to fire is returned again. `findings` is the whole list, each at its final severity and count once
    finished. How the text was cut into events does not change `findings`.

    Memory is bounded whatever the length: about 8 kB a text and 128 choices of 64 texts at most.

    Raises:
        ConfigError: limits that make no sense, from `DetectConfig`.
    """

    def __init__(self, config: DetectConfig | None = None) -> None:
        self.config = config or DetectConfig()
        self._choices: dict[int, Choice] = {}
        self._errors: list[Finding] = []
        self._usage: Usage | None = None
        self._told: dict[_Key, Severity] = {}
        self._has_too_many = False
        self._is_finished = False

    def feed(self, event: StreamEvent) -> list[Finding]:
        """Take one event; returns the findings that are new or have risen."""
        if event.usage is not None:
            self._usage = event.usage
        if event.error is not None:
            self._take_error(event)
            return self._news(self._errors)
        choice = self._choices.get(event.choice) or self._new_choice(event.choice)
        if choice is None or not choice.take(event):
            return []
        return self._news(choice.findings())

    def finish(self) -> list[Finding]:
        """End the answer; returns the findings that are new or have risen."""
        if not self._is_finished:
            self._is_finished = True
            share = self._usage
            if share is not None and len(self._choices) > 1:
                share = None  # the count is over all choices; whose tokens they were is unknown
            for choice in self._choices.values():
                choice.finish(share, has_error=bool(self._errors))
        return self._news(self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Everything found so far: errors first, then by choice, place and kind."""
        by_choice = (f for _, choice in sorted(self._choices.items()) for f in choice.findings())
        return [*self._errors, *self._limits(), *by_choice]

    @property
    def is_fire(self) -> bool:
        """Whether any finding is a fire."""
        return any(f.severity is Severity.FIRE for f in self.findings)

    def _new_choice(self, index: int) -> Choice | None:
        if len(self._choices) >= MAX_CHOICES:
            self._has_too_many = True
            return None
        return self._choices.setdefault(index, Choice(index, self.config))

    def _limits(self) -> Iterator[Finding]:
        if self._has_too_many:
            yield Finding(
                kind=FindingKind.BROKEN_STREAM,
                severity=Severity.ADVISORY,
                reason=f"more than {MAX_CHOICES} choices in one answer: the others were not judged",
            )

    def _take_error(self, event: StreamEvent) -> None:
        assert event.error is not None
        judged = judge_error(event.error)
        severity, why = judged or (
            Severity.ADVISORY,
            "the server answered with an error that says nothing of numbers",
        )
        finding = Finding(
            kind=FindingKind.ERROR_TEXT,
            severity=severity,
            reason=why,
            choice=event.choice,
            sample=event.error[:80],
        )
        if finding not in self._errors and len(self._errors) < MAX_CHOICES:
            self._errors.append(finding)

    def _news(self, findings: list[Finding]) -> list[Finding]:
        news = []
        for finding in findings:
            key = (finding.kind, finding.choice, finding.field, finding.position, finding.sample)
            before = self._told.get(key)
            if before is None or RANK[finding.severity] > RANK[before]:
                self._told[key] = finding.severity
                news.append(finding)
        return news
