# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention in Triton: window decode over paged keys and values, its combine, the end of prefill.

Shape legend: N sequences, W window tokens of each, H query heads, Hkv key and value heads, G = H / Hkv, D head width, S
splits. A program takes one split of one key head and all ``W * G`` query rows that read it, so that it is loaded once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.attention.cache import PagedKV
from firetower.ops.attention.checks import MAX_WINDOW
from firetower.ops.attention.splits import Splits
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

# Reasoned for an H200, not searched. 64 splits of 128 tokens of 2 key heads are 128 programs for 132 SMs; from 8192
# tokens on 32 splits a doubling keep partial sums at 6% of the bytes read for a window of 5 tokens. A tile of 64 query
# rows is the smallest that wgmma takes and holds 8 tokens of 8 heads, so that every window runs the same instructions.
# 32 keys and values of 256 are 32 KB a stage; five stages and the queries take 192 of 227 KB, so that 96 KB are in
# flight while a tile is computed. ptxas spills nothing in that loop; with tiles of 64 keys it does.
SPLITS = Splits(base_tokens=128, num_base=64, per_octave=32)
_MAX_BLOCK_M = 64
_BLOCK_N = 32
_NUM_STAGES = {1: 5, 2: 5, 4: 1}
_NUM_WARPS = {1: 4, 2: 4, 4: 8}
"""By bytes of the widest element. float32 runs on the scalar units: exact, and slow where heads are wide."""

_COMBINE_SPLITS, _COMBINE_DIM = 64, 64
_LOG2E = 1.4426950408889634
_UNSPECIALIZED = [
    "width", "num_pages", "table_width", "limit", "num_splits", "scale", "slot", "num_signals", "num_words", "shape",
    "neg_inf",
]  # fmt: skip


