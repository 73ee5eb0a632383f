# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Quantised products for windows: blocks are read as they stand in the file, codes and scales meet in registers.

A row of weights is cut into lanes of 64 weights, a quarter of a K block (or of 32, where that is a block). A program
takes a few weight rows for one token and walks the row in chunks of 32 lanes, one a thread, so that a scale is worked
out once a lane and nothing passes between threads before the last sum. What a token gets does not depend on the others:
each has programs of its own, the same for any number of them.

Products are integers, four in an instruction. ``quant_linear_q8_1`` takes activations of one byte.
``quant_linear`` first splits activations into three bytes over a power of two for each 32 of them, which is what an
fp32 sum keeps of them. Import needs Triton.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firetower.ops.quant import assembly, lanes, torch_path
from firetower.ops.quant.activations import BLOCK, Activations
from firetower.ops.quant.kinds import Kind
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

# Timed on an H200 among 6 tiles with and without the two switches below, on 12,288 and 248,320 rows: within 10% of the
# best for Q4_K and Q6_K with either kind of activations. Four rows a thread leave each 12 or more loads of 16 bytes in
# flight; 12,288 rows make 1,536 programs
_LANES, _ROWS, _NUM_WARPS = 32, 8, 2
_SKEW_WIDTH = 16
"""Bytes of the words that blocks of Q6_K, which stand at multiples of 2, are read by: 4, 8 or 16."""
_PDL = True
"""Whether a launch may begin while the one before it ends; it waits for that one's answers before it reads anything."""
_ASK = True
"""Whether a program asks for its weights to be brought into the L2 cache, before it waits."""
_SPLIT_BLOCKS = 16  # blocks of 32 activations that a program splits
_TOKENS_BLOCK = 64  # the same, that a program quantises
_MARK = ["slot", "num_signals", "num_rows", "shape", "neg_inf"]
_PREFETCH = tl.constexpr(assembly.PREFETCH)


