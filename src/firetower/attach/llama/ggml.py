"""Reading ggml tensors from Python: the C struct, the few functions of libggml-base, and the finite check.

The struct is not a stable interface, so `GgmlBase.load` proves its layout on tensors it makes itself before
anything of the model is read. Arrays are zero-copy windows on the tensor's own memory wherever that is host
memory, and a copy through ``ggml_backend_tensor_get`` elsewhere.

Shapes: ggml's ``ne`` counts from the fastest dimension; every shape here is the NumPy one, ``ne`` reversed.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from firetower.core.errors import TraceError
from firetower.core.records import DTYPE_BITS, BadValue, Kind, TensorSummary

NUM_DIMS, NUM_SOURCES, NAME_BYTES = 4, 10, 64
VIEW_OPS = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})
"""Ops that compute nothing: their data is another tensor's."""


class GgmlTensor(ctypes.Structure):
    """``struct ggml_tensor`` of llama-cpp-python 0.3.36; pointers are plain addresses."""

    type: int
    buffer: int | None
    ne: Any
    nb: Any
    op: int
    src: Any
    view_src: int | None
    view_offs: int
    data: int | None
    name: bytes

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * NUM_DIMS),
        ("nb", ctypes.c_size_t * NUM_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * NUM_SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * NAME_BYTES),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


def offset_of(field: str) -> int:
    """Bytes from the start of the struct to ``field``."""
    offset: int = getattr(GgmlTensor, field).offset
    return offset


NAME_OFFSET = offset_of("name")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloatType:
    """How a float type of ggml is stored. ``float_dtype`` is None where NumPy has no such type (bfloat16)."""

    name: str
    bits_dtype: str
    exponent_mask: int
    float_dtype: str | None

    @property
    def sign_mask(self) -> int:
        """The sign bit."""
        return 1 << (DTYPE_BITS[self.name] - 1)


FLOAT_TYPES: dict[int, FloatType] = {
    0: FloatType(name="float32", bits_dtype="<u4", exponent_mask=0x7F800000, float_dtype="<f4"),
    1: FloatType(name="float16", bits_dtype="<u2", exponent_mask=0x7C00, float_dtype="<f2"),
    28: FloatType(name="float64", bits_dtype="<u8", exponent_mask=0x7FF0000000000000, float_dtype="<f8"),
    30: FloatType(name="bfloat16", bits_dtype="<u2", exponent_mask=0x7F80, float_dtype=None),
}
INTEGER_TYPES = frozenset({24, 25, 26, 27})


class Ggml(Protocol):
    """What the sensor needs of libggml-base; tests hand in a double."""

    def op_name(self, address: int) -> str:
        """Name of the op that computes the tensor: ``MUL_MAT``, ``SWIGLU``."""

    def buffer_name(self, buffer: int | None) -> str:
        """Name of a backend buffer: ``CPU``, ``CUDA0``; empty for none."""

    def is_host(self, buffer: int | None) -> bool:
        """True when the buffer's memory can be read through its address, in ggml's plain layout."""

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copy the first bytes of a tensor out of device memory."""

    def type_name(self, type_id: int) -> str:
        """ggml's name of a type: ``f32``, ``q4_1``."""


