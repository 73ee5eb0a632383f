# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Marking from inside a kernel: functions for the epilogue of any Triton kernel that holds a tile it is about to store.

A kernel takes seven arguments from `firetower.sensors.marks.mark_arguments`, in this order: ``p_panel, p_row_ids, slot,
num_signals, num_rows, shape, neg_inf``. ``p_panel`` is None where no sensor is on: Triton then drops the branch.
Declare ``slot``, ``num_signals``, ``num_rows``, ``shape`` and ``neg_inf`` in ``do_not_specialize``.

The tile must be what is stored, after the cast. Import needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mark_ran(p_panel, slot, num_signals, num_rows, shape):
    """Says that the signal ran, and as which shape; to be called by one program of the launch."""
    tl.atomic_min(p_panel + slot, 9223372036854775806, sem="relaxed")
    p_shape = p_panel + 2 * num_signals + num_rows + slot
    before = tl.load(p_shape)
    same = (before == 9223372036854775807) | ((before | 1) == shape)
    first = tl.where(before == 9223372036854775807, shape, before)
    tl.store(p_shape, tl.where(same, first, before & -2))


@triton.jit
def codes(b_x):
    """Raw patterns of a fp32, fp16 or bf16 tile as int32, the 16-bit ones zero-extended."""
    # one return: after a return inside an if, Triton compiles what follows all the same
    if b_x.dtype == tl.float32:
        b_code = b_x.to(tl.int32, bitcast=True)
    else:
        b_code = b_x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return b_code


@triton.jit
def exponent_of(b_x):
    """All ones of the exponent field of the tile's type: a code with every one of these set is not finite."""
    if b_x.dtype == tl.float32:
        exponent = 0x7F800000
    elif b_x.dtype == tl.bfloat16:
        exponent = 0x7F80
    else:
        exponent = 0x7C00
    return exponent


@triton.jit
def mark_tile(b_x, b_row, b_col, b_mask, width, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf):
    """Lower the panel's words where the tile holds an illegal value; one compare an element where it does not.

    Args:
        b_x: tile in the stored type, any shape.
        b_row: int32 rows of the output, broadcastable to the tile; b_col likewise.
        b_mask: bool, broadcastable: which lanes are stored.
        width: columns of the output.
        p_panel: int64 words. p_row_ids: row word of each row, negative for a pad; None for no row words.
    """
    b_code = codes(b_x)
    exponent = exponent_of(b_x)
    b_bad = ((b_code & exponent) == exponent) & (b_code != neg_inf) & b_mask
    if tl.max(b_bad.to(tl.int32)) != 0:
        none: tl.constexpr = 9223372036854775807
        b_index = b_row.to(tl.int64) * width + b_col
        b_word = (b_index << 32) | (b_code.to(tl.int64) & 0xFFFFFFFF)
        if p_row_ids is None:
            tl.atomic_min(p_panel + slot, tl.min(tl.where(b_bad, b_word, none)), sem="relaxed")
        else:
            b_id = tl.load(p_row_ids + b_row + b_col * 0, mask=b_bad, other=-1).to(tl.int64)
            b_real = b_bad & (b_id >= 0)
            first = tl.min(tl.where(b_real, b_word, none))
            first_pad = tl.min(tl.where(b_bad & (b_id < 0), b_word, none))
            tl.atomic_min(p_panel + slot, first, sem="relaxed")
            tl.atomic_min(p_panel + num_signals + slot, first_pad, sem="relaxed")
            b_row_word = (slot.to(tl.int64) << 32) | (b_col + b_row * 0).to(tl.int64)
            p_row = p_panel + 2 * num_signals + b_id
            tl.atomic_min(p_row, b_row_word, mask=b_real & (b_id < num_rows), sem="relaxed")
