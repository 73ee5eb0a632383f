"""What counts of fires say: rates, rounds, clean tries, two arms, plans, ignition positions.

One question a call:
  firetower stats 4/34                       a rate with its exact interval
  firetower stats --rounds 6,18,1,9          rounds of tries until a fire; 40+ is a round without one
  firetower stats --rounds 1/40,0/40,3/40    rounds of a fixed number of tries
  firetower stats --clean 8 --rate 1/18      what clean tries exclude, and how many are needed
  firetower stats before=4/34 after=0/90     two arms, at the planned numbers of tries
  firetower stats --plan 1/18 1/100          tries an arm to tell two rates apart
  firetower stats --positions 88443,90000+   where fires start; 90000+ ended there without one
Intervals hold for numbers of tries fixed beforehand. Whoever looks now and then and stops when it pleases
adds --watching.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from firetower.cli.output import print_json

Parts = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower stats``."""
    parser.add_argument(
        "counts", nargs="*", metavar="[NAME=]FIRES/TRIES", help="one count for its rate, two to compare them"
    )
    parser.add_argument("--rounds", metavar="LIST", help="tries until the fire of each round, or fires/tries of each")
    parser.add_argument("--cap", type=int, metavar="N", help="with --rounds: tries at which a round was given up")
    parser.add_argument("--clean", type=int, metavar="N", help="tries in a row without a fire so far")
    parser.add_argument("--rate", metavar="P", help="rate to exclude by clean tries: 1/18, .05 or 5%%")
    parser.add_argument("--plan", nargs=2, metavar=("P", "P"), help="two true rates to tell apart")
    parser.add_argument("--power", type=float, metavar="P", help="with --plan: chance to find it (default .8)")
    parser.add_argument("--positions", metavar="LIST", help="token position of each try's fire, or its end with +")
    parser.add_argument("--watching", action="store_true", help="valid however often you look: wider")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="C", help="(default .95)")
    parser.add_argument("--json", action="store_true", help="machine-readable results on stdout")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Answer one question: sentences first, then the figures."""
    parts = _question(args)(args)
    if args.json:
        print_json({name: _plain(part) for name, part in parts.items()})
        return 0
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 100
    print("\n".join(textwrap.fill(part.sentence, width) for part in parts.values()))
    for name, part in parts.items():
        if figures := _figures(part):
            print("\n".join(["", name, *(f"  {line}" for line in figures)]))
    return 0


def _question(args: argparse.Namespace) -> Callable[[argparse.Namespace], Parts]:
    """The one question that was asked, or a usage error."""
    asked = {
        "FIRES/TRIES": (bool(args.counts), _counts),
        "--rounds": (args.rounds is not None, _rounds),
        "--clean/--rate": (args.clean is not None or args.rate is not None, _clean),
        "--plan": (args.plan is not None, _plan),
        "--positions": (args.positions is not None, _positions),
    }
    names = [name for name, (given, _) in asked.items() if given]
    if len(names) != 1:
        args.usage_error(f"ask one of {', '.join(asked)}" + (f"; got {' and '.join(names)}" if names else ""))
    [name] = names
    allowed = {"cap": "--rounds", "power": "--plan"}
    for option, home in allowed.items():
        if getattr(args, option) is not None and name != home:
            args.usage_error(f"--{option} goes with {home}")
    if args.watching and name not in ("FIRES/TRIES", "--rounds"):
        args.usage_error("--watching goes with FIRES/TRIES or --rounds")
    if len(args.counts) > 2:
        args.usage_error("two arms are compared at a time; rounds of one arm go into --rounds 1/40,0/40,3/40")
    return asked[name][1]


def _counts(args: argparse.Namespace) -> Parts:
    from firetower.lab import stats
    from firetower.lab.stats.parse import parse_arm

    arms = [parse_arm(text) for text in args.counts]
    rates = [stats.rate(*counts, confidence=args.confidence) for _, counts in arms]
    if len(arms) == 1:
        return _rate_parts(args, rates[0])
    names = (arms[0][0] or "A", arms[1][0] or "B")
    compare = stats.compare_watching if args.watching else stats.compare
    return {"comparison": compare(*rates, names=names, confidence=args.confidence)}


def _rounds(args: argparse.Namespace) -> Parts:
    from firetower.lab import stats
    from firetower.lab.stats.parse import parse_count, parse_rounds

    if "/" in args.rounds:
        if args.cap is not None:
            args.usage_error("--cap goes with rounds that stop at a fire, such as 6,18,40+")
        counts = [parse_count(part) for part in args.rounds.split(",")]
        pooled = stats.rate(sum(f for f, _ in counts), sum(t for _, t in counts), confidence=args.confidence)
        scatter = stats.dispersion(counts) if len(counts) > 1 else None
    else:
        rounds = parse_rounds(args.rounds)
        pooled = stats.rounds_rate(rounds, cap=args.cap, confidence=args.confidence)
        scatter = stats.rounds_dispersion(rounds, cap=args.cap) if len(rounds) > 1 else None
    return _rate_parts(args, pooled) | ({"dispersion": scatter} if scatter else {})


def _rate_parts(args: argparse.Namespace, rate: Any) -> Parts:
    """The rate and what clean tries it asks for, or, without a fire, what its clean tries exclude."""
    from firetower.lab import stats

    if args.watching:
        rate = stats.anytime_rate(rate.fires, rate.tries, confidence=args.confidence)
    if rate.fires:
        return {"rate": rate, "fixed": stats.fixed_support(rate, confidence=args.confidence)}
    return {"rate": rate, "clean": stats.clean_so_far(rate.tries, confidence=args.confidence)}


def _clean(args: argparse.Namespace) -> Parts:
    from firetower.lab import stats
    from firetower.lab.stats.parse import parse_rate

    rate = None if args.rate is None else parse_rate(args.rate)
    parts: Parts = {}
    if rate is not None:
        parts["needed"] = stats.clean_needed(rate, confidence=args.confidence)
    if args.clean is not None:
        parts["clean"] = stats.clean_so_far(args.clean, rate=rate, confidence=args.confidence)
    return parts


def _plan(args: argparse.Namespace) -> Parts:
    from firetower.lab import stats
    from firetower.lab.stats.parse import parse_rate

    power = 0.8 if args.power is None else args.power
    first, second = (parse_rate(text) for text in args.plan)
    return {"plan": stats.plan(first, second, power=power, confidence=args.confidence)}


def _positions(args: argparse.Namespace) -> Parts:
    from firetower.lab import stats
    from firetower.lab.stats.parse import parse_positions

    return {"curve": stats.ignition_curve(parse_positions(args.positions), confidence=args.confidence)}


def _plain(part: Any) -> dict[str, Any]:
    """A result with its sentence; nested results have none."""
    return {"sentence": part.sentence} | {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def _figures(part: Any) -> list[str]:
    """The numbers behind the sentence, one a line; a curve is a table."""
    if hasattr(part, "points"):
        return _curve(part)
    lines = []
    if hasattr(part, "names"):
        lines = [
            f"{'rate ' + letter:<18} {_number(arm.rate)} ({_number(arm.lower)} to {_number(arm.upper)}), "
            f"{arm.fires:,}/{arm.tries:,}, {name}"
            for letter, arm, name in zip("ab", (part.a, part.b), part.names, strict=True)
        ]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, int | float):
            lines.append(f"{field.name.replace('_', ' '):<18} {_number(value)}")
    return lines


def _curve(curve: Any) -> list[str]:
    if not curve.points:
        return []
    header = f"{'position':>12} {'at risk':>8} {'fires':>6} {'clean':>7} {'lower':>7} {'upper':>7}"
    return [header] + [
        f"{p.position:>12,} {p.at_risk:>8,} {p.fires:>6,} {p.surviving:>7.3f} {p.lower:>7.3f} {p.upper:>7.3f}"
        for p in curve.points
    ]


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if math.isfinite(value) else str(value)
