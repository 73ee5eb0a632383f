# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What one lane of the quantised product does: take its 64 weights of a block apart, and multiply them.

A lane has four runs of 16 weights, two in the formats of 32 to a block. Everything is a tensor [rows, lanes] or
[1, lanes] whose elements stay in one thread: a word of four codes, a sum of products, a scale. Bytes are loaded by the
widest words that their place allows. Import needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firetower.ops.quant import assembly
from firetower.ops.quant.kinds import IQ4_VALUES

_LOAD_16, _LOAD_8 = tl.constexpr(assembly.LOAD_16), tl.constexpr(assembly.LOAD_8)
_PERMUTE, _LOOKUP = tl.constexpr(assembly.PERMUTE), tl.constexpr(assembly.lookup(IQ4_VALUES))
_DOT_OF = tl.constexpr(assembly.DOT_CONSTRAINTS)
_DOT_UU, _DOT_US = tl.constexpr(assembly.dot("u32", "u32")), tl.constexpr(assembly.dot("u32", "s32"))
_DOT_SU, _DOT_SS = tl.constexpr(assembly.dot("s32", "u32")), tl.constexpr(assembly.dot("s32", "s32"))
_LOW, _HIGH = 0x0F0F0F0F, 0xF0F0F0F0
_LOW_UU, _LOW_US = tl.constexpr(assembly.dot("u32", "u32", _LOW)), tl.constexpr(assembly.dot("u32", "s32", _LOW))
_HIGH_UU, _HIGH_US = tl.constexpr(assembly.dot("u32", "u32", _HIGH)), tl.constexpr(assembly.dot("u32", "s32", _HIGH))


