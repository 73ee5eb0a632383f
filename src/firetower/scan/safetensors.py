"""Safetensors files: a bounded header parser, and the scan of their tensors.

Format: 8 bytes of header length, that much JSON, then the data; every byte of the data belongs to one tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from firetower.scan.check import Tensor, check_tensors
from firetower.scan.findings import Findings
from firetower.scan.layouts import Field, Layout, opaque, plain
from firetower.scan.names import mx_blocks_of
from firetower.scan.placement import Extent, check_extents, check_truncated
from firetower.scan.records import Finding, Problem
from firetower.scan.source import HeaderError, Source, printable

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 18
_MAX_COMMAS = 16 * MAX_TENSORS

_E8M0 = Layout(
    name="F8_E8M0",
    block_elements=1,
    block_bytes=1,
    fields=(Field(role="scale", dtype="float8_e8m0fnu", gain=6),),
)
LAYOUTS: dict[str, Layout] = {
    "F64": plain("F64", "float64"),
    "F32": plain("F32", "float32"),
    "F16": plain("F16", "float16"),
    "BF16": plain("BF16", "bfloat16"),
    "F8_E4M3": plain("F8_E4M3", "float8_e4m3fn", is_narrow=True),
    "F8_E5M2": plain("F8_E5M2", "float8_e5m2", is_narrow=True),
    "F8_E4M3FNUZ": plain("F8_E4M3FNUZ", "float8_e4m3fnuz", is_narrow=True),
    "F8_E5M2FNUZ": plain("F8_E5M2FNUZ", "float8_e5m2fnuz", is_narrow=True),
    "F8_E8M0": _E8M0,
    "C64": Layout(
        name="C64",
        block_elements=1,
        block_bytes=8,
        fields=(Field(role="value", dtype="float32"), Field(role="value", offset=4, dtype="float32")),
    ),
    "F4": opaque("F4", 2, 1),
    "F6_E2M3": opaque("F6_E2M3", 4, 3),
    "F6_E3M2": opaque("F6_E3M2", 4, 3),
    **{
        name: opaque(name, 1, size)
        for name, size in {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2}.items()
    },
    **{name: opaque(name, 1, size) for name, size in {"U32": 4, "I32": 4, "U64": 8, "I64": 8}.items()},
}
"""Every dtype of safetensors 0.8."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the header that could be understood; offsets are absolute."""

    raw_name: str
    layout: Layout
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Printable name."""
        return printable(self.raw_name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The parsed header: ``names`` are all tensors declared, ``entries`` those that could be understood."""

    names: tuple[str, ...]
    entries: tuple[Entry, ...]
    data_start: int


def scan_safetensors(
    source: Source, findings: Findings, advance: Callable[[int], None]
) -> tuple[int, int, Header | None]:
    """Scan an open safetensors file.

    Returns:
        (tensors that the header declares, tensors whose floats were read, the header, None if broken).

    Raises:
        ScanError: the file cannot be read any more.
    """
    try:
        header = read_header(source, findings)
    except HeaderError as e:
        findings.add(Finding(problem=Problem.HEADER, message=str(e), offset_bytes=e.offset))
        return 0, 0, None
    extents = [Extent(name=e.name, start=e.start, stop=e.stop) for e in header.entries]
    check_truncated(extents, source.size, findings)
    if len(header.entries) == len(header.names):
        check_extents(extents, header.data_start, source.size, 1, findings)
    tensors = [
        Tensor(
            name=entry.name,
            offset=entry.start,
            num_bytes=max(0, min(entry.stop, source.size) - entry.start),
            shape=entry.shape,
            layout=entry.layout,
        )
        for entry in header.entries
    ]
    return len(header.names), check_tensors(source, tensors, findings, advance), header


