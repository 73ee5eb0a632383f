# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Quantised products for windows: blocks are read as they stand in the file, codes and scales meet in registers.

A row of weights is cut into units of 16 code bytes. In every format but Q8_0 their low and high nibbles are two runs of
16 weights; a unit's products are summed by themselves, then scaled. A program takes a few weight rows for one token and
walks the row in chunks of 32 units, one unit a lane, so that a scale is worked out once a lane. What a token gets does
not depend on the others: each has programs of its own, the same for any number of them.

``quant_linear`` multiplies activations as they are, in fp32. ``quant_linear_q8_1`` takes quantised ones and adds up
integer products, four in an instruction: half the instructions a weight, so that memory is the limit. Import needs
Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.quant import assembly, torch_path
from firetower.ops.quant.activations import BLOCK, Activations
from firetower.ops.quant.kinds import IQ4_VALUES, Kind
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

# H200, by reasoning and by the registers that ptxas reports: 32 units are a warp, so that codes, scales and minima
# share one layout; 16 rows by 4 warps leave each thread 4 loads of 16 bytes in flight; 12,288 rows make 768 programs
_LANES, _ROWS, _NUM_WARPS = 32, 16, 4
_TOKENS_BLOCK = 64  # blocks of 32 activations that a program quantises
_MARK = ["slot", "num_signals", "num_rows", "shape", "neg_inf"]

_NIBBLES, _BYTES = tl.constexpr(assembly.NIBBLES), tl.constexpr(assembly.BYTES)
_FIVE_BITS, _SIX_BITS = tl.constexpr(assembly.FIVE_BITS), tl.constexpr(assembly.SIX_BITS)
_TABLE, _LOOKUP = tl.constexpr(assembly.table(IQ4_VALUES)), tl.constexpr(assembly.lookup(IQ4_VALUES))
_OF_ONE, _OF_JOINED = tl.constexpr(assembly.CONSTRAINTS_1), tl.constexpr(assembly.CONSTRAINTS_JOINED)
_OF_BYTES = tl.constexpr(assembly.CONSTRAINTS_BYTES)


