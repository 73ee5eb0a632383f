"""First look at a server, a weight file or a model's folder: a short finding, and the command to run next.

A file is scanned. A server (http://HOST:PORT, OpenAI's API; a key is taken from FIRETOWER_API_KEY) answers two short
prompts and a longer one, which go through the detectors. A Transformers folder is scanned, then generates a few
tokens under the watch.

Exit codes: 0 nothing found, 1 no check could judge, 3 a fire or a bad weight.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firetower.lab.triage import Triage

_MARKS = {"fire": "FIRE", "warn": "warn", "clean": "ok", "unknown": "?"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower triage``."""
    parser.add_argument("target", metavar="URL|FILE|MODEL", help="server, weight file, or folder of a model")
    parser.add_argument("--model", metavar="NAME", help="model to ask a server for (default: the first it lists)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="M", help="of the longer answer (default: 128)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each answer")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust, instead of the system's")
    parser.add_argument("--store", metavar="PATH", help="store for fires of a watched model, instead of the usual one")
    parser.add_argument("--no-store", action="store_true", help="keep no fire")
    parser.add_argument("--json", action="store_true", help="machine-readable, on stdout")


def run(args: argparse.Namespace) -> int:
    """Look, print the finding, and return 3 for a fire."""
    from firetower.cli.output import say
    from firetower.fires.text import visible
    from firetower.lab.triage import Look, TriageSettings, triage

    settings = TriageSettings(
        model=args.model,
        max_tokens=args.max_tokens,
        timeout_s=args.timeout,
        store="" if args.no_store else args.store,
        ca_file=args.ca_file,
    )
    found = triage(args.target, settings)
    if args.json:
        _print_json(found)
    else:
        _print(found)
        say("", f"next: {visible(found.next_command)}")
    if found.is_fire:
        return 3
    return 1 if all(c.look is Look.UNKNOWN for c in found.checks) else 0


def _print(found: Triage) -> None:
    from firetower.fires.text import visible

    print(visible(found.finding))
    width = max(len(c.name) for c in found.checks)
    for check in found.checks:
        print(f"  {_MARKS[check.look]:4} {check.name:{width}}  {visible(check.said)}")
        for detail in check.details:
            print(f"       {'':{width}}  - {visible(detail[:400])}")


def _print_json(found: Triage) -> None:
    import json

    from firetower.core.codec import encode

    # ASCII: what a server says may drive a terminal
    print(json.dumps(encode(found), indent=2, allow_nan=False))
