"""Checks of where a header puts its tensors: inside the file, apart, nothing missing or left over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from firetower.scan.findings import Findings
from firetower.scan.records import Finding, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes that a header claims for one tensor: absolute [start, stop) in the file."""

    name: str
    start: int
    stop: int


def check_extents(
    extents: Iterable[Extent], data_start: int, file_size: int, alignment: int, findings: Findings
) -> None:
    """Add overlaps, gaps, a truncated file and left-over bytes to ``findings``.

    Args:
        extents: of every tensor whose size is known.
        data_start: first byte after the header, aligned.
        alignment: padding up to a multiple of this is no gap and no left-over.
    """
    end, last = data_start, "the header"
    for extent in sorted(extents, key=lambda e: (e.start, e.stop)):
        if extent.start < end and extent.stop > extent.start:
            findings.add(_overlap(extent, end, last))
        elif extent.start - end >= alignment:
            findings.add(_gap(extent, end, last))
        if extent.stop > end:
            end, last = extent.stop, extent.name
    if end <= file_size and file_size - end >= alignment:
        findings.add(_left_over(end, file_size))


def check_truncated(extents: Iterable[Extent], file_size: int, findings: Findings) -> None:
    """Add one finding when the file ends before the last tensor does."""
    cut = sorted((e for e in extents if e.stop > file_size), key=lambda e: e.stop)
    if not cut:
        return
    first, needed = min(cut, key=lambda e: e.start), cut[-1].stop
    findings.add(
        Finding(
            problem=Problem.TRUNCATED,
            message=f"the file ends at byte {file_size}, the header promises {needed}: "
            f"{len(cut)} tensors incomplete, this is the first",
            tensor=first.name,
            offset_bytes=first.start,
            num_bytes=first.stop - first.start,
        )
    )


def _overlap(extent: Extent, end: int, last: str) -> Finding:
    return Finding(
        problem=Problem.OVERLAP,
        message=f"starts {end - extent.start} bytes before {last} ends",
        tensor=extent.name,
        offset_bytes=extent.start,
        num_bytes=extent.stop - extent.start,
    )


def _gap(extent: Extent, end: int, last: str) -> Finding:
    return Finding(
        problem=Problem.HEADER,
        message=f"{extent.start - end} bytes between {last} and this tensor belong to nothing",
        tensor=extent.name,
        offset_bytes=end,
        num_bytes=extent.start - end,
    )


def _left_over(end: int, file_size: int) -> Finding:
    return Finding(
        problem=Problem.OVERLONG,
        message=f"{file_size - end} bytes after the last tensor belong to nothing",
        offset_bytes=end,
        num_bytes=file_size - end,
    )
