"""A capture as a folder: written whole or not at all, read with every length and hash checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from firetower.capture.files import MAX_JSON_BYTES, opened, read_small, sha256_of, write_folder
from firetower.capture.records import CAPTURE_SCHEMA, Capture
from firetower.capture.schema import (
    CAPTURE,
    CONTENT,
    DOCUMENTS,
    FIRE,
    REQUEST,
    check_schema,
    dump_document,
    from_documents,
    parse_document,
    to_documents,
)
from firetower.capture.tensors import RawTensor, TensorEntry, read_table, read_tensors, tensor_file_parts
from firetower.core.errors import CaptureError

MANIFEST, TENSORS, SEEN = "manifest.json", "tensors.safetensors", "seen.json"
FILE_NAMES = (MANIFEST, *DOCUMENTS, TENSORS, SEEN)
"""Every name that a capture's folder may hold. ``seen.json`` is the only file that changes later."""

MAX_TENSOR_BYTES = 8 << 30
_MAX_SMALL_BYTES = 1 << 16
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SHA = re.compile(r"[0-9a-f]{64}")

Advance = Callable[[str, int, int], None]
"""Told of progress as (file, bytes done, bytes in all)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """Size and SHA-256 of one file, as they were when the capture was written."""

    name: str
    num_bytes: int
    sha256: str


def capture_parts(capture: Capture) -> dict[str, Iterable[bytes]]:
    """Every file of the folder as byte strings, the manifest last.

    Raises:
        CaptureError: a value that cannot be stored, an id that cannot name a file, or a document over 64 MiB.
    """
    if not _ID.fullmatch(capture.id):
        raise CaptureError(f"id={capture.id[:140]!r}: must be 1 to 128 of letters, digits and ._:-, no . first")
    parts: dict[str, Iterable[bytes]] = {}
    for name, data in to_documents(capture).items():
        raw = dump_document(data, indent=1 if name in (CAPTURE, FIRE) else None)
        if len(raw) > MAX_JSON_BYTES:
            raise CaptureError(f"file={name!r}: would take {len(raw):,} bytes, at most {MAX_JSON_BYTES:,}")
        parts[name] = [raw]
    if capture.tensors:
        parts[TENSORS] = list(tensor_file_parts(capture.tensors))
    files = [_manifest_file(name, pieces) for name, pieces in parts.items()]
    manifest = {"schema": CAPTURE_SCHEMA, "files": [dataclasses.asdict(f) for f in files]}
    return parts | {MANIFEST: [dump_document(manifest, indent=1)]}


def write_capture(capture: Capture, folder: Path | str) -> Path:
    """Write a capture to a new folder (0700, files 0600); the disk has it before this returns.

    Raises:
        CaptureError: the folder exists, something cannot be stored, or the disk is full; nothing is left then.
    """
    target = Path(folder)
    write_folder(target, capture_parts(capture).items())
    return target


def read_capture(folder: Path | str, *, with_tensors: bool = True, max_tensor_bytes: int = MAX_TENSOR_BYTES) -> Capture:
    """Read a capture, every file held against the manifest.

    Args:
        folder: the capture's folder.
        with_tensors: False leaves ``tensors`` empty and does not read their file.
        max_tensor_bytes: a larger file of tensors is refused.

    Raises:
        CaptureError: no capture, a damaged one, a newer schema, or files that are links or too large.
    """
    base = check_folder(folder)
    files = read_manifest(base)
    documents = {}
    for name in DOCUMENTS:
        if name in files:
            documents[name] = parse_document(_checked(base, files[name]), name)
    capture = from_documents(documents)
    if TENSORS not in files or not with_tensors:
        return capture
    return dataclasses.replace(capture, tensors=_read_tensors(base, files[TENSORS], max_tensor_bytes))


def read_manifest(folder: Path) -> dict[str, ManifestFile]:
    """The manifest's entries by file name.

    Raises:
        CaptureError: no manifest, one that does not read, or one that names a file no capture has.
    """
    if not (folder / MANIFEST).exists():
        raise CaptureError(f"folder={str(folder)!r}: is no capture, it has no {MANIFEST}")
    data = parse_document(read_small(folder, MANIFEST, _MAX_SMALL_BYTES), MANIFEST)
    check_schema(data.get("schema"), MANIFEST)
    raw = data.get("files")
    if data.keys() != {"schema", "files"} or not isinstance(raw, list):
        raise CaptureError(f"file={MANIFEST!r}: must have exactly schema and files")
    files = [_manifest_entry(item) for item in raw]
    if len({f.name for f in files}) < len(files):
        raise CaptureError(f"file={MANIFEST!r}: names a file twice")
    return {f.name: f for f in files}


def read_tensor_table(folder: Path) -> list[TensorEntry]:
    """Names, types and shapes of the captured tensors, without their data; empty where there are none.

    Raises:
        CaptureError: the file is broken or a link.
    """
    if TENSORS not in read_manifest(folder):
        return []
    with opened(folder, TENSORS) as (file, num_bytes):
        return read_table(file, num_bytes)


def digest_of(folder: Path) -> str:
    """SHA-256 of the manifest: one value that stands for every byte of the capture.

    Raises:
        CaptureError: no manifest.
    """
    return hashlib.sha256(read_small(folder, MANIFEST, _MAX_SMALL_BYTES)).hexdigest()


def check_folder(folder: Path | str) -> Path:
    """The folder, if it is one and no symbolic link.

    Raises:
        CaptureError: it is missing, a link, or no folder.
    """
    base = Path(folder)
    try:
        mode = os.lstat(base).st_mode
    except OSError as e:
        raise CaptureError(f"folder={str(base)!r}: {e.strerror or e}; give the folder of a capture") from e
    if stat.S_ISLNK(mode):
        raise CaptureError(f"folder={str(base)!r}: is a symbolic link; give the folder itself")
    if not stat.S_ISDIR(mode):
        raise CaptureError(f"folder={str(base)!r}: is no folder; a .tar.gz is read by: firetower capture unpack")
    return base


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found: nothing in ``problems`` means that every byte is as it was written."""

    folder: str
    digest: str
    files: tuple[ManifestFile, ...]
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify(folder: Path | str, advance: Advance | None = None) -> VerifyReport:
    """Check a capture: names, kinds and modes of files, sizes, hashes, schema, tensors, secrets.

    Raises:
        CaptureError: not a capture at all (no folder, no readable manifest).
    """
    base = check_folder(folder)
    files = read_manifest(base)
    problems = [*_check_names(base, files), *_check_modes(base)]
    for entry in files.values():
        problems += _check_file(base, entry, advance)
    if not problems:
        problems += _check_contents(base)
    return VerifyReport(folder=str(base), digest=digest_of(base), files=tuple(files.values()), problems=tuple(problems))


