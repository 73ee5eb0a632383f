# mypy: disable-error-code="no-untyped-call"
"""`firetower::mark`: the finiteness check as a PyTorch operator that leaves its answer in a device panel.

As an operator with a declared mutation it is traced by ``torch.compile`` without a graph break, is never
dropped as dead code, and is recorded in CUDA graphs. On CUDA it is a Triton kernel
(`firetower.sensors.mark_triton`); on the CPU it is plain PyTorch, used inside compiled CPU graphs and as the
oracle of the kernel's tests.

Shape legend: a watched tensor is read row-major as ``[B, A, T, C]``: B sequences, A heads (1 when the token
axis comes first), T tokens of this step, C elements. Panel layout for S signals and R rows, int64:

    signals [S] | pads [S] | rows [R] | shapes [S] | step [1]

Signal and pad words hold ``flat index << 32 | raw bits`` of the first bad element among real and pad tokens;
a row word holds ``slot << 32 | element offset inside the sequence`` of that sequence's first bad signal.
Shape words and the step word (`shape_word`, `step_word`) let a panel be read after a CUDA graph replay, when
no Python ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.records import Legal
from firetower.core.words import CLEAN, MAX_ELEMENTS, NOT_RUN, high_half, pack
from firetower.sensors.check import Layout, bad_mask, is_clean, raw_bits

BIT_TESTS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.float64: (0x7FF00000, 0x7FF00000, 0xFFF00000 - (1 << 32)),
    torch.float32: (0x7F800000, 0x7F800000, 0xFF800000 - (1 << 32)),
    torch.float16: (0x7C00, 0x7C00, 0xFC00),
    torch.bfloat16: (0x7F80, 0x7F80, 0xFF80),
    torch.float8_e5m2: (0x7C, 0x7C, 0xFC),
    torch.float8_e4m3fn: (0x7F, 0x7F, 0),
    torch.float8_e4m3fnuz: (0xFF, 0x80, 0),
    torch.float8_e5m2fnuz: (0xFF, 0x80, 0),
    torch.float8_e8m0fnu: (0xFF, 0xFF, 0),
}
"""(mask, value, pattern of -Inf): an element is non-finite when ``code & mask == value``.

