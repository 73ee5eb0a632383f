"""What a scan reports: findings, a report a file, a report a scan. `core.codec.encode` makes them JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum

from firetower.core.records import Kind

Progress = Callable[[str, int, int], None]
"""Called as ``progress(file, done_bytes, total_bytes)``: the file being read, bytes over all files."""


class Problem(StrEnum):
    """Class of a finding."""

    NONFINITE = "non-finite"
    ALL_ZERO = "all-zero"
    ABSURD = "absurd magnitude"
    TRUNCATED = "truncated"
    OVERLONG = "over-long"
    HEADER = "header"
    OVERLAP = "overlap"
    DUPLICATE = "duplicate"


class Severity(StrEnum):
    """``bad`` findings make the exit code 3; a ``note`` is shown and is normal in some real models."""

    BAD = "bad"
    NOTE = "note"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong with one file.

    Args:
        problem: its class.
        message: the finding in words, without the place.
        severity: whether it makes the scan fail.
        tensor: name as in the file, unprintable characters escaped; None for the file as a whole.
        expert: index of the expert in a stacked tensor, or in a name such as ``experts.17.down_proj``.
        row: row (all dimensions but the last, flattened; within the expert for a stacked tensor).
        block: block within the row, for types that store blocks.
        column_start: first column that the bad field reaches.
        column_stop: one past the last such column.
        offset_bytes: absolute offset in the file of the bad field, or of the data for a whole tensor.
        num_bytes: size of the bad field.
        field: ``value``, ``scale`` or ``min``.
        dtype: type of the field, a name of `core.records.DTYPE_BITS`.
        bits: raw bits of the field in hexadecimal, padded to the width of ``dtype``.
        kind: NaN, +Inf or -Inf, for non-finite findings.
        count: fields this finding stands for (a run of neighbouring columns is one finding).
        num_more: fields of the same tensor and problem that are bad too and not listed.
    """

    problem: Problem
    message: str
    severity: Severity = Severity.BAD
    tensor: str | None = None
    expert: int | None = None
    row: int | None = None
    block: int | None = None
    column_start: int | None = None
    column_stop: int | None = None
    offset_bytes: int | None = None
    num_bytes: int | None = None
    field: str | None = None
    dtype: str | None = None
    bits: str | None = None
    kind: Kind | None = None
    count: int = 1
    num_more: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What was read of one file; one that could not be scanned has ``error`` set and is never called clean.

    Args:
        file: the path as found.
        format: ``gguf``, ``safetensors``, ``pytorch`` or ``index``.
        num_tensors: tensors that the header declares.
        num_checked: those whose floats were read; integer tensors and tensors that cannot be placed are not.
        num_bytes: size of the file.
        seconds: time taken.
        findings: in file order; at most 8 a tensor and problem, and 1,000 a file.
        num_more_findings: findings beyond that limit.
        error: why the file could not be scanned, in one line.
    """

    file: str
    format: str
    num_tensors: int = 0
    num_checked: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    num_more_findings: int = 0
    error: str | None = None

    @property
    def bad(self) -> tuple[Finding, ...]:
        """The findings that make the scan fail."""
        return tuple(f for f in self.findings if f.severity is Severity.BAD)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are normal in some real models."""
        return tuple(f for f in self.findings if f.severity is Severity.NOTE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScanReport:
    """What a scan of one path found, file by file; ``skipped`` are files of the folder without weights."""

    path: str
    files: tuple[FileReport, ...]
    skipped: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings of all files, notes included."""
        return tuple(f for report in self.files for f in report.findings)

    @property
    def bad(self) -> tuple[Finding, ...]:
        """All findings that make the scan fail."""
        return tuple(f for report in self.files for f in report.bad)

    @property
    def errors(self) -> tuple[FileReport, ...]:
        """The files that could not be scanned."""
        return tuple(report for report in self.files if report.error is not None)

    @property
    def is_clean(self) -> bool:
        """True when every file was scanned and nothing bad was found."""
        return not self.bad and not self.errors
