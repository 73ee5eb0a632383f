# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Marking a large tile that was just stored, without paying for the words in registers.

`firetower.sensors.mark_tile.mark_tile` on a whole tile makes the compiler keep a 64-bit word for every element of a
thread, though it is hardly ever computed: 127 registers instead of 32 in an RMS norm of 2048, and a quarter of the
programs on each multiprocessor. Here the tile is only asked whether anything in it is bad; if so, it is read back from
memory a few columns at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firetower.sensors.mark_tile import codes, exponent_of, mark_tile


@triton.jit
def mark_stored(b_x, b_mask, p_row, b_row, b_in, first_col, WIDTH: tl.constexpr, COLS: tl.constexpr,
                STEP: tl.constexpr, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf):  # fmt: skip
    """Lower the panel's words where the tile holds an illegal value.

    Args:
        b_x: [rows, COLS] as stored; b_mask: which lanes of it are.
        p_row: pointers [rows, 1] to the stored rows; b_row: int32 [rows, 1] their numbers; b_in: bool [rows, 1].
        first_col: column of the tile's first lane. WIDTH: columns of the output.
        STEP: columns read back at once; ``rows * STEP`` no fewer than the threads of a program.
    """
    b_code = codes(b_x)
    exponent = exponent_of(b_x)
    b_bad = ((b_code & exponent) == exponent) & b_mask
    if tl.max(b_bad.to(tl.int32)) != 0:
        mark_again(p_row, b_row, b_in, first_col, WIDTH, COLS, STEP, p_panel, p_row_ids, slot, num_signals, num_rows,
                   neg_inf)  # fmt: skip


@triton.jit
def mark_again(p_row, b_row, b_in, first_col, WIDTH: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
               p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf):  # fmt: skip
    """Read rows back and mark them; arguments as `mark_stored`."""
    # what other threads of the program stored must be seen
    tl.debug_barrier()
    for start in range(0, COLS, STEP):
        b_col = first_col + start + tl.arange(0, STEP)[None, :]
        b_mask = b_in & (b_col < WIDTH)
        b_again = tl.load(p_row + b_col, mask=b_mask, other=0.0)
        mark_tile(b_again, b_row, b_col, b_mask, WIDTH, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)
