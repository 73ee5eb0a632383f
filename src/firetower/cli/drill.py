"""Inject known faults and check that the black box names the exact origin of each.

Every variant of a drill runs twice: with its fault, whose origin must be reported exactly, and as a
clean twin, of which nothing may be reported. Exit code 3 when a fault is missed or misplaced, or a twin
is not silent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from firetower.cli.main import EXIT_FIRE, EXIT_OK
from firetower.cli.output import print_json, print_table, say
from firetower.core.errors import ConfigError, FiretowerError

if TYPE_CHECKING:
    from firetower.drills.runner import Result
    from firetower.drills.spec import Drill

_HOSTS = ("pure", "smollm2", "qwen35moe", "qwen4exp")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``firetower drill``."""
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help="drills to run, by name or case (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="list the drills and stop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random variants (default: 0)")
    parser.add_argument("--variants", type=int, metavar="N", help="run N variants of each drill")
    parser.add_argument("--host", choices=_HOSTS, help="only variants placed in this model")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the drills; 3 when any is not exact."""
    from firetower.drills import find_drills

    if args.variants is not None and args.variants < 1:
        raise ConfigError(f"--variants={args.variants}: must be at least 1")
    drills = find_drills(args.name)
    if args.list:
        return _list(drills, args.json)
    results = [*_progress(*_start(drills, args))]
    if all(r.skipped for r in results):
        raise FiretowerError(next((r.skipped for r in results if r.skipped), "no drill has such a variant"))
    if args.json:
        print_json({"seed": args.seed, "results": [_to_json(r) for r in results]})
    else:
        print_table(
            ("drill", "variant", "host", "level", "planted", "seen", "twin", "ms"),
            (_row(r) for r in results),
            right=("ms",),
        )
    return _conclude(results)


def _list(drills: Iterable[Drill], as_json: bool) -> int:
    if as_json:
        rows = [
            {"name": d.name, "family": d.family, "case": d.case, "title": d.title, "stages": sorted(d.stages)}
            for d in drills
        ]
        print_json({"drills": rows})
    else:
        rows_of_text = ((d.name, d.case or d.family, d.title, ", ".join(sorted(d.stages))) for d in drills)
        print_table(("drill", "case", "fault", "stages at level layers"), rows_of_text)
    return EXIT_OK


def _start(drills: Iterable[Drill], args: argparse.Namespace) -> tuple[Iterator[Result], int]:
    """The results as they will come, and how many."""
    # read when the library is imported: its advice on faster kernels is not for models of this size
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from firetower.drills import runner

    # the models are tiny: more threads only wait for each other
    torch.set_num_threads(1)
    plan = [(d, v) for d in drills for v in runner.pick(d, args.seed, args.variants, args.host)]
    return runner.run(plan), len(plan)


def _progress(results: Iterator[Result], total: int) -> Iterator[Result]:
    """Pass results on, with a line on the terminal: how far, how fast, how long still."""
    start = time.perf_counter()
    for done, result in enumerate(results, start=1):
        elapsed = time.perf_counter() - start
        if sys.stderr.isatty():
            left = elapsed / done * (total - done)
            line = f"{done} of {total}, {done / elapsed:.1f}/s, {left:.0f} s left: {result.drill}"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        yield result
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _row(r: Result) -> tuple[str, ...]:
    if r.skipped:
        return r.drill, r.variant, r.host, r.level, "-", "skipped", "-", "-"
    if r.failures:
        # silence of a black box that broke says nothing, of the fault or of the twin
        return r.drill, r.variant, r.host, r.level, str(r.expected), "BROKEN", "-", f"{r.elapsed_ms:.0f}"
    if r.seen is None:
        seen = f"NOTHING by {r.seen_by}"
    elif r.mismatches:
        seen = f"WRONG {', '.join(r.mismatches)} by {r.seen_by}: {r.seen}"
    else:
        seen = "exact"
    twin = "silent" if r.twin is None else f"FIRED at {r.twin}"
    return r.drill, r.variant, r.host, r.level, str(r.expected), seen, twin, f"{r.elapsed_ms:.0f}"


def _to_json(r: Result) -> dict[str, Any]:
    import dataclasses

    fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    return {**fields, "exact": r.is_exact}


def _conclude(results: list[Result]) -> int:
    ran = [r for r in results if not r.skipped]
    for reason in {r.skipped for r in results if r.skipped}:
        say(f"skipped {sum(r.skipped == reason for r in results)}: {reason}")
    for r in ran:
        for failure in r.failures:
            say(f"{r.drill} {r.variant}: the black box itself failed: {failure}")
    exact = sum(r.is_exact for r in ran)
    silent = sum(r.twin is None and not r.failures for r in ran)
    say(f"{exact} of {len(ran)} origins exact, {silent} of {len(ran)} twins silent")
    return EXIT_OK if exact == len(ran) else EXIT_FIRE
