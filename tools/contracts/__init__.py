"""The rules of the house as functions: each takes sources and returns the breaches, one line each.

`tests/contracts` runs them on the tree, and on small bad sources to show that each can fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Sources = Mapping[str, str]
"""Path relative to the folder that holds ``firetower/``, such as ``firetower/core/bits.py``, to the text."""


def read_sources(folder: Path) -> dict[str, str]:
    """Every Python file under ``folder``, by its path relative to it."""
    return {
        p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in sorted(folder.rglob("*.py"))
    }


def parse(sources: Sources) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every source."""
    for path, text in sources.items():
        yield path, ast.parse(text, filename=path)


def room_of(path: str) -> str | None:
    """Room of a path such as ``firetower/core/bits.py``; None for files beside the rooms."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else None
