"""Reading tensors inside a dispatch mode: which can be read, what they hold, where the first bad value is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from firetower.core.records import BadValue, Legal
from firetower.sensors.check import Frame, describe, is_clean
from firetower.sensors.ops_kinds import OpInfo
from firetower.sensors.ops_table import Entry, StorageTable, storage_key

_FLOAT_NAMES = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_FLOATS = frozenset(getattr(torch, name) for name in _FLOAT_NAMES if hasattr(torch, name))
_UNREADABLE = {
    getattr(torch, name): reason
    for name, reason in (
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2 has no element type that torch can read"),
        ("qint8", "quantised tensors hold integers"),
        ("quint8", "quantised tensors hold integers"),
        ("qint32", "quantised tensors hold integers"),
    )
    if hasattr(torch, name)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Flags:
    """Which classes of non-finite values a tensor holds."""

    nan: bool = False
    pos_inf: bool = False
    neg_inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.pos_inf or self.neg_inf

    @property
    def only_neg_inf(self) -> bool:
        """Non-finite, but by -Inf alone."""
        return self.neg_inf and not (self.nan or self.pos_inf)


CLEAN = Flags()


@dataclasses.dataclass(slots=True)
class Operand:
    """One float tensor that an op read: as it was before the op, with what is known of its storage."""

    name: str
    tensor: Tensor
    value: Tensor
    flags: Flags
    entry: Entry | None


def is_float(x: Tensor) -> bool:
    """Whether ``x`` has a type that can hold a NaN and that torch can read."""
    return x.dtype in _FLOATS


def has_own_dispatch(x: Tensor) -> bool:
    """Whether ``x`` is of a subclass that handles its own ops, so that it may have no values of its own."""
    return type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def why_unreadable(x: Tensor) -> str | None:
    """Why the values of ``x`` cannot be checked here, or None."""
    if type(x) is not Tensor and has_own_dispatch(x):
        # a fake tensor has no memory at all: reading it would crash the process
        return f"tensor subclass {type(x).__name__}"
    if x.dtype in _UNREADABLE:
        return _UNREADABLE[x.dtype]
    if x.layout is not torch.strided:
        return f"layout {str(x.layout).removeprefix('torch.')}"
    if x.is_nested:
        return "nested tensor"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "inside a CUDA graph capture"
    return None


def readable(x: Tensor) -> bool:
    """Whether ``x`` is a float tensor whose values can be checked."""
    return x.dtype in _FLOATS and not x.is_meta and why_unreadable(x) is None


def plain(x: Tensor) -> Tensor:
    """``x`` as a real tensor without lazy conjugation or negation; complex gains a last dimension of 2."""
    if x.is_neg():
        x = x.resolve_neg()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def flags_of(x: Tensor) -> Flags:
    """What non-finite values the readable tensor ``x`` holds; one pass where it is clean."""
    x = plain(x)
    if is_clean(x):
        return CLEAN
    if is_clean(x, Legal.NEG_INF):
        return Flags(neg_inf=True)
    if x.element_size() == 1:
        x = x.to(torch.float32)
    return Flags(
        nan=bool(torch.isnan(x).any()),
        pos_inf=bool(torch.isposinf(x).any()),
        neg_inf=bool(torch.isneginf(x).any()),
    )


def bad_places(x: Tensor, *, neg_inf: bool) -> Tensor:
    """Bool tensor like `plain` of ``x``: NaN and +Inf, with ``neg_inf`` also -Inf."""
    x = plain(x)
    if x.element_size() == 1:
        x = x.to(torch.float32)
    return ~torch.isfinite(x) if neg_inf else torch.isnan(x) | torch.isposinf(x)


def first_at(x: Tensor, places: Tensor, frame: Frame | None) -> BadValue:
    """The record of the first True place of ``places`` in ``x``."""
    index = int(places.reshape(-1).nonzero()[0].item())
    return describe(index, plain(x).contiguous(), _frame_for(x, frame))


def _frame_for(x: Tensor, frame: Frame | None) -> Frame | None:
    # heads, experts and states lead with other dimensions: claim a token only where the shape leaves no doubt
    if frame is None or x.is_complex():
        return None
    b, t = frame.num_sequences, frame.num_tokens
    is_rows = (x.ndim == 3 and tuple(x.shape[:2]) == (b, t)) or (x.ndim == 2 and x.shape[0] == b * t)
    return frame if is_rows else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors of an op's argument or result: itself, or those in (nested) lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def named_arguments(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what an op was called with."""
    names = info.arg_names
    for i, value in enumerate(args):
        yield names[i] if i < len(names) else f"input {i}", value
    yield from kwargs.items()


def has_nonfinite_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a Python number among the arguments, or in a list of them, is NaN or infinite."""

    def bad(value: Any) -> bool:
        if isinstance(value, float):
            return not math.isfinite(value)
        if not isinstance(value, list | tuple):
            return False
        return any(isinstance(v, float) and not math.isfinite(v) for v in value)

    return any(bad(v) for v in args) or any(bad(v) for v in kwargs.values())


Snapshots = dict[int, Tensor | None]
"""By ``id`` of an argument: its values before an op that writes them, None where they were clean."""


def snapshot(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshots:
    """Keep what a mutating op is about to destroy: arguments it writes and reads, or that share memory."""
    arguments = [(n, t) for n, v in named_arguments(info, args, kwargs) for t in tensors_in(v) if readable(t)]
    written = {storage_key(t) for n, t in arguments if n in info.mutated}
    kept: Snapshots = {}
    for name, x in arguments:
        if storage_key(x) not in written or _is_only_written(info, name):
            continue
        kept[id(x)] = None if is_clean(plain(x)) else x.clone()
    return kept


def operands(
    info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], before: Snapshots | None, table: StorageTable
) -> list[Operand]:
    """The non-finite float tensors that an op read."""
    found = []
    for name, value in named_arguments(info, args, kwargs):
        if _is_only_written(info, name):
            continue
        for x in tensors_in(value):
            if not readable(x):
                continue
            old = x if before is None or id(x) not in before else before[id(x)]
            flags = CLEAN if old is None else flags_of(old)
            if old is not None and flags:
                found.append(Operand(name, x, old, flags, table.get(x)))
    return found


def _is_only_written(info: OpInfo, name: str) -> bool:
    return name in info.outs or (info.overwrites and name in info.mutated)
