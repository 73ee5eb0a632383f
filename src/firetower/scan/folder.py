"""Which files of a path to scan, and the checks that take a whole folder: shards against their index.

Names inside an index are only ever compared with the names of files in that folder: they never become paths.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from firetower.core.errors import ScanError
from firetower.scan.findings import Findings
from firetower.scan.records import Finding, Problem, Severity
from firetower.scan.source import HeaderError, Source, printable

SUFFIXES = {
    ".gguf": "gguf",
    ".safetensors": "safetensors",
    ".bin": "pytorch",
    ".pt": "pytorch",
    ".pth": "pytorch",
}
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
_MAX_INDEX_ENTRIES = 1 << 20
_NO_WEIGHTS = re.compile(
    r"^(?:training_args\.bin|optimizer\.(?:bin|pt)|scheduler\.(?:bin|pt)|rng_state.*\.pth|scaler\.pt)$"
)
_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a path stands for: model files, index files, and files that hold no weights."""

    files: tuple[Path, ...]
    indexes: tuple[Path, ...] = ()
    skipped: tuple[Path, ...] = ()


def list_files(path: Path) -> Listing:
    """The files to scan for a path: the file itself, or the model files directly in a folder, sorted.

    Raises:
        ScanError: nothing at the path, a folder without model files, or a file that is none of the formats.
    """
    if not path.exists():
        broken = "a symbolic link to nothing" if path.is_symlink() else "no such file or folder"
        raise ScanError(f"path={path}: {broken}")
    if not path.is_dir():
        return _single(path)
    try:
        inside = sorted(path.iterdir())
    except OSError as e:
        raise ScanError(f"path={path}: {e.strerror or e}") from e
    models = [p for p in inside if p.suffix.lower() in SUFFIXES and not p.is_dir()]
    indexes = tuple(p for p in inside if p.name.endswith(INDEX_SUFFIX))
    skipped = tuple(p for p in models if _NO_WEIGHTS.match(p.name))
    files = tuple(p for p in models if p not in skipped)
    if not files and not indexes:
        raise ScanError(
            f"path={path}: no model files in this folder ({', '.join(SUFFIXES)}); give a file or a subfolder"
        )
    return Listing(files=files, indexes=indexes, skipped=skipped)


def _single(path: Path) -> Listing:
    if path.name.endswith(INDEX_SUFFIX):
        raise ScanError(f"path={path}: is an index; give its folder")
    return Listing(files=(path,))


def check_index(source: Source, shards: Mapping[str, Iterable[str]], findings: Findings) -> int:
    """Compare a safetensors index with the shards beside it.

    Args:
        shards: raw tensor names of every safetensors file here that has a readable header, by file name.

    Returns:
        Number of tensors that the index lists.
    """
    try:
        weight_map = _read_index(source)
    except HeaderError as e:
        findings.add(Finding(problem=Problem.HEADER, message=str(e)))
        return 0
    folder = source.path.parent
    listed = set(weight_map.values())
    for name in sorted(listed):
        _check_shard_name(name, folder, findings)
    present = {name: set(tensors) for name, tensors in shards.items() if name in listed}
    for tensor, shard in weight_map.items():
        if shard in present and tensor not in present[shard]:
            message = f"the index places it in {printable(shard, 80)}, which does not have it"
            findings.add(Finding(problem=Problem.HEADER, message=message, tensor=printable(tensor)))
    _check_owners(weight_map, present, findings)
    return len(weight_map)


def check_splits(paths: Iterable[Path]) -> dict[Path, str]:
    """Which parts of a GGUF split (``x-00001-of-00003.gguf``) are missing, by its first part present."""
    groups: dict[tuple[str, int], dict[int, Path]] = {}
    for path in paths:
        if match := _SPLIT.match(path.name):
            groups.setdefault((match["stem"], int(match["count"])), {})[int(match["index"])] = path
    problems = {}
    for (_, count), parts in groups.items():
        missing = [i for i in range(1, min(count, 1000) + 1) if i not in parts]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            problems[parts[min(parts)]] = f"parts {shown} of {count} are not in the folder"
    return problems


def _read_index(source: Source) -> dict[str, str]:
    if source.size > MAX_INDEX_BYTES:
        raise HeaderError(f"index of {source.size} bytes; at most {MAX_INDEX_BYTES}")
    raw = source.read(0, source.size)
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > _MAX_INDEX_ENTRIES:
        raise HeaderError(f"index with more than {_MAX_INDEX_ENTRIES} values")
    try:
        table: Any = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise HeaderError(f"the index is not JSON: {printable(reason)}") from e
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise HeaderError("weight_map: must map tensor names to file names")
    return weight_map


def _check_shard_name(name: str, folder: Path, findings: Findings) -> None:
    shown = printable(name, 100)
    if not re.fullmatch(r"[^/\\\x00:]+", name) or name in (".", ".."):
        message = f"file name {shown!r} points outside the folder; not followed"
        findings.add(Finding(problem=Problem.HEADER, message=message))
    elif len(name) > 255 or not (folder / name).is_file():
        findings.add(Finding(problem=Problem.TRUNCATED, message=f"shard {shown} is not in the folder"))


def _check_owners(weight_map: Mapping[str, str], present: Mapping[str, set[str]], findings: Findings) -> None:
    owners: dict[str, str] = {}
    for shard, tensors in sorted(present.items()):
        for tensor in sorted(tensors):
            if tensor in owners:
                message = f"is in {printable(owners[tensor], 80)} and in {printable(shard, 80)}"
                findings.add(Finding(problem=Problem.DUPLICATE, message=message, tensor=printable(tensor)))
            owners[tensor] = shard
            if tensor not in weight_map:
                message = (
                    f"is in {printable(shard, 80)}, not in the index: loaders that follow the index skip it"
                )
                findings.add(
                    Finding(
                        problem=Problem.HEADER,
                        severity=Severity.NOTE,
                        message=message,
                        tensor=printable(tensor),
                    )
                )
