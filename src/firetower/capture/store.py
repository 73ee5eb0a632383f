"""The folder of captures: a byte quota, a rate limit, one capture an origin, and pruning."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from firetower.capture.files import PARTIAL_PREFIX, remove_folder, replace_file, write_folder
from firetower.capture.folder import MANIFEST, SEEN, TENSORS, capture_parts, read_seen
from firetower.capture.records import Capture
from firetower.capture.schema import dump_document
from firetower.core.config import data_folder
from firetower.core.errors import CaptureError, ConfigError
from firetower.core.records import utc_now

STALE_PARTIAL_S = 3600.0
"""Age at which a half-written folder is taken for the remains of a killed process."""

_logger = logging.getLogger("firetower.capture")


def captures_path() -> Path:
    """The usual folder of captures: ``captures`` in the data folder; not created here."""
    return data_folder() / "captures"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLimits:
    """How much a folder of captures may take.

    Attributes:
        max_bytes: of all captures together.
        max_per_window, window_s: new captures in that many seconds.
        per_origin: captures kept of one origin; further fires there are only counted.

    Raises:
        ConfigError: a negative limit.
    """

    max_bytes: int = 4 << 30
    max_per_window: int = 10
    window_s: float = 60.0
    per_origin: int = 1

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if (value := getattr(self, f.name)) < 0:
                raise ConfigError(f"{f.name}={value}: must not be negative")


class AddOutcome(StrEnum):
    """What became of a capture handed to the folder."""

    KEPT = "kept"
    MERGED = "merged"
    REFUSED = "refused"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddResult:
    """``path`` is the capture's folder, or the one it was merged into; ``reason`` says why it was not kept whole."""

    outcome: AddOutcome
    path: Path | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredCapture:
    """One capture of a folder, as far as its files' names and sizes tell. ``last_seen_s`` is seconds since 1970."""

    path: Path
    num_bytes: int
    created_s: float
    last_seen_s: float

    @property
    def id(self) -> str:
        """The capture's id."""
        return self.path.name.rpartition("+")[0]

    @property
    def origin_hash(self) -> str:
        """Short hash of the origin that captures are merged by."""
        return self.path.name.rpartition("+")[2]


