# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the kernels of the block share: what sets a window's kernels apart, and marks. Import needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from firetower.sensors.mark_tile import codes, exponent_of

WINDOW_BLOCK = 16
"""Rows of a block of a window, whose kernels overlap."""

MARK = ("slot", "num_signals", "num_rows", "shape", "neg_inf")
"""What varies from mark to mark, and is not specialised."""


@triton.jit
def is_any_bad(b_x):
    """Whether any element of a tile as stored is not finite: two instructions an element and one reduction."""
    exponent = exponent_of(b_x)
    return tl.max(codes(b_x) & exponent) == exponent


@triton.jit
def mark_line(b_x, b_col, b_mask, row, width, p_panel, p_row_ids, i_id, slot, num_signals, num_rows, neg_inf):
    """`firetower.sensors.mark_tile.mark_tile` for lanes that all lie in one row: one word a row.

    Args:
        b_x: [N] in the stored type. b_col: int32 [N]. b_mask: bool [N], which lanes are stored.
        row: of the output, which has ``width`` columns.
        p_row_ids: row words, of which number ``i_id`` is this row's; None for no row words.
    """
    none: tl.constexpr = 9223372036854775807
    b_code = codes(b_x)
    exponent = exponent_of(b_x)
    b_bad = ((b_code & exponent) == exponent) & (b_code != neg_inf) & b_mask
    first = row.to(tl.int64) * width
    b_word = ((first + b_col) << 32) | (b_code.to(tl.int64) & 0xFFFFFFFF)
    word = tl.min(tl.where(b_bad, b_word, none))
    if word != none:
        if p_row_ids is None:
            tl.atomic_min(p_panel + slot, word, sem="relaxed")
        else:
            name = tl.load(p_row_ids + i_id).to(tl.int64)
            tl.atomic_min(p_panel + tl.where(name >= 0, slot, num_signals + slot), word, sem="relaxed")
            row_word = (slot.to(tl.int64) << 32) | ((word >> 32) - first)
            p_row = p_panel + 2 * num_signals + name
            tl.atomic_min(p_row, row_word, mask=(name >= 0) & (name < num_rows), sem="relaxed")


@triton.jit
def ask_into_cache(p_x, num_bytes, i_part, num_parts, LANES: tl.constexpr):  # noqa: N803 - a compile-time argument
    """Ask part ``i_part`` of a read-only tensor's bytes into the L2 cache, a piece a warp; no answer depends on it.

    Needs 16-byte alignment; ``LANES`` is the number of threads. A hint may come before a kernel waits: the cache is
    where all writes meet. One thread of a warp asks: the instruction's address is in registers that a warp shares.
    """
    b_lane = tl.arange(0, LANES)
    piece = (num_bytes // (num_parts * (LANES // 32))) // 16 * 16
    b_at = p_x.to(tl.int64) + (i_part * (LANES // 32) + b_lane // 32).to(tl.int64) * piece
    b_size = tl.where(b_lane % 32 == 0, piece, 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p bra DONE; cp.async.bulk.prefetch.L2.global [$1], $2; "
        "DONE: mov.u32 $0, 0; }",
        "=r,l,r", [b_at, b_size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
