"""GGUF files: a bounded header parser, and the scan of their tensors.

Specification: ggml/docs/gguf.md, versions 2 and 3, both byte orders. The parser holds one window of the
header and the tensor table, whatever counts and lengths the file claims.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from firetower.core.errors import ScanError
from firetower.scan.check import Tensor, check_tensors
from firetower.scan.findings import Findings
from firetower.scan.ggml import ggml_layout
from firetower.scan.layouts import Layout
from firetower.scan.placement import Extent, check_extents, check_truncated
from firetower.scan.records import Finding, Problem
from firetower.scan.source import Cursor, HeaderError, Source, printable

MAGIC = b"GGUF"
MAX_TENSORS = 1 << 18
MAX_METADATA = 1 << 16
MAX_ARRAY = 1 << 24
MAX_NAME_BYTES = 1024
MAX_HEADER_BYTES = 256 << 20
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MAX_DEPTH = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One line of the tensor table, as the file states it; ``shape`` has the contiguous dimension last."""

    name: str
    raw_name: bytes
    shape: tuple[int, ...]
    type_id: int
    offset: int
    at: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The parsed header. ``problem`` is set where the table stops early since the file contradicts itself."""

    order: str
    alignment: int
    num_declared: int
    infos: tuple[TensorInfo, ...]
    data_start: int
    duplicate_keys: tuple[str, ...] = ()
    problem: HeaderError | None = None


def scan_gguf(source: Source, findings: Findings, advance: Callable[[int], None]) -> tuple[int, int]:
    """Scan an open GGUF file.

    Returns:
        (tensors that the header declares, tensors whose floats were read).

    Raises:
        ScanError: the file cannot be read any more.
    """
    try:
        header = read_header(source)
    except HeaderError as e:
        findings.add(Finding(problem=Problem.HEADER, message=str(e), offset_bytes=e.offset))
        return 0, 0
    _check_header(header, findings)
    if header.problem is not None:
        return header.num_declared, 0  # where the data starts is not known
    placed = [(info, layout) for info in header.infos if (layout := _layout(info, findings)) is not None]
    extents = [_extent(header, info, layout) for info, layout in placed]
    check_truncated(extents, source.size, findings)
    if len(placed) == len(header.infos):
        check_extents(extents, header.data_start, source.size, header.alignment, findings)
    tensors = [
        _tensor(header, info, layout, extent, source.size)
        for (info, layout), extent in zip(placed, extents, strict=True)
    ]
    return header.num_declared, check_tensors(source, tensors, findings, advance)


def block_location(path: str | Path, tensor_name: str, row: int, block: int) -> tuple[int, int]:
    """Where one block of a tensor lies in a GGUF file, for tests and drills that damage a copy.

    Args:
        path: the file.
        tensor_name: name as in the file.
        row: row, all dimensions but the contiguous one flattened (expert * rows + row for a stacked tensor).
        block: block within the row; the element for types without blocks.

    Returns:
        (absolute byte offset, size in bytes). A Q4_1 block is scale (fp16), min (fp16), 16 bytes of codes.

    Raises:
        ScanError: no such file, tensor, row or block, or a header that cannot be trusted.
    """
    with Source(Path(path)) as source:
        try:
            header = read_header(source)
        except HeaderError as e:
            raise ScanError(f"path={path}: {e}") from e
        if header.problem is not None:
            raise ScanError(f"path={path}: {header.problem}")
        info = next((i for i in header.infos if i.name == tensor_name), None)
        if info is None:
            raise ScanError(f"tensor_name={tensor_name!r}: not in {path}")
        findings = Findings()
        layout = _layout(info, findings)
        if layout is None:
            raise ScanError(f"tensor_name={tensor_name!r}: {findings.result()[0].message}")
        blocks_per_row = info.shape[-1] // layout.block_elements
        num_rows = math.prod(info.shape[:-1])
        if not (0 <= row < num_rows and 0 <= block < blocks_per_row):
            raise ScanError(
                f"row={row}, block={block}: must be below {num_rows} and {blocks_per_row} in {tensor_name}"
            )
        start = header.data_start + info.offset + (row * blocks_per_row + block) * layout.block_bytes
        if start + layout.block_bytes > source.size:
            raise ScanError(f"row={row}, block={block}: past the end of {path}")
        return start, layout.block_bytes


def read_header(source: Source) -> Header:
    """Parse magic, metadata and tensor table.

    Raises:
        HeaderError: the file is not GGUF, or its metadata cannot be walked; a broken tensor table is
            returned as far as it goes, with ``problem`` set.
    """
    cursor, num_tensors, num_metadata = _preamble(source)
    alignment, duplicate_keys = _metadata(cursor, num_metadata)
    infos: list[TensorInfo] = []
    problem: HeaderError | None = None
    try:
        infos.extend(_tensor_info(cursor, i) for i in range(num_tensors))
    except HeaderError as e:
        problem = e
    return Header(
        order=cursor.order,
        alignment=alignment,
        num_declared=num_tensors,
        infos=tuple(infos),
        data_start=cursor.offset + -cursor.offset % alignment,
        duplicate_keys=duplicate_keys,
        problem=problem,
    )


def _preamble(source: Source) -> tuple[Cursor, int, int]:
    cursor = Cursor(source, limit=MAX_HEADER_BYTES)
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise HeaderError(f"magic={magic!r}: must be b'GGUF'{_guess(source.read(0, 64))}", 0)
    version = cursor.number("I", "version")
    if version & 0xFFFF == 0:
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise HeaderError(
            f"version={version}: must be 2 or 3; convert the file again with a newer llama.cpp", 4
        )
    num_tensors, num_metadata = cursor.number("Q", "tensor count"), cursor.number("Q", "metadata count")
    # the least a table line can take: empty name, no dimension, type, offset; and key, type, one byte
    if num_tensors > min(MAX_TENSORS, source.size // 24):
        raise HeaderError(f"tensor count={num_tensors}: cannot be true of a file of {source.size} bytes", 8)
    if num_metadata > min(MAX_METADATA, source.size // 13):
        raise HeaderError(
            f"metadata count={num_metadata}: cannot be true of a file of {source.size} bytes", 16
        )
    return cursor, num_tensors, num_metadata


def _guess(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "; this is a git-lfs pointer: fetch the real file with git lfs pull"
    if head.lstrip()[:1] == b"<":
        return "; this is a web page: the download went wrong"
    return "; all zero: an unfinished download" if head and not any(head) else ""


def _metadata(cursor: Cursor, count: int) -> tuple[int, tuple[str, ...]]:
    """Walk the metadata; returns (alignment, duplicate keys)."""
    alignment, seen, duplicates = DEFAULT_ALIGNMENT, set[bytes](), []
    for i in range(count):
        what = f"metadata {i}"
        key = _name(cursor, what)
        if key in seen:
            duplicates.append(printable(key))
        seen.add(key)
        type_id, at = cursor.number("I", what), cursor.offset
        if key == b"general.alignment":
            if type_id != _UINT32:
                raise HeaderError(f"general.alignment: must be uint32 (type 4), is type {type_id}", at)
            alignment = cursor.number("I", what)
            if alignment.bit_count() != 1 or not 8 <= alignment <= 1 << 20:
                raise HeaderError(
                    f"general.alignment={alignment}: must be a power of two from 8 to 1048576", at
                )
        else:
            _skip_value(cursor, type_id, f"{what} ({printable(key, 60)})", 0)
    return alignment, tuple(duplicates)


def _skip_value(cursor: Cursor, type_id: int, what: str, depth: int) -> None:
    if type_id in _SCALAR_BYTES:
        cursor.skip(_SCALAR_BYTES[type_id], what)
    elif type_id == _STRING:
        cursor.skip(cursor.number("Q", what), what)
    elif type_id == _ARRAY:
        item, count = cursor.number("I", what), cursor.number("Q", what)
        _skip_array(cursor, item, count, what, depth)
    else:
        raise HeaderError(f"{what}: value type {type_id} does not exist", cursor.offset)


def _skip_array(cursor: Cursor, item: int, count: int, what: str, depth: int) -> None:
    if item in _SCALAR_BYTES:
        cursor.skip(count * _SCALAR_BYTES[item], what)
        return
    if count > MAX_ARRAY or depth >= _MAX_DEPTH:
        raise HeaderError(
            f"{what}: array of {count} items at depth {depth}; at most {MAX_ARRAY} and {_MAX_DEPTH}"
        )
    if item == _STRING:
        cursor.skip_strings(count, what)
        return
    for _ in range(count):
        _skip_value(cursor, item, what, depth + 1)


def _name(cursor: Cursor, what: str) -> bytes:
    at, length = cursor.offset, cursor.number("Q", what)
    if length > MAX_NAME_BYTES:
        raise HeaderError(f"{what}: name of {length} bytes; at most {MAX_NAME_BYTES}", at)
    return cursor.take(length, what)


def _tensor_info(cursor: Cursor, index: int) -> TensorInfo:
    what, at = f"tensor {index}", cursor.offset
    raw_name = _name(cursor, what)
    num_dims = cursor.number("I", what)
    if num_dims > MAX_DIMS:
        raise HeaderError(
            f"{what} ({printable(raw_name, 60)}): {num_dims} dimensions; at most {MAX_DIMS}", at
        )
    dims = [cursor.number("Q", what) for _ in range(num_dims)]
    return TensorInfo(
        name=printable(raw_name),
        raw_name=raw_name,
        shape=tuple(reversed(dims)),
        type_id=cursor.number("I", what),
        offset=cursor.number("Q", what),
        at=at,
    )


def _check_header(header: Header, findings: Findings) -> None:
    if header.problem is not None:
        message = f"{header.problem}; the data cannot be placed, nothing was read"
        findings.add(Finding(problem=Problem.HEADER, message=message, offset_bytes=header.problem.offset))
    for key in header.duplicate_keys:
        findings.add(Finding(problem=Problem.DUPLICATE, message=f"metadata key {key} appears twice"))
    seen = set[bytes]()
    for info in header.infos:
        if info.raw_name in seen:
            message = "the name appears twice; engines keep one of the two or refuse the file"
            findings.add(
                Finding(problem=Problem.DUPLICATE, message=message, tensor=info.name, offset_bytes=info.at)
            )
        seen.add(info.raw_name)
        if info.offset % header.alignment:
            message = f"offset={info.offset}: must be a multiple of the alignment {header.alignment}"
            findings.add(
                Finding(problem=Problem.HEADER, message=message, tensor=info.name, offset_bytes=info.at)
            )


def _layout(info: TensorInfo, findings: Findings) -> Layout | None:
    """Storage type of a tensor whose table line makes sense; otherwise a finding and None."""
    layout = ggml_layout(info.type_id)
    if layout is None:
        message = (
            f"type={info.type_id}: unknown to the installed gguf package; upgrade it, or the file is damaged"
        )
    elif 0 in info.shape or math.prod(info.shape) > 1 << 60:
        message = f"shape={list(info.shape)}: every dimension must be at least 1, and the product a real size"
    elif (info.shape[-1] if info.shape else 1) % layout.block_elements:
        message = (
            f"shape={list(info.shape)}: rows must be a multiple of {layout.block_elements} for {layout.name}"
        )
    else:
        return layout
    findings.add(Finding(problem=Problem.HEADER, message=message, tensor=info.name, offset_bytes=info.at))
    return None


def _extent(header: Header, info: TensorInfo, layout: Layout) -> Extent:
    start = header.data_start + info.offset
    num_bytes = math.prod(info.shape) // layout.block_elements * layout.block_bytes
    return Extent(name=info.name, start=start, stop=start + num_bytes)


def _tensor(header: Header, info: TensorInfo, layout: Layout, extent: Extent, file_size: int) -> Tensor:
    return Tensor(
        name=info.name,
        offset=extent.start,
        num_bytes=max(0, min(extent.stop, file_size) - extent.start),
        shape=info.shape or (1,),
        layout=layout,
        order=header.order,
    )
