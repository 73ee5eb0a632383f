"""Say what is to blame for a stored fire, as far as it tells, and which test to run next.

Each FIRE is an id in the store, or its unique beginning. A stored fire alone is little evidence: what it
cannot tell is listed, and the public reports that it looks like are named with the test that would tell.
A verdict that came with the fire, as from firetower.investigate, which runs the tests, is shown instead.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firetower.core.records import Fire
    from firetower.core.verdict import Verdict
    from firetower.lab.known_cases import Match


def configure(parser: argparse.ArgumentParser) -> None:
    """Add FIRE, ``--store`` and ``--json``."""
    parser.add_argument("fires", metavar="FIRE", nargs="+", help="id of a fire, or its unique beginning")
    parser.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")
    parser.add_argument("--json", action="store_true", help="machine-readable, on stdout")


def run(args: argparse.Namespace) -> int:
    """Diagnose each fire; 0, whatever the verdicts are."""
    from firetower.lab.known_cases import diagnose_fire

    found = [(fire, *_stored_verdict(fire), *diagnose_fire(fire)) for fire in _fires(args)]
    if args.json:
        _print_json(found)
        return 0
    for number, (fire, stored, verdict, matches) in enumerate(found):
        if number:
            print()
        _print_page(fire, stored or verdict, matches)
    _say_next(args, found[0][0])
    return 0


def _fires(args: argparse.Namespace) -> list[Fire]:
    from pathlib import Path

    from firetower.core.config import store_path
    from firetower.core.errors import StoreError
    from firetower.fires.store import Store
    from firetower.fires.text import visible

    path = store_path() if args.store is None else Path(args.store).expanduser()
    if not path.exists():
        raise StoreError(f"store={visible(str(path))}: does not exist; the first fire makes it, or give --store")
    with Store(path, readonly=True) as store:
        return [store.get(name) for name in args.fires]


def _stored_verdict(fire: Fire) -> tuple[Verdict | None]:
    """The verdict that came with the fire, from an investigation that had more to look at."""
    from firetower.core.errors import RecordError
    from firetower.core.verdict import Verdict

    if fire.verdict is None:
        return (None,)
    try:
        return (Verdict.from_mapping(fire.verdict),)
    except RecordError:
        # a foreign engine's verdict, in words of its own: `fires show` prints it
        return (None,)


def _print_page(fire: Fire, verdict: Verdict, matches: tuple[Match, ...]) -> None:
    from firetower.fires.text import visible
    from firetower.lab.diagnose import explain

    where = f"{fire.first.kind} first at {fire.origin.name}"
    print(visible(f"{fire.id}: {where}{f' ({fire.origin.op})' if fire.origin.op else ''}"))
    for line in explain(verdict):
        print(visible(line))
    if verdict.decided or not matches:
        return
    print("Resembles (a resemblance is no finding):")
    for m in matches:
        print(visible(f"  {m}"))
        print(visible(f"    {m.reports}; {m.command}"))


def _say_next(args: argparse.Namespace, fire: Fire) -> None:
    import shlex

    from firetower.cli.output import say

    store = "" if args.store is None else f" --store {shlex.quote(args.store)}"
    say("", f"next: firetower fires show {fire.id}{store}")


def _print_json(found: list[Any]) -> None:
    import dataclasses
    import json

    from firetower.core.codec import encode

    rows = [
        {
            "fire": fire.id,
            "verdict": verdict.to_mapping(),
            "stored_verdict": None if fire.verdict is None else encode(fire.verdict),
            "resembles": [dataclasses.asdict(m) | {"reports": m.reports} for m in matches],
        }
        for fire, _, verdict, matches in found
    ]
    # ASCII: a stored name may hold terminal controls or bytes that are not UTF-8
    print(json.dumps(rows, indent=2, allow_nan=False))
