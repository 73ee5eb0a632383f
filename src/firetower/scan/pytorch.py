"""PyTorch files (.bin, .pt, .pth): the structure through ``torch.load(weights_only=True)``, the data by us.

Loaded on the meta device, a zip checkpoint costs no memory; each storage tells where its bytes lie in the
file, and they are read in chunks as in the other formats. Files from before PyTorch 1.6 have no such offsets:
they are loaded whole, up to `MAX_LEGACY_BYTES`.
"""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from firetower.core.errors import MissingExtraError, ScanError
from firetower.core.formats import FORMATS
from firetower.scan.check import Tensor, check_tensor, check_tensors
from firetower.scan.findings import Findings
from firetower.scan.layouts import Field, Layout, opaque, plain
from firetower.scan.placement import Extent, check_truncated
from firetower.scan.records import Finding, Problem
from firetower.scan.source import Source, printable

ZIP_MAGIC = b"PK\x03\x04"
MAX_PICKLE_BYTES = 64 << 20
MAX_LEGACY_BYTES = 256 << 20
MAX_TENSORS = 1 << 18
MAX_NAME_LENGTH = 2000
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def looks_like_pytorch(head: bytes) -> bool:
    """Whether the first bytes are those of a zip or of a pickle, the two containers torch.save has used."""
    return head.startswith(ZIP_MAGIC) or (
        head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )


def scan_pytorch(source: Source, findings: Findings, advance: Callable[[int], None]) -> tuple[int, int]:
    """Scan an open PyTorch file.

    Returns:
        (tensors in the file, tensors whose floats were read).

    Raises:
        MissingExtraError: torch is not installed.
        ScanError: torch refuses the file, for example because loading it would run code.
    """
    try:
        import torch
    except ImportError as e:
        raise MissingExtraError(f"path={source.path}: a PyTorch file", "torch") from e
    if source.read(0, 4) == ZIP_MAGIC:
        archive = _read_archive(source, findings)
        return (0, 0) if archive is None else _scan_zip(torch, source, archive, findings, advance)
    return _scan_legacy(torch, source, findings, advance)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """What the zip says: byte order, and the size of every uncompressed record by the offset of its data."""

    order: str
    records: Mapping[int, int]


def _read_archive(source: Source, findings: Findings) -> _Archive | None:
    """The archive's table, or None and a finding where it is damaged."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            infos = archive.infolist()
            repeated = [name for name, count in Counter(i.filename for i in infos).items() if count > 1]
            for name in repeated:
                message = f"archive record {printable(name)} appears twice"
                findings.add(Finding(problem=Problem.DUPLICATE, message=message))
            order = b"".join(
                _small_record(archive, i, source, 16) for i in infos if i.filename.endswith("/byteorder")
            )
            for info in infos:
                if info.filename.endswith("data.pkl"):
                    _refuse_allocations(_small_record(archive, info, source, MAX_PICKLE_BYTES), source)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as e:
        message = (
            f"not a complete zip archive ({printable(str(e), 80)}): truncated, or an unfinished download"
        )
        findings.add(Finding(problem=Problem.TRUNCATED, message=message))
        return None
    stored = {_data_offset(source, i): i.file_size for i in infos if i.compress_type == zipfile.ZIP_STORED}
    return _Archive(order=">" if order == b"big" else "<", records=stored)


def _small_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, source: Source, limit: int) -> bytes:
    if info.file_size > limit:
        raise ScanError(
            f"path={source.path}: {printable(info.filename, 60)} of {info.file_size} bytes; at most {limit}"
        )
    try:
        with archive.open(info) as record:
            return record.read(limit)
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        EOFError,
    ) as e:
        raise ScanError(
            f"path={source.path}: {printable(info.filename, 60)} is damaged: {printable(str(e), 100)}"
        ) from e


def _refuse_allocations(pickled: bytes, source: Source) -> None:
    """The safe unpickler allows bytearray(n): any amount of memory, and no state dict needs it."""
    if b"bytearray" in pickled:
        raise ScanError(f"path={source.path}: its pickle names bytearray, which no weights need; not loaded")


def _data_offset(source: Source, info: zipfile.ZipInfo) -> int:
    local = source.read(info.header_offset, 30)
    if len(local) < 30:
        return -1
    name_bytes, extra_bytes = struct.unpack_from("<HH", local, 26)
    return info.header_offset + 30 + int(name_bytes) + int(extra_bytes)


def _scan_zip(
    torch: Any, source: Source, archive: _Archive, findings: Findings, advance: Callable[[int], None]
) -> tuple[int, int]:
    tensors = list(_tensors_of(torch, _load(torch, source, map_location="meta")))
    placed: list[Tensor] = []
    seen, num_tied = set[tuple[int, tuple[int, ...]]](), 0
    for name, tensor in tensors:
        item = _place(name, tensor, archive, findings)
        if item is not None and (item.offset, item.shape) in seen:
            num_tied += bool(item.layout.fields)  # read once, reported under the first name
        elif item is not None:
            seen.add((item.offset, item.shape))
            placed.append(item)
    extents = [Extent(name=t.name, start=t.offset, stop=t.offset + t.num_bytes) for t in placed]
    check_truncated(extents, source.size, findings)
    present = [
        dataclasses.replace(t, num_bytes=max(0, min(t.num_bytes, source.size - t.offset))) for t in placed
    ]
    return len(tensors), check_tensors(source, present, findings, advance) + num_tied


def _place(name: str, tensor: Any, archive: _Archive, findings: Findings) -> Tensor | None:
    """Where a meta tensor's bytes lie in the file; a finding and None where the archive has no such bytes."""
    storage, layout = tensor.untyped_storage(), _layout(tensor)
    start = getattr(storage, "_checkpoint_offset", None)
    offset, num_bytes, shape, has_rows = _part(tensor, layout)
    if tensor.numel() == 0:
        return None
    if start is None or archive.records.get(start) != storage.nbytes():
        message = f"storage of {storage.nbytes()} bytes at {start}: the archive has no such record"
    elif offset + num_bytes > storage.nbytes():
        message = f"shape={list(tensor.shape)}: reaches past its storage of {storage.nbytes()} bytes"
    else:
        return Tensor(
            name=name,
            offset=start + offset,
            num_bytes=num_bytes,
            shape=shape,
            layout=layout,
            order=archive.order,
            has_rows=has_rows,
        )
    findings.add(Finding(problem=Problem.HEADER, message=message, tensor=name))
    return None


