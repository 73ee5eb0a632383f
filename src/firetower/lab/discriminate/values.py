"""Small questions about arrays that the steps share."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from firetower.core.formats import FORMATS
from firetower.lab.subject import Array, Floats, Op

ABSURD = 1e16
"""Magnitude that no healthy activation, weight or state has; unwritten memory often does."""

_OVERLOAD = re.compile(r"^(?:aten|torch|prims|np|numpy)[.:]+")


def root(op: Op) -> str:
    """Name of an op without namespace, overload and in-place mark: ``aten.mul_.Tensor`` is ``mul``."""
    name = _OVERLOAD.sub("", op.name).split(".")[0]
    return name.strip("_").lower()


def is_float(a: Array) -> bool:
    """Whether an array holds floats, so that it may hold a NaN."""
    return bool(np.issubdtype(a.values.dtype, np.floating))


def num_nonfinite(a: Array) -> int:
    """How many elements are NaN or infinite."""
    return int((~np.isfinite(a.values)).sum()) if is_float(a) else 0


def all_finite(arrays: tuple[Array, ...]) -> bool:
    """Whether no element of any array is NaN or infinite."""
    return not any(num_nonfinite(a) for a in arrays)


def absmax(a: Array) -> float:
    """Largest finite magnitude, 0 where there is none."""
    values = np.abs(a.values.astype(np.float64))
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def type_max(a: Array) -> float:
    """Largest finite value of the stored type."""
    if a.type_name in FORMATS:
        return float(FORMATS[a.type_name].maximum)
    return float(np.finfo(a.values.dtype).max) if is_float(a) else float("inf")


def relative_error(actual: Array, reference: Array) -> float:
    """Frobenius norm of the difference over that of the reference, over places finite in both.

    Infinite where a place is finite in one only, or the shapes differ.
    """
    a, b = actual.values.astype(np.float64), reference.values.astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    scale = float(np.linalg.norm(b[finite]))
    error = float(np.linalg.norm(a[finite] - b[finite]))
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def bits_equal(a: Array, b: Array) -> bool:
    """Whether two arrays are the same bit for bit."""
    x, y = np.ascontiguousarray(a.values), np.ascontiguousarray(b.values)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def rows_of(values: Floats) -> Floats:
    """The array as [rows, last dimension]."""
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def number(x: float) -> str:
    """``78,000``, ``7,307,520``, ``1e+39``."""
    return f"{x:,.0f}" if 1e6 <= abs(x) < 1e12 else f"{x:,.6g}"


def first_place(a: Array) -> str:
    """``row 2, column 7`` of the first non-finite element."""
    rows = rows_of(a.values)
    places = np.argwhere(~np.isfinite(rows))
    return f"row {places[0][0]}, column {places[0][1]}" if len(places) else "nowhere"


def kinds(a: Array) -> str:
    """``1 +Inf``, ``3 NaN and 1 -Inf``."""
    x = a.values
    counts = ((np.isnan(x), "NaN"), (np.isposinf(x), "+Inf"), (np.isneginf(x), "-Inf"))
    return " and ".join(f"{int(m.sum()):,} {name}" for m, name in counts if m.any()) or "all finite"


def ops_before(op: Op) -> Iterator[Op]:
    """The op, then what made its inputs, nearest first."""
    yield op
    for producer in op.producers:
        yield from ops_before(producer)


def where(op: Op) -> str:
    """``mul in layers.3.mlp``."""
    return f"{root(op)} in {op.module}" if op.module else root(op)


def raw_bits(a: Array) -> npt.NDArray[np.uint64]:
    """Raw pattern of every element in the width of the stored type, as uint64 of the same shape.

    bfloat16, widened to float32, gives its 16 bits back; float8 cannot and gives those of the float32.
    """
    values = np.ascontiguousarray(a.values)
    size = values.dtype.itemsize
    bits = values.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]).astype(np.uint64)
    if a.type_name == "bfloat16" and size == 4:
        bits >>= np.uint64(16)
    return bits.reshape(a.values.shape)
