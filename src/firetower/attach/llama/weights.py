"""The row of a weight that one bad value was computed from: dequantised, and whether it is finite.

Reading one row answers "is the weight itself bad?" exactly and in microseconds, whatever the size of the
tensor. The bytes come from host memory in ggml's plain layout, else (repacked, or on a GPU) from the model
file.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firetower.attach.llama.ggml import (
    FLOAT_TYPES,
    Ggml,
    GgmlTensor,
    bits_view,
    memory_of,
    summarise,
    widen,
)
from firetower.core.records import BadValue, Status, TensorSummary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What was found in the weight: status, words for people, and the summary of the row that was read."""

    status: Status
    detail: str
    summary: TensorSummary | None = None


class WeightReader:
    """Reads rows of weights, from memory or from the GGUF file.

    Args:
        ggml: access to tensor memory.
        path: the model file, opened only when memory cannot be read.
    """

    def __init__(self, ggml: Ggml, path: Path | None) -> None:
        self._ggml, self._path = ggml, path
        self._file: dict[str, Any] | None = None

    def operand(self, consumer: GgmlTensor, index: int, first: BadValue, name: str) -> Operand:
        """Examine the part of source ``index`` of ``consumer`` that ``first`` was computed from.

        Args:
            consumer: the op's output tensor.
            index: which of its sources is the weight.
            first: the bad element of the output.
            name: the weight's name in the file.
        """
        weight = GgmlTensor.from_address(consumer.src[index])
        rows = self._rows(consumer, index, first)
        try:
            values, where = self._values(weight, consumer.src[index], rows, name)
        except (NotImplementedError, KeyError, ValueError, OSError) as e:
            return Operand(status=Status.NOT_COVERED, detail=f"cannot be read: {e or type(e).__name__}")
        what = "whole tensor" if rows is None else " ".join(f"{axis} {n}" for axis, n in rows.items())
        summary = summarise(name if rows is None else f"{name} ({what})", values, self._type_name(weight))
        if not summary.num_nonfinite:
            return Operand(status=Status.CLEAN, detail=f"{what} is finite{where}", summary=summary)
        columns = np.flatnonzero(~np.isfinite(values.reshape(-1, values.shape[-1])).all(axis=0))
        detail = f"{what}: {summary.num_nonfinite} of {values.size} non-finite, {_span(columns)}{where}"
        return Operand(status=Status.BAD, detail=detail, summary=summary)

    def _type_name(self, weight: GgmlTensor) -> str:
        kind = FLOAT_TYPES.get(weight.type)
        return kind.name if kind else self._ggml.type_name(weight.type)

    def _rows(self, consumer: GgmlTensor, index: int, first: BadValue) -> dict[str, int] | None:
        """Which row of the weight made the bad value, outer axis first; None where no single one did."""
        op = self._ggml.op_name(ctypes.addressof(consumer))
        at = np.unravel_index(first.flat_index, first.shape)
        if op == "MUL_MAT" and index == 0:
            matrices = int(GgmlTensor.from_address(consumer.src[0]).ne[2])
            if matrices == 1 or len(at) < 3:
                return {"row": first.column}
            return {"matrix": int(at[-3]) * matrices // int(consumer.ne[2]), "row": first.column}
        if op == "MUL_MAT_ID" and index == 0 and consumer.src[2]:
            ids = bits_view(GgmlTensor.from_address(consumer.src[2]), consumer.src[2], self._ggml)
            # output (tokens, experts used, columns) and ids (tokens, experts used) share their leading axes
            used = at[:-1] if len(at) == 3 else (0, at[0])
            return {"expert": int(ids[used]), "row": first.column}
        if op == "GET_ROWS" and index == 0 and consumer.src[1]:
            ids = bits_view(GgmlTensor.from_address(consumer.src[1]), consumer.src[1], self._ggml)
            return {"row": int(ids.ravel()[first.row])}
        return None

    def _values(
        self, weight: GgmlTensor, address: int, rows: dict[str, int] | None, name: str
    ) -> tuple[NDArray[Any], str]:
        if self._ggml.is_host(weight.buffer) and weight.type in FLOAT_TYPES:
            bits = bits_view(weight, address, self._ggml)
            picked = bits if rows is None else bits[tuple(rows.values())]
            return widen(picked, FLOAT_TYPES[weight.type]), ""
        if self._ggml.is_host(weight.buffer) and rows is not None:
            strides = (int(weight.nb[2]), int(weight.nb[1]))[-len(rows) :]
            offset = sum(n * stride for n, stride in zip(rows.values(), strides, strict=True))
            memory = np.frombuffer(
                memory_of(weight, address, offset + int(weight.nb[1]), self._ggml), np.uint8
            )
            return _dequantise(memory[offset:], weight.type), ""
        if weight.view_src:
            raise ValueError("part of a weight that is not in host memory")
        return self._from_file(name, rows), " (in the file; its copy on the device was not read)"

    def _from_file(self, name: str, rows: dict[str, int] | None) -> NDArray[Any]:
        tensor = self._tensors()[name]
        data = tensor.data if rows is None else tensor.data[tuple(rows.values())]
        if data.dtype.kind == "f":
            return np.asarray(data, dtype=np.float64)
        return _dequantise(data, int(tensor.tensor_type))

    def _tensors(self) -> dict[str, Any]:
        if self._file is None:
            from gguf import GGUFReader

            if self._path is None:
                raise KeyError("no model file")
            self._file = {t.name: t for t in GGUFReader(self._path).tensors}
        return self._file


def _dequantise(raw: NDArray[Any], type_id: int) -> NDArray[Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # NaN and Inf are what we look for
        return np.asarray(dequantize(raw, GGMLQuantizationType(type_id)), dtype=np.float64)


def _span(columns: NDArray[Any]) -> str:
    low, high = int(columns[0]), int(columns[-1])
    if len(columns) == high - low + 1:
        return f"column {low}" if low == high else f"columns {low}-{high}"
    return f"{len(columns)} columns from {low} to {high}"