def _part(tensor: Any, layout: Layout) -> tuple[int, int, tuple[int, ...], bool]:
    """(byte offset in the storage, bytes, shape, whether rows are as stored) of what the tensor covers."""
    size = layout.block_bytes
    offset = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return offset, tensor.numel() * size, tuple(tensor.shape), True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    return offset, span * size, (span,), False


def _scan_legacy(
    torch: Any, source: Source, findings: Findings, advance: Callable[[int], None]
) -> tuple[int, int]:
    if source.size > MAX_LEGACY_BYTES:
        raise ScanError(
            f"path={source.path}: format from before PyTorch 1.6 and over {MAX_LEGACY_BYTES >> 20} MiB, "
            "which would be loaded whole; save it again with torch.save"
        )
    _refuse_allocations(source.read(0, 1 << 20), source)
    num_tensors = num_checked = 0
    for name, tensor in _tensors_of(torch, _load(torch, source, map_location="cpu")):
        layout = _layout(tensor)
        num_tensors, num_checked = num_tensors + 1, num_checked + bool(layout.fields)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else None
        held = _InMemory(source, data if data is not None else np.empty(0, dtype=np.uint8))
        item = Tensor(
            name=name,
            offset=0,
            num_bytes=held.size,
            shape=tuple(tensor.shape),
            layout=layout,
            has_offset=False,
        )
        check_tensor(held, item, findings, advance)
    return num_tensors, num_checked


class _InMemory(Source):
    """The bytes of a tensor that torch loaded, read as a file is."""

    def __init__(self, source: Source, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.path, self.size, self._data = source.path, len(data), data

    def read_into(self, buffer: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]


def _load(torch: Any, source: Source, map_location: str) -> Any:
    try:
        return torch.load(source.path, map_location=map_location, weights_only=True)
    except Exception as e:
        # torch raises whatever the damaged bytes lead it into; all of it is a refusal
        reason = str(e).strip().splitlines()
        telling = (line for line in reason if "Unsupported" in line or "GLOBAL" in line)
        detail = next(telling, reason[0] if reason else "")
        raise ScanError(
            f"path={source.path}: torch.load(weights_only=True) refuses it: {type(e).__name__}: "
            f"{printable(detail, 160)}"
        ) from e


def _tensors_of(torch: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Every dense tensor in nested dicts, lists and tuples, with its dotted name; each container once."""
    stack, seen, count = [("", value)], set[int](), 0
    while stack:
        name, item = stack.pop()
        if isinstance(item, torch.Tensor):
            parts = [("", item)] if item.layout == torch.strided else _sparse_parts(torch, item)
            for suffix, part in parts:
                count += 1
                if count > MAX_TENSORS:
                    raise ScanError(f"more than {MAX_TENSORS} tensors in one file")
                yield printable(name + suffix or "tensor"), part
            continue
        if not isinstance(item, dict | list | tuple) or id(item) in seen:
            continue
        if len(name) > MAX_NAME_LENGTH:
            raise ScanError(f"containers nested too deeply for weights, at {printable(name, 60)}")
        seen.add(id(item))
        children = item.items() if isinstance(item, dict) else enumerate(item)
        stack.extend(
            (f"{name}.{key}" if name else str(key), child) for key, child in reversed(list(children))
        )


def _sparse_parts(torch: Any, tensor: Any) -> list[tuple[str, Any]]:
    if tensor.layout == torch.sparse_coo:
        return [(".indices", tensor._indices()), (".values", tensor._values())]
    return [(".values", tensor.values())]


def _layout(tensor: Any) -> Layout:
    name = str(tensor.dtype).removeprefix("torch.")
    if name in FORMATS:
        return plain(name, name, is_narrow=name.startswith("float8"))
    if name in _COMPLEX:
        part = _COMPLEX[name]
        size = FORMATS[part].num_bits // 8
        fields = (Field(role="value", dtype=part), Field(role="value", offset=size, dtype=part))
        return Layout(name=name, block_elements=1, block_bytes=2 * size, fields=fields)
    return opaque(name, 1, tensor.element_size())
