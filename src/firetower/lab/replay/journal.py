"""The journal of a campaign: one JSON document a line, on the disk before the next try begins.

Lines are only ever appended, so a killed campaign leaves at most one torn line, at the end, which is dropped. The
first line is the head (what is replayed, how, and the plan's seed); then come the events. None holds content.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firetower.core.codec import decode, dumps
from firetower.core.errors import RecordError, ReplayError
from firetower.lab.replay.records import CAMPAIGN_SCHEMA
from firetower.lab.replay.schema import check_schema

MAX_JOURNAL_BYTES = 256 << 20


class Journal:
    """An open journal; one process at a time holds it. Made by `create` or `reopen`.

    Attributes:
        path: of the file. head: its first line. events: those read when it was opened.
    """

    def __init__(self, path: Path, handle: int, head: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self.path = path
        self.head = head
        self.events = events
        self._handle = handle

    @classmethod
    def create(cls, path: Path, head: Mapping[str, Any]) -> Journal:
        """A new file (0600) with its head.

        Raises:
            ReplayError: it exists, or cannot be written.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ReplayError(f"journal={str(path)!r}: {e.strerror or e}; choose another place with --journal") from e
        journal = cls(path, handle, dict(head), [])
        try:
            journal._lock()
            journal._write({"event": "campaign", "schema": CAMPAIGN_SCHEMA} | dict(head))
            _sync_folder(path.parent)
        except ReplayError:
            journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    @classmethod
    def reopen(cls, path: Path) -> Journal:
        """An existing file, to go on with; a torn last line is cut off.

        Raises:
            ReplayError: no regular file, damaged, newer, or held by another process.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as e:
            raise ReplayError(f"journal={str(path)!r}: {e.strerror or e}") from e
        journal = cls(path, handle, {}, [])
        try:
            journal._lock()
            journal._read()
        except BaseException:
            journal.close()
            raise
        return journal

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one event; the disk has it when this returns. Returns it as a reader would see it.

        Raises:
            ReplayError: the disk is full or gone; what was written before stays.
        """
        line = {"event": event} | fields
        self._write(line)
        return json.loads(dumps(line))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ReplayError(f"journal={str(self.path)!r}: another firetower runs this campaign; wait for it") from e

    def _write(self, value: Mapping[str, Any]) -> None:
        raw = (dumps(value) + "\n").encode()
        size = os.fstat(self._handle).st_size
        try:
            os.lseek(self._handle, 0, os.SEEK_END)
            while raw:
                raw = raw[os.write(self._handle, raw) :]
            os.fsync(self._handle)
        except OSError as e:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, size)
            raise ReplayError(
                f"journal={str(self.path)!r}: {e.strerror or e}; make space, then give the same command to go on"
            ) from e

    def _read(self) -> None:
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JOURNAL_BYTES:
            raise ReplayError(f"journal={str(self.path)!r}: is no journal, or over {MAX_JOURNAL_BYTES >> 20} MiB")
        with open(os.dup(self._handle), "rb") as file:
            raw = file.read()
        whole = raw.rfind(b"\n") + 1
        lines = [self._parse(number, line) for number, line in enumerate(raw[:whole].splitlines(), 1)]
        if not lines or lines[0].get("event") != "campaign":
            raise ReplayError(f"journal={str(self.path)!r}: has no head; it is no journal of a campaign")
        try:
            check_schema(lines[0].get("schema"))
        except RecordError as e:
            raise ReplayError(f"journal={str(self.path)!r}: {e}") from e
        if whole < len(raw):
            os.ftruncate(self._handle, whole)
        self.head = {k: v for k, v in lines[0].items() if k not in ("event", "schema")}
        self.events = lines[1:]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as e:
            raise ReplayError(f"journal={str(self.path)!r}: line {number} is not JSON; the file is damaged") from e
        if not isinstance(value, dict) or not isinstance(value.get("event"), str):
            raise ReplayError(f"journal={str(self.path)!r}: line {number} is no event; the file is damaged")
        return value


def plain(value: Any) -> Any:
    """What comes back when ``value`` is written to a journal and read again."""
    return decode(json.loads(dumps(value)))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
