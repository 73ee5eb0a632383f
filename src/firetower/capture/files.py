"""The file system, carefully: nothing through a symlink, nothing half written, nothing larger than said."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from firetower.core.errors import CaptureError

PARTIAL_PREFIX = ".partial-"
"""Folders and files being written carry this name; readers never look at them."""

MAX_JSON_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20


def write_folder(target: Path, parts: Iterable[tuple[str, Iterable[bytes]]]) -> None:
    """Make a folder (0700) of files (0600), whole or not at all; the disk has it before this returns.

    ``parts`` are names and contents; they are taken one by one, so that they need not fit into memory.

    Raises:
        CaptureError: ``target`` exists, or it could not be written; then nothing is left of it.
    """
    if os.path.lexists(target):
        raise CaptureError(f"folder={str(target)!r}: exists; choose another name")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=target.parent))
    except OSError as e:
        raise CaptureError(f"folder={str(target.parent)!r}: {e.strerror or e}; choose another folder") from e
    try:
        for name, pieces in parts:
            write_file(temporary / name, pieces)
        _sync_folder(temporary)
        os.rename(temporary, target)
        _sync_folder(target.parent)
    except OSError as e:
        reason = f"{e.strerror or e}; free some space or choose another folder"
        raise CaptureError(f"folder={str(target)!r}: not written, {reason}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a new file (0600) and wait for the disk; never follows a link, never replaces a file.

    Raises:
        OSError: it exists or cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, pieces: Iterable[bytes], *, force: bool = True) -> None:
    """Write a file (0600) beside ``path`` and move it there; without ``force`` an existing one is kept.

    Raises:
        CaptureError: it exists and ``force`` is not given, or it cannot be written.
    """
    if os.path.lexists(path) and not (force and path.is_file()):
        raise CaptureError(f"output={str(path)!r}: exists; choose another name, or replace it with --force")
    temporary = path.with_name(f"{PARTIAL_PREFIX}{os.getpid()}-{path.name}"[:200])
    try:
        write_file(temporary, pieces)
        if force:
            os.replace(temporary, path)
        else:
            # a link, unlike a rename, fails if someone made the file meanwhile
            os.link(temporary, path)
    except OSError as e:
        raise CaptureError(f"output={str(path)!r}: {e.strerror or e}; choose another place") from e
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(folder: Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file of a folder, without following links: (file, its size).

    Raises:
        CaptureError: it is missing, a link, or no regular file.
    """
    try:
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise CaptureError(f"file={name!r}: {_why(folder / name, e)}") from e
    with open(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CaptureError(f"file={name!r}: is no regular file; a capture holds nothing else")
        yield file, status.st_size


def read_small(folder: Path, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole file of a folder.

    Raises:
        CaptureError: as `opened`, or a file over ``max_bytes``.
    """
    with opened(folder, name) as (file, num_bytes):
        if num_bytes > max_bytes:
            raise CaptureError(f"file={name!r}: has {num_bytes:,} bytes, at most {max_bytes:,} are read")
        data = file.read(num_bytes + 1)
    if len(data) > num_bytes:
        raise CaptureError(f"file={name!r}: grew while it was read; try again")
    return data


def sha256_of(file: BinaryIO, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of the rest of a file, in hexadecimal, a megabyte at a time; ``on_bytes`` is told each length."""
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        if on_bytes is not None:
            on_bytes(len(block))
    return digest.hexdigest()


def remove_folder(folder: Path) -> None:
    """Remove a folder so that readers see all of it or none: it is renamed away first.

    Raises:
        CaptureError: it cannot be removed.
    """
    try:
        trash = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=folder.parent))
        os.rename(folder, trash / "gone")
        shutil.rmtree(trash)
    except OSError as e:
        raise CaptureError(f"folder={str(folder)!r}: {e.strerror or e}; not removed") from e


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return "is a symbolic link; a capture holds regular files only"
    return f"{error.strerror or error}"