def read_header(source: Source, findings: Findings) -> Header:
    """Parse the header; entries that contradict themselves become findings.

    Raises:
        HeaderError: no header that can be read.
    """
    if source.size < 8:
        raise HeaderError(f"the file has {source.size} bytes; a header length takes 8", 0)
    length = int.from_bytes(source.read(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, source.size - 8):
        raise HeaderError(f"header length={length}: cannot be true of a file of {source.size} bytes", 0)
    table = _parse_json(source.read(8, length), findings)
    _check_metadata(table.pop("__metadata__", {}), findings)
    if len(table) > MAX_TENSORS:
        raise HeaderError(f"{len(table)} tensors; at most {MAX_TENSORS}")
    data_start, entries = 8 + length, []
    for name, raw in table.items():
        try:
            entries.append(_entry(name, raw, table, data_start))
        except HeaderError as e:
            findings.add(Finding(problem=Problem.HEADER, message=str(e), tensor=printable(name)))
    return Header(names=tuple(table), entries=tuple(entries), data_start=data_start)


def _parse_json(raw: bytes, findings: Findings) -> dict[str, Any]:
    # a header is three levels of short objects: these counts bound the memory that parsing can take
    if raw.count(b",") > _MAX_COMMAS or raw.count(b"[") + raw.count(b"{") > 4 * MAX_TENSORS:
        raise HeaderError(f"the header has more values than {MAX_TENSORS} tensors can have", 8)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            again = printable(Counter(key for key, _ in pairs).most_common(1)[0][0])
            findings.add(Finding(problem=Problem.DUPLICATE, message="the name appears twice", tensor=again))
        return result

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise HeaderError(f"the header is not JSON: {printable(reason)}", 8) from e
    if not isinstance(table, dict):
        raise HeaderError(f"the header must be a JSON object, is {type(table).__name__}", 8)
    return table


def _check_metadata(metadata: Any, findings: Findings) -> None:
    is_map = isinstance(metadata, dict)
    if not is_map or not all(isinstance(v, str) for v in metadata.values()):
        message = "__metadata__ must map strings to strings; the safetensors library refuses the file"
        findings.add(Finding(problem=Problem.HEADER, message=message, offset_bytes=8))


def _entry(name: str, raw: Any, table: Mapping[str, Any], data_start: int) -> Entry:
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError("must have exactly dtype, shape and data_offsets")
    layout, shape = _layout(name, raw["dtype"], table), _whole_numbers(raw["shape"], "shape")
    offsets = _whole_numbers(raw["data_offsets"], "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"data_offsets={printable(str(list(offsets)))}: must be [start, stop]")
    num_elements = math.prod(shape)
    if num_elements >= 1 << 60:
        raise HeaderError(f"shape={printable(str(list(shape)), 80)}: more elements than any file holds")
    if num_elements % layout.block_elements:
        raise HeaderError(f"shape={list(shape)}: {layout.name} must fill whole bytes")
    needed = num_elements // layout.block_elements * layout.block_bytes
    if needed != offsets[1] - offsets[0]:
        raise HeaderError(
            f"shape={list(shape)}: {layout.name} takes {needed} bytes, data_offsets {offsets[1] - offsets[0]}"
        )
    return Entry(
        raw_name=name, layout=layout, shape=shape, start=data_start + offsets[0], stop=data_start + offsets[1]
    )


def _layout(name: str, dtype: Any, table: Mapping[str, Any]) -> Layout:
    layout = LAYOUTS.get(dtype) if isinstance(dtype, str) else None
    if layout is None:
        raise HeaderError(f"dtype={printable(str(dtype), 40)}: unknown; known: {', '.join(LAYOUTS)}")
    # gpt-oss keeps E8M0 scales as uint8 beside the blocks they scale
    return _E8M0 if dtype == "U8" and mx_blocks_of(name) in table else layout


def _whole_numbers(raw: Any, what: str) -> tuple[int, ...]:
    is_list = isinstance(raw, list) and len(raw) <= 64
    if not is_list or not all(type(n) is int and 0 <= n < 1 << 60 for n in raw):
        raise HeaderError(f"{what}={printable(str(raw)[:200], 80)}: must be a list of whole numbers from 0")
    return tuple(raw)
