"""Reads one tensor in chunks and finds non-finite, all-zero and absurd fields.

Every float type orders its magnitudes as integers do once the sign is masked off, so one maximum over those
integers answers the three questions at once. Only a tensor with something to report is read a second time.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from firetower.core.formats import classify, decode
from firetower.core.records import Kind
from firetower.scan.findings import Findings
from firetower.scan.layouts import Field, Keys, Layout, bit_test, field_bits, magnitude_keys
from firetower.scan.names import expert_of, is_scale, is_stacked, is_unbounded, may_hold_neg_inf
from firetower.scan.records import Finding, Problem, Severity
from firetower.scan.source import Source

CHUNK_BYTES = 1 << 20
MAX_EXPERTS = 4096
"""A stacked tensor that claims more is judged as a whole."""
ABSURD = 1e6
"""No weight is this large: a value, or ``scale * gain``, above it is absurd in any tensor."""
ABSURD_FLOAT16 = 32768.0
"""Half the fp16 maximum: the next doubling is Inf."""
ABSURD_IN_MATRIX = 64.0
"""In a matrix a value above this is absurd when it is also `ABSURD_RATIO` times the tensor's median."""
ABSURD_RATIO = 4096.0
"""A flip of the top exponent bit of an fp16 is a factor of 65536; real outliers stay below 1000."""

_SAMPLE_SPOTS, _SAMPLE_BLOCKS = 64, 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where one tensor lies.

    Args:
        name: printable name.
        offset: absolute offset of its first byte.
        num_bytes: bytes of it that the file has.
        shape: dimensions, last one contiguous.
        layout: storage type.
        order: byte order, ``<`` or ``>``.
        has_rows: False for a strided view, whose rows and columns the stored order does not show.
        has_offset: False where ``offset`` is not a place in the file.
    """

    name: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    layout: Layout
    order: str = "<"
    has_rows: bool = True
    has_offset: bool = True

    @property
    def row_length(self) -> int:
        """Elements along the last dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """A tensor, or one expert of a stacked one: what all-zero and absurd are judged on."""

    tensor: Tensor
    expert: int | None
    offset: int
    num_blocks: int
    is_whole: bool

    @property
    def is_matrix(self) -> bool:
        blocks_per_row = self.tensor.row_length // self.tensor.layout.block_elements
        return self.tensor.row_length >= 32 and self.num_blocks >= 2 * max(1, blocks_per_row)


def check_tensors(
    source: Source, tensors: Iterable[Tensor], findings: Findings, advance: Callable[[int], None]
) -> int:
    """`check_tensor` for all, in file order; returns how many had floats and were read whole.

    A header may let thousands of tensors share the same bytes: past twice the file's size no more are read.
    """
    num_read, budget = 0, 2 * source.size
    for tensor in sorted(tensors, key=lambda t: t.offset):
        budget -= tensor.num_bytes
        if budget < 0:
            message = f"tensors overlap to over twice the file's size: from {tensor.name} on not read"
            findings.add(Finding(problem=Problem.OVERLAP, message=message, offset_bytes=tensor.offset))
            break
        check_tensor(source, tensor, findings, advance)
        is_whole = (
            tensor.num_bytes
            >= tensor.num_elements // tensor.layout.block_elements * tensor.layout.block_bytes
        )
        num_read += bool(tensor.layout.fields) and is_whole
    return num_read


def check_tensor(source: Source, tensor: Tensor, findings: Findings, advance: Callable[[int], None]) -> None:
    """Read one tensor and add what is wrong with it to ``findings``.

    Args:
        advance: called with the bytes read, chunk by chunk.

    Raises:
        ScanError: the file cannot be read any more.
    """
    if not tensor.layout.fields:
        advance(tensor.num_bytes)
        return
    for unit in _units(tensor):
        largest, is_zero = _first_pass(source, unit, advance)
        if is_zero and unit.is_whole and unit.num_blocks:
            _add_zero(unit, findings)
        for field, (top, finite_top) in zip(tensor.layout.fields, largest, strict=True):
            bad_from = bit_test(field.dtype).bad_from
            if top >= bad_from:
                _collect(source, unit, field, bad_from, Problem.NONFINITE, findings)
            limit = _absurd_key(source, unit, field, finite_top)
            if limit is not None:
                _collect(source, unit, field, limit, Problem.ABSURD, findings)


