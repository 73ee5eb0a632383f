"""Reading a file that is not trusted: positioned reads into small buffers, never a map, never past the end.

A memory map would count against resident memory and kill the process if the file shrank while being read.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from firetower.core.errors import ScanError

_WINDOW_BYTES = 1 << 20


class HeaderError(Exception):
    """The header contradicts itself or the file; becomes a finding. ``offset`` is where in the file."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


class Source:
    """A regular file, open for positioned reads.

    Raises:
        ScanError: no such file, not a regular file (a pipe would block), no permission, or a read error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ScanError(f"path={path}: must be a regular file")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as e:
            raise ScanError(f"path={path}: {e.strerror or e}") from e

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Up to ``num_bytes`` bytes, fewer only at the end of the file."""
        buffer = np.empty(max(0, min(num_bytes, self.size - offset)), dtype=np.uint8)
        self.read_into(buffer, offset)
        return buffer.tobytes()

    def read_into(self, buffer: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill ``buffer`` (uint8, contiguous) from ``offset``; the range must lie within ``size``."""
        view, done = buffer.data, 0
        try:
            self._file.seek(offset)
            while done < len(view):
                count = self._file.readinto(view[done:])
                if not count:
                    raise ScanError(f"path={self.path}: shrank while it was being read; scan it again")
                done += count
        except OSError as e:
            raise ScanError(f"path={self.path}: reading byte {offset + done}: {e.strerror or e}") from e


class Cursor:
    """Sequential reader of a binary header; every step is checked against the end of the file.

    Args:
        limit: no header is longer than this; bounds the time that a hostile one can take.
        order: byte order of the numbers, ``<`` or ``>``.
    """

    def __init__(self, source: Source, *, limit: int, order: str = "<") -> None:
        self._source = source
        self._stop = min(limit, source.size)
        self._start = self._at = 0
        self._window = b""
        self.order = order

    @property
    def offset(self) -> int:
        """Absolute offset of the next byte."""
        return self._start + self._at

    @property
    def left(self) -> int:
        """Bytes up to the end of the file, or to the longest header."""
        return self._stop - self.offset

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes. Keep ``num_bytes`` small: it is held in memory.

        Raises:
            HeaderError: the file ends before.
        """
        if num_bytes > self.left:
            raise HeaderError(f"{what}: needs {num_bytes} bytes, {self.left} are left", self.offset)
        if self._at + num_bytes > len(self._window):
            self._refill(max(num_bytes, _WINDOW_BYTES))
        data = self._window[self._at : self._at + num_bytes]
        self._at += num_bytes
        return data

    def number(self, code: str, what: str) -> int:
        """The next integer; ``code`` as in `struct` (``I``, ``Q``)."""
        form = self.order + code
        value: int = struct.unpack(form, self.take(struct.calcsize(form), what))[0]
        return value

    def skip(self, num_bytes: int, what: str) -> None:
        """Step over bytes without reading them.

        Raises:
            HeaderError: the file ends before.
        """
        if num_bytes > self.left:
            raise HeaderError(f"{what}: needs {num_bytes} bytes, {self.left} are left", self.offset)
        self._at += num_bytes

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` strings, each a 64-bit length and its bytes; a tokenizer has 100,000."""
        unpack = struct.Struct(self.order + "Q").unpack_from
        while count:
            if self._at + 8 > len(self._window):
                if self.left < 8:
                    raise HeaderError(f"{what}: the header ends with {count} strings to come", self.offset)
                self._refill(_WINDOW_BYTES)
            window, at, last = self._window, self._at, len(self._window) - 8
            while count and at <= last:
                at += 8 + unpack(window, at)[0]
                count -= 1
            self._at = at
            if self.left < 0:
                raise HeaderError(f"{what}: a string runs {-self.left} bytes past the end")

    def _refill(self, num_bytes: int) -> None:
        self._start, self._at = self.offset, 0
        self._window = self._source.read(self._start, num_bytes)


def printable(raw: bytes | str, limit: int = 200) -> str:
    """A name from a file, safe on a terminal: bad UTF-8 and control characters escaped, cut at ``limit``."""
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else raw
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
