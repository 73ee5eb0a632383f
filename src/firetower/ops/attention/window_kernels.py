# ruff: noqa: N803, N806 - compile-time names are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
"""Window decode over paged keys and values in Triton: the parts of a sequence.

Shape legend: N sequences, W window tokens of each, H query heads, Hkv key and value heads, G = H / Hkv, D head width, S
parts, R query rows of a tile, K keys of a tile, C columns of the values. A program takes some keys of one key head, up
to R of the ``W * G`` query rows that read it, and C columns.

Few rows stand *upright*, keys by rows: 16 of them fill the narrow side of the tensor cores' tile, where 64 would be
needed on the other. Many rows lie *flat*, rows by keys: a row is within one warp then, its weights stay in registers,
and no step waits for another warp. Both make the same products in the same order; sums over keys that are not products
take one tree of key indices. So the form changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from firetower.sensors.mark_tile import mark_ran, mark_tile

UNSPECIALIZED = [
    "width", "num_pages", "table_width", "limit", "num_parts", "num_programs", "scale", "slot", "num_signals",
    "num_words", "shape", "neg_inf",
]  # fmt: skip


@triton.jit
def shares(length, num_programs, UNIT: tl.constexpr, PER_SPLIT: tl.constexpr, MAX_UNITS: tl.constexpr):
    """`Splits.shares`."""
    units = tl.cdiv(length, UNIT)
    share = tl.cdiv(units, num_programs)
    is_fine = share <= MAX_UNITS
    whole = tl.cdiv(share, PER_SPLIT) * PER_SPLIT
    return tl.where(is_fine, share, whole) * UNIT, tl.where(is_fine, UNIT, UNIT * PER_SPLIT)


@triton.jit
def visible(length, p_slots, i_n, b_w, width, WINDOW: tl.constexpr):
    """Keys that tokens ``b_w`` [M] of a window see: those of the sequence less the real tokens after; 0 for a pad."""
    if p_slots is None:
        b_after = width - 1 - b_w
        b_mine = b_w < width
    else:
        b_i = tl.arange(0, WINDOW)
        b_real = tl.load(p_slots + i_n * width + b_i, mask=b_i < width, other=-1) >= 0
        b_after = tl.sum((b_real[None, :] & (b_i[None, :] > b_w[:, None])).to(tl.int32), 1)
        b_mine = tl.sum((b_real[None, :] & (b_i[None, :] == b_w[:, None])).to(tl.int32), 1) != 0
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
def _has_bad_values(p_v, p_scale, p_table, begin, end, num_pages, kv_page, s_page, s_token, b_c, in_c,
                    KV_TOKEN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """1 where a value from ``begin`` to ``end`` (fewer than WINDOW positions) is not finite, else 0."""
    b_at = begin + tl.arange(0, WINDOW)
    b_in = b_at < end
    b_page, _ = _checked(tl.load(p_table + b_at // PAGE, mask=b_in, other=0), num_pages)
    b_offset = (b_page * kv_page + (b_at % PAGE) * KV_TOKEN)[:, None] + b_c[None, :]
    b_place = b_page * s_page + (b_at % PAGE) * s_token
    b_v = _values(p_v, p_scale, b_offset, b_place, b_in, b_in[:, None] & in_c[None, :], tl.float32)
    return tl.max((b_v * 0.0 != 0.0).to(tl.int32))


@triton.jit
def _across(b_x, FLAT: tl.constexpr):
    """A value of each row [R], against keys or columns."""
    if FLAT:
        b_y = b_x[:, None]
    else:
        b_y = b_x[None, :]
    return b_y


@triton.jit
def _zeros(NUM: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr):
    if FLAT:
        b_zero = tl.zeros([ROWS, NUM], tl.float32)
    else:
        b_zero = tl.zeros([NUM, ROWS], tl.float32)
    return b_zero


@triton.jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr):
    """Sums of no key: (acc [C, R] or flat [R, C], top [R], total [R])."""
    b_zero = tl.zeros([ROWS], tl.float32)
    return _zeros(COLUMNS, ROWS, FLAT), b_zero - float("inf"), b_zero


@triton.jit
def _nothing_yet(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, FLAT: tl.constexpr):
    """A unit of no key: (acc, top [R], weights [K, R] or flat [R, K])."""
    b_top = tl.zeros([ROWS], tl.float32) - float("inf")
    return _zeros(COLUMNS, ROWS, FLAT), b_top, _zeros(BLOCK_N, ROWS, FLAT)


@triton.jit
def _shift(b_top):
    """What is taken off scores: their maximum, 0 where nothing was seen, as -Inf less -Inf would be NaN."""
    return tl.where(b_top == -float("inf"), 0.0, b_top)


@triton.jit
def fold(one, other, FLAT: tl.constexpr):
    """The sum of two parts, keys of ``one`` first: (acc, top, total). One that saw nothing adds exactly nothing."""
    b_top = tl.maximum(one[1], other[1])
    b_shift = _shift(b_top)
    b_keep, b_take = tl.exp2(one[1] - b_shift), tl.exp2(other[1] - b_shift)
    b_acc = one[0] * _across(b_keep, FLAT) + other[0] * _across(b_take, FLAT)
    return b_acc, b_top, one[2] * b_keep + other[2] * b_take


@triton.jit
def _key_sum(b_x, LEVELS: tl.constexpr, FLAT: tl.constexpr):
    """Sum over 2^LEVELS keys [R], i with i + K/2 first: a sum of two has one order only, whatever form and layout."""
    for _ in tl.static_range(LEVELS):
        if FLAT:
            b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), 1)
        else:
            b_x = tl.sum(tl.reshape(b_x, (2, b_x.shape[0] // 2, b_x.shape[1])), 0)
    return tl.reshape(b_x, (b_x.shape[0] * b_x.shape[1],))


@triton.jit
def _add_tile(b_k, b_v, b_scale, b_q, b_at, b_sight, unit, FLAT: tl.constexpr):
    """A tile of keys joins a unit. A row that sees none of it keeps its bits; a NaN score makes its weights NaN."""
    if FLAT:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_scale[None, :]
        b_s = tl.where(b_at[None, :] < b_sight[:, None], b_s, -float("inf"))
        b_top = tl.maximum(unit[1], tl.max(b_s, 1))
    else:
        b_s = tl.dot(b_k, b_q, input_precision="ieee") * b_scale[:, None]
        b_s = tl.where(b_at[:, None] < b_sight[None, :], b_s, -float("inf"))
        b_top = tl.maximum(unit[1], tl.max(b_s, 0))
    b_shift = _shift(b_top)
    b_p = tl.exp2(b_s - _across(b_shift, FLAT))
    b_keep = _across(tl.exp2(unit[1] - b_shift), FLAT)
    b_acc = unit[0] * b_keep
    if FLAT:
        # the zero makes Triton 3.6 wait for the product here. It would wait for it in the next turn, find the sums read
        # before at the end of a unit, and ptxas then run every product of the loop by itself
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc, input_precision="ieee") + 0.0
    else:
        b_acc = tl.dot(tl.trans(b_v), b_p.to(b_q.dtype), b_acc, input_precision="ieee")
    return b_acc, b_top, unit[2] * b_keep + b_p


@triton.jit
def _halves(b_x):
    """Left and right columns of [R, C]."""
    return tl.split(tl.permute(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _store(p_part, b_acc, b_m, b_stored, first, DIM: tl.constexpr, FLAT: tl.constexpr):
    """Sums of columns from ``first`` on. A store goes through shared memory, which a quarter of a flat tile spares."""
    if FLAT:
        b_c = tl.arange(0, b_acc.shape[1] // 4)
        b_left, b_right = _halves(b_acc)
        b_quarters = _halves(b_left) + _halves(b_right)
        for i in tl.static_range(4):
            b_column = first + i * (b_acc.shape[1] // 4) + b_c
            tl.store(p_part + b_m[:, None] * DIM + b_column[None, :], b_quarters[i],
                     mask=b_stored[:, None] & (b_column < DIM)[None, :])  # fmt: skip
    else:
        b_column = first + tl.arange(0, b_acc.shape[0])
        tl.store(p_part + b_m[None, :] * DIM + b_column[:, None], b_acc,
                 mask=b_stored[None, :] & (b_column < DIM)[:, None])  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_window_fwd_kernel(p_q, p_k, p_v, p_k_scale, p_v_scale, p_table, p_seq_lens, p_slots, p_acc, p_top,
                                p_total, scale, width, num_pages, table_width, limit, num_parts, num_programs, q_row,
                                q_head, kv_page, kv_head, s_page, s_token, s_head, KV_TOKEN: tl.constexpr,
                                NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                                ROWS: tl.constexpr, FLAT: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr,
                                BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
                                UNIT: tl.constexpr, PER_SPLIT: tl.constexpr, MAX_UNITS: tl.constexpr,
                                WINDOW: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Unnormalised sums of parts: ``acc`` float32 [N, Hkv, S, W * G, D], ``top`` and ``total`` [N, Hkv, W * G, S].

    A part that no row reaches writes nothing, and is not read.
    """
    if PDL:
        # the combine may take its place as soon as no program of this kernel waits for one
        tl_cuda.gdc_launch_dependents()
    # programs that read the same keys are neighbours: one of them finds the keys in L2
    i_chunk = tl.program_id(0) % CHUNKS
    i_rest = tl.program_id(0) // CHUNKS
    i_h = i_rest % NUM_KV
    i_program = i_rest // NUM_KV % num_programs
    i_tile = i_rest // NUM_KV // num_programs
    i_n = tl.program_id(1)
    length = tl.load(p_seq_lens + i_n).to(tl.int32)
    share, part = shares(tl.minimum(length, limit), num_programs, UNIT, PER_SPLIT, MAX_UNITS)
    begin = i_program * share
    b_m = i_tile * ROWS + tl.arange(0, ROWS)
    b_w = b_m // GROUP
    b_sights = tl.minimum(visible(length, p_slots, i_n, b_w, width, WINDOW), limit)
    last = tl.max(b_sights, 0)
    if begin >= last:
        return
    last = tl.minimum(last, begin + share)
    b_d = tl.arange(0, BLOCK_D)
    b_c = i_chunk * COLUMNS + tl.arange(0, COLUMNS)
    b_n = tl.arange(0, BLOCK_N)
    in_d = b_d < DIM
    in_c = b_c < DIM
    rows = width * GROUP
    p_q_rows = p_q + (i_n * width + b_w).to(tl.int64) * q_row + (i_h * GROUP + b_m % GROUP) * q_head
    b_q = tl.load(p_q_rows[:, None] + b_d[None, :], mask=(b_m < rows)[:, None] & in_d[None, :], other=0.0)
    if not FLAT:
        b_q = tl.trans(b_q)
    p_table += i_n.to(tl.int64) * table_width
    p_k += i_h * kv_head
    p_v += i_h * kv_head
    if p_k_scale is not None:
        p_k_scale += i_h * s_head
        p_v_scale += i_h * s_head
    i_head = i_n.to(tl.int64) * NUM_KV + i_h

    # a value that is not finite and that only later tokens of the window see would reach the earlier ones as 0 * NaN:
    # then each token takes a pass of its own, over the keys that it sees. The positions that not all see are 7 at most.
    has_bad = i_n * 0
    shared = tl.maximum(tl.min(tl.where(b_sights > 0, b_sights, last), 0), begin)
    if shared < last:
        has_bad = _has_bad_values(p_v, p_v_scale, p_table, shared, last, num_pages, kv_page, s_page, s_token, b_c,
                                  in_c, KV_TOKEN, PAGE, WINDOW)  # fmt: skip
    for i_pass in range(tl.where(has_bad != 0, width, 1)):
        b_mine = (b_w == i_pass) | (b_w * 0 + has_bad == 0)
        b_sight = tl.where(b_mine, tl.minimum(b_sights, last), 0)
        end = tl.max(b_sight, 0)
        unit = _nothing_yet(ROWS, COLUMNS, BLOCK_N, FLAT)
        sums = _nothing(ROWS, COLUMNS, FLAT)
        next_page = tl.load(p_table + begin // PAGE)
        for n in range(begin, end, BLOCK_N):
            b_at = n + b_n
            b_in = b_at < end
            if PAGE % BLOCK_N == 0:
                # one page holds the tile: a scalar address, and offsets that no step changes
                page, is_page = _checked(next_page, num_pages)
                next_page = tl.load(p_table + tl.minimum(n + BLOCK_N, end - 1) // PAGE)
                b_scale = tl.where(is_page, scale, float("nan")) + b_n * 0.0
                begin_kv = page * kv_page + (n % PAGE) * KV_TOKEN
                b_offset = b_n * KV_TOKEN
                b_place = page * s_page + (n % PAGE) * s_token + b_n * s_token
            else:
                b_page, b_ok = _checked(tl.load(p_table + b_at // PAGE, mask=b_in, other=0), num_pages)
                b_scale = tl.where(b_ok, scale, float("nan"))
                begin_kv = 0
                b_offset = b_page * kv_page + (b_at % PAGE) * KV_TOKEN
                b_place = b_page * s_page + (b_at % PAGE) * s_token
            b_k = tl.load(p_k + begin_kv + (b_offset[:, None] + b_d[None, :]), mask=b_in[:, None] & in_d[None, :],
                          other=0.0).to(p_q.dtype.element_ty)  # fmt: skip
            if p_k_scale is not None:
                b_scale = b_scale * tl.load(p_k_scale + b_place, mask=b_in, other=0.0).to(tl.float32)
            b_v = _values(p_v + begin_kv, p_v_scale, b_offset[:, None] + b_c[None, :], b_place, b_in,
                          b_in[:, None] & in_c[None, :], p_q.dtype.element_ty)  # fmt: skip
            unit = _add_tile(b_k, b_v, b_scale, b_q, b_at, b_sight, unit, FLAT)
            at = n + BLOCK_N
            if (at % UNIT == 0) | (at >= end):
                sums = fold(sums, (unit[0], unit[1], _key_sum(unit[2], LEVELS, FLAT)), FLAT)
                unit = _nothing_yet(ROWS, COLUMNS, BLOCK_N, FLAT)
                if (at % part == 0) | (at >= end):
                    i_part = n // part
                    b_stored = (b_m < rows) & b_mine
                    p_part = p_acc + (i_head * num_parts + i_part) * rows * DIM
                    _store(p_part, sums[0], b_m, b_stored, i_chunk * COLUMNS, DIM, FLAT)
                    b_part = (i_head * rows + b_m) * num_parts + i_part
                    if i_chunk == 0:
                        tl.store(p_top + b_part, sums[1], mask=b_stored)
                        tl.store(p_total + b_part, sums[2], mask=b_stored)
                    sums = _nothing(ROWS, COLUMNS, FLAT)


@triton.jit
def _pairs(b_x):
    """Sums of neighbours along the last axis."""
    if len(b_x.shape) == 2:
        b_pairs = tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2))
    else:
        b_pairs = tl.reshape(b_x, (b_x.shape[0] // 2, 2))
    b_even, b_odd = tl.split(b_pairs)
    return b_even + b_odd


@triton.jit
def _tree(b_x, LEVELS: tl.constexpr):
    """Sum along the last axis, 2^LEVELS elements, by one tree: `tl.sum` takes an order that depends on the tile."""
    for _ in tl.static_range(LEVELS - 1):
        b_x = _pairs(b_x)
    b_even, b_odd = tl.split(b_x)
    return b_even + b_odd


@triton.jit
def _part(p_acc, p_top, p_total, b_part, count, row, b_d, in_d, DIM: tl.constexpr):
    """Parts [S] of one row: (acc [D, S], top [S], total [S]); nothing from ``count`` on."""
    b_in = b_part < count
    b_top = tl.load(p_top + b_part, mask=b_in, other=-float("inf"))
    b_total = tl.load(p_total + b_part, mask=b_in, other=0.0)
    p_parts = p_acc + (b_part.to(tl.int64) * row)[None, :] + b_d[:, None]
    return tl.load(p_parts, mask=b_in[None, :] & in_d[:, None], other=0.0), b_top, b_total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_combine_fwd_kernel(p_acc, p_top, p_total, p_gate, p_seq_lens, p_slots, p_out, width, limit, num_parts,
                                 num_programs, gate_row, gate_head, p_panel, p_row_ids, slot, num_signals, num_words,
                                 shape, neg_inf, NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                                 LEVELS: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
                                 PER_SPLIT: tl.constexpr, MAX_UNITS: tl.constexpr, WINDOW: tl.constexpr,
                                 PDL: tl.constexpr):  # fmt: skip
    """Sums the parts that a row reaches, in their order, then gate, store and mark: ``out`` [N * W, H * D].

    Reads those parts alone. One that a row reaches but sees nothing of has the maximum -Inf and sums of zero: its
    weight is 2^-Inf = 0. No weight is forced to 0 by a test, which would also drop a NaN.
    """
    BLOCK_S: tl.constexpr = 1 << LEVELS
    i_row = tl.program_id(0)
    i_head = tl.program_id(1)
    i_d = tl.program_id(2)
    i_n = i_row // width
    i_w = i_row % width
    length = tl.load(p_seq_lens + i_n).to(tl.int32)
    b_s = tl.arange(0, BLOCK_S)
    seen = tl.max(visible(length, p_slots, i_n, b_s * 0 + i_w, width, WINDOW), 0)
    _, part = shares(tl.minimum(length, limit), num_programs, UNIT, PER_SPLIT, MAX_UNITS)
    count = tl.cdiv(tl.minimum(seen, limit), part)
    num_splits = tl.cdiv(tl.minimum(seen, limit), UNIT * PER_SPLIT)
    rows = width * GROUP
    i_m = i_w * GROUP + i_head % GROUP
    i_kv = i_n.to(tl.int64) * NUM_KV + i_head // GROUP
    b_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = b_d < DIM
    p_acc += (i_kv * num_parts * rows + i_m) * DIM
    p_top += (i_kv * rows + i_m) * num_parts
    p_total += (i_kv * rows + i_m) * num_parts
    row = rows * DIM
    if PDL:
        # everything above was there before the kernel that writes the parts
        tl_cuda.gdc_wait()
    top = -float("inf")
    total = 0.0
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for s in range(0, num_splits, BLOCK_S):
        if part == UNIT:
            split = _nothing(BLOCK_S, BLOCK_D, False)
            for j in tl.static_range(PER_SPLIT):
                i_part = (s + b_s) * PER_SPLIT + j
                split = fold(split, _part(p_acc, p_top, p_total, i_part, count, row, b_d, in_d, DIM), False)
        else:
            split = _part(p_acc, p_top, p_total, s + b_s, count, row, b_d, in_d, DIM)
        best = tl.maximum(top, tl.max(split[1], 0))
        shift = _shift(best)
        keep = tl.exp2(top - shift)
        b_take = tl.exp2(split[1] - shift)
        b_acc = b_acc * keep + _tree(split[0] * b_take[None, :], LEVELS)
        total = total * keep + _tree(split[2] * b_take, LEVELS)
        top = best
    b_y = b_acc / total
    # more keys than can be read: no answer is better than part of one
    b_y = tl.where(seen > limit, float("nan"), b_y)
    b_column = i_head * DIM + b_d
    if p_gate is not None:
        p_gates = p_gate + i_row.to(tl.int64) * gate_row + i_head * gate_head + b_d
        b_y *= tl.sigmoid(tl.load(p_gates, mask=in_d, other=0.0).to(tl.float32))
    # adding zero takes the sign off a zero: that of a sum that underflows depends on how long the window is
    b_y = tl.where(seen > 0, b_y + 0.0, 0.0).to(p_out.dtype.element_ty)
    full_width = NUM_KV * GROUP * DIM
    tl.store(p_out + i_row.to(tl.int64) * full_width + b_column, b_y, mask=in_d)
    if p_panel is not None:
        if (i_row == 0) & (i_head == 0) & (i_d == 0):
            mark_ran(p_panel, slot, num_signals, num_words, shape)
        mark_tile(b_y, i_row + b_column * 0, b_column, in_d, full_width, p_panel, p_row_ids, slot, num_signals,
                  num_words, neg_inf)  # fmt: skip
