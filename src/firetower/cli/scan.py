"""Look for NaN, Inf, zero or absurd weights in model files, and for damaged files, without loading a model.

Reads GGUF and safetensors files, and PyTorch files if torch is installed. A folder stands for the model files
directly in it. Block-quantised tensors are judged by their scales and mins, so nothing is dequantised.

Exit codes: 0 nothing bad, 1 a file could not be scanned, 3 at least one finding.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from firetower.cli.output import print_json, print_table, say
from firetower.core.errors import FiretowerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firetower.scan.records import FileReport, Finding, Progress, ScanReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a model file, or a folder with model files")
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON document")


def run(args: argparse.Namespace) -> int:
    """Scan every path; a path that cannot be scanned does not keep the others from it."""
    from firetower.scan import scan

    reports: list[ScanReport] = []
    errors: list[dict[str, str]] = []
    for path in args.paths:
        try:
            with _progress() as progress:
                report = scan(path, progress)
        except FiretowerError as e:
            errors.append({"path": path, "error": str(e)})
            continue
        reports.append(report)
        errors += [{"path": f.file, "error": f.error} for f in report.errors if f.error]
    if args.json:
        print_json({"reports": reports, "errors": errors})
    else:
        _print_reports(reports)
    for item in errors:
        say(f"firetower: {item['error']}")
    if any(report.bad for report in reports):
        return 3
    return 1 if errors else 0


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar with rate and end time on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scan", total=None)
        yield lambda file, done, total: bar.update(task, description=file, completed=done, total=total)


def _print_reports(reports: list[ScanReport]) -> None:
    files = [file for report in reports for file in report.files]
    findings = [(file, finding) for file in files for finding in file.findings]
    if findings:
        with_file = len(files) > 1
        columns = ["problem", "tensor", "where", "offset", "bits", "what"]
        rows = [_row(finding) for _, finding in findings]
        if with_file:
            columns.insert(0, "file")
            rows = [(Path(file.file).name, *row) for (file, _), row in zip(findings, rows, strict=True)]
        print_table(columns, rows, right=("offset",))
    for file in files:
        print(_summary(file))
    for report in reports:
        for skipped in report.skipped:
            say(f"{skipped}: not scanned, holds training state and no weights")
    _say_next([finding for _, finding in findings])


def _row(finding: Finding) -> tuple[str, ...]:
    label = finding.problem.value if finding.severity == "bad" else f"note: {finding.problem.value}"
    offset = "" if finding.offset_bytes is None else str(finding.offset_bytes)
    more = f"; and {finding.num_more:,} more" if finding.num_more else ""
    return label, finding.tensor or "", _where(finding), offset, finding.bits or "", finding.message + more


def _where(finding: Finding) -> str:
    parts = [] if finding.expert is None else [f"expert {finding.expert}"]
    if finding.row is not None:
        parts.append(f"row {finding.row}")
    if finding.block is not None:
        parts.append(f"block {finding.block}")
    if finding.column_start is not None and finding.column_stop is not None:
        start, last = finding.column_start, finding.column_stop - 1
        parts.append(f"column {start}" if start == last else f"columns {start}-{last}")
    return ", ".join(parts)


def _summary(file: FileReport) -> str:
    num_bad, num_notes = len(file.bad), len(file.notes)
    more = sum(f.num_more for f in file.findings) + file.num_more_findings
    counts = f"{num_bad} finding{'' if num_bad == 1 else 's'}"
    counts += f" (and {more:,} more values)" if more else ""
    counts += f", {num_notes} note{'' if num_notes == 1 else 's'}" if num_notes else ""
    if file.error is not None:
        return f"{file.file}: not scanned, {counts}"
    if file.format == "index":
        return f"{file.file}: index of {file.num_tensors} tensors, {counts}"
    unread = file.num_tensors - file.num_checked
    tensors = f"{file.num_tensors} tensors" + (
        f" ({unread} without floats or not readable)" if unread else ""
    )
    return f"{file.file}: {tensors}, {_size(file.num_bytes)}, {counts}, {file.seconds:.1f} s"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1000
    return f"{value:.3g} TB"


def _say_next(findings: list[Finding]) -> None:
    """Point to what the bits of the first non-finite value can tell."""
    first = next((f for f in findings if f.kind is not None), None)
    if first is not None:
        say(f"next: firetower bits {first.bits} --dtype {first.dtype}")
