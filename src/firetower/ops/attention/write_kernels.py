# ruff: noqa: N803, SIM102 - compile-time arguments are upper case, compile-time conditions stand alone, as in Triton
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Writing keys and values into pages in Triton, quantised on the way where the pages hold 8 bits.

One program a token and head; a pad writes nothing. Marked is what stands in the cache: the elements of a float type, or
the scales of an 8-bit one, which are NaN where a row was not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.attention.cache import LARGEST, LARGEST_SCALE, SMALLEST_SCALE, PagedKV
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

_UNSPECIALIZED = ["num_slots", "slot", "num_signals", "num_words", "shape", "neg_inf"]


@triton.jit
def _rounded_to_e4m3(b_x):
    """To the nearest e4m3 value, ties to even, in float32: the cast that follows is exact, whoever does it. (Triton's
    interpreter drops the carry: it makes 31.6 a 16.)"""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_normal = (b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) & -0x100000
    # subnormals are steps of 2^-9: 1.5 * 2^14 has no bits for less
    b_subnormal = (b_x + 24576.0) - 24576.0
    return tl.where(tl.abs(b_x) < 0.015625, b_subnormal, b_normal.to(tl.float32, bitcast=True))


@triton.jit
def _quantised(b_x, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr, LARGEST_SCALE: tl.constexpr,
               IS_INTEGER: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """(float32 steps, the scale as stored) of one row; a row that is not finite has zeros and NaN."""
    is_bad = tl.max((b_x * 0.0 != 0.0).to(tl.int32), 0) != 0
    largest = tl.max(tl.abs(tl.where(is_bad, 0.0, b_x)), 0)
    scale = tl.minimum(tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE), LARGEST_SCALE).to(SCALE)
    b_steps = tl.div_rn(tl.where(is_bad, 0.0, b_x), scale.to(tl.float32))
    # beyond it every step saturates; the sum below is exact under 2^22 only
    b_steps = tl.minimum(tl.maximum(b_steps, -LARGEST), LARGEST)
    if IS_INTEGER:
        # to the nearest integer, ties to even: float32 has no bits for a fraction there
        b_steps = (b_steps + 12582912.0) - 12582912.0
    else:
        b_steps = _rounded_to_e4m3(b_steps)
    return b_steps, tl.where(is_bad, float("nan"), scale.to(tl.float32)).to(SCALE)


