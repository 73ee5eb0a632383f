"""List, show, export, import and erase the stored fires.

The store is --store PATH, else $FIRETOWER_STORE, else fires.sqlite in the data folder. An ID may be cut short
as long as it fits one fire only. Times are ISO 8601 (2026-11-30, 2026-11-30T21:44Z) or ages (90s, 30m, 12h,
7d, 2w). Token ids are private content: no verb shows or exports them without --with-content.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from firetower.core.records import Fire
    from firetower.fires.query import FireFilter
    from firetower.fires.store import Store

_FILTERS = ("model", "source", "stage", "layer", "kind", "phase", "outcome", "since", "until")
_COLUMNS = ("ID", "WHERE", "VALUE", "TIMES", "PHASE", "OUTCOME", "CREATED", "MODEL")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``list``, ``show``, ``export``, ``import``, ``prune`` and ``rm``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _configure_list(_verb(verbs, "list", "table of the fires, newest first"))
    _configure_show(_verb(verbs, "show", "one fire as a page: where first, bits, findings"))
    _configure_export(_verb(verbs, "export", "fires as JSON Lines, losing no bit"))
    _configure_import(_verb(verbs, "import", "add fires from JSON Lines, of any engine"))
    _configure_prune(_verb(verbs, "prune", "erase old fires by age, number or size"))
    _configure_rm(_verb(verbs, "rm", "erase fires by id"))


def run(args: argparse.Namespace) -> int:
    """Run the verb that was asked for."""
    verbs = {"list": _list, "show": _show, "export": _export, "import": _import, "prune": _prune, "rm": _rm}
    return verbs[args.verb](args)


def _verb(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=description)
    parser.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _configure_list(parser: argparse.ArgumentParser) -> None:
    _add_filters(parser)
    parser.add_argument(
        "--limit", type=_natural, default=50, help="at most this many; 0 for all (default: 50)"
    )
    _add_json(parser)


def _configure_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="id of the fire, or its unique beginning")
    parser.add_argument("--with-content", action="store_true", help="with --json: with the private token ids")
    _add_json(parser)


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="only these fires, without filters")
    _add_filters(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--with-content", action="store_true", help="with the private token ids")
    _add_json(parser, "accepted for uniformity: exports are JSON Lines anyway")


def _configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="JSON Lines; - is stdin")
    _add_json(parser)


def _configure_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="AGE", help="fires last seen longer ago than this (30d)")
    parser.add_argument("--keep", metavar="N", type=_natural, help="all but the N last seen")
    parser.add_argument(
        "--max-bytes", metavar="SIZE", type=_size, help="oldest first until the store fits (20M, 1G)"
    )
    parser.add_argument("--content-only", action="store_true", help="keep the fires, erase their token ids")
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    _add_json(parser)


def _configure_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+", help="id of the fire, or its unique beginning")
    parser.add_argument("--content-only", action="store_true", help="keep the fires, erase their token ids")
    _add_json(parser)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters, all of which must hold")
    group.add_argument("--model", help="part of the model's name")
    group.add_argument("--source", help="what handed the fire in: attach, import, ...")
    group.add_argument("--stage", help="stage of the origin: down, swiglu, logits, ...")
    group.add_argument("--layer", type=int, help="layer of the origin")
    group.add_argument("--kind", choices=("nan", "+inf", "-inf"), help="class of the first bad value")
    group.add_argument("--phase", choices=("prefill", "decode", "verify", "draft", "unknown"))
    group.add_argument("--outcome", choices=("raised", "recorded", "isolated", "imported"))
    group.add_argument("--since", metavar="TIME", help="created at or after")
    group.add_argument("--until", metavar="TIME", help="created before")


def _add_json(parser: argparse.ArgumentParser, text: str = "machine-readable, on stdout") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _list(args: argparse.Namespace) -> int:
    from firetower.cli.output import say

    with _reading(args) as store:
        fires = store.list(limit=args.limit or None, **_filters(args)) if store else ()
        total = store.count(**_filters(args)) if store else 0
    if args.json:
        _print_json([_as_dict(fire) for fire in fires])
        return 0
    if not fires:
        say(f"no fires{' match' if any(_filters(args).values()) else ''} in {_shown_store(args)}")
        return 0
    _print_fires(fires)
    if total > len(fires):
        say(f"{len(fires)} of {total} fires, newest first; --limit 0 shows all")
    say(f"next: firetower fires show {fires[0].id}{_store_option(args)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.core.errors import StoreError
    from firetower.fires.page import fire_page

    with _reading(args) as store:
        if store is None:
            raise StoreError(f"id={args.id!r}: no such fire; {_shown_store(args)} does not exist yet")
        fire = store.get(args.id)
        last_seen = store.last_seen(fire.id)
    if args.json:
        _print_json(_as_dict(fire, with_content=args.with_content))
        return 0
    for line in fire_page(fire, last_seen=last_seen):
        print(_wrapped(line))
    say("", *_next_steps(fire, _store_option(args)))
    return 0


def _next_steps(fire: Fire, store_option: str) -> list[str]:
    bad_weight = any(weight.num_nonfinite for weight in fire.weights)
    steps = ["firetower scan PATH   (the model's files: a weight is non-finite)"] if bad_weight else []
    steps += [
        f"firetower bits {fire.first.bits_hex} --dtype {_shown(fire.first.dtype)}",
        f"firetower fires export {fire.id}{store_option} -o {fire.id}.jsonl",
    ]
    return [f"{'      ' if i else 'next: '}{step}" for i, step in enumerate(steps)]


def _wrapped(line: str) -> str:
    """A line of a page broken at the terminal's width, the rest indented under it; as it is elsewhere."""
    import textwrap

    if not sys.stdout.isatty() or len(line) <= _width():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, _width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _export(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.core.errors import ConfigError, StoreError
    from firetower.fires.files import write_lines
    from firetower.fires.jsonl import to_lines

    if args.ids and any(value is not None for value in _filters(args).values()):
        raise ConfigError("export: takes ids or filters, not both; leave one out")
    with _reading(args) as store:
        if store is None:
            raise StoreError(f"store={_shown_store(args)}: does not exist yet; the first fire makes it")
        fires = [store.get(i) for i in args.ids] if args.ids else store.iterate(**_filters(args))
        lines = to_lines(fires, with_content=args.with_content)
        if args.output in (None, "-"):
            sys.stdout.writelines(lines)
            return 0
        num_fires = write_lines(Path(args.output), lines, force=args.force)
    say(f"Wrote {num_fires} fire{'s' * (num_fires != 1)} to {_shown(args.output)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.fires.store import Store

    done = []
    with Store(args.store) as store:
        for name in args.files:
            added, num_skipped = _import_file(store, name)
            done.append({"file": name, "imported": list(added), "num_skipped": num_skipped})
            skipped = f", {num_skipped} skipped (in the store already)" if num_skipped else ""
            say(f"{_shown(name)}: {len(added)} imported{skipped}")
            if not args.json:
                sys.stdout.writelines(f"{i}\n" for i in added)
    if args.json:
        _print_json(done)
    if last := next((d["imported"][-1] for d in reversed(done) if d["imported"]), None):
        say(f"next: firetower fires show {last}{_store_option(args)}")
    return 0


def _import_file(store: Store, name: str) -> tuple[tuple[str, ...], int]:
    from firetower.core.errors import StoreError
    from firetower.fires.jsonl import read_lines

    try:
        with _opened(name) as file:
            fires = read_lines(file, "stdin" if name == "-" else name)
    except OSError as e:
        raise StoreError(f"file={_shown(name)}: {e.strerror or e}; give a file of JSON Lines, or -") from e
    return store.add_many(fires)


def _prune(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.fires.prune import PruneRule
    from firetower.fires.times import parse_age

    rule = PruneRule(
        older_than_s=None if args.older_than is None else parse_age(args.older_than, "older_than"),
        keep=args.keep,
        max_bytes=args.max_bytes,
        content_only=args.content_only,
    )
    fires: Sequence[Fire] = ()
    with _existing(args) as store:
        if store is not None:
            fires = store.prune(rule, dry_run=args.dry_run)
    if args.json:
        ids = [fire.id for fire in fires]
        _print_json({"dry_run": args.dry_run, "content_only": args.content_only, "ids": ids})
    elif fires:
        _print_fires(fires)
    what = "token ids of " if args.content_only else ""
    verb = "would erase" if args.dry_run else "erased"
    say(f"{verb} {what}{len(fires)} fire{'s' * (len(fires) != 1)} in {_shown_store(args)}")
    return 0


def _rm(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.core.errors import StoreError

    with _existing(args) as store:
        if store is None:
            raise StoreError(f"id={args.ids[0]!r}: no such fire; {_shown_store(args)} does not exist yet")
        ids = store.remove(args.ids, content_only=args.content_only)
    if args.json:
        _print_json({"content_only": args.content_only, "ids": ids})
    else:
        print("\n".join(ids))
    what = "token ids of " if args.content_only else ""
    say(f"erased {what}{len(ids)} fire{'s' * (len(ids) != 1)}")
    return 0


@contextmanager
def _reading(args: argparse.Namespace) -> Iterator[Store | None]:
    """The store opened to read, or None where there is none yet: looking makes no file."""
    from firetower.fires.store import Store

    if not _is_there(_path(args)):
        yield None
        return
    with Store(args.store, readonly=True) as store:
        yield store


@contextmanager
def _existing(args: argparse.Namespace) -> Iterator[Store | None]:
    from firetower.fires.store import Store

    if not _is_there(_path(args)):
        yield None
        return
    with Store(args.store) as store:
        yield store


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as file:
        yield file


def _print_fires(fires: Sequence[Fire]) -> None:
    from firetower.cli.output import print_table
    from firetower.fires.listing import fit, table_rows

    columns, rows = fit(_COLUMNS, table_rows(fires), _width())
    print_table(columns, rows, right=("TIMES",))


def _width() -> int:
    import shutil

    # print_table writes 160 columns where stdout is no terminal
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 160


def _filters(args: argparse.Namespace) -> FireFilter:
    return {name: getattr(args, name) for name in _FILTERS}  # type: ignore[return-value]


def _as_dict(fire: Fire, *, with_content: bool = False) -> dict[str, Any]:
    import dataclasses

    from firetower.core.codec import fire_to_dict

    return fire_to_dict(fire if with_content else dataclasses.replace(fire, token_ids=None))


def _print_json(value: Any) -> None:
    import json

    # ASCII, unlike output.print_json: a stored name may hold terminal controls or bytes that are not UTF-8
    print(json.dumps(value, indent=2, allow_nan=False))


def _path(args: argparse.Namespace) -> Path:
    from firetower.core.config import store_path

    return store_path() if args.store is None else Path(args.store).expanduser()


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # it may be; opening it says what is wrong
        return True
    return True


def _shown(text: str) -> str:
    from firetower.fires.text import visible

    return visible(text)


def _shown_store(args: argparse.Namespace) -> str:
    return _shown(str(_path(args)))


def _store_option(args: argparse.Namespace) -> str:
    import shlex

    return "" if args.store is None else f" --store {_shown(shlex.quote(args.store))}"


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return _natural(text[:-1]) * unit if unit else _natural(text)
