"""List, show, verify, pack, unpack, redact and prune captures.

A CAPTURE is a folder, or the beginning of an id in the folder of captures (--captures FOLDER, else captures in the
data folder). What was said in a request is private: no verb shows it without --with-content, and redact takes it out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firetower.capture.folder import Advance
    from firetower.capture.store import CaptureFolder, StoredCapture


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``list``, ``show``, ``verify``, ``pack``, ``unpack``, ``redact`` and ``prune``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = _verb(verbs, "list", "table of the captures, newest first")
    listing.add_argument("--limit", type=_natural, default=50, help="at most this many; 0 for all (default: 50)")
    show = _verb(verbs, "show", "one capture as a page, without its content")
    show.add_argument("capture", metavar="CAPTURE", help="folder, or beginning of an id")
    show.add_argument("--with-content", action="store_true", help="with messages, prompt ids and outputs")
    verify = _verb(verbs, "verify", "hold every file against its hash, and look for secrets")
    verify.add_argument("captures_to_verify", metavar="CAPTURE", nargs="+", help="folder, or beginning of an id")
    pack = _verb(verbs, "pack", "one .tar.gz to hand on; equal captures give equal bytes")
    pack.add_argument("capture", metavar="CAPTURE", help="folder, or beginning of an id")
    pack.add_argument("-o", "--output", metavar="FILE", required=True, help="the archive to write (0600)")
    pack.add_argument("--force", action="store_true", help="replace FILE if it exists")
    unpack = _verb(verbs, "unpack", "a packed capture into a new folder, verified")
    unpack.add_argument("archive", metavar="FILE", help="what pack wrote")
    unpack.add_argument("-o", "--output", metavar="FOLDER", required=True, help="the folder to make")
    _configure_redact(_verb(verbs, "redact", "random token ids instead of the prompt, and no content"))
    _configure_prune(_verb(verbs, "prune", "remove old captures by age, number or size"))


def run(args: argparse.Namespace) -> int:
    """Run the verb that was asked for."""
    verbs = {
        "list": _list,
        "show": _show,
        "verify": _verify,
        "pack": _pack,
        "unpack": _unpack,
        "redact": _redact,
        "prune": _prune,
    }
    return verbs[args.verb](args)


def _verb(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=description)
    parser.add_argument("--captures", metavar="FOLDER", help="the folder of captures, instead of the usual one")
    parser.add_argument("--json", action="store_true", help="machine-readable, on stdout")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _configure_redact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", metavar="CAPTURE", help="folder, or beginning of an id")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="the folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the random ids (default: 0)")
    parser.add_argument("--vocabulary-size", type=_natural, metavar="N", help="ids are drawn below this")
    parser.add_argument("--special-ids", type=_ids, metavar="A,B,...", help="ids never drawn")
    parser.add_argument("--keep-special", action="store_true", help="leave special ids of the prompt in place")


def _configure_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="AGE", help="captures last seen longer ago than this (30d)")
    parser.add_argument("--keep", metavar="N", type=_natural, help="all but the N last seen")
    parser.add_argument("--max-bytes", metavar="SIZE", type=_size, help="longest unseen first until they fit (20G)")
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")


def _list(args: argparse.Namespace) -> int:
    from firetower.cli.output import say

    folder = _folder(args)
    stored = folder.captures()
    shown = stored[: args.limit] if args.limit else stored
    rows = [_row(s) for s in shown]
    if args.json:
        _print_json(rows)
        return 0
    if not rows:
        say(f"no captures in {_visible(str(folder.path))}")
        return 0
    _print_rows(rows)
    more = f"{len(shown)} of {len(stored)} captures, newest first; --limit 0 shows all"
    say(*([more] if len(shown) < len(stored) else []), f"next: firetower capture show {_shell(rows[0]['id'])}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from firetower.capture.folder import digest_of, read_capture, read_manifest, read_seen, read_tensor_table
    from firetower.capture.page import capture_page
    from firetower.cli.output import say

    path = _resolve(args, args.capture)
    capture = read_capture(path, with_tensors=False)
    if args.json:
        _print_json(_documents(capture, with_content=args.with_content))
        return 0
    page = capture_page(
        capture,
        digest=digest_of(path),
        files=read_manifest(path),
        tensors=read_tensor_table(path),
        seen=read_seen(path),
        with_content=args.with_content,
    )
    for line in page:
        print(_visible(line))
    # what was typed finds it again, unless another folder of captures was named
    name = _shell(args.capture if args.captures is None else str(path))
    steps = [f"firetower capture verify {name}", f"firetower capture pack {name} -o {_shell(capture.id)}.tar.gz"]
    if capture.redaction is None and capture.prompt_token_ids is not None:
        steps.insert(1, f"firetower capture redact {name} -o {_shell(capture.id)}-redacted")
    say("", *(f"{'      ' if i else 'next: '}{step}" for i, step in enumerate(steps)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from firetower.capture.folder import verify

    reports = []
    for name in args.captures_to_verify:
        with _progress() as advance:
            reports.append(verify(_resolve(args, name), advance))
    if args.json:
        _print_json([asdict(r) for r in reports])
    else:
        for report in reports:
            num_bytes = sum(f.num_bytes for f in report.files)
            num_problems = len(report.problems)
            state = "sound" if report.is_sound else f"{num_problems} problem{'s' * (num_problems != 1)}"
            print(f"{_visible(report.folder)}: {state}, {len(report.files)} files, {num_bytes:,} bytes")
            print(f"  digest {report.digest}")
            for problem in report.problems:
                print(f"  {_visible(problem)}")
    return 0 if all(r.is_sound for r in reports) else 3


def _pack(args: argparse.Namespace) -> int:
    from firetower.capture.archive import pack
    from firetower.capture.files import read_small
    from firetower.capture.schema import CAPTURE, parse_document
    from firetower.cli.output import say

    path = _resolve(args, args.capture)
    num_bytes = pack(path, args.output, force=args.force)
    if args.json:
        _print_json({"output": args.output, "num_bytes": num_bytes})
    head = parse_document(read_small(path, CAPTURE), CAPTURE)
    if head.get("redaction") is None:
        say("it holds the request word for word; firetower capture redact makes one without")
    say(f"Wrote {_visible(args.output)} ({num_bytes:,} bytes)")
    return 0


def _unpack(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from firetower.capture.archive import unpack
    from firetower.cli.output import say

    report = unpack(args.archive, args.output)
    if args.json:
        _print_json(asdict(report))
    else:
        print(f"{_visible(args.output)}: sound, digest {report.digest}")
    say(f"next: firetower capture show {_shell(args.output)}")
    return 0


def _redact(args: argparse.Namespace) -> int:
    from firetower.capture.folder import read_capture, read_tensor_table, write_capture
    from firetower.capture.redaction import redact
    from firetower.cli.output import say

    path = _resolve(args, args.capture)
    capture = read_capture(path, with_tensors=False)
    result = redact(
        capture,
        seed=args.seed,
        vocabulary_size=args.vocabulary_size,
        special_ids=args.special_ids,
        keep_special=args.keep_special,
        also_dropped=("tensors",) if read_tensor_table(path) else (),
    )
    write_capture(result, args.output)
    assert result.redaction is not None
    if args.json:
        _print_json(_documents(result, with_content=False)["capture.json"]["redaction"])
    else:
        print(f"{result.redaction.num_replaced:,} token ids replaced; still fires: not measured")
    say(
        f"Wrote {_visible(args.output)}",
        f"next: firetower replay {_shell(args.output)} --tries 20 --target ...   (whether it still fires)",
        f"      firetower capture pack {_shell(args.output)} -o {_shell(args.output.rstrip('/'))}.tar.gz",
    )
    return 0


def _prune(args: argparse.Namespace) -> int:
    from firetower.cli.output import say
    from firetower.fires.times import parse_age

    older = None if args.older_than is None else parse_age(args.older_than, "older_than")
    folder = _folder(args)
    gone = folder.prune(older_than_s=older, keep=args.keep, max_bytes=args.max_bytes, dry_run=args.dry_run)
    rows = [_row(s) for s in gone] if args.dry_run else [{"id": s.id, "num_bytes": s.num_bytes} for s in gone]
    if args.json:
        _print_json({"dry_run": args.dry_run, "captures": rows})
    else:
        for stored in gone:
            print(_visible(stored.id))
    verb = "would remove" if args.dry_run else "removed"
    num_bytes = sum(s.num_bytes for s in gone)
    say(f"{verb} {len(gone)} capture{'s' * (len(gone) != 1)}, {num_bytes:,} bytes")
    return 0


def _folder(args: argparse.Namespace) -> CaptureFolder:
    from firetower.capture.store import CaptureFolder

    return CaptureFolder(args.captures)


def _resolve(args: argparse.Namespace, name: str) -> Path:
    """The folder that a CAPTURE argument means: a path that is there, or an id's beginning."""
    path = Path(name)
    if path.exists() or "/" in name:
        return path
    return _folder(args).find(name).path


