"""Named tensors as safetensors, without the package: raw bytes, so that no type and no NaN payload is lost.

Format: 8 bytes of header length, that much JSON, then the data without gaps. Source: safetensors 0.8 format page.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from firetower.core.errors import CaptureError

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 16

_CODES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
DTYPE_BYTES: dict[str, int] = {name: size for name, (_, size) in _CODES.items()}
"""Bytes of one element of every type that a captured tensor may have."""

_NAMES = {code: name for name, (code, _) in _CODES.items()}
_NOT_IN_NUMPY = frozenset({"bfloat16"} | {name for name in _CODES if name.startswith("float8")})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as its little-endian, row-major bytes.

    Raises:
        CaptureError: an unknown dtype, or bytes that do not fill the shape.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise CaptureError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
        needed = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if min(self.shape, default=0) < 0 or needed != len(self.data):
            raise CaptureError(
                f"shape={list(self.shape)}: {self.dtype} takes {needed} bytes, data has {len(self.data)}"
            )

    @classmethod
    def from_array(cls, array: np.ndarray[Any, Any], dtype: str | None = None) -> RawTensor:
        """Take a numpy array; ``dtype`` names what its unsigned integers are the bits of (``bfloat16``)."""
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        return cls(dtype=dtype or array.dtype.name, shape=array.shape, data=little.tobytes())

    def to_array(self) -> np.ndarray[Any, Any]:
        """As a numpy array; types that numpy lacks (bfloat16, float8) come as unsigned integers of their bits."""
        import numpy as np

        size = DTYPE_BYTES[self.dtype]
        name = f"uint{8 * size}" if self.dtype in _NOT_IN_NUMPY else self.dtype
        return np.frombuffer(self.data, dtype=np.dtype(name).newbyteorder("<")).reshape(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a header: its place in the file is ``start`` to ``stop``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensor_file_parts(tensors: Mapping[str, RawTensor]) -> Iterator[bytes]:
    """The file as a sequence of byte strings, header first; tensors by name, so that equal ones give equal files.

    Raises:
        CaptureError: too many tensors, or a reserved or overlong name.
    """
    if len(tensors) > MAX_TENSORS:
        raise CaptureError(f"tensors={len(tensors)}: at most {MAX_TENSORS} in a capture; keep fewer")
    header: dict[str, Any] = {"__metadata__": {"format": "firetower"}}
    offset = 0
    # wide types first: every tensor starts at a multiple of its element
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    for name in order:
        if not name or name == "__metadata__" or len(name) > 512:
            raise CaptureError(f"tensor={name[:80]!r}: must have 1 to 512 characters and not be __metadata__")
        tensor = tensors[name]
        stop = offset + len(tensor.data)
        code = _CODES[tensor.dtype][0]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield tensors[name].data


def read_table(file: BinaryIO, num_bytes: int) -> list[TensorEntry]:
    """Read and check the header of an open file of ``num_bytes``; entries come in the order of their data.

    Raises:
        CaptureError: a header that contradicts itself or the file.
    """
    length = int.from_bytes(file.read(8), "little")
    if num_bytes < 8 or length > min(MAX_HEADER_BYTES, num_bytes - 8):
        raise CaptureError(f"tensors: header length {length} cannot be true of a file of {num_bytes} bytes")
    table = _parse(file.read(length))
    table.pop("__metadata__", None)
    if len(table) > MAX_TENSORS:
        raise CaptureError(f"tensors: {len(table)} entries; at most {MAX_TENSORS}")
    entries = sorted((_entry(name, raw, 8 + length) for name, raw in table.items()), key=lambda e: (e.start, e.stop))
    place = 8 + length
    for entry in entries:
        if entry.start != place:
            raise CaptureError(f"tensor={entry.name[:80]!r}: starts at {entry.start}, must start at {place}")
        place = entry.stop
    if place != num_bytes:
        raise CaptureError(f"tensors: the data ends at {place}, the file at {num_bytes}")
    return entries


def read_tensors(file: BinaryIO, num_bytes: int) -> dict[str, RawTensor]:
    """Read every tensor of an open file; the caller has bounded ``num_bytes``.

    Raises:
        CaptureError: a broken header, or a file shorter than it was.
    """
    tensors = {}
    for entry in read_table(file, num_bytes):
        data = file.read(entry.stop - entry.start)
        tensors[entry.name] = RawTensor(dtype=entry.dtype, shape=entry.shape, data=data)
    return tensors


def _parse(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise CaptureError("tensors: a name appears twice in the header")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        if isinstance(e, CaptureError):
            raise
        raise CaptureError("tensors: the header is not JSON; the file is damaged") from e
    if not isinstance(table, dict):
        raise CaptureError("tensors: the header must be a JSON object; the file is damaged")
    return table


def _entry(name: str, raw: Any, data_start: int) -> TensorEntry:
    shown = name[:80]
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise CaptureError(f"tensor={shown!r}: must have exactly dtype, shape and data_offsets")
    dtype = _NAMES.get(raw["dtype"]) if isinstance(raw["dtype"], str) else None
    if dtype is None:
        raise CaptureError(f"tensor={shown!r}: dtype must be one of {', '.join(_NAMES)}")
    shape, offsets = _whole(raw["shape"], shown), _whole(raw["data_offsets"], shown)
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CaptureError(f"tensor={shown!r}: data_offsets must hold exactly the elements of its shape")
    start, stop = (data_start + o for o in offsets)
    return TensorEntry(name=name, dtype=dtype, shape=shape, start=start, stop=stop)


def _whole(raw: Any, shown: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > 64 or not all(type(n) is int and 0 <= n < 1 << 60 for n in raw):
        raise CaptureError(f"tensor={shown!r}: shape and data_offsets must be lists of whole numbers from 0")
    return tuple(raw)