@triton.jit
def _run_at(b_lane, num_lanes, RUN: tl.constexpr, KIND: tl.constexpr, IN_LANES: tl.constexpr):
    """Where a lane finds its run ``RUN`` of 16 activations, in runs: as the activations stand, or sorted by lanes."""
    if IN_LANES:
        b_at = RUN * num_lanes + b_lane
    elif KIND == "Q6_K":
        b_at = 8 * (b_lane // 2) + 2 * RUN + b_lane % 2
    elif KIND == "Q4_1" or KIND == "Q8_0":
        b_at = 2 * b_lane + RUN
    else:
        b_at = 4 * b_lane + RUN
    return b_at


@triton.jit
def _x_run(p_x, b_lane, num_lanes, words, RUN: tl.constexpr, KIND: tl.constexpr, LIMBS: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """A run of activations, four words each: the lowest bytes, those above them, the highest, which is the signed one;
    the highest three times where there is one only."""
    p_run = p_x + 4 * _run_at(b_lane, num_lanes, RUN, KIND, LIMBS == 3)
    if LIMBS == 3:
        b_low, b_middle = lanes.vector(p_run, 16, ASM), lanes.vector(p_run + words, 16, ASM)
        b_top = lanes.vector(p_run + 2 * words, 16, ASM)
    else:
        b_top = lanes.vector(p_run, 16, ASM)
        b_low, b_middle = b_top, b_top
    return b_low, b_middle, b_top


@triton.jit
def _sums(b_codes, b_x, b_before, CODES: tl.constexpr, PART: tl.constexpr, LIMBS: tl.constexpr, ASM: tl.constexpr):
    """Products of a run for each byte of the activations, added to what came before."""
    b_low, b_middle, b_top = b_before
    b_x_low, b_x_middle, b_x_top = b_x
    b_top = lanes.dot(b_codes, b_x_top, b_top, CODES, True, PART, ASM)
    if LIMBS == 3:
        b_low = lanes.dot(b_codes, b_x_low, b_low, CODES, False, PART, ASM)
        b_middle = lanes.dot(b_codes, b_x_middle, b_middle, CODES, False, PART, ASM)
    return b_low, b_middle, b_top


@triton.jit
def _value(b_sums, LIMBS: tl.constexpr):
    """A sum as fp32, in steps of the activations."""
    b_low, b_middle, b_top = b_sums
    if LIMBS == 3:
        b_value = b_top.to(tl.float32) * 65536.0 + (b_middle * 256 + b_low).to(tl.float32)
    else:
        b_value = b_top.to(tl.float32)
    return b_value


@triton.jit
def _less_32(b_x, LIMBS: tl.constexpr, ASM: tl.constexpr):
    """What a sum of codes that are 32 too large must start from."""
    b_none = b_x[2][0] * 0
    b_32 = b_none + 0x20202020
    b_low, b_middle, b_top = _sums((b_32, b_32, b_32, b_32), b_x, (b_none, b_none, b_none), False, 255, LIMBS, ASM)
    return -b_low, -b_middle, -b_top


@triton.jit
def _k_products(p_block, b_place, b_x0, b_x1, b_x2, b_x3, b_steps, b_totals, KIND: tl.constexpr,
                BLOCK_BYTES: tl.constexpr, LIMBS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """`_lane_products` of Q4_K and Q5_K, of blocks at ``p_block`` [rows, lanes]."""
    b_zero = b_x0[2][0] * 0
    b_none = (b_zero, b_zero, b_zero)
    b_scale, b_minimum, b_sub0, b_sub1, b_min0, b_min1 = lanes.six_bit_scales(
        lanes.vector(p_block, WIDTH, ASM), b_place, ASM
    )
    p_codes = p_block + (BLOCK_BYTES - 128) // 4 + 8 * b_place
    b_a, b_b = lanes.vector(p_codes, WIDTH, ASM), lanes.vector(p_codes + 4, WIDTH, ASM)
    if KIND == "Q4_K":
        b_low = _sums(b_b, b_x1, _sums(b_a, b_x0, b_none, False, 15, LIMBS, ASM), False, 15, LIMBS, ASM)
        b_high = _sums(b_b, b_x3, _sums(b_a, b_x2, b_none, False, 240, LIMBS, ASM), False, 240, LIMBS, ASM)
        b_high_value = _value(b_high, LIMBS) * 0.0625
    else:
        b_top_a = lanes.shifted(lanes.vector(p_block + 4, WIDTH, ASM), 2 * b_place)
        b_top_b = lanes.shifted(lanes.vector(p_block + 8, WIDTH, ASM), 2 * b_place)
        b_low_a = lanes.topped(lanes.nibbles(b_a, False), b_top_a, 4, 0x10101010)
        b_low_b = lanes.topped(lanes.nibbles(b_b, False), b_top_b, 4, 0x10101010)
        b_high_a = lanes.topped(lanes.nibbles(b_a, True), b_top_a, 3, 0x10101010)
        b_high_b = lanes.topped(lanes.nibbles(b_b, True), b_top_b, 3, 0x10101010)
        b_low = _sums(b_low_b, b_x1, _sums(b_low_a, b_x0, b_none, False, 255, LIMBS, ASM), False, 255, LIMBS, ASM)
        b_high = _sums(b_high_b, b_x3, _sums(b_high_a, b_x2, b_none, False, 255, LIMBS, ASM), False, 255, LIMBS, ASM)
        b_high_value = _value(b_high, LIMBS)
    b_part = b_steps[0] * (b_sub0 * _value(b_low, LIMBS)) + b_steps[1] * (b_sub1 * b_high_value)
    b_less = b_min0 * b_totals[0] + b_min1 * b_totals[1]
    return b_scale * b_part - b_minimum * b_less


@triton.jit
def _q6_products(p_word, b_row_at, b_block, b_place, b_x0, b_x1, b_x2, b_x3, b_steps, BLOCK_BYTES: tl.constexpr,
                 LIMBS: tl.constexpr, WIDTH: tl.constexpr, ROW_ALIGNED: tl.constexpr,
                 ASM: tl.constexpr):  # fmt: skip
    """`_lane_products` of Q6_K: a lane has every second 16 of a half's 128 weights."""
    b_upper, b_odd = b_place >= 2, b_place % 2
    b_at = BLOCK_BYTES * b_block + tl.where(b_upper, 64, 0) + 16 * b_odd
    b_a0, b_a1, b_a2, b_a3, _ = lanes.skewed(p_word, b_row_at, b_at, False, WIDTH, ROW_ALIGNED, ASM)
    b_b0, b_b1, b_b2, b_b3, _ = lanes.skewed(p_word, b_row_at, b_at + 32, False, WIDTH, ROW_ALIGNED, ASM)
    b_t0, b_t1, b_t2, b_t3, _ = lanes.skewed(
        p_word, b_row_at, b_at + tl.where(b_upper, 96, 128), False, WIDTH, ROW_ALIGNED, ASM
    )
    b_s0, b_s1, b_s2, b_s3, b_last = lanes.skewed(
        p_word, b_row_at, BLOCK_BYTES * b_block + 192, True, WIDTH, ROW_ALIGNED, ASM
    )
    b_a, b_b, b_t = (b_a0, b_a1, b_a2, b_a3), (b_b0, b_b1, b_b2, b_b3), (b_t0, b_t1, b_t2, b_t3)
    b_sub0, b_sub1, b_sub2, b_sub3 = lanes.signed_scales((b_s0, b_s1, b_s2, b_s3), b_upper, b_odd == 1, ASM)
    b_0 = lanes.topped(lanes.nibbles(b_a, False), b_t, 4, 0x30303030)
    b_1 = lanes.topped(lanes.nibbles(b_b, False), b_t, 2, 0x30303030)
    b_2 = lanes.topped(lanes.nibbles(b_a, True), b_t, 0, 0x30303030)
    b_3 = lanes.topped(lanes.nibbles(b_b, True), b_t, -2, 0x30303030)
    b_v0 = _value(_sums(b_0, b_x0, _less_32(b_x0, LIMBS, ASM), False, 255, LIMBS, ASM), LIMBS)
    b_v1 = _value(_sums(b_1, b_x1, _less_32(b_x1, LIMBS, ASM), False, 255, LIMBS, ASM), LIMBS)
    b_v2 = _value(_sums(b_2, b_x2, _less_32(b_x2, LIMBS, ASM), False, 255, LIMBS, ASM), LIMBS)
    b_v3 = _value(_sums(b_3, b_x3, _less_32(b_x3, LIMBS, ASM), False, 255, LIMBS, ASM), LIMBS)
    b_part = (b_steps[0] * (b_sub0 * b_v0) + b_steps[1] * (b_sub1 * b_v1)) + (
        b_steps[2] * (b_sub2 * b_v2) + b_steps[3] * (b_sub3 * b_v3)
    )
    return lanes.half(b_last) * b_part


@triton.jit
def _lane_products(p_word, b_row_at, b_block, b_place, b_x0, b_x1, b_x2, b_x3, b_steps, b_totals, p_values,
                   KIND: tl.constexpr, BLOCK_BYTES: tl.constexpr, LIMBS: tl.constexpr, WIDTH: tl.constexpr,
                   ROW_ALIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """What each lane adds to its rows: fp32 [rows, lanes]. ``b_x0`` to ``b_x3`` are its runs; ``b_steps`` and
    ``b_totals`` the scales and sums of the blocks of 32 that they stand in."""
    b_zero = b_x0[2][0] * 0
    b_none = (b_zero, b_zero, b_zero)
    p_block = p_word + b_row_at // 4 + b_block * (BLOCK_BYTES // 4)
    if KIND == "Q4_K" or KIND == "Q5_K":
        b_found = _k_products(p_block, b_place, b_x0, b_x1, b_x2, b_x3, b_steps, b_totals, KIND, BLOCK_BYTES, LIMBS,
                              WIDTH, ASM)  # fmt: skip
    elif KIND == "Q6_K":
        b_found = _q6_products(p_word, b_row_at, b_block, b_place, b_x0, b_x1, b_x2, b_x3, b_steps, BLOCK_BYTES, LIMBS,
                               WIDTH, ROW_ALIGNED, ASM)  # fmt: skip
    elif KIND == "IQ4_XS":
        b_first, b_second = lanes.pair(p_block, WIDTH, ASM)
        # the sub-scale's upper two bits stand in the upper half of the first word, its lower four in the second
        b_upper = b_first >> (16 + 4 * b_place)
        b_lower = b_second >> (8 * b_place)
        b_sub0 = (((b_lower & 15) | ((b_upper & 3) << 4)) - 32).to(tl.float32)
        b_sub1 = ((((b_lower >> 4) & 15) | ((b_upper & 12) << 2)) - 32).to(tl.float32)
        p_codes = p_block + 2 + 8 * b_place
        b_a, b_b = lanes.vector(p_codes, WIDTH, ASM), lanes.vector(p_codes + 4, WIDTH, ASM)
        b_low_a = lanes.looked_up(lanes.nibbles(b_a, False), p_values, ASM)
        b_high_a = lanes.looked_up(lanes.nibbles(b_a, True), p_values, ASM)
        b_low_b = lanes.looked_up(lanes.nibbles(b_b, False), p_values, ASM)
        b_high_b = lanes.looked_up(lanes.nibbles(b_b, True), p_values, ASM)
        b_0 = _sums(b_high_a, b_x1, _sums(b_low_a, b_x0, b_none, True, 255, LIMBS, ASM), True, 255, LIMBS, ASM)
        b_1 = _sums(b_high_b, b_x3, _sums(b_low_b, b_x2, b_none, True, 255, LIMBS, ASM), True, 255, LIMBS, ASM)
        b_part = b_steps[0] * (b_sub0 * _value(b_0, LIMBS)) + b_steps[1] * (b_sub1 * _value(b_1, LIMBS))
        b_found = lanes.half(b_first) * b_part
    elif KIND == "Q4_1":
        b_both = tl.load(p_block)
        b_a = lanes.vector(p_block + 1, WIDTH, ASM)
        b_low = _value(_sums(b_a, b_x0, b_none, False, 15, LIMBS, ASM), LIMBS)
        b_high = _value(_sums(b_a, b_x1, b_none, False, 240, LIMBS, ASM), LIMBS)
        b_part = b_steps[0] * (b_low + b_high * 0.0625)
        b_found = lanes.half(b_both) * b_part + lanes.half(b_both >> 16) * b_totals[0]
    else:
        b_byte = b_row_at + BLOCK_BYTES * b_block
        b_skew = (b_byte % 4).to(tl.int32)
        p_first = p_word + (b_byte - b_skew) // 4
        b_0, b_1, b_2, b_3 = lanes.vector(p_first, WIDTH, ASM)
        b_4, b_5, b_6, b_7 = lanes.vector(p_first + 4, WIDTH, ASM)
        b_8 = tl.load(p_first + 8)
        b_scale = lanes.half(b_0 >> (8 * b_skew))
        b_selector = tl.where(b_skew == 0, 0x5432, 0x7654)
        b_0, b_1 = lanes.permute(b_0, b_1, b_selector, ASM), lanes.permute(b_1, b_2, b_selector, ASM)
        b_2, b_3 = lanes.permute(b_2, b_3, b_selector, ASM), lanes.permute(b_3, b_4, b_selector, ASM)
        b_4, b_5 = lanes.permute(b_4, b_5, b_selector, ASM), lanes.permute(b_5, b_6, b_selector, ASM)
        b_6, b_7 = lanes.permute(b_6, b_7, b_selector, ASM), lanes.permute(b_7, b_8, b_selector, ASM)
        b_low = _sums((b_0, b_1, b_2, b_3), b_x0, b_none, True, 255, LIMBS, ASM)
        b_sum = _sums((b_4, b_5, b_6, b_7), b_x1, b_low, True, 255, LIMBS, ASM)
        b_found = b_scale * (b_steps[0] * _value(b_sum, LIMBS))
    return b_found


@triton.jit
def _block_values(p_values, b_lane, b_live, KIND: tl.constexpr):
    """Scales, or sums, of the blocks of 32 activations that a lane's runs stand in: four of Q6_K, two, or one; 0 where
    there is no lane."""
    if KIND == "Q6_K":
        p_first = p_values + 4 * (b_lane // 2)
        b_0, b_1 = tl.load(p_first).to(tl.float32), tl.load(p_first + 1).to(tl.float32)
        b_2, b_3 = tl.load(p_first + 2).to(tl.float32), tl.load(p_first + 3).to(tl.float32)
    elif KIND == "Q4_1" or KIND == "Q8_0":
        b_0 = tl.load(p_values + b_lane).to(tl.float32)
        b_1, b_2, b_3 = b_0, b_0, b_0
    else:
        b_0, b_1 = tl.load(p_values + 2 * b_lane).to(tl.float32), tl.load(p_values + 2 * b_lane + 1).to(tl.float32)
        b_2, b_3 = b_0, b_1
    return (
        tl.where(b_live, b_0, 0.0), tl.where(b_live, b_1, 0.0), tl.where(b_live, b_2, 0.0), tl.where(b_live, b_3, 0.0)
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_lanes", *_MARK])
def quant_linear_fwd_kernel(p_raw, p_x, p_step, p_total, p_values, p_y, rows, num_lanes, row_bytes, columns, p_panel,
                            p_row_ids, slot, num_signals, num_rows, shape, neg_inf, KIND: tl.constexpr,
                            BLOCK_BYTES: tl.constexpr, PLACES: tl.constexpr, LIMBS: tl.constexpr, LANES: tl.constexpr,
                            ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_ALIGNED: tl.constexpr, ASM: tl.constexpr,
                            ASK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (token, tile of weight rows). ``PLACES`` lanes make a block. Activations are int32 words [T, LIMBS,
    columns / 4], with a step and a sum for each 32 of them; in the order of the lanes if there are three limbs."""
    i_token = tl.program_id(0)
    i_tile = tl.program_id(1)
    token = i_token.to(tl.int64)
    b_row = i_tile * ROWS + tl.arange(0, ROWS)
    b_row_mask = b_row < rows
    if PDL:
        gdc_launch_dependents()
    if ASK and ROW_ALIGNED and WIDTH == 16:
        first = (i_tile * ROWS).to(tl.int64) * row_bytes
        num_bytes = tl.minimum(rows - i_tile * ROWS, ROWS) * row_bytes
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r", [(p_raw + first).to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
        )
    # rows and lanes that there are none of repeat the last: what they read is there, and what they add is 0
    b_row_at = tl.minimum(b_row, rows - 1).to(tl.int64)[:, None] * row_bytes
    p_word = p_raw.to(tl.pointer_type(tl.int32))
    words = columns // 4
    p_mine = p_x + token * LIMBS * words
    b_acc = tl.zeros([ROWS, LANES], tl.float32)
    if PDL:
        gdc_wait()
    for i in range(tl.cdiv(num_lanes, LANES)):
        b_any = (i * LANES + tl.arange(0, LANES))[None, :]
        b_live = b_any < num_lanes
        b_lane = tl.minimum(b_any, num_lanes - 1)
        b_x0 = _x_run(p_mine, b_lane, num_lanes, words, 0, KIND, LIMBS, ASM)
        b_x1 = _x_run(p_mine, b_lane, num_lanes, words, 1, KIND, LIMBS, ASM)
        b_x2, b_x3 = b_x0, b_x1
        if PLACES > 1:
            b_x2 = _x_run(p_mine, b_lane, num_lanes, words, 2, KIND, LIMBS, ASM)
            b_x3 = _x_run(p_mine, b_lane, num_lanes, words, 3, KIND, LIMBS, ASM)
        b_steps = _block_values(p_step + token * (columns // 32), b_lane, b_live, KIND)
        b_totals = b_steps
        if KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q4_1":
            b_totals = _block_values(p_total + token * (columns // 32), b_lane, b_live, KIND)
        b_acc += _lane_products(
            p_word, b_row_at, b_lane // PLACES, b_lane % PLACES, b_x0, b_x1, b_x2, b_x3, b_steps, b_totals, p_values,
            KIND, BLOCK_BYTES, LIMBS, WIDTH, ROW_ALIGNED, ASM,
        )  # fmt: skip
    b_y = tl.sum(b_acc, axis=1).to(p_y.dtype.element_ty)
    tl.store(p_y + token * rows + b_row, b_y, mask=b_row_mask)
    if p_panel is not None:
        if (i_token == 0) & (i_tile == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_y, i_token, b_row, b_row_mask, rows, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)


@triton.jit(do_not_specialize=["num_lanes"])
def quant_split_fwd_kernel(p_x, p_bytes, p_step, p_total, num_blocks, num_lanes, stride_x, KIND: tl.constexpr,
                           BLOCKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (tile of blocks, token): activations as three bytes over a step for each 32, a power of two.

    The largest of a block has 21 bits below its first, so that a step is what an fp32 sum of 16 such values keeps. A
    value is exact if its last bit stands there or above: in bf16 all down to 2**-14 of the largest. Blocks with a NaN
    or Inf: step and sum NaN, bytes 0.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    b_block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    b_mask = b_block < num_blocks
    b_in = tl.arange(0, 32)[None, :]
    b_column = b_block[:, None] * 32 + b_in
    b_x = tl.load(p_x + token * stride_x + b_column, mask=b_mask[:, None], other=0.0).to(tl.float32)
    # as integers: a comparison of floats would drop a NaN
    b_size = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    b_bad = b_size >= 0x7F800000
    # no step below the least normal number: what is below 2**-127 then is nothing
    b_exponent = tl.maximum(b_size >> 23, 22)
    b_inverse = ((275 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_step = ((b_exponent - 21) << 23).to(tl.float32, bitcast=True)
    # adding 1.5 * 2**23 rounds to the nearest integer, ties to even, and leaves it in the last bits
    b_usable = tl.where(b_bad[:, None], 0.0, b_x)
    b_rounded = b_usable * tl.where(b_bad, 0.0, b_inverse)[:, None] + 12582912.0
    b_value = b_rounded.to(tl.int32, bitcast=True) - 0x4B400000
    b_total = tl.sum(b_value, axis=1).to(tl.float32) * b_step
    b_run = b_block[:, None] * 2 + b_in // 16
    if KIND == "Q6_K":
        b_lane, b_slot = b_run // 16 * 4 + b_run // 8 % 2 * 2 + b_run % 2, b_run // 2 % 4
    elif KIND == "Q4_1" or KIND == "Q8_0":
        b_lane, b_slot = b_run // 2, b_run % 2
    else:
        b_lane, b_slot = b_run // 4, b_run % 4
    p_byte = p_bytes + token * num_blocks * 96 + (b_slot * num_lanes + b_lane) * 16 + b_in % 16
    tl.store(p_byte, b_value.to(tl.int8), mask=b_mask[:, None])
    tl.store(p_byte + num_blocks * 32, (b_value >> 8).to(tl.int8), mask=b_mask[:, None])
    tl.store(p_byte + num_blocks * 64, (b_value >> 16).to(tl.int8), mask=b_mask[:, None])
    tl.store(p_step + token * num_blocks + b_block, tl.where(b_bad, float("nan"), b_step), mask=b_mask)
    tl.store(p_total + token * num_blocks + b_block, tl.where(b_bad, float("nan"), b_total), mask=b_mask)


@triton.jit(do_not_specialize=["num_blocks", *_MARK])
def quant_activations_fwd_kernel(p_x, p_codes, p_scale, p_total, num_blocks, stride_x, p_panel, p_row_ids, slot,
                                 num_signals, num_rows, shape, neg_inf, BLOCKS: tl.constexpr,
                                 PDL: tl.constexpr):  # fmt: skip
    """Program (tile of blocks, token): `activations.quantize`; marks the scales as stored."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_tile = tl.program_id(0)
    i_token = tl.program_id(1)
    token = i_token.to(tl.int64)
    b_block = i_tile * BLOCKS + tl.arange(0, BLOCKS)
    b_mask = b_block < num_blocks
    b_column = b_block[:, None] * 32 + tl.arange(0, 32)[None, :]
    b_x = tl.load(p_x + token * stride_x + b_column, mask=b_mask[:, None], other=0.0).to(tl.float32)
    # as integers: a comparison of floats would drop a NaN
    b_size = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    b_bad = b_size >= 0x7F800000
    b_largest = tl.where(b_bad, 0, b_size).to(tl.float32, bitcast=True)
    b_scale = tl.minimum(tl.math.div_rn(b_largest, 127.0), 65504.0).to(tl.float16)
    b_wide = b_scale.to(tl.float32)
    b_none = b_wide == 0
    b_ratio = tl.math.div_rn(b_x, tl.where(b_none, 1.0, b_wide)[:, None])
    # adding 1.5 * 2**23 rounds to the nearest integer, ties to even; what is beyond 127 is so afterwards too
    b_ratio = tl.minimum(tl.maximum(b_ratio, -200.0), 200.0)
    b_code = (b_ratio + 12582912.0) - 12582912.0
    b_code = tl.minimum(tl.maximum(b_code, -127.0), 127.0)
    b_code = tl.where((b_none | b_bad)[:, None], 0.0, b_code).to(tl.int8)
    b_sum = tl.sum(b_code.to(tl.int32), axis=1).to(tl.float32) * b_wide
    b_sum = tl.minimum(tl.maximum(b_sum, -65504.0), 65504.0)
    b_total = tl.where(b_bad, float("nan"), b_sum).to(tl.float16)
    b_stored = tl.where(b_bad, float("nan"), b_wide).to(tl.float16)
    tl.store(p_codes + token * num_blocks * 32 + b_column, b_code, mask=b_mask[:, None])
    tl.store(p_scale + token * num_blocks + b_block, b_stored, mask=b_mask)
    tl.store(p_total + token * num_blocks + b_block, b_total, mask=b_mask)
    if p_panel is not None:
        if (i_tile == 0) & (i_token == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_stored, i_token, b_block, b_mask, num_blocks, p_panel, p_row_ids, slot, num_signals, num_rows,
                  neg_inf)  # fmt: skip


_PLACES = {"Q8_0": 1, "Q4_1": 1, "Q4_K": 4, "Q5_K": 4, "Q6_K": 4, "IQ4_XS": 4}
"""Lanes a block."""

_WIDTHS = {"Q8_0": 4, "Q4_1": 4, "Q4_K": 16, "Q5_K": 16, "IQ4_XS": 8}
"""Bytes of the widest word that every part of a block is a multiple of; Q6_K has `_SKEW_WIDTH`."""


def has_assembly() -> bool:
    """Whether kernels are compiled; the interpreter knows no PTX."""
    return isinstance(quant_linear_fwd_kernel, triton.JITFunction)


def _is_early() -> bool:
    """Whether launches may begin early: `_PDL`, and a device to do so."""
    return _PDL and has_assembly()


def _product(x: Tensor, step: Tensor, total: Tensor, limbs: int, raw: Tensor, kind: Kind, y: Tensor,
             mark: Mark | None) -> None:  # fmt: skip
    """``y [T, rows]`` of activations as words int32 [T, limbs, columns / 4], with steps and sums [T, columns / 32]."""
    tokens, rows = y.shape
    row_bytes, places = raw.shape[1], _PLACES[kind.name]
    num_lanes = row_bytes // kind.block_bytes * places
    width = math.gcd(raw.data_ptr(), _WIDTHS.get(kind.name, _SKEW_WIDTH))
    values = torch_path.iq4_values(raw.device) if kind.name == "IQ4_XS" else None
    with torch.cuda.device_of(raw):
        quant_linear_fwd_kernel[(tokens, triton.cdiv(rows, _ROWS))](
            raw, x, step, total, values, y, rows, num_lanes, row_bytes, num_lanes // places * kind.block_elements,
            *mark_arguments(mark, y.dtype, tokens, rows), KIND=kind.name, BLOCK_BYTES=kind.block_bytes, PLACES=places,
            LIMBS=limbs, LANES=min(_LANES, triton.next_power_of_2(num_lanes)), ROWS=_ROWS, WIDTH=width,
            ROW_ALIGNED=row_bytes % width == 0, ASM=has_assembly(), ASK=_ASK and has_assembly(), PDL=_is_early(),
            num_warps=_NUM_WARPS, launch_pdl=_is_early(),
        )  # fmt: skip


def split(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [T, K] as ``quant_split_fwd_kernel`` leaves them, for weights of a format.

    Returns:
        Bytes int8 [T, 3, K], lowest first, in runs of 16 in the order of the lanes; steps and sums fp32 [T, K / 32].
    """
    tokens, columns = x.shape
    num_blocks = columns // BLOCK
    parts = torch.empty(tokens, 3, columns, dtype=torch.int8, device=x.device)
    step = torch.empty(tokens, num_blocks, dtype=torch.float32, device=x.device)
    total = torch.empty_like(step)
    with torch.cuda.device_of(x):
        quant_split_fwd_kernel[(triton.cdiv(num_blocks, _SPLIT_BLOCKS), tokens)](
            x, parts, step, total, num_blocks, columns // kind.block_elements * _PLACES[kind.name], x.stride(0),
            KIND=kind.name, BLOCKS=_SPLIT_BLOCKS, PDL=_is_early(), num_warps=_NUM_WARPS, launch_pdl=_is_early(),
        )  # fmt: skip
    return parts, step, total


def linear(x: Tensor, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows] = x [T, K] W^T``; arguments checked."""
    if len(x):
        parts, step, total = split(x, kind)
        _product(parts.view(torch.int32), step, total, 3, raw, kind, y, mark)


def linear_q8_1(x: Activations, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows]`` of quantised activations; arguments checked."""
    if len(x.codes):
        _product(x.codes.view(torch.int32), x.scale, x.total, 1, raw, kind, y, mark)


def quantize(x: Tensor, mark: Mark | None) -> Activations:
    """`activations.quantize` in one launch; arguments checked."""
    tokens, columns = x.shape
    num_blocks = columns // BLOCK
    found = Activations(
        codes=torch.empty(tokens, columns, dtype=torch.int8, device=x.device),
        scale=torch.empty(tokens, num_blocks, dtype=torch.float16, device=x.device),
        total=torch.empty(tokens, num_blocks, dtype=torch.float16, device=x.device),
    )
    if tokens:
        with torch.cuda.device_of(x):
            quant_activations_fwd_kernel[(triton.cdiv(num_blocks, _TOKENS_BLOCK), tokens)](
                x, found.codes, found.scale, found.total, num_blocks, x.stride(0),
                *mark_arguments(mark, torch.float16, tokens, num_blocks), BLOCKS=_TOKENS_BLOCK, PDL=_is_early(),
                num_warps=_NUM_WARPS, launch_pdl=_is_early(),
            )  # fmt: skip
    return found
