"""Show what the flight recorder kept of a fire: the last windows, signal by signal.

``show`` takes the folder of a dump, or the id of its fire. It prints the plan of the step that burned, the state
audit, each recorded window, and the signals of one of them: largest finite value, NaN, Inf, first bad place. Rows of
pads are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firetower.cli.output import print_json, print_table, say
from firetower.core.errors import CaptureError

if TYPE_CHECKING:
    from firetower.engine.dump import Dump, DumpStep, SignalFigures


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower dump``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = commands.add_parser("show", help="windows, signals, absmax, NaN, Inf, first bad place")
    show.add_argument("path", metavar="DUMP", help="folder of a dump, or the id of its fire")
    show.add_argument("--step", type=int, help="step whose signals are listed (default: the one that burned)")
    show.add_argument("--all", action="store_true", help="list the signals of every window")
    show.add_argument("--json", action="store_true", help="all of it, machine-readable, on stdout")
    parser.epilog = "example: firetower dump show 20261201-141754-79de380b91"


def run(args: argparse.Namespace) -> int:
    """Print one dump."""
    from firetower.engine.dump import read_dump, read_signals

    folder = _folder(args.path)
    dump = read_dump(folder)
    steps = [window.number for window in dump.windows]
    if args.step is not None and args.step not in steps:
        raise CaptureError(f"step={args.step}: is not recorded; recorded are {', '.join(map(str, steps)) or 'none'}")
    found = list(read_signals(folder, dump))
    if args.json:
        print_json({"dump": dump, "signals": [_plain(one) for one in found]})
        return 0
    _print_head(dump)
    if not found:
        say("no window is in it")
        return 0
    _print_windows(dump, found)
    chosen = args.step if args.step is not None else dump.step.number if dump.step.number in steps else steps[-1]
    _print_signals([one for one in found if args.all or one.step.number == chosen])
    return 0


def _folder(path: str) -> Path:
    """The folder itself, or that of a fire in the usual place."""
    from firetower.engine.dump import dumps_path

    given = Path(path).expanduser()
    usual = dumps_path() / path
    is_id = not given.is_dir() and Path(path).name == path and not path.startswith(".") and usual.is_dir()
    return usual if is_id else given


def _print_head(dump: Dump) -> None:
    from firetower.core.records import Status

    print(f"dump of fire {dump.fire}, {dump.created_at}: {dump.model} on {dump.device}")
    print(f"step {dump.step.number} burned: {_shape(dump.step)}")
    for row in dump.step.rows:
        if row.is_burned:
            print(
                f"  request {row.request}: position {row.position}, {_count(row.num_real, 'token')}, slot {row.slot}, "
                f"{_count(len(row.pages), 'page')}, seed {row.seed}, {row.accepted} accepted before"
            )
    origin = dump.reading.origin
    if origin is not None and origin.first is not None:
        first = origin.first
        print(f"first bad: {origin.signal.name}, column {first.column}, {first.kind}, bits {first.bits_hex}")
    if dump.audit:
        bad = [item for item in dump.audit if item.status is Status.BAD]
        unseen = [item for item in dump.audit if item.status is Status.NOT_COVERED]
        num_clean = len(dump.audit) - len(bad) - len(unseen)
        print(f"state audit: {num_clean} clean, {len(bad)} bad, {len(unseen)} not covered")
        for item in bad:
            when = (
                "" if item.what == "weights" else "; older than the step" if item.is_older else "; by the step or after"
            )
            print(f"  {item.name} first bad at {item.first}{when}")
        for item in unseen:
            print(f"  {item.name} not covered: {item.reason}")
    for why in dump.left_out:
        print(f"left out: {why}")
    print()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shape(step: DumpStep) -> str:
    rows = f"{len(step.rows)} of {step.num_rows} rows"
    return f"{step.phase}, {rows}, window of {step.window}, {'graph' if step.is_graphed else 'no graph'}"


def _print_windows(dump: Dump, found: Sequence[SignalFigures]) -> None:
    rows = []
    for window in dump.windows:
        mine = [one for one in found if one.step.number == window.number]
        bad = next((one for one in mine if one.figures.first_bad is not None), None)
        rows.append(
            (
                f"{window.number}{' *' if window.number == dump.step.number else ''}",
                _shape(window),
                str(len(mine)),
                f"{max((one.figures.absmax for one in mine), default=0.0):.4g}",
                str(sum(one.figures.num_nan for one in mine)),
                str(sum(one.figures.num_inf for one in mine)),
                "" if bad is None else bad.signal.name,
            )
        )
    columns = ("step", "window", "signals", "absmax", "NaN", "Inf", "first bad signal")
    print_table(columns, rows, right=("step", "signals", "absmax", "NaN", "Inf"))


def _print_signals(found: Iterable[SignalFigures]) -> None:
    rows = []
    for one in found:
        figures = one.figures
        rows.append(
            (
                str(one.step.number),
                one.signal.name,
                f"{figures.shape[0]} x {figures.shape[1]}",
                figures.dtype,
                f"{figures.absmax:.4g}",
                str(figures.num_nan),
                str(figures.num_inf),
                _first_bad(one),
            )
        )
    columns = ("step", "signal", "shape", "type", "absmax", "NaN", "Inf", "first bad")
    print_table(columns, rows, right=("step", "absmax", "NaN", "Inf"))


def _first_bad(one: SignalFigures) -> str:
    first = one.figures.first_bad
    if first is None:
        return ""
    where = f"request {one.request}, position {one.position}"
    return f"row {first[0]}, column {first[1]}: bits {one.figures.bits} ({where})"


def _plain(one: SignalFigures) -> dict[str, Any]:
    figures, first = one.figures, one.figures.first_bad
    return {
        "step": one.step.number,
        "index": one.signal.index,
        "signal": one.signal.name,
        "dtype": figures.dtype,
        "shape": list(figures.shape),
        "absmax": figures.absmax,
        "num_nan": figures.num_nan,
        "num_inf": figures.num_inf,
        "num_pad_bad": one.num_pad_bad,
        "first_bad": None
        if first is None
        else {
            "row": first[0],
            "column": first[1],
            "bits": figures.bits,
            "request": one.request,
            "position": one.position,
        },
    }