@triton.jit
def _write_row(p_x, p_pages, p_scales, x_at, page_at, scale_at, b_d, in_d, b_fits, b_pad, i_row, i_column, row_width,
               p_panel, p_row_ids, slot, num_signals, num_words, neg_inf, DIM: tl.constexpr, LARGEST: tl.constexpr,
               SMALLEST_SCALE: tl.constexpr, LARGEST_SCALE: tl.constexpr, IS_INTEGER: tl.constexpr):  # fmt: skip
    """One head of one token; ``i_column`` counts heads, keys first."""
    b_x = tl.load(p_x + x_at + b_d, mask=in_d & (b_pad == 0), other=0.0)
    if p_scales is None:
        b_stored = b_x.to(p_pages.dtype.element_ty)
        tl.store(p_pages + page_at + b_d, b_stored, mask=in_d & b_fits)
        b_column = i_column * DIM + b_d
        b_marked = in_d
    else:
        b_steps, scale = _quantised(b_x.to(tl.float32), LARGEST, SMALLEST_SCALE, LARGEST_SCALE, IS_INTEGER,
                                    p_scales.dtype.element_ty)  # fmt: skip
        tl.store(p_pages + page_at + b_d, b_steps.to(p_pages.dtype.element_ty), mask=in_d & b_fits)
        b_stored = (b_d * 0).to(scale.dtype) + scale
        tl.store(p_scales + scale_at + b_d, b_stored, mask=(b_d == 0) & b_fits)
        b_column = i_column + b_d * 0
        b_marked = b_d == 0
    if p_panel is not None:
        # a slot beyond the pool: nothing is written, and that must show
        b_stored = tl.where(b_fits | b_pad, b_stored, tl.full([1], float("nan"), b_stored.dtype))
        mark_tile(b_stored, i_row + b_column * 0, b_column, b_marked & (b_pad == 0), row_width, p_panel, p_row_ids,
                  slot, num_signals, num_words, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_write_fwd_kernel(p_key, p_value, p_key_pages, p_value_pages, p_key_scales, p_value_scales, p_slots,
                               num_slots, key_row, key_head, value_row, value_head, kv_page, kv_token, kv_head,
                               s_page, s_token, s_head, p_panel, p_row_ids, slot, num_signals, num_words, shape,
                               neg_inf, NUM_KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                               BLOCK_D: tl.constexpr, LARGEST: tl.constexpr,
                               SMALLEST_SCALE: tl.constexpr, LARGEST_SCALE: tl.constexpr,
                               IS_INTEGER: tl.constexpr):  # fmt: skip
    """Keys and values [T, Hkv, D] into slots [T]: negative for a pad."""
    i_row = tl.program_id(0)
    i_h = tl.program_id(1)
    row = i_row.to(tl.int64)
    at = tl.load(p_slots + i_row).to(tl.int64)
    b_d = tl.arange(0, BLOCK_D)
    in_d = b_d < DIM
    b_pad = at + b_d * 0 < 0
    b_fits = (at + b_d * 0 >= 0) & (at + b_d * 0 < num_slots)
    at = tl.where((at >= 0) & (at < num_slots), at, 0)
    page = at // PAGE
    token = at % PAGE
    row_width = 2 * NUM_KV
    if p_key_scales is None:
        row_width = 2 * NUM_KV * DIM
    if p_panel is not None:
        if (i_row == 0) & (i_h == 0):
            mark_ran(p_panel, slot, num_signals, num_words, shape)
    _write_row(p_key, p_key_pages, p_key_scales, row * key_row + i_h * key_head,
               page * kv_page + token * kv_token + i_h * kv_head, page * s_page + token * s_token + i_h * s_head,
               b_d, in_d, b_fits, b_pad, i_row, i_h, row_width, p_panel, p_row_ids, slot, num_signals, num_words,
               neg_inf, DIM, LARGEST, SMALLEST_SCALE, LARGEST_SCALE, IS_INTEGER)  # fmt: skip
    _write_row(p_value, p_value_pages, p_value_scales, row * value_row + i_h * value_head,
               page * kv_page + token * kv_token + i_h * kv_head, page * s_page + token * s_token + i_h * s_head,
               b_d, in_d, b_fits, b_pad, i_row, NUM_KV + i_h, row_width, p_panel, p_row_ids, slot, num_signals,
               num_words, neg_inf, DIM, LARGEST, SMALLEST_SCALE, LARGEST_SCALE, IS_INTEGER)  # fmt: skip


def write_kv(key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor, mark: Mark | None) -> None:
    """Launch; arguments as `firetower.ops.attention.torch_path.write_kv`."""
    rows, heads, dim = key.shape
    scales = (kv.key_scale, kv.value_scale)
    marked = kv.key.dtype if scales[0] is None else scales[0].dtype
    panel = mark_arguments(mark, marked, rows, 2 * heads * (dim if scales[0] is None else 1))
    if rows == 0:
        return
    scale_strides = (0, 0, 0) if scales[0] is None else scales[0].stride()
    with torch.cuda.device_of(key):
        attention_write_fwd_kernel[(rows, heads)](
            key, value, kv.key, kv.value, *scales, slot_mapping, kv.num_slots, *key.stride()[:2], *value.stride()[:2],
            *kv.key.stride()[:3], *scale_strides, *panel, NUM_KV=heads, DIM=dim,
            PAGE=kv.key.shape[1], BLOCK_D=triton.next_power_of_2(dim), LARGEST=LARGEST.get(kv.key.dtype, 0.0),
            SMALLEST_SCALE=SMALLEST_SCALE.get(marked, 0.0), LARGEST_SCALE=LARGEST_SCALE.get(marked, 0.0),
            IS_INTEGER=kv.key.dtype is torch.int8, num_warps=1,
        )  # fmt: skip
