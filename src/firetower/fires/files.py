"""Writing an export: whole or not at all, and never over a file by accident."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from firetower.core.errors import StoreError
from firetower.fires.text import visible


def write_lines(path: Path, lines: Iterable[str], *, force: bool) -> int:
    """Write lines to a new file (0600) and return how many; with ``force`` it replaces an existing one.

    Raises:
        StoreError: the file exists and ``force`` is not given, it is not a regular file, or it cannot be
            written; an existing file is then as before.
    """
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"output={visible(str(path))}: is not a regular file; use - and a pipe")
        if path.exists() and not force:
            raise StoreError(f"output={visible(str(path))}: exists; use --force to replace it")
        return _write_and_move(path, lines, force=force)
    except OSError as e:
        raise StoreError(f"output={visible(str(path))}: {e.strerror or e}; choose another file") from e


def _write_and_move(path: Path, lines: Iterable[str], *, force: bool) -> int:
    number = 0
    handle, temporary = tempfile.mkstemp(prefix=".firetower-", dir=path.parent)
    try:
        with open(handle, "w", encoding="ascii", newline="\n") as file:
            for line in lines:
                file.write(line)
                number += 1
        if force:
            os.replace(temporary, path)
        else:
            # a link, unlike a rename, fails if someone made the file meanwhile
            os.link(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return number