def _row(stored: StoredCapture) -> dict[str, Any]:
    """What a list says of one capture; one that does not read is listed with the reason."""
    from firetower.capture.folder import read_capture, read_seen
    from firetower.capture.page import KIND_NAMES
    from firetower.core.errors import CaptureError

    row: dict[str, Any] = {"id": stored.id, "path": str(stored.path), "num_bytes": stored.num_bytes}
    try:
        capture = read_capture(stored.path, with_tensors=False)
        seen = read_seen(stored.path)
    except CaptureError as e:
        return row | {"problem": str(e)}
    fire = capture.fire
    kinds = ", ".join(sorted({str(f.get("kind")) for f in capture.findings}))
    return row | {
        "created_at": capture.created_at,
        "what": f"{KIND_NAMES[fire.first.kind]} at {fire.origin.name}" if fire is not None else kinds or "request",
        "count": 1 if seen is None else seen.count,
        "kind": capture.request.kind,
        "num_prompt_tokens": capture.num_prompt_tokens,
        "model": capture.model.name,
        "is_redacted": capture.redaction is not None,
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from firetower.cli.output import print_table

    columns = ("ID", "WHAT", "TIMES", "REQUEST", "PROMPT", "SIZE", "CREATED", "MODEL")
    cells = []
    for row in rows:
        if "problem" in row:
            cells.append((row["id"], f"unreadable: {row['problem']}", "", "", "", _bytes(row["num_bytes"]), "", ""))
            continue
        tokens = "?" if row["num_prompt_tokens"] is None else f"{row['num_prompt_tokens']:,}"
        created = row["created_at"][:16].replace("T", " ")
        request = row["kind"] + (" redacted" if row["is_redacted"] else "")
        size = _bytes(row["num_bytes"])
        cells.append((row["id"], row["what"], f"{row['count']:,}", request, tokens, size, created, row["model"]))
    visible = [tuple(_visible(c) for c in cell) for cell in cells]
    print_table(columns, visible, right=("TIMES", "PROMPT", "SIZE"))


def _documents(capture: Any, *, with_content: bool) -> dict[str, Any]:
    from firetower.capture.schema import CONTENT, REQUEST, to_documents

    documents = to_documents(capture)
    return documents if with_content else {k: v for k, v in documents.items() if k not in (REQUEST, CONTENT)}


@contextmanager
def _progress() -> Iterator[Advance | None]:
    """A bar on a terminal with rate and end time; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _print_json(value: Any) -> None:
    import json

    # ASCII: a capture may hold terminal controls
    print(json.dumps(value, indent=2, allow_nan=False))


def _visible(text: str) -> str:
    from firetower.fires.text import visible

    return visible(text)


def _shell(text: str) -> str:
    import shlex

    return _visible(shlex.quote(text))


def _bytes(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1000
    return f"{value:.3g} GB"


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return _natural(text[:-1]) * unit if unit else _natural(text)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(_natural(part.strip()) for part in text.split(",") if part.strip())