The code is the raw pattern in 32 bits; of fp64 its high half. A type without infinities has 0 for the last.
"""

FLOAT_TYPES = tuple(BIT_TESTS)
"""Element types that a panel can hold the bits of."""

MANY = 16
"""Most tensors that one `mark_many` launch takes; longer lists are cut into launches of this size."""

_LIBRARY = torch.library.Library("firetower", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    "mark(Tensor x, Tensor(a!) panel, Tensor? pad, int slot, int num_signals, int num_rows, "
    "SymInt num_heads, SymInt num_tokens, SymInt width, bool neg_inf_legal) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "mark_many(Tensor[] xs, Tensor(a!) panel, Tensor? pad, int[] slots, int num_signals, int[] num_rows, "
    "SymInt[] num_heads, SymInt[] num_tokens, SymInt[] widths, bool[] neg_inf_legal, bool[] padded) -> ()",
    tags=_TAGS,
)
_LIBRARY.define("reset(Tensor(a!) panel, SymInt num_sequences, SymInt num_tokens) -> ()", tags=_TAGS)


def unmarkable(x: Tensor) -> str | None:
    """Why a tensor cannot be marked, or None when it can; the caller reports the signal as not covered."""
    if x.layout is not torch.strided or x.is_quantized:
        return f"layout {x.layout}: only dense tensors are watched"
    if x.dtype not in FLOAT_TYPES:
        return f"dtype {str(x.dtype).removeprefix('torch.')}: not a real float type"
    if x.numel() > MAX_ELEMENTS:
        return f"{x.numel()} elements: a word's index has 31 bits; split the tensor by rows"
    return None


def view_of(
    shape: Sequence[int], layout: Layout, num_sequences: int, num_tokens: int
) -> tuple[int, int, int, int]:
    """How a tensor of one step is read as ``[B, A, T, C]``, by the rules of `firetower.sensors.check.locate`.

    Args:
        shape: of the tensor.
        layout: how its dimensions map.
        num_sequences: B of the step.
        num_tokens: T of the step.

    Returns:
        (B, A, T, C). B is 0 where the shape does not say which sequence an element belongs to: no row word
        may be set then, and A is 1, C the number of elements. T is 0 where it does not say which token: no
        pad can be told.
    """
    numel = math.prod(shape)
    b, t = num_sequences, num_tokens
    if len(shape) == 0 or numel == 0:
        return 0, 1, 0, max(numel, 1)
    if layout is Layout.TOKENS and shape[0] == b * t and (len(shape) == 2 or shape[0] != b):
        return b, 1, t, numel // shape[0]
    if shape[0] != b:
        return 0, 1, 0, numel
    if layout is Layout.HEADS and len(shape) == 4 and shape[2] <= t:
        return b, shape[1], shape[2], shape[3]
    if layout is Layout.TOKENS and len(shape) >= 3 and shape[1] <= t:
        return b, 1, shape[1], numel // (b * shape[1])
    if layout is Layout.TOKENS and t == 1:
        return b, 1, 1, numel // b
    return b, 1, 0, numel // b


def shape_word(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Type and shape of a marked tensor in one word: lowest bit set, type in 4 bits, rank in 3, then each
    dimension.

    A dimension is 5 bits of length and the bits below its highest; at most 30 of those in a tensor that can
    be marked. Leading dimensions beyond four are merged; the last one, which makes the column, is always
    kept.
    """
    dims = list(shape)
    if 0 in dims:
        dims = []
    if len(dims) > 4:
        dims = [math.prod(dims[:-3]), *dims[-3:]]
    word, at = 1 | (FLOAT_TYPES.index(dtype) + 1) << 1 | len(dims) << 5, 8
    for dim in dims:
        length = dim.bit_length() - 1
        word |= length << at | (dim - (1 << length)) << (at + 5)
        at += 5 + length
    # the top bit keeps the kernel's argument 64 bits wide whatever the shape
    return word | 1 << 62


def shape_of_word(word: int) -> tuple[str, tuple[int, ...] | None]:
    """Undo `shape_word`: (type, shape); the shape is None where the signal was marked as several shapes in
    one step."""
    dtype = str(FLOAT_TYPES[(word >> 1 & 15) - 1]).removeprefix("torch.")
    dims, at = [], 8
    for _ in range(word >> 5 & 7):
        length = word >> at & 31
        dims.append(1 << length | word >> (at + 5) & ((1 << length) - 1))
        at += 5 + length
    return dtype, tuple(dims) if word & 1 else None


def step_word(num_sequences: int, num_tokens: int) -> int:
    """B and T of the step that a panel was emptied for."""
    return pack(num_sequences, num_tokens)