class CaptureFolder:
    """The captures under one folder, shared by any number of processes (a file lock orders their writes).

    Args:
        path: the folder; `captures_path` when omitted. Made (0700) with the first capture.
        limits: quota and rate; the default ones when omitted.

    Attributes:
        num_refused: captures that quota or rate kept out, in this process.
        num_failed: captures that `add_safely` could not write.
        last_error: what the last of them said.
    """

    def __init__(self, path: Path | str | None = None, limits: CaptureLimits | None = None) -> None:
        self.path = captures_path() if path is None else Path(path)
        self.limits = limits or CaptureLimits()
        self.num_refused = 0
        self.num_failed = 0
        self.last_error: str | None = None

    def add(self, capture: Capture) -> AddResult:
        """Keep a capture, unless its origin is captured already, or quota or rate say no.

        Tensors that alone break the quota are left out, and that is noted in the capture.

        Raises:
            CaptureError: it cannot be written (full disk, no permission); nothing is left of it then.
        """
        origin = hashlib.sha256(capture.merge_key.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        with self._locked():
            self._sweep()
            stored = list(self._scan())
            same = [s for s in stored if s.origin_hash == origin]
            twin = [s for s in same if s.id == capture.id]
            if twin or (same and len(same) >= self.limits.per_origin):
                return self._merge(max(twin or same, key=lambda s: s.created_s))
            newest = time.time() - self.limits.window_s
            if sum(s.created_s > newest for s in stored) >= self.limits.max_per_window:
                limits = self.limits
                return self._refuse(f"{limits.max_per_window} captures in {limits.window_s:g} s already")
            return self._write(capture, origin, sum(s.num_bytes for s in stored))

    def add_safely(self, capture: Capture) -> AddResult:
        """As `add`, but never raises: a failure is counted, logged once and returned."""
        try:
            return self.add(capture)
        except Exception as e:  # noqa: BLE001 - the promise of this method: whatever it is, inference goes on
            self.num_failed += 1
            self.last_error = f"{e}" or type(e).__name__
            if self.num_failed == 1:
                _logger.warning("captures are not kept: %s (later failures are only counted)", self.last_error)
            return AddResult(outcome=AddOutcome.FAILED, reason=self.last_error)

    def captures(self) -> list[StoredCapture]:
        """Every whole capture, newest first; half-written ones and strangers are left out."""
        return sorted(self._scan(), key=lambda s: (s.created_s, s.path.name), reverse=True)

    def find(self, id_or_prefix: str) -> StoredCapture:
        """The one capture whose id begins so.

        Raises:
            CaptureError: none, or several.
        """
        matches = [s for s in self.captures() if s.path.name.startswith(id_or_prefix)]
        exact = [s for s in matches if s.id == id_or_prefix]
        matches = exact if len(exact) == 1 else matches
        if not matches:
            raise CaptureError(f"capture={id_or_prefix!r}: neither a folder nor an id in {str(self.path)!r}")
        if len(matches) > 1:
            raise CaptureError(f"capture={id_or_prefix!r}: fits {len(matches)} captures; give more of the id")
        return matches[0]

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        keep: int | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> list[StoredCapture]:
        """Remove captures that any limit is against, longest unseen first; returns what went (or would go).

        Raises:
            ConfigError: no limit, or a negative one.
            CaptureError: one cannot be removed.
        """
        limits = {"older_than_s": older_than_s, "keep": keep, "max_bytes": max_bytes}
        if all(v is None for v in limits.values()):
            raise ConfigError("prune: needs at least one limit: --older-than, --keep or --max-bytes")
        for name, value in limits.items():
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: must not be negative")
        if not self.path.is_dir():
            return []
        with self._locked():
            stored = sorted(self._scan(), key=lambda s: (s.last_seen_s, s.path.name))
            victims = _victims(stored, older_than_s, keep, max_bytes)
            if not dry_run:
                self._sweep()
                for victim in victims:
                    remove_folder(victim.path)
        return victims

    def _write(self, capture: Capture, origin: str, used: int) -> AddResult:
        target, limit = self.path / f"{capture.id}+{origin}", self.limits.max_bytes
        parts = {name: list(pieces) for name, pieces in capture_parts(capture).items()}
        reason = ""
        if used + _size(parts) > limit and capture.tensors:
            reason = f"tensors ({_size({TENSORS: parts[TENSORS]}):,} bytes): over the quota of {limit:,} bytes"
            slim = dataclasses.replace(capture, tensors={}, left_out=(*capture.left_out, reason))
            parts = {name: list(pieces) for name, pieces in capture_parts(slim).items()}
        if used + _size(parts) > limit:
            return self._refuse(f"over the quota: {used:,} of {limit:,} bytes used; firetower capture prune")
        write_folder(target, parts.items())
        return AddResult(outcome=AddOutcome.KEPT, path=target, reason=reason)

    def _merge(self, stored: StoredCapture) -> AddResult:
        seen = read_seen(stored.path)
        count = (1 if seen is None else seen.count) + 1
        replace_file(stored.path / SEEN, [dump_document({"count": count, "last_seen": utc_now()})])
        return AddResult(outcome=AddOutcome.MERGED, path=stored.path, reason=f"seen {count:,} times")

    def _refuse(self, reason: str) -> AddResult:
        self.num_refused += 1
        return AddResult(outcome=AddOutcome.REFUSED, reason=reason)

    def _scan(self) -> Iterator[StoredCapture]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        except OSError as e:
            raise CaptureError(f"folder={str(self.path)!r}: {e.strerror or e}; choose another folder") from e
        for name in names:
            folder = self.path / name
            if name.startswith(".") or "+" not in name or folder.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield _stored(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise CaptureError(f"folder={str(self.path)!r}: {e.strerror or e}; choose another folder") from e
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what a killed process left half-written; called with the lock held."""
        oldest = time.time() - STALE_PARTIAL_S
        for folder in self.path.glob(f"{PARTIAL_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                if folder.lstat().st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)


def _stored(folder: Path) -> StoredCapture:
    """Sizes and times from the files' own records; the manifest never changes, so its time is the capture's."""
    with os.scandir(folder) as entries:
        status = {e.name: e.stat(follow_symlinks=False) for e in entries}
    if MANIFEST not in status:
        raise FileNotFoundError(folder / MANIFEST)
    created_s = status[MANIFEST].st_mtime
    last_seen_s = status[SEEN].st_mtime if SEEN in status else created_s
    num_bytes = sum(s.st_size for s in status.values())
    return StoredCapture(path=folder, num_bytes=num_bytes, created_s=created_s, last_seen_s=last_seen_s)


def _victims(
    stored: list[StoredCapture], older_than_s: float | None, keep: int | None, max_bytes: int | None
) -> list[StoredCapture]:
    """What goes, of captures sorted by when they were last seen."""
    num = 0
    if older_than_s is not None:
        oldest = time.time() - older_than_s
        num = sum(s.last_seen_s < oldest for s in stored)
    if keep is not None:
        num = max(num, len(stored) - keep)
    if max_bytes is not None:
        left = sum(s.num_bytes for s in stored[num:])
        while left > max_bytes:
            left -= stored[num].num_bytes
            num += 1
    return stored[:num]


def _size(parts: dict[str, list[bytes]]) -> int:
    return sum(len(piece) for pieces in parts.values() for piece in pieces)