class GgmlBase:
    """The real libggml-base that llama-cpp-python brings along."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library
        address, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ggml_op_desc", ctypes.c_char_p, (address,)),
            ("ggml_type_name", ctypes.c_char_p, (ctypes.c_int,)),
            ("ggml_backend_buffer_name", ctypes.c_char_p, (address,)),
            ("ggml_backend_buffer_is_host", ctypes.c_bool, (address,)),
            ("ggml_backend_tensor_get", None, (address, address, size, size)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    @classmethod
    def load(cls, folder: Path) -> GgmlBase:
        """Open the library in llama-cpp-python's ``lib`` folder and prove the struct's layout.

        Raises:
            TraceError: no library there, a function missing, or a layout that this firetower does not know.
        """
        names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
        path = next((folder / n for n in names if (folder / n).exists()), None)
        if path is None:
            raise TraceError(
                f"llama_cpp library folder {folder}: no libggml-base; reinstall llama-cpp-python>=0.3.36"
            )
        try:
            base = cls(ctypes.CDLL(str(path)))
            check_layout(base._lib)
        except (OSError, AttributeError) as e:
            raise TraceError(f"{path.name}: cannot be used ({e}); install llama-cpp-python>=0.3.36") from e
        return base

    def op_name(self, address: int) -> str:
        """Name of the op that computes the tensor."""
        return _text(self._lib.ggml_op_desc(address))

    def buffer_name(self, buffer: int | None) -> str:
        """Name of a backend buffer; empty for none."""
        return _text(self._lib.ggml_backend_buffer_name(buffer)) if buffer else ""

    def is_host(self, buffer: int | None) -> bool:
        """True for host memory in ggml's plain layout."""
        # repacked and AMX buffers are host memory, but in an interleaved layout that is nobody else's
        # business
        name = self.buffer_name(buffer)
        plain = bool(name) and "REPACK" not in name and "AMX" not in name
        return plain and bool(self._lib.ggml_backend_buffer_is_host(buffer))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copy bytes from the start of a tensor's data, wherever it lies."""
        out = ctypes.create_string_buffer(num_bytes)
        self._lib.ggml_backend_tensor_get(address, out, 0, num_bytes)
        return out.raw

    def type_name(self, type_id: int) -> str:
        """ggml's name of a type."""
        return _text(self._lib.ggml_type_name(type_id))


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def check_layout(library: Any) -> None:
    """Make small tensors with ggml itself and read them back through `GgmlTensor`.

    Raises:
        TraceError: a field is not where this firetower expects it.
        AttributeError: the library lacks a function.
    """
    lib, ptr, i64 = library, ctypes.c_void_p, ctypes.c_int64
    lib.ggml_init.restype, lib.ggml_init.argtypes = ptr, (_InitParams,)
    lib.ggml_free.restype, lib.ggml_free.argtypes = None, (ptr,)
    lib.ggml_new_tensor_2d.restype, lib.ggml_new_tensor_2d.argtypes = ptr, (ptr, ctypes.c_int, i64, i64)
    lib.ggml_mul_mat.restype, lib.ggml_mul_mat.argtypes = ptr, (ptr, ptr, ptr)
    lib.ggml_view_1d.restype, lib.ggml_view_1d.argtypes = ptr, (ptr, ptr, i64, ctypes.c_size_t)
    lib.ggml_set_name.restype, lib.ggml_set_name.argtypes = ptr, (ptr, ctypes.c_char_p)
    lib.ggml_get_data.restype, lib.ggml_get_data.argtypes = ptr, (ptr,)
    context = lib.ggml_init(_InitParams(mem_size=1 << 16, mem_buffer=None, no_alloc=False))
    try:
        a, b = lib.ggml_new_tensor_2d(context, 1, 3, 5), lib.ggml_new_tensor_2d(context, 0, 3, 2)
        product, view = lib.ggml_mul_mat(context, a, b), lib.ggml_view_1d(context, a, 2, 6)
        lib.ggml_set_name(a, b"probe")
        t_a, t_p, t_v = (GgmlTensor.from_address(p) for p in (a, product, view))
        found = (
            t_a.type,
            *t_a.ne,
            *t_a.nb,
            t_a.name,
            t_a.data,
            *t_p.ne,
            *t_p.src[:3],
            t_v.view_src,
            t_v.view_offs,
        )
        data = lib.ggml_get_data(a)
        expected = (1, 3, 5, 1, 1, 2, 6, 30, 30, b"probe", data, 5, 2, 1, 1, a, b, None, a, 6)
        ops = (_text(lib.ggml_op_desc(a)), _text(lib.ggml_op_desc(product)))
    finally:
        lib.ggml_free(context)
    if found != expected or ops != ("NONE", "MUL_MAT"):
        raise TraceError(
            "ggml_tensor: a layout this firetower does not know; install llama-cpp-python 0.3.36"
        )


def name_of(tensor: GgmlTensor) -> str:
    """The tensor's name; whatever is not UTF-8 in it is replaced."""
    return tensor.name.decode("utf-8", "replace")


def shape_of(tensor: GgmlTensor) -> tuple[int, ...]:
    """NumPy shape, at least (rows, columns); leading ones beyond that are dropped."""
    ne = list(tensor.ne)
    while len(ne) > 2 and ne[-1] == 1:
        ne.pop()
    return tuple(reversed(ne))


