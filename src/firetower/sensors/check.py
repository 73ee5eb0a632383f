"""Exact finiteness checks of host tensors: a one-pass filter, then the first bad element with its raw bits.

The filter is a sum: any NaN or Inf makes it non-finite, and a finite sum proves every element finite. A sum that
overflows over finite values only costs the exact pass; it never makes a fire.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum

import torch
from torch import Tensor

from firetower.core.records import BadValue, Kind, Legal

_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SUM_DTYPE: dict[torch.dtype, torch.dtype | None] = {
    torch.float64: None,
    torch.float32: None,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""Types whose sum says "clean", with the type to sum in: 16-bit sums would be stored in 16 bits and overflow."""


class Layout(StrEnum):
    """How a signal's dimensions map to sequences and tokens."""

    TOKENS = "[B, T, ...], [B*T, ...], or [B, K, ...] holding the last K tokens"
    HEADS = "[B, heads, K, D]: keys and values of the last K tokens"
    STATE = "[B, ...]: one state a sequence, no token"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How the rows of one step's tensors map to sequences and tokens.

    ``num_sequences`` B and ``num_tokens`` T are those of the step's input. ``pad`` [B, T] bool marks pad rows,
    ``positions`` [B, T] int64 gives absolute positions; both None where unknown.
    """

    num_sequences: int
    num_tokens: int
    pad: Tensor | None = None
    positions: Tensor | None = None
    layout: Layout = Layout.TOKENS


def is_clean(x: Tensor, legal: Legal = Legal.FINITE) -> bool:
    """Whether every element of ``x`` (any shape, any float type) is legal.

    Exact: no false alarm and no miss. Reads ``x`` once when clean. Complex tensors count both parts.
    """
    if x.numel() == 0:
        return True
    if x.requires_grad:
        x = x.detach()
    if x.is_complex() or x.is_nested or x.layout is not torch.strided:
        x = plain(x)
    if x.dtype not in SUM_DTYPE:
        x = x.to(torch.float32)
    if legal is Legal.NEG_INF:
        top: float = x.amax().item()
        return top - top == 0.0 or (top < 0 and not bool(torch.isnan(x).any()))
    total: float = x.sum(dtype=SUM_DTYPE[x.dtype]).item()
    return total - total == 0.0 or bool(torch.isfinite(x).all())


def plain(x: Tensor) -> Tensor:
    """``x`` as a dense real tensor: nested ones padded with zeros, sparse ones filled, complex ones [..., 2]."""
    x = x.detach()
    if x.is_nested:
        x = torch.nested.to_padded_tensor(x, 0.0)
    elif x.layout is not torch.strided:
        x = x.to_dense()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def bad_mask(x: Tensor, legal: Legal = Legal.FINITE) -> Tensor:
    """Bool tensor of the shape of ``x``: True where the element is not legal."""
    if x.dtype.itemsize == 1:
        x = x.to(torch.float32)
    if legal is Legal.NEG_INF:
        return torch.isnan(x) | torch.isposinf(x)
    return ~torch.isfinite(x)


def first_bad(
    x: Tensor, legal: Legal = Legal.FINITE, frame: Frame | None = None
) -> tuple[BadValue | None, BadValue | None]:
    """The first bad element in row-major order among real rows, and the first among pad rows.

    Args:
        x: any float tensor, any strides; copied only when it is not contiguous.
        legal: what may stand in it.
        frame: maps rows to sequences, tokens and positions; without it no row is a pad.

    Returns:
        (first real, first pad), each None when there is none.
    """
    x = plain(x).contiguous()
    places = torch.nonzero(bad_mask(x, legal).reshape(-1)).reshape(-1)
    if places.numel() == 0:
        return None, None
    pads = _pad_of(places, x, frame)
    return _describe_first(places[~pads], x, frame), _describe_first(places[pads], x, frame)


def burned_sequences(x: Tensor, legal: Legal, frame: Frame) -> dict[int, BadValue]:
    """For each sequence of the batch with a bad real row in ``x``: its first bad element."""
    x = plain(x).contiguous()
    places = torch.nonzero(bad_mask(x, legal).reshape(-1)).reshape(-1)
    places = places[~_pad_of(places, x, frame)]
    sequence, _ = locate(places, x.shape, frame)
    if sequence is None or places.numel() == 0:
        return {}
    result: dict[int, BadValue] = {}
    for number in torch.unique(sequence).tolist():
        first = _describe_first(places[sequence == number], x, frame)
        if first is not None:
            result[number] = first
    return result


def raw_bits(x: Tensor, flat_index: int) -> int:
    """Raw bit pattern of one element of a contiguous tensor, unsigned, in the width of its type."""
    size = x.dtype.itemsize
    element = x.reshape(-1)[flat_index : flat_index + 1].view(_INT_VIEW[size])
    return int(element.item()) & ((1 << (8 * size)) - 1)


def kind_of(value: float) -> Kind:
    """Class of a non-finite Python float."""
    if value != value:
        return Kind.NAN
    return Kind.POS_INF if value > 0 else Kind.NEG_INF


def locate(flat: Tensor, shape: tuple[int, ...], frame: Frame | None) -> tuple[Tensor | None, Tensor | None]:
    """Map flat row-major indices to (sequence, token), each int64 like ``flat``, or None where the shape is silent."""
    if frame is None or not shape:
        return None, None
    b, t = frame.num_sequences, frame.num_tokens
    num_elements = math.prod(shape)
    if frame.layout is Layout.TOKENS and shape[0] == b * t and (len(shape) == 2 or shape[0] != b):
        token = flat // (num_elements // shape[0])
        return token // t, token % t
    if shape[0] != b:
        return None, None
    sequence, rest = flat // (num_elements // b), flat % (num_elements // b)
    if frame.layout is Layout.STATE:
        return sequence, None
    if frame.layout is Layout.HEADS:
        if len(shape) != 4 or shape[2] > t:
            return sequence, None
        # a sliding window may hold the last tokens of the step only
        return sequence, (rest // shape[3]) % shape[2] + (t - shape[2])
    if len(shape) >= 3 and shape[1] <= t:
        return sequence, rest // (num_elements // b // shape[1]) + (t - shape[1])
    if t == 1:
        return sequence, torch.zeros_like(sequence)
    return sequence, None


def _pad_of(places: Tensor, x: Tensor, frame: Frame | None) -> Tensor:
    if frame is None or frame.pad is None:
        return torch.zeros_like(places, dtype=torch.bool)
    sequence, token = locate(places, tuple(x.shape), frame)
    if sequence is None or token is None:
        return torch.zeros_like(places, dtype=torch.bool)
    return frame.pad.to(places.device)[sequence, token]


def _describe_first(places: Tensor, x: Tensor, frame: Frame | None) -> BadValue | None:
    if places.numel() == 0:
        return None
    return describe(int(places[0].item()), x, frame)


def describe(flat_index: int, x: Tensor, frame: Frame | None = None) -> BadValue:
    """The record of one element of a contiguous tensor: place, bits, and its sequence, token and position."""
    bits = raw_bits(x, flat_index)
    value = float(x.reshape(-1)[flat_index].to(torch.float64 if x.dtype is torch.float64 else torch.float32).item())
    dtype = str(x.dtype).removeprefix("torch.")
    return place(flat_index, bits, dtype, kind_of(value), tuple(x.shape), frame)


def place(
    flat_index: int, bits: int, dtype: str, kind: Kind, shape: tuple[int, ...], frame: Frame | None
) -> BadValue:
    """Build the record from a place and bits that are known already (a panel word, say)."""
    width = shape[-1] if shape else 1
    sequence, token = locate(torch.tensor(flat_index), shape, frame)
    s = None if sequence is None else int(sequence)
    t = None if token is None else int(token)
    position = is_pad = None
    if frame is not None and s is not None and t is not None:
        position = None if frame.positions is None else int(frame.positions[s, t])
        is_pad = None if frame.pad is None else bool(frame.pad[s, t])
    return BadValue(
        flat_index=flat_index,
        row=flat_index // width,
        column=flat_index % width,
        bits=bits,
        dtype=dtype,
        kind=kind,
        shape=shape,
        sequence=s,
        token=t,
        position=position,
        is_pad=is_pad,
    )
