"""Many fires together: what is invariant, what varies, which causes that leaves, what to look at next.

  firetower incident show INCIDENT.json               an incident file: facts that somebody wrote down
  firetower incident read LOG --patterns P.toml -o F  an incident file from an engine's log lines
  firetower incident across [ID...]                   fires of the store, compared (all of them without an ID)
  firetower incident store INCIDENT.json              those of its fires whose first bad value is known, into the store

Every conclusion names what it rests on; nothing is called proven that single tests do not prove.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firetower.core.analysis import Analysis
    from firetower.core.records import Fire


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``show``, ``read``, ``across`` and ``store``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = _verb(verbs, "show", "analyse an incident file")
    show.add_argument("file", metavar="INCIDENT.json", help="in the form of docs/reference/incident-schema.md")
    read = _verb(verbs, "read", "make an incident file of log lines")
    read.add_argument("file", metavar="LOG", help="an engine's log; - is stdin")
    read.add_argument("--patterns", metavar="P.toml", required=True, help="how its lines are read")
    read.add_argument("--what", metavar="TEXT", default="", help="one sentence on the incident")
    read.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    read.add_argument("--force", action="store_true", help="replace FILE if it exists")
    across = _verb(verbs, "across", "compare fires of the store")
    across.add_argument("ids", metavar="ID", nargs="*", help="ids or their unique beginnings (default: all fires)")
    across.add_argument("--model", help="only fires whose model's name contains this")
    across.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")
    store = _verb(verbs, "store", "put an incident's fires into the store")
    store.add_argument("file", metavar="INCIDENT.json", help="in the form of docs/reference/incident-schema.md")
    store.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")


def _verb(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=description)
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    parser.add_argument("--json", action="store_true", help="machine-readable, on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the verb that was asked for."""
    return {"show": _show, "read": _read, "across": _across, "store": _store}[args.verb](args)


def _show(args: argparse.Namespace) -> int:
    import shlex

    from firetower.lab.across import across_incident
    from firetower.lab.incident import read_incident

    analysis = across_incident(read_incident(args.file))
    return _print_analysis(args, analysis, f"firetower report {shlex.quote(args.file)} -o report.html")


def _across(args: argparse.Namespace) -> int:
    from firetower.lab.across import across

    return _print_analysis(args, across(_fires(args)), "firetower report -o report.html")


def _print_analysis(args: argparse.Namespace, analysis: Analysis, command: str) -> int:
    from firetower.cli.output import say
    from firetower.fires.text import visible
    from firetower.report import analysis_lines

    if args.json:
        _print_json(analysis)
    else:
        print("\n".join(analysis_lines(analysis)))
        say("", f"next: {visible(command)}")
    return 0


def _fires(args: argparse.Namespace) -> tuple[Fire, ...]:
    from pathlib import Path

    from firetower.core.config import store_path
    from firetower.core.errors import StoreError
    from firetower.fires.store import Store
    from firetower.fires.text import visible

    path = store_path() if args.store is None else Path(args.store).expanduser()
    if not path.exists():
        raise StoreError(f"store={visible(str(path))}: does not exist; the first fire makes it, or give --store")
    with Store(path, readonly=True) as store:
        if args.ids:
            return tuple(store.get(name) for name in args.ids)
        return store.list(model=args.model)


def _read(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from firetower.cli.output import say
    from firetower.fires.files import write_lines
    from firetower.fires.text import visible
    from firetower.lab.incident.logs import incident_of_log
    from firetower.lab.incident.patterns import read_patterns

    patterns = read_patterns(args.patterns)
    log = incident_of_log(_lines(args.file), patterns, args.what or f"fires in {Path(args.file).name}")
    text = json.dumps(log.incident, indent=1, allow_nan=False) + "\n"
    for problem in log.problems[:20]:
        say(visible(problem))
    if len(log.problems) > 20:
        say(f"and {len(log.problems) - 20} more lines with something left out")
    found = log.incident["fires_total"]
    say(f"{found} fire{'s' * (found != 1)} in {log.num_lines:,} lines")
    if args.output is None:
        sys.stdout.write(text)
        return 0
    write_lines(Path(args.output).expanduser(), [text], force=args.force)
    say(f"Wrote {visible(args.output)}", f"next: firetower incident show {visible(args.output)}")
    if args.json:
        _print_json({"file": args.output, "fires": found, "lines": log.num_lines, "problems": list(log.problems)})
    return 0


def _lines(name: str) -> Iterator[str]:
    from pathlib import Path

    from firetower.core.errors import RecordError
    from firetower.fires.text import visible

    if name == "-":
        yield from sys.stdin
        return
    try:
        with Path(name).open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as e:
        raise RecordError(f"log={visible(name)}: {e.strerror or e}; give a log file, or -") from e


def _store(args: argparse.Namespace) -> int:
    from pathlib import Path

    from firetower.cli.output import say
    from firetower.fires.store import Store
    from firetower.fires.text import visible
    from firetower.lab.incident import read_incident
    from firetower.lab.incident.to_fires import incident_fires

    fires, missing = incident_fires(read_incident(args.file), Path(args.file).name)
    with Store(args.store) as store:
        added, num_skipped = store.add_many(fires)
    if args.json:
        _print_json({"stored": list(added), "num_skipped": num_skipped, "missing": dict(missing)})
    else:
        print("\n".join(added))
    say(f"{len(added)} stored" + (f", {num_skipped} in the store already" if num_skipped else ""))
    for fire_id, lack in missing[:20]:
        say(f"{visible(fire_id)}: not stored, {visible(lack)} is not known")
    return 0


def _print_json(value: Any) -> None:
    import json

    from firetower.core.codec import encode

    # ASCII: a name in an incident may hold terminal controls
    print(json.dumps(encode(value), indent=2, allow_nan=False))
