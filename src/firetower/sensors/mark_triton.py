# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The marking kernel: reads each watched tensor once and touches the panel only when an element is bad.

Works on raw integer bits, never on floats, so that no load or compare can canonicalise a NaN. One
`atomic_min` a program gives the first position whatever the thread order. Import needs Triton;
`firetower.sensors.mark` imports this file on the first CUDA mark.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.core.words import CLEAN, NOT_RUN
from firetower.sensors.mark import BIT_TESTS

# of 1024 to 16384 elements and 2 to 16 warps the fastest on an H200, for one row and for 268 MB alike
_BLOCK, _NUM_WARPS = 1024, 4
_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _load_codes(p_x, offsets, mask, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Raw patterns as int32; a masked-off lane reads 0, which is finite in every format."""
    if MASKED:
        b_raw = tl.load(p_x + offsets, mask=mask, other=0)
    else:
        b_raw = tl.load(p_x + offsets)
    if BITS == 64:
        b_high = (b_raw >> 32).to(tl.int32)
        low_only = (b_raw.to(tl.int32) != 0) & ((b_high & 0xFFFFF) == 0)
        return tl.where(low_only, b_high | 1, b_high)
    if BITS == 16:
        return b_raw.to(tl.int32) & 0xFFFF
    return b_raw.to(tl.int32)


@triton.jit
def _is_bad(b_code, MASK: tl.constexpr, VALUE: tl.constexpr, NEG_INF: tl.constexpr):
    """``NEG_INF`` is the legal pattern, or 0 when -Inf is not legal: 0 is finite anyway."""
    return ((b_code & MASK) == VALUE) & (b_code != NEG_INF)


@triton.jit
def _decoded(number):
    """Undo `_encoded`: 32 bits again, also where twice the number needed 64."""
    return ((number - 3) >> 1).to(tl.int32)


@triton.jit
def _record(b_offset, b_code, b_bad, p_panel, p_pad, is_padded, slot, num_signals, num_rows, per_row,
            num_tokens, width, HAS_PAD: tl.constexpr):  # fmt: skip
    """The rare path: at least one element of this block is bad; one pass a sequence that the block
    touches."""
    none: tl.constexpr = 9223372036854775807
    b_row = b_offset // per_row
    b_word = (b_offset.to(tl.int64) << 32) | (b_code.to(tl.int64) & 0xFFFFFFFF)
    if HAS_PAD:
        b_token = (b_offset // width) % num_tokens
        b_asked = b_bad.to(tl.int32) * is_padded != 0
        b_is_pad = tl.load(p_pad + b_row * num_tokens + b_token, mask=b_asked, other=0) != 0
        first_pad = tl.min(tl.where(b_bad & b_is_pad, b_word, none), axis=0)
        if first_pad != none:
            tl.atomic_min(p_panel + num_signals + slot, first_pad, sem="relaxed")
        b_bad = b_bad & (b_is_pad == 0)
    row = tl.min(tl.where(b_bad, b_row, 2147483647), axis=0)
    last_row = tl.max(tl.where(b_bad, b_row, -1), axis=0)
    while row <= last_row:
        first = tl.min(tl.where(b_bad & (b_row == row), b_word, none), axis=0)
        if first != none:
            tl.atomic_min(p_panel + slot, first, sem="relaxed")
            if row < num_rows:
                offset = (first >> 32) - row.to(tl.int64) * per_row
                row_word = (slot.to(tl.int64) << 32) | offset
                tl.atomic_min(p_panel + 2 * num_signals + row, row_word, sem="relaxed")
        row += 1


@triton.jit
def _declare_ran(p_panel, p_shape, slot, shape, RAN: tl.constexpr, NOT_RUN: tl.constexpr):
    """Says that the signal ran, and as which shape; a second, different shape clears the word's lowest
    bit."""
    tl.atomic_min(p_panel + slot, RAN, sem="relaxed")
    before = tl.load(p_shape + slot)
    same = (before == NOT_RUN) | ((before | 1) == shape)
    first = tl.where(before == NOT_RUN, shape, before)
    tl.store(p_shape + slot, tl.where(same, first, before & -2))


@triton.jit(do_not_specialize=["num_signals", "shapes_at"])
def mark_fwd_kernel(p_xs, p_panel, p_pad, num_signals, shapes_at, starts, numels, slots, num_rows, per_rows,
                    num_tokens, widths, padded, shapes, MASKS: tl.constexpr, VALUES: tl.constexpr,
                    NEG_INFS: tl.constexpr, BITS: tl.constexpr, HAS_PAD: tl.constexpr, RAN: tl.constexpr,
                    NOT_RUN: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program a block of one tensor. All tuples of integers but ``shapes`` are `_encoded`; ``starts`` are
    the first programs of the tensors, the number of programs appended.

    The tensors take turns in the first loop alone, so that the long rare path is compiled once.
    """
    i_program = tl.program_id(0)
    b_lane = tl.arange(0, BLOCK)
    b_code = tl.zeros([BLOCK], tl.int32)
    b_bad = b_code != 0
    begin = i_program * 0
    slot = _decoded(slots[0])
    rows = _decoded(num_rows[0])
    per_row = _decoded(per_rows[0])
    tokens = _decoded(num_tokens[0])
    width = _decoded(widths[0])
    is_padded = _decoded(padded[0])
    for i in tl.static_range(NUM):
        if (i_program >= _decoded(starts[i])) & (i_program < _decoded(starts[i + 1])):
            begin = (i_program - _decoded(starts[i])) * BLOCK
            slot = _decoded(slots[i])
            rows = _decoded(num_rows[i])
            per_row = _decoded(per_rows[i])
            tokens = _decoded(num_tokens[i])
            width = _decoded(widths[i])
            is_padded = _decoded(padded[i])
            # compared from the end: begin + BLOCK would wrap in a tensor of nearly 2**31 elements
            left = _decoded(numels[i]) - begin
            if left >= BLOCK:
                b_code = _load_codes(p_xs[i], begin + b_lane, None, BITS[i], False)
            else:
                b_code = _load_codes(p_xs[i], begin + b_lane, b_lane < left, BITS[i], True)
            b_bad = _is_bad(b_code, MASKS[i], VALUES[i], NEG_INFS[i])
            if begin == 0:
                _declare_ran(p_panel, p_panel + shapes_at, slot, shapes[i], RAN, NOT_RUN)
    if tl.max(b_bad.to(tl.int32), axis=0) != 0:
        _record(begin + b_lane, b_code, b_bad, p_panel, p_pad, is_padded, slot, num_signals, rows, per_row,
                tokens, width, HAS_PAD)  # fmt: skip


@triton.jit(do_not_specialize=["num_words", "step"])
def reset_fwd_kernel(p_panel, num_words, step, NOT_RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Every word to ``NOT_RUN``, the last one to ``step``."""
    b_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_word = tl.where(b_index == num_words - 1, step.to(tl.int64), NOT_RUN)
    tl.store(p_panel + b_index, b_word, mask=b_index < num_words)


def _encoded(numbers: Sequence[int]) -> tuple[int, ...]:
    """Odd numbers above 1: Triton compiles a kernel anew for arguments of 1 and for multiples of 16, and
    inside a tuple ``do_not_specialize`` is ignored; this way all slots and shapes share one compiled
    kernel."""
    return tuple(2 * n + 3 for n in numbers)


def launch(
    xs: Sequence[Tensor],
    panel: Tensor,
    pad: Tensor | None,
    *,
    slots: Sequence[int],
    num_signals: int,
    shapes_at: int,
    num_rows: Sequence[int],
    per_row: Sequence[int],
    num_tokens: Sequence[int],
    widths: Sequence[int],
    shapes: Sequence[int],
    neg_inf_legal: Sequence[bool],
    padded: Sequence[bool],
) -> None:
    """Mark contiguous tensors of one device in a single launch; other arguments as `firetower::mark_many`.

    Args:
        xs: contiguous, each below 2**31 elements; element ``f`` belongs to row ``f // per_row``.
        panel: int64 words, on the same device.
        pad: [B, T] bool or uint8; read only for tensors with ``padded``.
        shapes_at: index of the first shape word.
        shapes: words of `firetower.sensors.mark.shape_word`.
    """
    starts = [0]
    for x in xs:
        starts.append(starts[-1] + max(1, triton.cdiv(x.numel(), _BLOCK)))
    tests = [BIT_TESTS[x.dtype] for x in xs]
    use_pad = [pad is not None and p for p in padded]
    with torch.cuda.device_of(panel):
        mark_fwd_kernel[(starts[-1],)](
            tuple(x.view(_INT_VIEW[x.itemsize]) for x in xs),
            panel,
            pad.contiguous().view(torch.uint8) if pad is not None and any(use_pad) else None,
            num_signals,
            shapes_at,
            _encoded(starts),
            _encoded([x.numel() for x in xs]),
            _encoded(slots),
            _encoded(num_rows),
            _encoded(per_row),
            _encoded(num_tokens),
            _encoded(widths),
            _encoded(use_pad),
            tuple(shapes),
            MASKS=tuple(t[0] for t in tests),
            VALUES=tuple(t[1] for t in tests),
            NEG_INFS=tuple(t[2] if legal else 0 for t, legal in zip(tests, neg_inf_legal, strict=True)),
            BITS=tuple(8 * x.itemsize for x in xs),
            HAS_PAD=any(use_pad),
            RAN=CLEAN,
            NOT_RUN=NOT_RUN,
            NUM=len(xs),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def launch_reset(panel: Tensor, step: int) -> None:
    """Empty the panel in a single launch."""
    num_words = panel.numel()
    with torch.cuda.device_of(panel):
        reset_fwd_kernel[(triton.cdiv(num_words, _BLOCK),)](
            panel, num_words, step, NOT_RUN=NOT_RUN, BLOCK=_BLOCK
        )