@triton.jit
def _split_bounds(index, BASE: tl.constexpr, NUM_BASE: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """`Splits.bounds`."""
    far = tl.maximum(index - NUM_BASE, 0)
    one = far * 0 + 1
    doubled = one << (far // PER_OCTAVE)
    size = tl.where(index < NUM_BASE, BASE, doubled * (BASE * NUM_BASE // PER_OCTAVE))
    begin = tl.where(index < NUM_BASE, index * BASE, doubled * (BASE * NUM_BASE) + (far % PER_OCTAVE) * size)
    return begin, size


@triton.jit
def _split_count(num_tokens, BASE: tl.constexpr, NUM_BASE: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """`Splits.count`."""
    last = tl.maximum(num_tokens - 1, 0)
    times = last // (BASE * NUM_BASE)
    # the exponent of a float32, which holds integers below 2^24 exactly, is the place of the highest bit
    octave = tl.maximum((times.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)
    doubled = (octave * 0 + 1) << octave
    rest = (last - doubled * (BASE * NUM_BASE)) // (doubled * (BASE * NUM_BASE // PER_OCTAVE))
    index = tl.where(times == 0, last // BASE, NUM_BASE + octave * PER_OCTAVE + rest)
    return tl.where(num_tokens > 0, index + 1, 0)


@triton.jit
def _visible(p_seq_lens, p_slots, i_n, b_w, width):
    """Keys that token ``b_w`` of a window sees: those of the sequence less the real tokens after it; 0 for a pad."""
    length = tl.load(p_seq_lens + i_n).to(tl.int32)
    if p_slots is None:
        b_after = width - 1 - b_w
        b_mine = b_w < width
    else:
        b_after = b_w * 0
        for w in range(width):
            b_slot = tl.load(p_slots + i_n * width + w + b_w * 0)
            b_after += ((b_slot >= 0) & (b_w < w)).to(tl.int32)
        b_mine = tl.load(p_slots + i_n * width + b_w, mask=b_w < width, other=-1) >= 0
    return tl.where(b_mine, tl.maximum(length - b_after, 0), 0)


@triton.jit
def _checked(b_page, num_pages):
    """(int64 pages, whether each is one of the pool's); page 0 in place of those that are not."""
    b_ok = (b_page >= 0) & (b_page < num_pages)
    return tl.where(b_ok, b_page, 0).to(tl.int64), b_ok


@triton.jit
def _values(p_v, p_scale, b_offset, b_place, b_in, b_mask, DTYPE: tl.constexpr):
    """Values as they are multiplied. Their scale is applied here: times a weight it could leave float16's range."""
    b_v = tl.load(p_v + b_offset, mask=b_mask, other=0.0)
    if p_scale is not None:
        b_scale = tl.load(p_scale + b_place, mask=b_in, other=0.0).to(tl.float32)
        b_v = b_v.to(tl.float32) * b_scale[:, None]
    return b_v.to(DTYPE)


@triton.jit
def _has_bad_values(p_v, p_scale, p_table, begin, end, num_pages, kv_page, kv_token, s_page, s_token, b_d, in_d,
                    PAGE: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """1 where a value from ``begin`` to ``end`` (fewer than WINDOW positions) is not finite, else 0."""
    b_at = begin + tl.arange(0, WINDOW)
    b_in = b_at < end
    b_page, _ = _checked(tl.load(p_table + b_at // PAGE, mask=b_in, other=0), num_pages)
    b_offset = (b_page * kv_page + (b_at % PAGE) * kv_token)[:, None] + b_d[None, :]
    b_place = b_page * s_page + (b_at % PAGE) * s_token
    b_v = _values(p_v, p_scale, b_offset, b_place, b_in, b_in[:, None] & in_d[None, :], tl.float32)
    return tl.max((b_v * 0.0 != 0.0).to(tl.int32))


@triton.jit
def _weigh(b_s, b_top, b_total):
    """One step of the running softmax: (weights, factor for what was summed before, maximum, total).

    A row that saw nothing yet keeps the maximum -Inf and sums of zero; a NaN score makes its row's total NaN.
    """
    b_best = tl.maximum(b_top, tl.max(b_s, 1))
    b_shift = tl.where(b_best == -float("inf"), 0.0, b_best)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_keep = tl.exp2(b_top - b_shift)
    return b_p, b_keep, b_best, b_total * b_keep + tl.sum(b_p, 1)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_window_fwd_kernel(p_q, p_k, p_v, p_k_scale, p_v_scale, p_table, p_seq_lens, p_slots, p_acc, p_top,
                                p_total, scale, width, num_pages, table_width, limit, num_splits, q_row, q_head,
                                kv_page, kv_token, kv_head, s_page, s_token, s_head, NUM_KV: tl.constexpr,
                                GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                                BASE: tl.constexpr, NUM_BASE: tl.constexpr, PER_OCTAVE: tl.constexpr,
                                WINDOW: tl.constexpr):  # fmt: skip
    """Unnormalised sums of one split: ``acc`` float32 [N, Hkv, S, W * G, D], ``top`` and ``total`` [N, Hkv, W * G, S].

    A split that no row reaches writes nothing, and is not read.
    """
    # the longest splits are the last: they start first
    i_split = num_splits - 1 - tl.program_id(0)
    i_tile = tl.program_id(1) // NUM_KV
    i_h = tl.program_id(1) % NUM_KV
    i_n = tl.program_id(2)
    b_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    b_w = b_m // GROUP
    b_visible = tl.minimum(_visible(p_seq_lens, p_slots, i_n, b_w, width), limit)
    last = tl.max(b_visible, 0)
    begin, size = _split_bounds(i_split, BASE, NUM_BASE, PER_OCTAVE)
    if begin >= last:
        return
    b_d = tl.arange(0, BLOCK_D)
    b_n = tl.arange(0, BLOCK_N)
    in_d = b_d < DIM
    in_m = b_w < width
    p_q_rows = p_q + (i_n * width + b_w).to(tl.int64) * q_row + (i_h * GROUP + b_m % GROUP) * q_head
    b_q = tl.load(p_q_rows[:, None] + b_d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
    p_table += i_n.to(tl.int64) * table_width
    p_k += i_h * kv_head
    p_v += i_h * kv_head
    if p_k_scale is not None:
        p_k_scale += i_h * s_head
        p_v_scale += i_h * s_head

    # a value that is not finite and that only later tokens of the window see would reach the earlier ones as 0 * NaN:
    # then each token takes a pass of its own, over the keys that it sees. The positions that not all see are 7 at most.
    shared = tl.maximum(tl.min(tl.where(b_visible > 0, b_visible, last), 0), begin)
    has_bad = _has_bad_values(p_v, p_v_scale, p_table, shared, tl.minimum(begin + size, last), num_pages, kv_page,
                              kv_token, s_page, s_token, b_d, in_d, PAGE, WINDOW)  # fmt: skip
    for i_pass in range(tl.where(has_bad != 0, width, 1)):
        b_mine = (b_w == i_pass) | (b_w * 0 + has_bad == 0)
        b_sight = tl.minimum(tl.where(b_mine, b_visible, 0), begin + size)
        end = tl.max(b_sight, 0)
        b_top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        b_total = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(begin, end, BLOCK_N):
            b_at = n + b_n
            b_in = b_at < end
            if PAGE % BLOCK_N == 0:
                # one page holds the tile: a scalar address, and offsets that no step changes
                page, is_page = _checked(tl.load(p_table + n // PAGE), num_pages)
                b_ok = (b_n * 0 + is_page.to(tl.int32)) != 0
                begin_kv = page * kv_page + (n % PAGE) * kv_token
                b_offset = (b_n * kv_token)[:, None] + b_d[None, :]
                b_place = page * s_page + (n % PAGE) * s_token + b_n * s_token
            else:
                b_page, b_ok = _checked(tl.load(p_table + b_at // PAGE, mask=b_in, other=0), num_pages)
                begin_kv = 0
                b_offset = (b_page * kv_page + (b_at % PAGE) * kv_token)[:, None] + b_d[None, :]
                b_place = b_page * s_page + (b_at % PAGE) * s_token
            b_mask = b_in[:, None] & in_d[None, :]
            b_k = tl.load(p_k + begin_kv + b_offset, mask=b_mask, other=0.0)
            b_s = tl.dot(b_q, tl.trans(b_k).to(b_q.dtype), input_precision="ieee") * scale
            if p_k_scale is not None:
                b_s = b_s * tl.load(p_k_scale + b_place, mask=b_in, other=0.0).to(tl.float32)[None, :]
            b_s = tl.where(b_ok[None, :], b_s, float("nan"))
            b_s = tl.where(b_at[None, :] < b_sight[:, None], b_s, -float("inf"))
            b_p, b_keep, b_top, b_total = _weigh(b_s, b_top, b_total)
            b_v = _values(p_v + begin_kv, p_v_scale, b_offset, b_place, b_in, b_mask, b_q.dtype)
            b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
        rows = width * GROUP
        i_head = i_n.to(tl.int64) * NUM_KV + i_h
        b_stored = (b_m < rows) & b_mine
        p_part = p_acc + (i_head * num_splits + i_split) * rows * DIM + (b_m[:, None] * DIM + b_d[None, :])
        tl.store(p_part, b_acc, mask=b_stored[:, None] & in_d[None, :])
        b_part = (i_head * rows + b_m) * num_splits + i_split
        tl.store(p_top + b_part, b_top, mask=b_stored)
        tl.store(p_total + b_part, b_total, mask=b_stored)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_combine_fwd_kernel(p_acc, p_top, p_total, p_gate, p_seq_lens, p_slots, p_out, width, limit, num_splits,
                                 gate_row, gate_head, p_panel, p_row_ids, slot, num_signals, num_words, shape,
                                 neg_inf, NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                                 BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BASE: tl.constexpr,
                                 NUM_BASE: tl.constexpr, PER_OCTAVE: tl.constexpr):  # fmt: skip
    """Sums the splits that a row reaches, in their order, then gate, store and mark: ``out`` [N * W, H * D].

    Reads those splits alone. One that a row reaches but sees nothing of has the maximum -Inf and sums of zero: its
    weight is 2^-Inf = 0. No weight is forced to 0 by a test, which would also drop a NaN.
    """
    i_row = tl.program_id(0)
    i_head = tl.program_id(1)
    i_d = tl.program_id(2)
    i_n = i_row // width
    i_w = i_row % width
    visible = _visible(p_seq_lens, p_slots, i_n, i_w, width)
    count = _split_count(tl.minimum(visible, limit), BASE, NUM_BASE, PER_OCTAVE)
    rows = width * GROUP
    i_m = i_w * GROUP + i_head % GROUP
    i_kv = i_n.to(tl.int64) * NUM_KV + i_head // GROUP
    p_top += (i_kv * rows + i_m) * num_splits
    p_total += (i_kv * rows + i_m) * num_splits
    b_s = tl.arange(0, BLOCK_S)
    b_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = b_d < DIM
    b_best = tl.full([BLOCK_S], -float("inf"), tl.float32)
    for s in range(0, count, BLOCK_S):
        b_best = tl.maximum(b_best, tl.load(p_top + s + b_s, mask=s + b_s < count, other=-float("inf")))
    best = tl.max(b_best, 0)
    shift = tl.where(best == -float("inf"), 0.0, best)
    b_sum = tl.zeros([BLOCK_S], tl.float32)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for s in range(0, count, BLOCK_S):
        in_s = s + b_s < count
        b_keep = tl.exp2(tl.load(p_top + s + b_s, mask=in_s, other=-float("inf")) - shift)
        b_sum += b_keep * tl.load(p_total + s + b_s, mask=in_s, other=0.0)
        p_part = p_acc + ((i_kv * num_splits + s + b_s) * rows + i_m)[:, None] * DIM + b_d[None, :]
        b_part = tl.load(p_part, mask=in_s[:, None] & in_d[None, :], other=0.0)
        b_acc += tl.sum(b_keep[:, None] * b_part, 0)
    b_y = b_acc / tl.sum(b_sum, 0)
    # more keys than can be read: no answer is better than part of one
    b_y = tl.where(visible > limit, float("nan"), b_y)
    b_column = i_head * DIM + b_d
    if p_gate is not None:
        p_gates = p_gate + i_row.to(tl.int64) * gate_row + i_head * gate_head + b_d
        b_y *= tl.sigmoid(tl.load(p_gates, mask=in_d, other=0.0).to(tl.float32))
    # adding zero takes the sign off a zero: that of a sum that underflows depends on how long the window is
    b_y = tl.where(visible > 0, b_y + 0.0, 0.0).to(p_out.dtype.element_ty)
    full_width = NUM_KV * GROUP * DIM
    tl.store(p_out + i_row.to(tl.int64) * full_width + b_column, b_y, mask=in_d)
    if p_panel is not None:
        if (i_row == 0) & (i_head == 0) & (i_d == 0):
            mark_ran(p_panel, slot, num_signals, num_words, shape)
        mark_tile(b_y, i_row + b_column * 0, b_column, in_d, full_width, p_panel, p_row_ids, slot, num_signals,
                  num_words, neg_inf)  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_finish_fwd_kernel(p_attended, p_q, p_gate, p_first_key, p_first_value, p_sequence, p_last, p_out, a_row,
                                a_head, q_row, q_head, gate_row, gate_head, p_panel, p_row_ids, slot, num_signals,
                                num_words, shape, neg_inf, NUM_KV: tl.constexpr, GROUP: tl.constexpr,
                                DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """`firetower.ops.attention.torch_path.finish`, one program a row."""
    i_row = tl.program_id(0)
    row = i_row.to(tl.int64)
    b_h = tl.arange(0, BLOCK_H)[:, None]
    b_d = tl.arange(0, BLOCK_D)[None, :]
    in_h = b_h < NUM_KV * GROUP
    b_mask = in_h & (b_d < DIM)
    last = tl.load(p_last + i_row)
    sequence = tl.load(p_sequence + i_row)
    b_q = tl.load(p_q + row * q_row + b_h * q_head + b_d, mask=b_mask, other=0.0).to(tl.float32)
    # NaN, Inf or squares beyond float32: the difference is NaN
    b_norm = tl.sum(b_q * b_q, 1)[:, None]
    b_kv = sequence * NUM_KV + b_h // GROUP
    b_bad = (b_norm - b_norm != 0.0) | (tl.load(p_first_key + b_kv, mask=in_h, other=2147483647) <= last)
    b_bad = b_bad | (tl.load(p_first_value + b_kv * DIM + b_d, mask=b_mask, other=2147483647) <= last)
    b_y = tl.load(p_attended + row * a_row + b_h * a_head + b_d, mask=b_mask, other=0.0).to(tl.float32)
    b_y = tl.where(b_bad, float("nan"), b_y)
    if p_gate is not None:
        p_gates = p_gate + row * gate_row + b_h * gate_head + b_d
        b_y *= tl.sigmoid(tl.load(p_gates, mask=b_mask, other=0.0).to(tl.float32))
    b_y = tl.where(last < 0, 0.0, b_y).to(p_out.dtype.element_ty)
    full_width = NUM_KV * GROUP * DIM
    b_column = b_h * DIM + b_d
    tl.store(p_out + row * full_width + b_column, b_y, mask=b_mask)
    if p_panel is not None:
        if i_row == 0:
            mark_ran(p_panel, slot, num_signals, num_words, shape)
        mark_tile(b_y, i_row + b_column * 0, b_column, b_mask, full_width, p_panel, p_row_ids, slot, num_signals,
                  num_words, neg_inf)  # fmt: skip


def block_m_for(group: int) -> int:
    """Query rows of a tile: as many as the largest window has, so that no window chooses."""
    return int(min(_MAX_BLOCK_M, max(16, 1 << (group * MAX_WINDOW - 1).bit_length())))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Partial sums of one `window` call; every element that is read was written by the same call.

    Attributes:
        acc: float32 [N, Hkv, S, W * G, D].
        top: float32 [N, Hkv, W * G, S], maxima of the scores, as powers of two.
        total: float32 [N, Hkv, W * G, S], sums of the weights.
    """

    acc: Tensor
    top: Tensor
    total: Tensor


def new_workspace(query: Tensor, num_kv_heads: int, max_seq_len: int, splits: Splits = SPLITS) -> Workspace:
    """Uninitialised partial sums for a query [N, W, H, D]."""
    n, w, h, d = query.shape
    rows, count = w * (h // num_kv_heads), splits.count(max_seq_len)
    acc = torch.empty(n, num_kv_heads, count, rows, d, dtype=torch.float32, device=query.device)
    top, total = (
        torch.empty(n, num_kv_heads, rows, count, dtype=torch.float32, device=query.device) for _ in range(2)
    )
    return Workspace(acc=acc, top=top, total=total)


def window(
    query: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor | None,
    gate: Tensor | None,
    scale: float,
    max_seq_len: int,
    out: Tensor,
    mark: Mark | None,
    *,
    workspace: Workspace | None = None,
    splits: Splits = SPLITS,
) -> None:
    """Launch both kernels; arguments as `firetower.ops.attention.torch_path.window`."""
    n, w, h, d = query.shape
    num_kv = kv.key.shape[2]
    panel = mark_arguments(mark, out.dtype, n * w, h * d)
    rows = query.reshape(n * w, h, d)
    gates = None if gate is None else gate.reshape(n * w, h, d)
    parts = new_workspace(query, num_kv, max_seq_len, splits) if workspace is None else workspace
    count = splits.count(max_seq_len)
    rule = {"BASE": splits.base_tokens, "NUM_BASE": splits.num_base, "PER_OCTAVE": splits.per_octave}
    heads = {"NUM_KV": num_kv, "GROUP": h // num_kv, "DIM": d}
    _launch_window(rows, kv, block_table, seq_lens, slot_mapping, scale, w, max_seq_len, count, parts, heads | rule)
    gate_strides = (0, 0) if gates is None else gates.stride()[:2]
    with torch.cuda.device_of(query):
        attention_combine_fwd_kernel[(n * w, h, triton.cdiv(d, _COMBINE_DIM))](
            parts.acc, parts.top, parts.total, gates, seq_lens, slot_mapping, out, w, max_seq_len, count,
            *gate_strides, *panel, **heads, **rule, BLOCK_S=_COMBINE_SPLITS, BLOCK_D=_COMBINE_DIM, num_warps=4,
        )  # fmt: skip


def _launch_window(
    rows: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor | None,
    scale: float,
    width: int,
    limit: int,
    num_splits: int,
    parts: Workspace,
    shape: dict[str, int],
) -> None:
    block_m = block_m_for(shape["GROUP"])
    tiles = triton.cdiv(width * shape["GROUP"], block_m)
    size = max(rows.itemsize, kv.key.itemsize)
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    scales = (0, 0, 0) if kv.key_scale is None else kv.key_scale.stride()
    with torch.cuda.device_of(rows):
        attention_window_fwd_kernel[(num_splits, shape["NUM_KV"] * tiles, len(rows) // width)](
            rows, kv.key, kv.value, kv.key_scale, kv.value_scale, table, seq_lens, slot_mapping, parts.acc, parts.top,
            parts.total, scale * _LOG2E, width, kv.key.shape[0], table.stride(0), limit, num_splits,
            *rows.stride()[:2], *kv.key.stride()[:3], *scales, **shape,
            PAGE=kv.key.shape[1], WINDOW=MAX_WINDOW, BLOCK_M=block_m, BLOCK_N=_BLOCK_N,
            BLOCK_D=max(16, triton.next_power_of_2(shape["DIM"])), num_warps=_NUM_WARPS[size],
            num_stages=_NUM_STAGES[size],
        )  # fmt: skip


def finish(
    attended: Tensor,
    query: Tensor,
    gate: Tensor | None,
    first_key: Tensor,
    first_value: Tensor,
    sequence: Tensor,
    last_key: Tensor,
    out: Tensor,
    mark: Mark | None,
) -> None:
    """Launch; arguments as `firetower.ops.attention.torch_path.finish`."""
    rows, heads, dim = out.shape
    panel = mark_arguments(mark, out.dtype, rows, heads * dim)
    if rows == 0:
        return
    num_kv = first_key.shape[1]
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]
    with torch.cuda.device_of(out):
        attention_finish_fwd_kernel[(rows,)](
            attended, query, gate, first_key, first_value, sequence, last_key, out, *attended.stride()[:2],
            *query.stride()[:2], *gate_strides, *panel, NUM_KV=num_kv, GROUP=heads // num_kv, DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_H=triton.next_power_of_2(heads), num_warps=4,
        )  # fmt: skip
