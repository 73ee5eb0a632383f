"""Collects the findings of one file, a few of each kind and a count of the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter

from firetower.scan.records import Finding, Problem

MAX_PER_TENSOR = 8
MAX_PER_FILE = 1000


class Findings:
    """Findings of one file: `MAX_PER_TENSOR` a tensor and problem, `MAX_PER_FILE` in all, others counted."""

    def __init__(self) -> None:
        self._listed: list[Finding] = []
        self._num_listed: Counter[tuple[str | None, Problem]] = Counter()
        self._more: Counter[tuple[str | None, Problem]] = Counter()
        self.num_beyond = 0

    def has_room(self, tensor: str | None, problem: Problem) -> bool:
        """Whether another finding of this tensor (None for the file) and problem would be listed."""
        is_open = tensor is None or len(self._listed) < MAX_PER_FILE
        return is_open and self._num_listed[tensor, problem] < MAX_PER_TENSOR

    def add(self, finding: Finding) -> None:
        """List a finding, or count it where there is no room."""
        key = finding.tensor, finding.problem
        if not self.has_room(*key):
            self.add_more(*key, finding.count)
            return
        self._num_listed[key] += 1
        self._listed.append(finding)

    def add_more(self, tensor: str | None, problem: Problem, count: int) -> None:
        """Count bad fields that are not listed."""
        if count == 0:
            return
        if self._num_listed[tensor, problem]:
            self._more[tensor, problem] += count
        else:
            self.num_beyond += count

    def result(self) -> tuple[Finding, ...]:
        """The listed findings, the last of each tensor and problem carrying the count of the rest."""
        last = {(f.tensor, f.problem): i for i, f in enumerate(self._listed)}
        listed = list(self._listed)
        for key, count in self._more.items():
            listed[last[key]] = dataclasses.replace(listed[last[key]], num_more=count)
        return tuple(listed)
