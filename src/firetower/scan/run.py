"""Scanning a path: every model file in it, each to a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from firetower.core.errors import FiretowerError, ScanError
from firetower.scan.findings import Findings
from firetower.scan.folder import SUFFIXES, check_index, check_splits, list_files
from firetower.scan.gguf import MAGIC, scan_gguf
from firetower.scan.pytorch import looks_like_pytorch, scan_pytorch
from firetower.scan.records import FileReport, Finding, Problem, Progress, ScanReport
from firetower.scan.safetensors import scan_safetensors
from firetower.scan.source import Source


def scan(path: str | Path, progress: Progress | None = None) -> ScanReport:
    """Look for non-finite, all-zero and absurd weights, and for damaged files.

    Args:
        path: a GGUF, safetensors or PyTorch file, or a folder with such files directly in it.
        progress: called with (file, bytes done, bytes in all) as the scan goes on.

    Returns:
        The report. A file of a folder that cannot be scanned carries an ``error``; the others are scanned.

    Raises:
        ScanError: nothing to scan at the path, or the one file given cannot be scanned.
        MissingExtraError: the one file given is a PyTorch file and torch is not installed.

    Numerics: nothing is dequantised; scales, mins and plain floats are read as bits, so a NaN keeps its own.
    """
    path = Path(path)
    listing = list_files(path)
    total = sum(_size(file) for file in listing.files)
    clock = _Progress(progress, total)
    names: dict[str, tuple[str, ...]] = {}
    splits = check_splits(listing.files) if path.is_dir() else {}
    reports = [
        _scan_file(file, clock, names, splits.get(file), is_only=not path.is_dir()) for file in listing.files
    ]
    reports += [_scan_index(file, names) for file in listing.indexes]
    return ScanReport(path=str(path), files=tuple(reports), skipped=tuple(str(p) for p in listing.skipped))


class _Progress:
    """Adds up the bytes of all files for the caller's progress function."""

    def __init__(self, report: Progress | None, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def advance(self, file: Path) -> Callable[[int], None]:
        """The function that a file's scan calls with the bytes it has read."""

        def advance(num_bytes: int) -> None:
            self._done += num_bytes
            if self._report is not None:
                self._report(file.name, min(self._done, self._total), self._total)

        return advance


def _scan_file(
    path: Path,
    clock: _Progress,
    names: dict[str, tuple[str, ...]],
    split_problem: str | None,
    *,
    is_only: bool,
) -> FileReport:
    started, findings = time.perf_counter(), Findings()
    num_tensors = num_checked = size = 0
    form, error = SUFFIXES.get(path.suffix.lower(), "unknown"), None
    if split_problem is not None:
        findings.add(Finding(problem=Problem.TRUNCATED, message=split_problem))
    try:
        with Source(path) as source:
            size, form = source.size, _format(source)
            if form == "gguf":
                num_tensors, num_checked = scan_gguf(source, findings, clock.advance(path))
            elif form == "safetensors":
                num_tensors, num_checked, header = scan_safetensors(source, findings, clock.advance(path))
                if header is not None:
                    names[path.name] = header.names
            else:
                num_tensors, num_checked = scan_pytorch(source, findings, clock.advance(path))
    except FiretowerError as e:
        if is_only:
            raise
        error = str(e)
    return FileReport(
        file=str(path),
        format=form,
        num_tensors=num_tensors,
        num_checked=num_checked,
        num_bytes=size,
        seconds=time.perf_counter() - started,
        findings=findings.result(),
        num_more_findings=findings.num_beyond,
        error=error,
    )


def _format(source: Source) -> str:
    """Format by the first bytes, then by the name: a damaged ``x.gguf`` is a bad GGUF file, not unknown."""
    if source.size == 0:
        raise ScanError(f"path={source.path}: the file is empty")
    head = source.read(0, 10)
    if head[:4] in (MAGIC, MAGIC[::-1]):
        return "gguf"
    by_name = SUFFIXES.get(source.path.suffix.lower())
    if by_name == "pytorch" and not looks_like_pytorch(head):
        raise ScanError(f"path={source.path}: neither a zip nor a pickle, so not a file of torch.save")
    if by_name is not None:
        return by_name
    if looks_like_pytorch(head) and head[:2] == b"PK":
        return "pytorch"
    if head[8:10] == b'{"':
        return "safetensors"
    raise ScanError(
        f"path={source.path}: not a GGUF, safetensors or PyTorch file; known suffixes: {', '.join(SUFFIXES)}"
    )


def _scan_index(path: Path, names: dict[str, tuple[str, ...]]) -> FileReport:
    started, findings, error, size, num_tensors = time.perf_counter(), Findings(), None, 0, 0
    try:
        with Source(path) as source:
            size = source.size
            num_tensors = check_index(source, names, findings)
    except ScanError as e:
        error = str(e)
    return FileReport(
        file=str(path),
        format="index",
        num_tensors=num_tensors,
        num_bytes=size,
        seconds=time.perf_counter() - started,
        findings=findings.result(),
        num_more_findings=findings.num_beyond,
        error=error,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a broken link: its scan says so
