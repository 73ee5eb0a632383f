"""What commands share for printing: data to stdout, talk to stderr, tables through rich when it is a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def say(*lines: str) -> None:
    """Talk to the user on stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout, non-finite floats encoded explicitly."""
    from firetower.core.codec import encode

    print(json.dumps(encode(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout; columns named in ``right`` are right-aligned. Content is never read as markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, width=width, highlight=False).print(table)