def _check_names(folder: Path, files: Mapping[str, ManifestFile]) -> list[str]:
    problems = []
    for name in sorted(os.listdir(folder)):
        if name not in FILE_NAMES:
            problems.append(f"{name[:120]!r}: a capture holds no such file")
        elif name not in (MANIFEST, SEEN) and name not in files:
            problems.append(f"{name}: is not in the manifest")
    problems += [f"{name}: missing from the manifest" for name in (CAPTURE, REQUEST, CONTENT) if name not in files]
    return problems


def _check_modes(folder: Path) -> list[str]:
    problems = []
    for path in (folder, *(folder / n for n in FILE_NAMES)):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            continue
        name = "the folder" if path == folder else path.name
        if not stat.S_ISLNK(mode) and mode & 0o077:
            problems.append(f"{name}: mode {stat.S_IMODE(mode):o}, others may read it; chmod go-rwx")
    return problems


def _check_file(folder: Path, entry: ManifestFile, advance: Advance | None) -> list[str]:
    try:
        with opened(folder, entry.name) as (file, num_bytes):
            if num_bytes != entry.num_bytes:
                return [f"{entry.name}: has {num_bytes:,} bytes, the manifest says {entry.num_bytes:,}"]
            done = 0

            def count(more: int) -> None:
                nonlocal done
                done += more
                if advance is not None:
                    advance(entry.name, done, num_bytes)

            if sha256_of(file, count) != entry.sha256:
                return [f"{entry.name}: its SHA-256 is not the manifest's; it was changed or damaged"]
    except (CaptureError, OSError) as e:
        return [str(e)]
    return []