def bits_view(tensor: GgmlTensor, address: int, ggml: Ggml) -> NDArray[Any]:
    """The raw bits of a float or integer tensor: unsigned, logical shape, strides as stored.

    Zero-copy for host memory: valid only until the callback that handed the tensor in returns.
    """
    width = (
        FLOAT_TYPES[tensor.type].bits_dtype if tensor.type in FLOAT_TYPES else _INTEGER_DTYPES[tensor.type]
    )
    shape = shape_of(tensor)
    strides = tuple(reversed(list(tensor.nb)[: len(shape)]))
    span = np.dtype(width).itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = memory_of(tensor, address, span, ggml)
    return np.ndarray(shape, dtype=width, buffer=buffer, strides=strides)


_INTEGER_DTYPES = {24: "<i1", 25: "<i2", 26: "<i4", 27: "<i8"}


def memory_of(tensor: GgmlTensor, address: int, num_bytes: int, ggml: Ggml) -> Any:
    """A buffer of ``num_bytes`` from the start of the tensor's data: a window on host memory, or a copy."""
    if tensor.data is None:
        raise ValueError(f"tensor {tensor.name!r} has no memory")
    if ggml.is_host(tensor.buffer):
        return (ctypes.c_ubyte * num_bytes).from_address(tensor.data)
    return ggml.read(address, num_bytes)


def is_finite(bits: NDArray[Any], kind: FloatType, *, allow_neg_inf: bool = False) -> bool:
    """True when every element is finite (or, if allowed, -Inf). Exact for every pattern."""
    if kind.float_dtype is not None and bool(np.isfinite(bits.view(kind.float_dtype)).all()):
        return True
    return not bool(bad_mask(bits, kind, allow_neg_inf=allow_neg_inf).any())


def bad_mask(bits: NDArray[Any], kind: FloatType, *, allow_neg_inf: bool = False) -> NDArray[np.bool_]:
    """Boolean mask of NaN and Inf; -Inf is left out where it is legal."""
    bad = (bits & kind.exponent_mask) == kind.exponent_mask
    if allow_neg_inf:
        bad &= bits != (kind.exponent_mask | kind.sign_mask)
    return np.asarray(bad)


def kind_of(pattern: int, kind: FloatType) -> Kind:
    """Class of one non-finite pattern."""
    if pattern & ~(kind.sign_mask | kind.exponent_mask):
        return Kind.NAN
    return Kind.NEG_INF if pattern & kind.sign_mask else Kind.POS_INF


def first_bad(bits: NDArray[Any], kind: FloatType, *, allow_neg_inf: bool = False) -> BadValue | None:
    """The first bad element in row-major order, or None; token and position are for the caller to fill in."""
    bad = bad_mask(bits, kind, allow_neg_inf=allow_neg_inf)
    if not bad.any():
        return None
    flat = int(bad.argmax())
    pattern = int(bits[np.unravel_index(flat, bits.shape)])
    row, column = divmod(flat, bits.shape[-1])
    return BadValue(
        flat_index=flat,
        row=row,
        column=column,
        bits=pattern,
        dtype=kind.name,
        kind=kind_of(pattern, kind),
        shape=bits.shape,
        sequence=0,
    )


def widen(bits: NDArray[Any], kind: FloatType) -> NDArray[Any]:
    """The values as float64 (NaN and Inf stay so); for summaries only."""
    if kind.float_dtype is None:
        return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
    return bits.view(kind.float_dtype).astype(np.float64)


_LARGEST = {
    "float64": float(np.finfo("f8").max),
    "float32": float(np.finfo("f4").max),
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}


def summarise(name: str, values: NDArray[Any], dtype: str) -> TensorSummary:
    """Counts and range of ``values`` (any float array), named and typed as given."""
    finite = values[np.isfinite(values)]
    absmax = float(np.abs(finite).max()) if finite.size else None
    largest = _LARGEST.get(dtype)
    return TensorSummary(
        name=name,
        shape=values.shape,
        dtype=dtype,
        num_nan=int(np.isnan(values).sum()),
        num_pos_inf=int(np.isposinf(values).sum()),
        num_neg_inf=int(np.isneginf(values).sum()),
        absmax=absmax,
        zero_frac=float((values == 0).mean()) if values.size else 0.0,
        headroom=largest / absmax if absmax and largest else None,
    )
