"""One file of a capture, to post: a deterministic .tar.gz, and reading one from a stranger."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from firetower.capture.files import MAX_JSON_BYTES, opened, remove_folder, replace_file, write_folder
from firetower.capture.folder import (
    FILE_NAMES,
    MANIFEST,
    MAX_TENSOR_BYTES,
    SEEN,
    TENSORS,
    VerifyReport,
    check_folder,
    read_manifest,
    verify,
)
from firetower.core.errors import CaptureError

ROOT = "capture"
"""Name of the folder inside the archive; the unpacked folder gets the name that the reader asks for."""

_BLOCK = 512
_CHUNK_BYTES = 1 << 20


def pack(folder: Path | str, output: Path | str, *, force: bool = False) -> int:
    """Pack a capture into one file (0600); equal captures give equal bytes. Returns the archive's size in bytes.

    Raises:
        CaptureError: the capture is not sound (then nothing is written), or the output exists.
    """
    base = check_folder(folder)
    report = verify(base)
    if not report.is_sound:
        raise CaptureError(f"capture={str(base)!r}: not packed, {report.problems[0]}; see firetower capture verify")
    target = Path(output)
    replace_file(target, _archive(base), force=force)
    return target.stat().st_size


def unpack(archive: Path | str, folder: Path | str) -> VerifyReport:
    """Unpack a packed capture to a new folder (0700, files 0600) and verify it.

    Only plain files with a capture's own names are taken; links, folders, devices, other names, wrong sizes and
    archives that unpack to more than they may are refused.

    Raises:
        CaptureError: no such archive, or one that is refused; nothing is left of it then.
    """
    source, target = Path(archive), Path(folder)
    with opened(source.parent, source.name) as (file, _):
        write_folder(target, _members(_Unzipped(file)))
    try:
        report = verify(target)
    except CaptureError:
        remove_folder(target)
        raise
    if not report.is_sound:
        remove_folder(target)
        raise CaptureError(f"archive={source.name!r}: not unpacked, {report.problems[0]}")
    return report


def _archive(folder: Path) -> Iterator[bytes]:
    """The archive in pieces: no time, owner or name of this machine in it."""
    names = sorted({*read_manifest(folder), MANIFEST} | ({SEEN} if (folder / SEEN).exists() else set()))
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=buffer, mtime=0) as zipped:
        for name in names:
            with opened(folder, name) as (file, num_bytes):
                zipped.write(_header(name, num_bytes))
                yield from _body(file, num_bytes, zipped, buffer)
        zipped.write(bytes(2 * _BLOCK))
    yield buffer.getvalue()


def _body(file: BinaryIO, num_bytes: int, zipped: gzip.GzipFile, buffer: io.BytesIO) -> Iterator[bytes]:
    left = num_bytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise CaptureError("capture: a file shrank while it was packed; try again")
        zipped.write(chunk)
        left -= len(chunk)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    zipped.write(bytes(-num_bytes % _BLOCK))


def _header(name: str, num_bytes: int) -> bytes:
    info = tarfile.TarInfo(f"{ROOT}/{name}")
    info.size, info.mode = num_bytes, 0o600
    # GNU: sizes over 8 GiB fit, still one block a header
    return info.tobuf(tarfile.GNU_FORMAT)


class _Unzipped:
    """Reads exactly what is asked for from a gzip stream; whatever is wrong with it is one kind of error."""

    def __init__(self, file: BinaryIO) -> None:
        self._stream = gzip.GzipFile(fileobj=file, mode="rb")

    def read(self, num_bytes: int) -> bytes:
        """Exactly ``num_bytes`` bytes.

        Raises:
            CaptureError: the stream is damaged or ends before.
        """
        try:
            data = self._stream.read(num_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise CaptureError(f"archive: is damaged or no .tar.gz ({e}); nothing was unpacked") from e
        if len(data) != num_bytes:
            raise CaptureError("archive: ends in the middle; nothing was unpacked")
        return data


def _members(stream: _Unzipped) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Names and contents of the archive, each content read as it is written."""
    seen: set[str] = set()
    while (block := stream.read(_BLOCK)) != bytes(_BLOCK):
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as e:
            raise CaptureError(f"archive: is no tar ({e}); nothing was unpacked") from e
        name = _checked_name(info, seen)
        seen.add(name)
        yield name, _content(stream, info.size)


def _content(stream: _Unzipped, num_bytes: int) -> Iterator[bytes]:
    for start in range(0, num_bytes, _CHUNK_BYTES):
        yield stream.read(min(_CHUNK_BYTES, num_bytes - start))
    stream.read(-num_bytes % _BLOCK)


def _checked_name(info: tarfile.TarInfo, seen: set[str]) -> str:
    """Name of a member, if it is a plain file that a capture holds.

    ``tarfile`` strips a final slash and turns old-style folders into their type, so the type is asked, not the name.
    """
    root, _, name = info.name.partition("/")
    if not info.isreg() or root != ROOT or name not in FILE_NAMES:
        raise CaptureError(f"archive: {info.name[:120]!r} is no file of a capture; nothing was unpacked")
    if name in seen:
        raise CaptureError(f"archive: {name!r} is there twice; nothing was unpacked")
    limit = MAX_TENSOR_BYTES if name == TENSORS else MAX_JSON_BYTES
    if not 0 <= info.size <= limit:
        raise CaptureError(f"archive: {name!r} would take {info.size:,} bytes, at most {limit:,}")
    return name