def _check_contents(folder: Path) -> list[str]:
    from firetower.capture.secrets import allowed_headers, scrub

    try:
        capture = read_capture(folder, with_tensors=False)
        read_tensor_table(folder)
        if (folder / SEEN).exists():
            read_seen(folder)
    except CaptureError as e:
        return [str(e)]
    secret = [
        *allowed_headers(capture.request.headers)[1],
        *scrub(capture.request.body, "body").dropped,
        *scrub(capture.engine_settings, "engine_settings").dropped,
    ]
    return [f"{place}: holds a secret that a capture must not have" for place in secret]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How often an incident was seen again after it was captured, and when last (UTC)."""

    count: int
    last_seen: str


def read_seen(folder: Path) -> Seen | None:
    """The count of merged fires; None where the incident was captured once and not seen again.

    Raises:
        CaptureError: a file that does not read.
    """
    if not os.path.lexists(folder / SEEN):
        return None
    data = parse_document(read_small(folder, SEEN, _MAX_SMALL_BYTES), SEEN)
    count, last_seen = data.get("count"), data.get("last_seen")
    if type(count) is not int or count < 1 or not isinstance(last_seen, str):
        raise CaptureError(f"file={SEEN!r}: must have count, at least 1, and last_seen")
    return Seen(count=count, last_seen=last_seen)


def _manifest_file(name: str, pieces: Iterable[bytes]) -> ManifestFile:
    digest, num_bytes = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        num_bytes += len(piece)
    return ManifestFile(name=name, num_bytes=num_bytes, sha256=digest.hexdigest())


def _manifest_entry(item: Any) -> ManifestFile:
    where = f"file={MANIFEST!r}"
    if not isinstance(item, dict) or item.keys() != {"name", "num_bytes", "sha256"}:
        raise CaptureError(f"{where}: every entry must have exactly name, num_bytes and sha256")
    name, num_bytes, sha256 = item["name"], item["num_bytes"], item["sha256"]
    if name not in (*DOCUMENTS, TENSORS):
        raise CaptureError(f"{where}: name={str(name)[:120]!r}: a capture holds no such file")
    if type(num_bytes) is not int or num_bytes < 0 or not isinstance(sha256, str) or not _SHA.fullmatch(sha256):
        raise CaptureError(f"{where}: {json.dumps(name)}: needs num_bytes from 0 and a SHA-256 in hexadecimal")
    return ManifestFile(name=name, num_bytes=num_bytes, sha256=sha256)


def _checked(folder: Path, entry: ManifestFile) -> bytes:
    raw = read_small(folder, entry.name)
    if len(raw) != entry.num_bytes or hashlib.sha256(raw).hexdigest() != entry.sha256:
        raise CaptureError(f"file={entry.name!r}: is not what the manifest says; it was changed or damaged")
    return raw


def _read_tensors(folder: Path, entry: ManifestFile, max_bytes: int) -> dict[str, RawTensor]:
    with opened(folder, TENSORS) as (file, num_bytes):
        if num_bytes > max_bytes:
            raise CaptureError(f"file={TENSORS!r}: has {num_bytes:,} bytes, at most {max_bytes:,} are read")
        if num_bytes != entry.num_bytes or sha256_of(file) != entry.sha256:
            raise CaptureError(f"file={TENSORS!r}: is not what the manifest says; it was changed or damaged")
        file.seek(0)
        return read_tensors(file, num_bytes)