def _mark_cpu(
    x: Tensor,
    panel: Tensor,
    pad: Tensor | None,
    slot: int,
    num_signals: int,
    num_rows: int,
    num_heads: int,
    num_tokens: int,
    width: int,
    neg_inf_legal: bool,
) -> None:
    _lower(panel, slot, CLEAN)
    _set_shape(panel, _shapes_at(panel, num_signals) + slot, shape_word(x.dtype, x.shape))
    legal = Legal.NEG_INF if neg_inf_legal else Legal.FINITE
    if is_clean(x, legal):
        return
    x = x.detach().contiguous()
    places = torch.nonzero(bad_mask(x, legal).reshape(-1)).reshape(-1)
    per_row = num_heads * num_tokens * width
    rows = places // per_row
    if pad is not None:
        is_pad = pad.to(torch.bool)[rows, (places // width) % num_tokens]
        _mark_first(x, panel, num_signals + slot, places[is_pad])
        places, rows = places[~is_pad], rows[~is_pad]
    _mark_first(x, panel, slot, places)
    for row in torch.unique(rows[rows < num_rows]).tolist():
        offset = int(places[rows == row][0].item()) - row * per_row
        _lower(panel, 2 * num_signals + row, pack(slot, offset))


def _mark_first(x: Tensor, panel: Tensor, word: int, places: Tensor) -> None:
    if places.numel():
        first = int(places[0].item())
        bits = raw_bits(x, first)
        _lower(panel, word, pack(first, high_half(bits) if x.dtype is torch.float64 else bits))


def _lower(panel: Tensor, index: int, word: int) -> None:
    if word < int(panel[index].item()):
        panel[index] = word


def _set_shape(panel: Tensor, index: int, shape: int) -> None:
    before = int(panel[index].item())
    if before == NOT_RUN:
        panel[index] = shape
    elif before | 1 != shape:
        panel[index] = before & -2


def _shapes_at(panel: Tensor, num_signals: int) -> int:
    return panel.numel() - 1 - num_signals


def _mark_many_cpu(
    xs: list[Tensor],
    panel: Tensor,
    pad: Tensor | None,
    slots: list[int],
    num_signals: int,
    num_rows: list[int],
    num_heads: list[int],
    num_tokens: list[int],
    widths: list[int],
    neg_inf_legal: list[bool],
    padded: list[bool],
) -> None:
    geometry = zip(xs, slots, num_rows, num_heads, num_tokens, widths, neg_inf_legal, padded, strict=True)
    for x, slot, rows, heads, tokens, width, legal, use_pad in geometry:
        _mark_cpu(x, panel, pad if use_pad else None, slot, num_signals, rows, heads, tokens, width, legal)


def _mark_cuda(
    x: Tensor,
    panel: Tensor,
    pad: Tensor | None,
    slot: int,
    num_signals: int,
    num_rows: int,
    num_heads: int,
    num_tokens: int,
    width: int,
    neg_inf_legal: bool,
) -> None:
    lists = [slot], num_signals, [num_rows], [num_heads], [num_tokens], [width], [neg_inf_legal], [True]
    _mark_many_cuda([x], panel, pad, *lists)


def _mark_many_cuda(
    xs: list[Tensor],
    panel: Tensor,
    pad: Tensor | None,
    slots: list[int],
    num_signals: int,
    num_rows: list[int],
    num_heads: list[int],
    num_tokens: list[int],
    widths: list[int],
    neg_inf_legal: list[bool],
    padded: list[bool],
) -> None:
    from firetower.sensors import mark_triton

    per_row = [a * t * c for a, t, c in zip(num_heads, num_tokens, widths, strict=True)]
    for i in range(0, len(xs), MANY):
        part = slice(i, i + MANY)
        mark_triton.launch(
            [x.detach().contiguous() for x in xs[part]],
            panel,
            pad,
            slots=slots[part],
            num_signals=num_signals,
            shapes_at=_shapes_at(panel, num_signals),
            num_rows=num_rows[part],
            per_row=per_row[part],
            num_tokens=num_tokens[part],
            widths=widths[part],
            shapes=[shape_word(x.dtype, x.shape) for x in xs[part]],
            neg_inf_legal=neg_inf_legal[part],
            padded=padded[part],
        )


def _reset_cpu(panel: Tensor, num_sequences: int, num_tokens: int) -> None:
    panel.fill_(NOT_RUN)
    panel[-1] = step_word(num_sequences, num_tokens)


def _reset_cuda(panel: Tensor, num_sequences: int, num_tokens: int) -> None:
    from firetower.sensors import mark_triton

    mark_triton.launch_reset(panel, step_word(num_sequences, num_tokens))


def _no_output(*_args: object) -> None:
    """Shape rule of operators that return nothing."""


for _name, _cpu, _cuda in (
    ("mark", _mark_cpu, _mark_cuda),
    ("mark_many", _mark_many_cpu, _mark_many_cuda),
    ("reset", _reset_cpu, _reset_cuda),
):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"firetower::{_name}", _no_output, lib=_LIBRARY)