def _units(tensor: Tensor) -> Iterator[_Unit]:
    layout = tensor.layout
    num_blocks = tensor.num_elements // layout.block_elements
    is_split = (
        is_stacked(tensor.name, len(tensor.shape)) and tensor.has_rows and tensor.shape[0] <= MAX_EXPERTS
    )
    num_units = tensor.shape[0] if is_split else 1
    in_file = tensor.num_bytes // layout.block_bytes
    size = num_blocks // max(1, num_units)
    for i in range(min(num_units, math.ceil(in_file / size)) if size else 0):
        expert = i if num_units > 1 else expert_of(tensor.name)
        present = min(size, in_file - i * size)
        yield _Unit(tensor, expert, tensor.offset + i * size * layout.block_bytes, present, present == size)


def _chunks(source: Source, unit: _Unit) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    block_bytes = unit.tensor.layout.block_bytes
    step = max(1, CHUNK_BYTES // block_bytes)
    buffer = np.empty(min(step, unit.num_blocks) * block_bytes, dtype=np.uint8)
    for start in range(0, unit.num_blocks, step):
        data = buffer[: min(step, unit.num_blocks - start) * block_bytes]
        source.read_into(data, unit.offset + start * block_bytes)
        yield start, data


def _first_pass(
    source: Source, unit: _Unit, advance: Callable[[int], None]
) -> tuple[list[tuple[int, int]], bool]:
    """(largest key, largest finite key) of each field, and whether every element is zero."""
    layout, order = unit.tensor.layout, unit.tensor.order
    tests = [bit_test(f.dtype) for f in layout.fields]
    largest, codes_zero = [(0, 0)] * len(layout.fields), layout.code_bytes is not None
    for _, data in _chunks(source, unit):
        num_blocks = len(data) // layout.block_bytes
        for i, field in enumerate(layout.fields):
            keys = magnitude_keys(field_bits(data, num_blocks, layout, field, order), field.dtype)
            top = finite_top = int(keys.max())
            if top >= tests[i].bad_from:
                finite_top = int(keys.max(where=keys < tests[i].bad_from, initial=0))
            largest[i] = max(largest[i][0], top), max(largest[i][1], finite_top)
        codes_zero = codes_zero and _codes_are_zero(data, num_blocks, layout)
        advance(len(data))
    return largest, codes_zero if layout.code_bytes else not any(top for top, _ in largest)


def _codes_are_zero(data: npt.NDArray[np.uint8], num_blocks: int, layout: Layout) -> bool:
    assert layout.code_bytes is not None
    start, stop = layout.code_bytes
    codes = data.reshape(num_blocks, layout.block_bytes)[:, start:stop]
    return not bool((codes & layout.code_mask).any())


def _add_zero(unit: _Unit, findings: Findings) -> None:
    tensor = unit.tensor
    is_bad = unit.is_matrix or is_scale(tensor.name) or unit.expert is not None
    what = "every element of this expert is zero" if unit.expert is not None else "every element is zero"
    if tensor.layout.name == "F8_E8M0":
        what = "every byte is zero: every scale is 2^-127"
    note = "" if is_bad else "; normal for a bias or a zero-centred norm"
    findings.add(
        Finding(
            problem=Problem.ALL_ZERO,
            severity=Severity.BAD if is_bad else Severity.NOTE,
            message=what + note,
            tensor=tensor.name,
            expert=unit.expert,
            offset_bytes=unit.offset if tensor.has_offset else None,
            num_bytes=unit.num_blocks * tensor.layout.block_bytes,
            dtype=tensor.layout.name,
        )
    )


def _absurd_key(source: Source, unit: _Unit, field: Field, finite_top: int) -> int | None:
    """The key from which magnitudes are absurd in this unit, or None when the largest finite one is not."""
    if is_unbounded(unit.tensor.name) or finite_top == 0:
        return None
    bound = decode(finite_top, field.dtype) * field.gain
    limit = min(ABSURD, ABSURD_FLOAT16 * field.gain) if field.dtype == "float16" else ABSURD
    if unit.is_matrix and not unit.tensor.layout.is_narrow and ABSURD_IN_MATRIX < bound <= limit:
        limit = min(limit, max(ABSURD_IN_MATRIX, ABSURD_RATIO * _typical(source, unit, field) * field.gain))
    return _first_key_above(field.dtype, limit / field.gain) if bound > limit else None


def _typical(source: Source, unit: _Unit, field: Field) -> float:
    """Median magnitude of the finite non-zero fields in an even sample of the unit; Inf where none is."""
    layout, test = unit.tensor.layout, bit_test(field.dtype)
    sample: list[Keys] = []
    num_blocks = min(_SAMPLE_BLOCKS, unit.num_blocks)
    spots = np.linspace(0, unit.num_blocks - num_blocks, _SAMPLE_SPOTS, dtype=np.int64)
    for start in np.unique(spots).tolist():
        data = np.empty(num_blocks * layout.block_bytes, dtype=np.uint8)
        source.read_into(data, unit.offset + start * layout.block_bytes)
        keys = magnitude_keys(field_bits(data, num_blocks, layout, field, unit.tensor.order), field.dtype)
        sample.append(keys[(keys > 0) & (keys < test.bad_from)])
    keys = np.sort(np.concatenate(sample))
    return decode(int(keys[len(keys) // 2]), field.dtype) if len(keys) else math.inf


@lru_cache
def _first_key_above(dtype: str, limit: float) -> int:
    return bisect_right(range(bit_test(dtype).bad_from), limit, key=lambda key: decode(key, dtype))


def _collect(
    source: Source, unit: _Unit, field: Field, low: int, problem: Problem, findings: Findings
) -> None:
    """Read the unit again and list the fields with keys from ``low`` on (finite ones, for magnitudes)."""
    layout, bad_from = unit.tensor.layout, bit_test(field.dtype).bad_from
    neg_inf_is_legal = problem is Problem.NONFINITE and may_hold_neg_inf(unit.tensor.name)
    for start, data in _chunks(source, unit):
        bits = field_bits(data, len(data) // layout.block_bytes, layout, field, unit.tensor.order)
        keys = magnitude_keys(bits, field.dtype)
        hit = keys >= low if problem is Problem.NONFINITE else (keys >= low) & (keys < bad_from)
        if neg_inf_is_legal:
            hit &= ~((bits != keys) & (keys == bad_from))
        indices = np.flatnonzero(hit)
        listed = 0
        for first, count in _runs(indices, start, unit):
            if not findings.has_room(unit.tensor.name, problem):
                break
            findings.add(_finding(unit, field, start + first, count, int(bits[first]), problem))
            listed += count
        findings.add_more(unit.tensor.name, problem, len(indices) - listed)


def _runs(indices: npt.NDArray[np.int64], start: int, unit: _Unit) -> Iterator[tuple[int, int]]:
    """(first index, length) of neighbouring plain values of one row; blocks stay apart."""
    if unit.tensor.layout.block_elements > 1 or len(indices) < 2:
        yield from ((int(i), 1) for i in indices)
        return
    rows = (indices + start) // max(1, unit.tensor.row_length)
    breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(rows) != 0)) + 1
    edges = np.concatenate(([0], breaks, [len(indices)]))
    yield from ((int(indices[edges[i]]), int(edges[i + 1] - edges[i])) for i in range(len(edges) - 1))


def _finding(unit: _Unit, field: Field, block: int, count: int, bits: int, problem: Problem) -> Finding:
    tensor, layout = unit.tensor, unit.tensor.layout
    size = bit_test(field.dtype).itemsize
    row, in_row = divmod(block, max(1, tensor.row_length // layout.block_elements))
    start, stop = field.columns or (0, layout.block_elements)
    column = in_row * layout.block_elements
    is_scale_tensor = field.role == "value" and is_scale(tensor.name)
    kind = classify(bits, field.dtype)
    return Finding(
        problem=problem,
        message=_words(bits, field, kind, layout),
        tensor=tensor.name,
        expert=unit.expert,
        row=row if tensor.has_rows else None,
        block=in_row if layout.block_elements > 1 and tensor.has_rows else None,
        column_start=column + start if tensor.has_rows else None,
        column_stop=column + (stop if layout.block_elements > 1 else count) if tensor.has_rows else None,
        offset_bytes=unit.offset + block * layout.block_bytes + field.offset if tensor.has_offset else None,
        num_bytes=8 if field.is_packed else size,
        field="scale" if is_scale_tensor else field.role,
        dtype=field.dtype,
        bits=f"{bits:0{2 * size}x}",
        kind=kind,
        count=count,
    )


def _words(bits: int, field: Field, kind: Kind | None, layout: Layout) -> str:
    if kind is None:
        value = decode(bits, field.dtype)
        reach = abs(value) * field.gain
        spread = f": elements up to {reach:.3g}" if field.gain > 1 else ""
        overflow = "; overflows fp32 when multiplied" if reach > 3.4e38 else ""
        return f"{field.role} {value:.6g}{spread}{overflow}"
    name = {Kind.NAN: "NaN", Kind.POS_INF: "+Inf", Kind.NEG_INF: "-Inf"}[kind]
    reads_as = "; ggml itself reads 7f as 0" if layout.name == "NVFP4" and bits == 0x7F else ""
    return f"{name} {field.role}{reads_as}"