@triton.jit
def vector(p_word, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """The four words at each pointer; ``WIDTH`` bytes are what its address is a multiple of."""
    if ASM and WIDTH == 16:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            _LOAD_16, "=r,=r,=r,=r,l", [p_word.to(tl.int64)], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    elif ASM and WIDTH == 8:
        b_0, b_1 = pair(p_word, WIDTH, ASM)
        b_2, b_3 = pair(p_word + 2, WIDTH, ASM)
    else:
        b_0, b_1, b_2, b_3 = tl.load(p_word), tl.load(p_word + 1), tl.load(p_word + 2), tl.load(p_word + 3)
    return b_0, b_1, b_2, b_3


@triton.jit
def pair(p_word, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """The two words at each pointer."""
    if ASM and WIDTH >= 8:
        b_0, b_1 = tl.inline_asm_elementwise(
            _LOAD_8, "=r,=r,l", [p_word.to(tl.int64)], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        b_0, b_1 = tl.load(p_word), tl.load(p_word + 1)
    return b_0, b_1


@triton.jit
def permute(b_a, b_b, b_selector, ASM: tl.constexpr):
    """Four of the eight bytes of two words, by the nibbles of a selector."""
    if ASM:
        b_found = tl.inline_asm_elementwise(
            _PERMUTE, "=r,r,r,r", [b_a, b_b, b_selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b_both = (b_b.to(tl.int64) << 32) | (b_a.to(tl.int64) & 0xFFFFFFFF)
        b_places = b_selector.to(tl.int64)
        b_wide = (b_both >> ((b_places & 7) * 8)) & 255
        for i in tl.static_range(1, 4):
            b_wide = b_wide | (((b_both >> (((b_places >> (4 * i)) & 7) * 8)) & 255) << (8 * i))
        b_found = b_wide.to(tl.int32)
    return b_found


@triton.jit
def _joined(b_words):
    """Four words side by side: [..., 2, 2]."""
    b_0, b_1, b_2, b_3 = b_words
    return tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))


@triton.jit
def _sum_of_bytes(b_codes, b_x, CODES: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr):
    """Arithmetic in place of ``dp4a``, of four words each."""
    b_codes, b_x = _joined(b_codes), _joined(b_x)
    b_sum = (b_codes ^ b_codes) + (b_x ^ b_x)
    for i in tl.static_range(4):
        b_code, b_value = (b_codes >> (8 * i)) & MASK, (b_x >> (8 * i)) & 255
        if CODES:
            b_code = (b_code ^ 128) - 128
        if X:
            b_value = (b_value ^ 128) - 128
        b_sum += b_code * b_value
    return tl.sum(tl.sum(b_sum, axis=3), axis=2)


@triton.jit
def dot(b_codes, b_x, b_init, CODES: tl.constexpr, X: tl.constexpr, PART: tl.constexpr, ASM: tl.constexpr):
    """``b_init`` and the products of a run: four words of codes, four of activations, int32.

    Args:
        CODES: whether the bytes of codes are signed. X: the same of the activations.
        PART: the bits of a byte of codes that count: 255, or 15, or 240, whose products are 16 times too large.
    """
    b_0, b_1, b_2, b_3 = b_codes
    b_x0, b_x1, b_x2, b_x3 = b_x
    if ASM:
        low: tl.constexpr = _LOW_US if X else _LOW_UU
        high: tl.constexpr = _HIGH_US if X else _HIGH_UU
        unsigned: tl.constexpr = _DOT_US if X else _DOT_UU
        signed: tl.constexpr = _DOT_SS if X else _DOT_SU
        whole: tl.constexpr = signed if CODES else unsigned
        part: tl.constexpr = low if PART == 15 else high
        text: tl.constexpr = whole if PART == 255 else part
        b_sum = tl.inline_asm_elementwise(
            text, _DOT_OF, [b_0, b_1, b_2, b_3, b_x0, b_x1, b_x2, b_x3, b_init], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b_sum = b_init + _sum_of_bytes(b_codes, b_x, CODES, X, PART)
    return b_sum


@triton.jit
def lookup(b_nibbles, p_values, ASM: tl.constexpr):
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
def skewed(p_word, b_row_at, b_at, TAIL: tl.constexpr, WIDTH: tl.constexpr, ROW_ALIGNED: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """The 16 bytes at places that are multiples of 2 only: four words, and the two bytes behind them if ``TAIL``.

    Whole words of ``WIDTH`` bytes that hold them are read, none that holds nothing of them, and shifted.

    Args:
        p_word: the first byte of all, a multiple of ``WIDTH``.
        b_row_at: int64 [rows, 1], byte of a row; a multiple of ``WIDTH`` if ``ROW_ALIGNED``: then a lane shifts all
            rows alike.
        b_at: int32 [1, lanes], byte in the row.
    """
    if ROW_ALIGNED:
        b_skew = b_at % WIDTH
        p_first = p_word + b_row_at // 4 + (b_at - b_skew) // 4
    else:
        b_byte = b_row_at + b_at
        b_skew = (b_byte % WIDTH).to(tl.int32)
        p_first = p_word + (b_byte - b_skew) // 4
    b_next = tl.where((b_skew > 0) | TAIL, 4, 4 - WIDTH // 4)
    if WIDTH == 16:
        b_0, b_1, b_2, b_3 = vector(p_first, WIDTH, ASM)
        b_4, b_5, b_6, b_7 = vector(p_first + b_next, WIDTH, ASM)
        b_far = (b_skew & 8) != 0
        b_0, b_1, b_2 = tl.where(b_far, b_2, b_0), tl.where(b_far, b_3, b_1), tl.where(b_far, b_4, b_2)
        b_3, b_4, b_5 = tl.where(b_far, b_5, b_3), tl.where(b_far, b_6, b_4), tl.where(b_far, b_7, b_5)
    elif WIDTH == 8:
        b_0, b_1, b_2, b_3 = vector(p_first, WIDTH, ASM)
        b_4, b_5 = pair(p_first + b_next, WIDTH, ASM)
    else:
        b_0, b_1, b_2, b_3 = vector(p_first, WIDTH, ASM)
        b_4 = tl.load(p_first + b_next)
    if WIDTH >= 8:
        b_far = (b_skew & 4) != 0
        b_0, b_1, b_2 = tl.where(b_far, b_1, b_0), tl.where(b_far, b_2, b_1), tl.where(b_far, b_3, b_2)
        b_3, b_4 = tl.where(b_far, b_4, b_3), tl.where(b_far, b_5, b_4)
    b_odd = (b_skew & 2) != 0
    b_selector = tl.where(b_odd, 0x5432, 0x3210)
    b_0, b_1 = permute(b_0, b_1, b_selector, ASM), permute(b_1, b_2, b_selector, ASM)
    b_2, b_3 = permute(b_2, b_3, b_selector, ASM), permute(b_3, b_4, b_selector, ASM)
    return b_0, b_1, b_2, b_3, b_4 >> (8 * (b_skew & 2))


@triton.jit
def half(b_word):
    """The fp16 in the low half of a word, as fp32."""
    return (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(b_word, PLACE: tl.constexpr):
    """A byte of a word, as fp32."""
    return ((b_word >> (8 * PLACE)) & 255).to(tl.float32)


@triton.jit
def _signed_byte(b_word, PLACE: tl.constexpr):
    return ((b_word << (24 - 8 * PLACE)) >> 24).to(tl.float32)


@triton.jit
def six_bit_scales(b_header, b_pair, ASM: tl.constexpr):
    """Scale and minimum of a K block, then the 6-bit scales and minima of sub-blocks ``2 * b_pair`` and the next."""
    b_both, b_first, b_second, b_third = b_header
    # the first four stand in six bits of a byte; of the others the upper two bits there, the lower four in the last
    b_is_late = b_pair >= 2
    b_odd = b_pair % 2 == 1
    b_early = permute(b_first, b_second, tl.where(b_odd, 0x7632, 0x5410), ASM)
    b_rest = permute(b_third, b_third, tl.where(b_odd, 0x3232, 0x1010), ASM)
    b_packed = ((b_early >> tl.where(b_is_late, 2, 0)) & tl.where(b_is_late, 0x30303030, 0x3F3F3F3F)) | (
        b_rest & tl.where(b_is_late, 0x0F0F, 0)
    ) | ((b_rest >> 4) & tl.where(b_is_late, 0x0F0F0000, 0))  # fmt: skip
    return (
        half(b_both), half(b_both >> 16), _byte(b_packed, 0), _byte(b_packed, 1), _byte(b_packed, 2), _byte(b_packed, 3)
    )  # fmt: skip


@triton.jit
def signed_scales(b_subs, b_upper, b_odd, ASM: tl.constexpr):
    """The scales of runs 0 to 3 of a lane of Q6_K: bytes 0, 2, 4, 6 of a half's eight, or the odd ones."""
    b_0, b_1, b_2, b_3 = b_subs
    b_low, b_high = tl.where(b_upper, b_2, b_0), tl.where(b_upper, b_3, b_1)
    b_packed = permute(b_low, b_high, tl.where(b_odd, 0x7531, 0x6420), ASM)
    return _signed_byte(b_packed, 0), _signed_byte(b_packed, 1), _signed_byte(b_packed, 2), _signed_byte(b_packed, 3)


@triton.jit
def nibbles(b_words, HIGH: tl.constexpr):
    """The low or the high nibbles of four words, in bytes of their own."""
    b_0, b_1, b_2, b_3 = b_words
    if HIGH:
        b_0, b_1, b_2, b_3 = b_0 >> 4, b_1 >> 4, b_2 >> 4, b_3 >> 4
    return b_0 & 0x0F0F0F0F, b_1 & 0x0F0F0F0F, b_2 & 0x0F0F0F0F, b_3 & 0x0F0F0F0F


@triton.jit
def topped(b_words, b_tops, LEFT: tl.constexpr, MASK: tl.constexpr):
    """Nibbles joined with bits above them: those of ``b_tops``, shifted left by ``LEFT``, that ``MASK`` leaves; what
    crosses into the next byte is masked away."""
    b_0, b_1, b_2, b_3 = b_words
    b_t0, b_t1, b_t2, b_t3 = b_tops
    if LEFT > 0:
        b_t0, b_t1, b_t2, b_t3 = b_t0 << LEFT, b_t1 << LEFT, b_t2 << LEFT, b_t3 << LEFT
    elif LEFT < 0:
        b_t0, b_t1, b_t2, b_t3 = b_t0 >> -LEFT, b_t1 >> -LEFT, b_t2 >> -LEFT, b_t3 >> -LEFT
    return b_0 | (b_t0 & MASK), b_1 | (b_t1 & MASK), b_2 | (b_t2 & MASK), b_3 | (b_t3 & MASK)


@triton.jit
def shifted(b_words, b_right):
    """Four words, each shifted right."""
    b_0, b_1, b_2, b_3 = b_words
    return b_0 >> b_right, b_1 >> b_right, b_2 >> b_right, b_3 >> b_right


@triton.jit
def looked_up(b_words, p_values, ASM: tl.constexpr):
    """`lookup` of four words."""
    b_0, b_1, b_2, b_3 = b_words
    b_0, b_1 = lookup(b_0, p_values, ASM), lookup(b_1, p_values, ASM)
    return b_0, b_1, lookup(b_2, p_values, ASM), lookup(b_3, p_values, ASM)