@triton.jit
def _blocks(p_data, b_row_at, b_block, BLOCK_BYTES: tl.constexpr, WIDTH: tl.constexpr):
    """Starts of blocks ``b_block`` [lanes] of rows at bytes ``b_row_at``: pointers [lanes, rows] to ``WIDTH`` bytes."""
    return p_data + (b_row_at // WIDTH)[None, :] + (b_block * (BLOCK_BYTES // WIDTH))[:, None]


@triton.jit
def _bytes(p_byte, b_mask):
    """The 16 bytes at pointers [lanes, rows]: uint8 [lanes, rows, 16]."""
    return tl.load(p_byte[:, :, None] + tl.arange(0, 16)[None, None, :], mask=b_mask[:, :, None], other=0)


@triton.jit
def _words(p_word, p_half, b_at, b_mask, ALIGNED: tl.constexpr):
    """The 16 bytes ``b_at`` bytes from pointers, four to a word: int32 [lanes, rows, 4]; put together of pairs where
    blocks are not aligned to words."""
    b_word = tl.arange(0, 4)[None, None, :]
    if ALIGNED:
        b_words = tl.load((p_word + b_at // 4)[:, :, None] + b_word, mask=b_mask[:, :, None], other=0)
    else:
        p_pair = (p_half + b_at // 2)[:, :, None] + 2 * b_word
        b_low = tl.load(p_pair, mask=b_mask[:, :, None], other=0).to(tl.int32)
        b_high = tl.load(p_pair + 1, mask=b_mask[:, :, None], other=0).to(tl.int32)
        b_words = (b_low & 0xFFFF) | (b_high << 16)
    return b_words


@triton.jit
def _half(p_half, b_mask):
    """The fp16 at each pointer, as fp32."""
    b_bits = tl.load(p_half, mask=b_mask, other=0)
    return b_bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pair(b_word):
    """The two fp16 of a word of 32 bits, as fp32."""
    b_low = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_high = ((b_word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return b_low.to(tl.float32), b_high.to(tl.float32)


@triton.jit
def _scales(p_byte, p_half, p_word, b_place, b_mask, KIND: tl.constexpr):
    """Of each unit [lanes, rows], fp32: scale and minimum of the block; then, in units of these, the scales of the low
    run and of the high one, and their minima. A minimum is taken off; unused ones are 0."""
    b_none = tl.zeros(b_mask.shape, tl.float32)
    b_low, b_high, b_low_min, b_high_min, b_minimum = b_none + 1.0, b_none + 1.0, b_none, b_none, b_none
    if KIND == "Q8_0":
        b_scale = _half(p_half, b_mask)
    elif KIND == "Q4_1":
        b_scale, b_minimum = _pair(tl.load(p_word, mask=b_mask, other=0))
        b_low_min, b_high_min = b_none - 1.0, b_none - 1.0
    elif KIND == "IQ4_XS":
        b_first = tl.load(p_word, mask=b_mask, other=0)
        b_second = tl.load(p_word + 1, mask=b_mask, other=0)
        b_sub = ((b_second >> (4 * b_place)) & 15) | (((b_first >> (16 + 2 * b_place)) & 3) << 4)
        b_scale, _ = _pair(b_first)
        b_low = (b_sub - 32).to(tl.float32)
        b_high = b_low
    elif KIND == "Q6_K":
        b_scale = _half(p_half + 104, b_mask)
        p_sub = p_byte + (192 + 4 * (b_place // 4) + b_place)
        b_low = tl.load(p_sub, mask=b_mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        b_high = tl.load(p_sub + 4, mask=b_mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        # sub-scales and sub-minima of 6 bits: four bytes for the first four, else nibbles and what is left of those
        b_scale, b_minimum = _pair(tl.load(p_word, mask=b_mask, other=0))
        b_first = tl.load(p_word + 1, mask=b_mask, other=0)
        b_second = tl.load(p_word + 2, mask=b_mask, other=0)
        b_third = tl.load(p_word + 3, mask=b_mask, other=0)
        b_late_scales = (b_third & 0x0F0F0F0F) | ((b_first >> 2) & 0x30303030)
        b_late_minima = ((b_third >> 4) & 0x0F0F0F0F) | ((b_second >> 2) & 0x30303030)
        b_is_late = b_place >= 4
        b_shift = 16 * (b_place // 2 % 2)
        b_subs = tl.where(b_is_late, b_late_scales, b_first & 0x3F3F3F3F) >> b_shift
        b_mins = tl.where(b_is_late, b_late_minima, b_second & 0x3F3F3F3F) >> b_shift
        b_low, b_high = (b_subs & 63).to(tl.float32), ((b_subs >> 8) & 63).to(tl.float32)
        b_low_min, b_high_min = (b_mins & 63).to(tl.float32), ((b_mins >> 8) & 63).to(tl.float32)
    return b_scale, b_minimum, b_low, b_high, b_low_min, b_high_min


@triton.jit
def _code_bytes(b_place, KIND: tl.constexpr):
    """Where in a block a unit has its code bytes, and the bytes that hold the upper bits of its codes."""
    if KIND == "Q8_0":
        b_at, b_top = 2 + 16 * b_place, 0 * b_place
    elif KIND == "Q4_1":
        b_at, b_top = 4 + 16 * b_place, 0 * b_place
    elif KIND == "IQ4_XS":
        b_at, b_top = 8 + 16 * b_place, 0 * b_place
    elif KIND == "Q4_K":
        b_at, b_top = 16 + 16 * b_place, 0 * b_place
    elif KIND == "Q5_K":
        b_at, b_top = 48 + 16 * b_place, 16 + 16 * (b_place % 2)
    else:
        b_at, b_top = 16 * b_place, 128 + 32 * (b_place // 4) + 16 * (b_place % 2)
    return b_at, b_top


@triton.jit
def _top_shift(b_place, KIND: tl.constexpr):
    """How far right the upper bits of a unit's low codes stand in their byte."""
    return 2 * (b_place // 2) if KIND == "Q5_K" else 2 * (b_place // 2 % 2)


@triton.jit
def _float_codes(p_byte, p_values, b_place, b_mask, KIND: tl.constexpr, ASM: tl.constexpr):
    """Low and high codes of each unit as fp32 [lanes, rows, 16]; Q8_0 has 16 codes only, given twice."""
    b_at, b_top_at = _code_bytes(b_place, KIND)
    b_bytes = _bytes(p_byte + b_at, b_mask)
    if KIND == "Q5_K" or KIND == "Q6_K":
        b_tops = _bytes(p_byte + b_top_at, b_mask)
        b_shift = _top_shift(b_place, KIND)[:, :, None] + tl.zeros(b_bytes.shape, tl.int32)
    if ASM:
        if KIND == "Q8_0":
            b_low = tl.inline_asm_elementwise(_BYTES, _OF_BYTES, [b_bytes], dtype=tl.float32, is_pure=True, pack=4)
            b_high = b_low
        elif KIND == "Q5_K":
            b_low, b_high = tl.inline_asm_elementwise(
                _FIVE_BITS, _OF_JOINED, [b_bytes, b_tops, b_shift], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
        elif KIND == "Q6_K":
            b_low, b_high = tl.inline_asm_elementwise(
                _SIX_BITS, _OF_JOINED, [b_bytes, b_tops, b_shift], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
        elif KIND == "IQ4_XS":
            b_low, b_high = tl.inline_asm_elementwise(
                _TABLE, _OF_ONE, [b_bytes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
        else:
            b_low, b_high = tl.inline_asm_elementwise(
                _NIBBLES, _OF_ONE, [b_bytes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
    else:
        b_code = b_bytes.to(tl.int32)
        b_low_code, b_high_code = b_code & 15, b_code >> 4
        if KIND == "Q8_0":
            b_low_code = (b_code ^ 128) - 128
            b_high_code = b_low_code
        elif KIND == "IQ4_XS":
            b_low_code, b_high_code = tl.load(p_values + b_low_code), tl.load(p_values + b_high_code)
        elif KIND == "Q5_K":
            b_top = b_tops.to(tl.int32) >> b_shift
            b_low_code, b_high_code = b_low_code | ((b_top & 1) << 4), b_high_code | ((b_top & 2) << 3)
        elif KIND == "Q6_K":
            b_top = b_tops.to(tl.int32) >> b_shift
            b_low_code = (b_low_code | ((b_top & 3) << 4)) - 32
            b_high_code = (b_high_code | (b_top & 48)) - 32
        b_low, b_high = b_low_code.to(tl.float32), b_high_code.to(tl.float32)
    return b_low, b_high


@triton.jit
def _activations(p_x, b_column, b_live):
    """16 activations from each column ``b_column`` [lanes] on, as fp32 [lanes, 16]."""
    b_i = tl.arange(0, 16)
    return tl.load(p_x + b_column[:, None] + b_i[None, :], mask=b_live[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_units", *_MARK])
def quant_linear_fwd_kernel(p_raw, p_half, p_word, p_x, p_values, p_y, rows, num_units, row_bytes, stride_x, p_panel,
                            p_row_ids, slot, num_signals, num_rows, shape, neg_inf, KIND: tl.constexpr,
                            BLOCK_BYTES: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
                            ROWS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Program (token, tile of weight rows). ``UNITS`` make a block; the low runs of ``GROUP`` units stand before their
    high ones. ``p_half`` and ``p_word`` are ``p_raw`` in elements of 2 and 4 bytes."""
    i_token = tl.program_id(0)
    i_tile = tl.program_id(1)
    b_row = i_tile * ROWS + tl.arange(0, ROWS)
    b_row_mask = b_row < rows
    b_row_at = b_row.to(tl.int64) * row_bytes
    p_mine = p_x + i_token.to(tl.int64) * stride_x
    b_acc = tl.zeros([LANES, ROWS], tl.float32)
    for i in range(tl.cdiv(num_units, LANES)):
        b_unit = i * LANES + tl.arange(0, LANES)
        b_live = b_unit < num_units
        b_mask = b_live[:, None] & b_row_mask[None, :]
        b_place = (b_unit % UNITS)[:, None]
        p_byte = _blocks(p_raw, b_row_at, b_unit // UNITS, BLOCK_BYTES, 1)
        p_pair = _blocks(p_half, b_row_at, b_unit // UNITS, BLOCK_BYTES, 2)
        p_four = p_pair if p_word is None else _blocks(p_word, b_row_at, b_unit // UNITS, BLOCK_BYTES, 4)
        b_low, b_high = _float_codes(p_byte, p_values, b_place, b_mask, KIND, ASM)
        b_scale, b_minimum, b_low_sub, b_high_sub, b_low_min, b_high_min = _scales(
            p_byte, p_pair, p_four, b_place, b_mask, KIND
        )
        if KIND == "Q8_0":
            b_x = _activations(p_mine, 16 * b_unit, b_live)
            b_acc += b_scale * tl.sum(b_low * b_x[:, None, :], axis=2)
        else:
            b_column = 32 * GROUP * (b_unit // GROUP) + 16 * (b_unit % GROUP)
            b_low_x = _activations(p_mine, b_column, b_live)
            b_high_x = _activations(p_mine, b_column + 16 * GROUP, b_live)
            b_low_sum = tl.sum(b_low * b_low_x[:, None, :], axis=2)
            b_high_sum = tl.sum(b_high * b_high_x[:, None, :], axis=2)
            b_acc += b_scale * (b_low_sub * b_low_sum + b_high_sub * b_high_sum)
            if KIND == "Q4_1" or KIND == "Q4_K" or KIND == "Q5_K":
                b_low_total, b_high_total = tl.sum(b_low_x, axis=1)[:, None], tl.sum(b_high_x, axis=1)[:, None]
                b_acc -= b_minimum * (b_low_min * b_low_total + b_high_min * b_high_total)
    b_y = tl.sum(b_acc, axis=0).to(p_y.dtype.element_ty)
    tl.store(p_y + i_token.to(tl.int64) * rows + b_row, b_y, mask=b_row_mask)
    if p_panel is not None:
        if (i_token == 0) & (i_tile == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_y, i_token, b_row, b_row_mask, rows, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)


@triton.jit
def _dot_of_four(b_codes, b_x, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Sum of the products of the four bytes of words: int32; those of ``b_x`` signed, the others if ``SIGNED``."""
    if ASM:
        if SIGNED:
            b_sum = tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [b_codes, b_x], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            b_sum = tl.inline_asm_elementwise(
                "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [b_codes, b_x], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        b_sum = (b_codes + b_x) * 0
        for i in tl.static_range(4):
            b_code = (b_codes >> (8 * i)) & 255
            if SIGNED:
                b_code = (b_code ^ 128) - 128
            b_sum += b_code * ((((b_x >> (8 * i)) & 255) ^ 128) - 128)
    return b_sum


@triton.jit
def _lookup(b_nibbles, p_values, ASM: tl.constexpr):
    """Values of the four codes in the low nibbles of a word, as four signed bytes."""
    if ASM:
        b_found = tl.inline_asm_elementwise(_LOOKUP, "=r,r", [b_nibbles], dtype=tl.int32, is_pure=True, pack=1)
    else:
        b_found = b_nibbles * 0
        for i in tl.static_range(4):
            b_value = tl.load(p_values + ((b_nibbles >> (8 * i)) & 15)).to(tl.int32)
            b_found |= (b_value & 255) << (8 * i)
    return b_found


@triton.jit
def _word_codes(p_half, p_word, p_values, b_place, b_mask, KIND: tl.constexpr, ALIGNED: tl.constexpr,
                ASM: tl.constexpr):  # fmt: skip
    """Low and high codes of each unit, four bytes a word: int32 [lanes, rows, 4]; those of Q6_K are 32 too large."""
    b_at, b_top_at = _code_bytes(b_place, KIND)
    b_words = _words(p_word, p_half, b_at, b_mask, ALIGNED)
    b_low, b_high = b_words, b_words
    if KIND != "Q8_0":
        b_low, b_high = b_words & 0x0F0F0F0F, (b_words >> 4) & 0x0F0F0F0F
    if KIND == "IQ4_XS":
        b_low, b_high = _lookup(b_low, p_values, ASM), _lookup(b_high, p_values, ASM)
    if KIND == "Q5_K" or KIND == "Q6_K":
        # bits that cross into the next byte are masked away
        b_top = _words(p_word, p_half, b_top_at, b_mask, ALIGNED) >> _top_shift(b_place, KIND)[:, :, None]
        if KIND == "Q5_K":
            b_low, b_high = b_low | ((b_top << 4) & 0x10101010), b_high | ((b_top << 3) & 0x10101010)
        else:
            b_low, b_high = b_low | ((b_top << 4) & 0x30303030), b_high | (b_top & 0x30303030)
    return b_low, b_high


@triton.jit(do_not_specialize=["num_units", *_MARK])
def quant_linear_q8_1_fwd_kernel(p_raw, p_half, p_word, p_codes, p_scale, p_total, p_values, p_y, rows, num_units,
                                 row_bytes, columns, p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                                 KIND: tl.constexpr, BLOCK_BYTES: tl.constexpr, UNITS: tl.constexpr,
                                 GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
                                 ASM: tl.constexpr):  # fmt: skip
    """As ``quant_linear``, for codes int32 [T, columns / 4], scales and sums fp16 [T, columns / 32]."""
    i_token = tl.program_id(0)
    i_tile = tl.program_id(1)
    token = i_token.to(tl.int64)
    b_row = i_tile * ROWS + tl.arange(0, ROWS)
    b_row_mask = b_row < rows
    b_row_at = b_row.to(tl.int64) * row_bytes
    p_mine = p_codes + token * (columns // 4)
    b_word = tl.arange(0, 4)[None, :]
    b_acc = tl.zeros([LANES, ROWS], tl.float32)
    for i in range(tl.cdiv(num_units, LANES)):
        b_unit = i * LANES + tl.arange(0, LANES)
        b_live = b_unit < num_units
        b_mask = b_live[:, None] & b_row_mask[None, :]
        b_place = (b_unit % UNITS)[:, None]
        p_byte = _blocks(p_raw, b_row_at, b_unit // UNITS, BLOCK_BYTES, 1)
        p_pair = _blocks(p_half, b_row_at, b_unit // UNITS, BLOCK_BYTES, 2)
        p_four = p_pair if p_word is None else _blocks(p_word, b_row_at, b_unit // UNITS, BLOCK_BYTES, 4)
        b_low, b_high = _word_codes(p_pair, p_four, p_values, b_place, b_mask, KIND, BLOCK_BYTES % 4 == 0, ASM)
        b_scale, b_minimum, b_low_sub, b_high_sub, b_low_min, b_high_min = _scales(
            p_byte, p_pair, p_four, b_place, b_mask, KIND
        )
        if KIND == "Q8_0":
            b_x = tl.load(p_mine + 4 * b_unit[:, None] + b_word, mask=b_live[:, None], other=0)
            b_sum = tl.sum(_dot_of_four(b_low, b_x[:, None, :], True, ASM), axis=2)
            b_x_scale = tl.load(p_scale + token * (columns // 32) + b_unit // 2, mask=b_live, other=0.0)
            b_acc += b_scale * (b_sum.to(tl.float32) * b_x_scale.to(tl.float32)[:, None])
        else:
            b_column = 32 * GROUP * (b_unit // GROUP) + 16 * (b_unit % GROUP)
            p_low = p_mine + (b_column // 4)[:, None] + b_word
            b_low_x = tl.load(p_low, mask=b_live[:, None], other=0)
            b_high_x = tl.load(p_low + 4 * GROUP, mask=b_live[:, None], other=0)
            b_low_sum = tl.sum(_dot_of_four(b_low, b_low_x[:, None, :], KIND == "IQ4_XS", ASM), axis=2)
            b_high_sum = tl.sum(_dot_of_four(b_high, b_high_x[:, None, :], KIND == "IQ4_XS", ASM), axis=2)
            if KIND == "Q6_K":
                b_ones = b_low_x * 0 + 0x20202020
                b_low_sum -= tl.sum(_dot_of_four(b_ones, b_low_x, False, ASM), axis=1)[:, None]
                b_high_sum -= tl.sum(_dot_of_four(b_ones, b_high_x, False, ASM), axis=1)[:, None]
            b_low_block = token * (columns // 32) + b_column // 32
            b_high_block = token * (columns // 32) + (b_column + 16 * GROUP) // 32
            b_low_scale = tl.load(p_scale + b_low_block, mask=b_live, other=0.0).to(tl.float32)[:, None]
            b_high_scale = tl.load(p_scale + b_high_block, mask=b_live, other=0.0).to(tl.float32)[:, None]
            b_low_part = b_low_sub * (b_low_scale * b_low_sum.to(tl.float32))
            b_high_part = b_high_sub * (b_high_scale * b_high_sum.to(tl.float32))
            b_acc += b_scale * (b_low_part + b_high_part)
            if KIND == "Q4_1":
                b_total = tl.load(p_total + b_low_block, mask=b_live, other=0.0).to(tl.float32)[:, None]
                b_acc -= b_minimum * (b_low_min * b_total)
            if KIND == "Q4_K" or KIND == "Q5_K":
                # a run of 32 belongs to two units: the first of them takes its sum
                b_first = b_live & (b_unit % 2 == 0)
                b_low_total = tl.load(p_total + b_low_block, mask=b_first, other=0.0).to(tl.float32)[:, None]
                b_high_total = tl.load(p_total + b_high_block, mask=b_first, other=0.0).to(tl.float32)[:, None]
                b_acc -= b_minimum * (b_low_min * b_low_total + b_high_min * b_high_total)
    b_y = tl.sum(b_acc, axis=0).to(p_y.dtype.element_ty)
    tl.store(p_y + token * rows + b_row, b_y, mask=b_row_mask)
    if p_panel is not None:
        if (i_token == 0) & (i_tile == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_y, i_token, b_row, b_row_mask, rows, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)


@triton.jit(do_not_specialize=["num_blocks", *_MARK])
def quant_activations_fwd_kernel(p_x, p_codes, p_scale, p_total, num_blocks, stride_x, p_panel, p_row_ids, slot,
                                 num_signals, num_rows, shape, neg_inf, BLOCKS: tl.constexpr):  # fmt: skip
    """Program (tile of blocks, token): `activations.quantize`; marks the scales as stored."""
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


_UNITS = {"Q8_0": (2, 1), "Q4_1": (1, 1), "Q4_K": (8, 2), "Q5_K": (8, 2), "Q6_K": (8, 4), "IQ4_XS": (8, 1)}
"""Units a block, and units that share a run: the low nibbles of ``n`` units are followed by their high ones."""


def _views(raw: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The raw bytes, the same as int16, as int32 where blocks are aligned to it, and the values of a code book."""
    words = raw.view(torch.int32) if kind.block_bytes % 4 == 0 else None
    return raw, raw.view(torch.int16), words, torch_path.iq4_values(raw.device) if kind.name == "IQ4_XS" else None


def has_assembly(raw: Tensor) -> bool:
    """Whether kernels on this tensor are compiled; the interpreter knows no PTX."""
    return raw.is_cuda


def _geometry(raw: Tensor, kind: Kind) -> tuple[int, dict[str, int | str | bool]]:
    """Units of a row, and what a kernel is compiled for."""
    units, group = _UNITS[kind.name]
    num_units = raw.shape[1] // kind.block_bytes * units
    compiled: dict[str, int | str | bool] = {
        "KIND": kind.name, "BLOCK_BYTES": kind.block_bytes, "UNITS": units, "GROUP": group, "LANES": _LANES,
        "ROWS": _ROWS, "ASM": has_assembly(raw), "num_warps": _NUM_WARPS,
    }  # fmt: skip
    return num_units, compiled


def linear(x: Tensor, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows] = x [T, K] W^T``; arguments checked."""
    tokens, rows = y.shape
    if tokens == 0:
        return
    num_units, compiled = _geometry(raw, kind)
    data, halves, words, values = _views(raw, kind)
    with torch.cuda.device_of(raw):
        quant_linear_fwd_kernel[(tokens, triton.cdiv(rows, _ROWS))](
            data, halves, words, x, values, y, rows, num_units, raw.shape[1], x.stride(0),
            *mark_arguments(mark, y.dtype, tokens, rows), **compiled,
        )  # fmt: skip


def linear_q8_1(x: Activations, raw: Tensor, kind: Kind, y: Tensor, mark: Mark | None) -> None:
    """``y [T, rows]`` of quantised activations; arguments checked."""
    tokens, rows = y.shape
    if tokens == 0:
        return
    num_units, compiled = _geometry(raw, kind)
    data, halves, words, values = _views(raw, kind)
    with torch.cuda.device_of(raw):
        quant_linear_q8_1_fwd_kernel[(tokens, triton.cdiv(rows, _ROWS))](
            data, halves, words, x.codes.view(torch.int32), x.scale, x.total, values, y, rows, num_units, raw.shape[1],
            x.codes.shape[1], *mark_arguments(mark, y.dtype, tokens, rows), **compiled,
        )  # fmt: skip


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
                *mark_arguments(mark, torch.float16, tokens, num_blocks), BLOCKS=_TOKENS_BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
    return found
