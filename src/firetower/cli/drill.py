"""Inject known faults and check what the black box and the lab say of each.

Every variant of a drill runs twice: with its fault, whose origin must be reported exactly, and as a
clean twin, of which nothing may be reported. With --all the lab is asked as well: it must name the
family of causes, and change its mind when the refuter comes out the other way. Exit code 3 when
anything was missed, misplaced or misnamed, or a twin was not silent.
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
        "name", nargs="*", metavar="NAME", help="drills to run, by name, case or family letter (default: all)"
    )
    parser.add_argument(
        "--all", action="store_true", help="the board: every drill (or each NAME) with the lab's verdict and refuter"
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
    if args.all:
        return _board(results, args)
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
            {
                "name": d.name,
                "family": d.family,
                "case": d.case,
                "title": d.title,
                "verdict": d.verdict,
                "refuter": d.refuter.test,
                "stages": sorted(d.stages),
            }
            for d in drills
        ]
        print_json({"drills": rows})
    else:
        rows_of_text = ((d.name, d.case or d.family, d.title, d.verdict, d.refuter.test) for d in drills)
        print_table(("drill", "case", "fault", "verdict", "refuted by"), rows_of_text)
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
    return runner.run(plan, verdicts=args.all), len(plan)


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


def _planted(r: Result) -> str:
    return str(r.expected) if r.expected is not None else f"finite: {'; '.join(r.places)}"


def _row(r: Result) -> tuple[str, ...]:
    if r.skipped:
        return r.drill, r.variant, r.host, r.level, "-", "skipped", "-", "-"
    ms = f"{r.elapsed_ms:.0f}"
    if r.failures:
        # silence of a black box that broke says nothing, of the fault or of the twin
        return r.drill, r.variant, r.host, r.level, _planted(r), "BROKEN", "-", ms
    return r.drill, r.variant, r.host, r.level, _planted(r), _seen(r), _twin(r), ms


def _seen(r: Result) -> str:
    if r.is_placed:
        return "exact"
    if not r.is_detected:
        return f"NOTHING by {r.seen_by if r.expected is not None else 'the lab'}"
    if r.expected is None:
        assert r.judgement is not None
        return f"NOT NAMED by the lab: {'; '.join(r.judgement.unnamed)}"
    return f"WRONG {', '.join(r.mismatches)} by {r.seen_by}: {r.seen}"


def _twin(r: Result) -> str:
    if r.twin is not None:
        return f"FIRED at {r.twin}"
    if r.judgement is not None and r.judgement.twin_said is not None:
        return f"FIRED: {r.judgement.twin_said}"
    return "silent"


def _to_json(r: Result) -> dict[str, Any]:
    import dataclasses

    fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    return {**fields, "detected": r.is_detected, "placed": r.is_placed, "exact": r.is_exact}


def _conclude(results: list[Result]) -> int:
    ran = [r for r in results if not r.skipped]
    _say_failures(results)
    exact = sum(r.is_exact for r in ran)
    placed = sum(r.is_placed and not r.failures for r in ran)
    silent = sum(r.is_twin_silent for r in ran)
    say(f"{placed} of {len(ran)} origins exact, {silent} of {len(ran)} twins silent")
    return EXIT_OK if exact == len(ran) else EXIT_FIRE


def _say_failures(results: list[Result]) -> None:
    for reason in {r.skipped for r in results if r.skipped}:
        say(f"skipped {sum(r.skipped == reason for r in results)}: {reason}")
    for r in results:
        for failure in r.failures:
            say(f"{r.drill} {r.variant}: the black box itself failed: {failure}")


def _board(results: list[Result], args: argparse.Namespace) -> int:
    from firetower.drills import board

    missed = board.misses(results)
    if args.json:
        _print_board_json(results, args.seed)
    else:
        _print_board(results)
    _say_failures(results)
    for r in missed:
        say(*_miss(r))
    for figure in board.figures(results):
        say(str(figure))
    return EXIT_FIRE if missed else EXIT_OK


def _print_board(results: list[Result]) -> None:
    from firetower.drills import board

    print_table(
        ("drill", "planted", "variants", "detected", "origin", "family", "refuter", "twin", "s"),
        (
            (
                x.drill,
                x.verdict,
                str(x.num_variants),
                *(str(n) if n == x.num_variants else f"{n} !" for n in (x.detected, x.placed, x.right, x.flipped)),
                "silent" if x.silent == x.num_variants else f"{x.num_variants - x.silent} FIRED",
                f"{x.elapsed_ms / 1e3:.1f}",
            )
            for x in board.lines(results)
        ),
        right=("variants", "detected", "origin", "family", "refuter", "s"),
    )
    matrix = board.confusion(results)
    said = list(next(iter(matrix.values()), {}))
    print_table(
        ("planted", *(s if s != "V" else "undecided" for s in said)),
        ((want, *(str(row[s]) if row[s] else "." for s in said)) for want, row in matrix.items()),
        right=("undecided", *said),
    )


def _print_board_json(results: list[Result], seed: int) -> None:
    from firetower.drills import board

    figures = [
        {"name": f.name, "count": f.count, "total": f.total, "bar": f.bar, "at_most": f.at_most, "met": f.is_met}
        for f in board.figures(results)
    ]
    print_json(
        {
            "seed": seed,
            "figures": figures,
            "confusion": board.confusion(results),
            "results": [{**_to_json(r), **_judged(r)} for r in results],
        }
    )


def _judged(r: Result) -> dict[str, Any]:
    j = r.judgement
    if j is None:
        return {}
    return {"family_right": j.is_right, "detail_right": j.is_detail_right, "refuter_flips": j.has_flipped}


def _miss(r: Result) -> Iterator[str]:
    """What was not as it should be, a line each."""
    head = f"{r.drill} {r.variant} ({r.host})"
    if not r.is_placed:
        yield f"{head}: {_planted(r)}: {_seen(r)}"
    if not r.is_twin_silent:
        yield f"{head}: the twin {_twin(r)}"
    j = r.judgement
    if j is not None and not j.is_right:
        yield f"{head}: planted {j.wanted}, the lab said {j.said}: {j.statement}"
    if j is not None and not j.has_flipped:
        yield f"{head}: refuted by {j.refuter}, and the lab still said {j.refuted}"
