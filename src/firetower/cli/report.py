"""One self-contained HTML page on fires, an incident or a replay campaign; or the same on the terminal.

TARGET is the id of a fire (or its unique beginning), an incident file or a campaign file (JSON). Without it the
page is on all fires of the store. The page loads nothing, is at most 2 MB, and holds no prompt content unless
--with-content asks for it. Without -o it is printed as text.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from firetower.core.records import Fire
    from firetower.core.verdict import Verdict
    from firetower.report.records import FireView

MAX_JSON = 256 << 20


class Made(NamedTuple):
    """What a target gives: HTML, text and JSON, each made when it is asked for."""

    html: Callable[[], str]
    lines: Callable[[], Sequence[str]]
    data: Callable[[], Any]
    what: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower report``."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="fire id, INCIDENT.json or CAMPAIGN.json")
    parser.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="write one HTML file instead of text to stdout")
    parser.add_argument("--force", action="store_true", help="replace FILE.html if it exists")
    parser.add_argument("--with-content", action="store_true", help="of one fire: its private token ids and fields")
    parser.add_argument("--json", action="store_true", help="what the page is made of, on stdout")


def run(args: argparse.Namespace) -> int:
    """Make the page; 0, whatever it says."""
    from firetower.cli.output import say
    from firetower.core.errors import ConfigError

    if args.json and args.output:
        raise ConfigError("json=True: goes to stdout and output= to a file; leave one of them out")
    made = _made(args)
    if args.output is not None:
        path = _write(args.output, made.html(), force=args.force)
        say(f"{made.what}", f"Wrote {path}")
    elif args.json:
        _print_json(made.data())
    else:
        print("\n".join(made.lines()))
        say("", f"next: firetower report {_quoted(args)}-o report.html")
    return 0


def _made(args: argparse.Namespace) -> Made:
    if args.target is None:
        return _store(args)
    path = _as_file(args.target)
    if path is None:
        return _one(args)
    data = _load(path)
    if isinstance(data, dict) and "arms" in data:
        return _campaign(data)
    if isinstance(data, dict) and {"origin", "first"} <= data.keys():
        return _handed_in(data, args)
    return _incident(data)


def _as_file(target: str) -> Path | None:
    from pathlib import Path

    path = Path(target).expanduser()
    return path if target.endswith(".json") or "/" in target or path.is_file() else None


def _load(path: Path) -> Any:
    import json

    from firetower.core.errors import RecordError
    from firetower.fires.text import visible

    name = visible(path.name)
    try:
        if path.stat().st_size > MAX_JSON:
            raise RecordError(f"target={name}: over {MAX_JSON >> 20} MB; give a fire, an incident or a campaign")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise RecordError(f"target={name}: {e.strerror or e}; give a fire id or a JSON file") from e
    except (ValueError, RecursionError) as e:
        raise RecordError(f"target={name}: is no JSON ({e}); give a fire id or a JSON file") from e


def _store(args: argparse.Namespace) -> Made:
    from firetower.core.analysis import Analysis
    from firetower.report import FireView, fires_html, fires_lines

    fires = _fires(args)
    views = [FireView(fire=f, verdict=_stored(f)) for f in fires]
    known: list[Analysis | None] = []

    def analysis() -> Analysis | None:
        if not known:
            from firetower.lab.across import across

            known.append(across(fires) if len(fires) > 1 else None)
        return known[0]

    return Made(
        html=lambda: fires_html(views, analysis=analysis(), store=_store_name(args)),
        lines=lambda: fires_lines(views, analysis()),
        data=lambda: {"num_fires": len(fires), "ids": [f.id for f in fires], "analysis": analysis()},
        what=f"{len(fires)} fire{'s' * (len(fires) != 1)} of {_store_name(args)}",
    )


def _fires(args: argparse.Namespace) -> tuple[Fire, ...]:
    from firetower.fires.store import Store

    if not _store_path(args).exists():
        # looking at a store that is not there makes none
        return ()
    with Store(args.store, readonly=True) as store:
        return store.list()


def _one(args: argparse.Namespace) -> Made:
    from firetower.core.errors import StoreError
    from firetower.fires.store import Store
    from firetower.fires.text import visible

    if not _store_path(args).exists():
        raise StoreError(f"id={visible(args.target)!r}: no such fire; {_store_name(args)} does not exist yet")
    with Store(args.store, readonly=True) as store:
        fire = store.get(args.target)
        last_seen = store.last_seen(fire.id)
    return _fire(fire, args, last_seen)


def _handed_in(data: dict[str, Any], args: argparse.Namespace) -> Made:
    from firetower.core.codec import fire_from_dict
    from firetower.fires.handin import complete

    return _fire(fire_from_dict(complete(data)), args, None)


def _fire(fire: Fire, args: argparse.Namespace, last_seen: str | None) -> Made:
    import dataclasses

    from firetower.core.codec import fire_to_dict
    from firetower.report import fire_html, fire_lines

    view = _view(fire, last_seen)
    shown = fire if args.with_content else dataclasses.replace(fire, token_ids=None)
    verdict = None if view.verdict is None else view.verdict.to_mapping()
    return Made(
        html=lambda: fire_html(view, with_content=args.with_content),
        lines=lambda: fire_lines(view, with_content=args.with_content),
        data=lambda: {"fire": fire_to_dict(shown), "verdict": verdict, "resembles": view.resembles},
        what=f"fire {fire.id}",
    )


def _view(fire: Fire, last_seen: str | None) -> FireView:
    """The fire with the verdict that came with it, else with one from what is stored of it."""
    from firetower.lab.known_cases import diagnose_fire
    from firetower.report import FireView

    stored = _stored(fire)
    verdict, matches = diagnose_fire(fire)
    foreign = stored is None and fire.verdict is not None
    return FireView(
        fire=fire,
        verdict=stored or (None if foreign else verdict),
        verdict_source="stored with the fire" if stored else "made for this report from what is stored of the fire",
        resembles=tuple((str(m), f"{m.reports}; {m.command}") for m in matches),
        last_seen=last_seen,
    )


def _stored(fire: Fire) -> Verdict | None:
    from firetower.core.errors import RecordError
    from firetower.core.verdict import Verdict

    try:
        return Verdict.from_mapping(fire.verdict) if fire.verdict else None
    except RecordError:
        # another engine's verdict, in words of its own: the page shows these
        return None


def _incident(data: Any) -> Made:
    from firetower.lab.across import across_incident
    from firetower.lab.incident import incident_from_dict
    from firetower.report import analysis_html, analysis_lines

    analysis = across_incident(incident_from_dict(data))
    return Made(
        html=lambda: analysis_html(analysis),
        lines=lambda: analysis_lines(analysis),
        data=lambda: analysis,
        what=f"incident with {analysis.num_fires} fires",
    )


def _campaign(data: dict[str, Any]) -> Made:
    from firetower.lab.curves import campaign_curves
    from firetower.lab.replay.schema import campaign_from_dict
    from firetower.report import campaign_html, campaign_lines

    curves = campaign_curves(campaign_from_dict(data))
    return Made(
        html=lambda: campaign_html(curves),
        lines=lambda: campaign_lines(curves),
        data=lambda: curves,
        what=curves.title,
    )


def _write(name: str, page: str, *, force: bool) -> str:
    from pathlib import Path

    from firetower.fires.files import write_lines
    from firetower.fires.text import visible

    # characters of every script as references: write_lines writes ASCII
    lines = [page.encode("ascii", "xmlcharrefreplace").decode("ascii")]
    write_lines(Path(name).expanduser(), lines, force=force)
    return visible(name)


def _print_json(value: Any) -> None:
    import json

    from firetower.core.codec import encode

    # ASCII: a stored name may hold terminal controls or bytes that are not UTF-8
    json.dump(encode(value), sys.stdout, indent=2, allow_nan=False)
    print()


def _store_path(args: argparse.Namespace) -> Path:
    from pathlib import Path

    from firetower.core.config import store_path

    return store_path() if args.store is None else Path(args.store).expanduser()


def _store_name(args: argparse.Namespace) -> str:
    from firetower.fires.text import visible

    return visible(_store_path(args).name)


def _quoted(args: argparse.Namespace) -> str:
    import shlex

    from firetower.fires.text import visible

    parts = [visible(shlex.quote(args.target))] if args.target else []
    parts += ["--store", visible(shlex.quote(args.store))] if args.store else []
    return "".join(f"{p} " for p in parts)
