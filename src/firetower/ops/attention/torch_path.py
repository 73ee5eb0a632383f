"""Attention in PyTorch: the library's kernel for prefill, a gather for windows, both held to the op's rules.

On the CPU the window form runs row by row over chunks of one fixed shape, so that a row's bits cannot depend on its
neighbours. On a device it runs all rows at once, without host sync; there the library's choices may show in the bits.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from firetower.ops.attention.cache import LARGEST, LARGEST_SCALE, SMALLEST_SCALE, PagedKV
from firetower.sensors.marks import Mark, mark_rows

NEVER = 2**31 - 1
"""Position of the first bad key where there is none."""

_CHUNK = 256
_PLACES = (operator.floordiv, operator.mod)
_NAN, _INF = float("nan"), float("inf")


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
    """One sequence through the library: [Tq, H, D], [Tk, Hkv, D] twice, to [Tq, H, D]; the last query sees all keys.

    Keys and values must be finite: the library's masks add -Inf to a score, which a NaN survives, and multiply values
    with a weight of zero.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = _lower_right(query, k.shape[2]) if causal and q.shape[2] != k.shape[2] else None
    is_square = causal and mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_square, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _lower_right(query: Tensor, num_keys: int) -> Tensor:
    """The mask in which the last query sees every key; dense where the library has no kernel for it, and would warn."""
    num_queries = query.shape[0]
    if query.is_cuda and query.itemsize == 2:
        return causal_lower_right(num_queries, num_keys)
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)


def has_no_norm(x: Tensor) -> Tensor:
    """Rows ``[..., D]`` with a NaN or Inf, or whose squares sum beyond float32: bool [...].

    The product of two rows that have a norm cannot overflow float32, so that no score does.
    """
    return ~x.float().square().sum(-1).isfinite()


def first_bad(is_bad: Tensor) -> Tensor:
    """Index along dimension 0 of the first True, `NEVER` where there is none: int32."""
    places = torch.arange(is_bad.shape[0], dtype=torch.int32, device=is_bad.device)
    places = places.view(-1, *[1] * (is_bad.ndim - 1))
    return torch.where(is_bad, places, NEVER).amin(0)


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
    """What the library leaves out of prefill: bad values made visible, pads, output gate, sensor.

    Args:
        attended: [T, H, D] of the library; any values in pad rows.
        query: [T, H, D].
        gate: [T, H, D] or None.
        first_key: int32 [S, Hkv], position of each sequence's first bad key.
        first_value: int32 [S, Hkv, D], of its first bad value a column.
        sequence: int32 [T], which sequence a row belongs to.
        last_key: int32 [T], last key that a row sees, -1 for a pad.
        out: [T, H, D].
        mark: signal of ``out`` as ``[T, H * D]``.
    """
    rows, heads, dim = out.shape
    group = heads // first_key.shape[1]
    which, last = sequence.long(), last_key[:, None]
    bad_row = has_no_norm(query) | (first_key[which] <= last).repeat_interleave(group, 1)
    bad = bad_row[..., None] | (first_value[which] <= last[..., None]).repeat_interleave(group, 1)
    y = torch.where(bad, _NAN, attended.to(torch.promote_types(out.dtype, torch.float32)))
    y = y if gate is None else y * gate.to(y.dtype).sigmoid()
    out.copy_(torch.where(last_key[:, None, None] < 0, 0.0, y))
    mark_rows(out.view(rows, heads * dim), mark)


def visible_tokens(seq_lens: Tensor, slot_mapping: Tensor | None, width: int) -> Tensor:
    """Keys that each window row sees, 0 for a pad: int32 [N, W]."""
    if slot_mapping is None:
        after = torch.arange(width - 1, -1, -1, dtype=torch.int32, device=seq_lens.device)
        return (seq_lens[:, None].int() - after).clamp_min(0)
    is_real = (slot_mapping >= 0).int()
    after = is_real.sum(1, keepdim=True) - is_real.cumsum(1)
    return ((seq_lens[:, None] - after).clamp_min(0) * is_real).int()


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
) -> None:
    """Arguments as `firetower.ops.attention.window`; ``max_seq_len`` at most what the block table holds."""
    width, heads, dim = query.shape[1:]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.reshape(-1, heads, dim).to(dtype).contiguous()
    table = block_table.long().repeat_interleave(width, 0)
    visible = visible_tokens(seq_lens, slot_mapping, width).view(-1)
    gates = None if gate is None else gate.reshape(rows.shape).to(dtype)
    if query.is_cpu:
        y = torch.zeros_like(rows)
        for i, seen in enumerate(visible.tolist()):
            part = slice(i, i + 1)
            if seen > 0 and _reads_whole_pages(kv):
                y[i] = _attend_on_host(rows[i], kv, table[i].tolist(), scale, min(seen, max_seq_len))
            elif seen > 0:
                y[part] = _attend(rows[part], kv, table[part], visible[part], scale, min(seen, max_seq_len))
            if gates is not None:
                # PyTorch's sigmoid of an element depends on its place in the tensor: vector lanes and rest differ
                y[part] *= gates[part].clone().sigmoid()
    else:
        y = _attend(rows, kv, table, visible, scale, max_seq_len)
        y = y if gates is None else y * gates.sigmoid()
    # more keys than can be read: no answer is better than part of one
    y = torch.where((visible > max_seq_len)[:, None, None], _NAN, y)
    y = torch.where((visible > 0)[:, None, None], y, 0.0)
    out.copy_(y.view(out.shape))
    mark_rows(out.view(-1, heads * dim), mark)


def _attend(query: Tensor, kv: PagedKV, table: Tensor, visible: Tensor, scale: float, length: int) -> Tensor:
    """[R, H, D] over pages [R, P], chunk after chunk, merged by the running maximum; a row with no keys gives NaN."""
    rows, heads, dim = query.shape
    q = (query * scale).view(rows, kv.key.shape[2], -1, dim)
    top = q.new_full((*q.shape[:3], 1), -_INF)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for begin in range(0, length, _CHUNK):
        key, value, sees = _gather(kv, table, visible, begin, q.dtype)
        scores = torch.matmul(q, key.transpose(2, 3)).masked_fill(~sees[:, None, None, :], -_INF)
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        # nothing seen yet: -Inf minus -Inf would be NaN
        shift = torch.where(best == -_INF, 0.0, best)
        weights, keep = (scores - shift).exp(), (top - shift).exp()
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.matmul(weights, value)
        top = best
    return (acc / total).view(rows, heads, dim)


def _reads_whole_pages(kv: PagedKV) -> bool:
    return not kv.is_quantised and _CHUNK % kv.key.shape[1] == 0


def _attend_on_host(query: Tensor, kv: PagedKV, table: list[int], scale: float, length: int) -> Tensor:
    """`_attend` of one row [H, D] whose pages the host knows: pages are copied whole, and products have one shape."""
    heads, dim = query.shape
    num_pages, page_size, num_kv = kv.key.shape[:3]
    q = (query * scale).view(num_kv, -1, dim)
    top = q.new_full((*q.shape[:2], 1), -_INF)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for begin in range(0, length, _CHUNK):
        count = min(length - begin, _CHUNK)
        pages = table[begin // page_size : -(-(begin + count) // page_size)]
        inside = torch.tensor([page if 0 <= page < num_pages else 0 for page in pages])
        both = []
        for x in (kv.key, kv.value):
            chunk = torch.zeros(_CHUNK, num_kv, dim, dtype=q.dtype)
            chunk[:count] = x.index_select(0, inside).flatten(0, 1)[:count]
            both.append(chunk)
        for i, page in enumerate(pages):
            if not 0 <= page < num_pages:
                both[0][i * page_size : min((i + 1) * page_size, count)] = _NAN
        scores = torch.matmul(q, both[0].permute(1, 2, 0))
        scores[..., count:] = -_INF
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        # nothing seen yet: -Inf minus -Inf would be NaN
        shift = torch.where(best == -_INF, 0.0, best)
        weights = (scores - shift).exp()
        share, part = weights.sum(-1, keepdim=True), torch.matmul(weights, both[1].transpose(0, 1))
        if begin:
            keep = (top - shift).exp()
            share, part = total * keep + share, acc * keep + part
        top, total, acc = best, share, part
    return (acc / total).view(heads, dim)


def _gather(
    kv: PagedKV, table: Tensor, visible: Tensor, begin: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [R, Hkv, C, D] of a chunk of positions, zeros where unseen, and which are seen [R, C].

    A page outside the pool gives NaN keys: an error that shows, not another request's memory.
    """
    num_pages, page_size = kv.key.shape[:2]
    at = torch.arange(begin, begin + _CHUNK, device=table.device)
    sees = at < visible[:, None]
    page = table[:, (at // page_size).clamp_max(table.shape[1] - 1)]
    is_outside = (page < 0) | (page >= num_pages)
    place = (page.clamp(0, num_pages - 1), (at % page_size).expand_as(page))
    both = []
    for x, x_scale in ((kv.key, kv.key_scale), (kv.value, kv.value_scale)):
        rows = x.view(torch.uint8)[place].view(x.dtype).to(dtype) if x.itemsize == 1 else x[place].to(dtype)
        rows = rows if x_scale is None else rows * x_scale[place].to(dtype)[..., None]
        both.append(rows.masked_fill(~sees[..., None, None], 0.0))
    both[0] = both[0].masked_fill((is_outside & sees)[..., None, None], _NAN)
    return both[0].transpose(1, 2), both[1].transpose(1, 2), sees


def quantise(x: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows ``[..., D]`` in 8 bits and their scales ``[...]``; a row that is not finite has the scale NaN and zeros."""
    x = x.float()
    largest = x.abs().amax(-1)
    # by a tensor: CUDA turns a division by a number into a product with its rounded inverse
    scale = largest / torch.full_like(largest, LARGEST[dtype])
    scale = scale.clamp(SMALLEST_SCALE[scale_dtype], LARGEST_SCALE[scale_dtype]).to(scale_dtype)
    is_finite = largest.isfinite()
    steps = torch.where(is_finite[..., None], x / scale.float()[..., None], 0.0)
    steps = (steps.round() if dtype is torch.int8 else steps).clamp(-LARGEST[dtype], LARGEST[dtype])
    return steps.to(dtype), torch.where(is_finite, scale, _NAN)


def write_kv(key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor, mark: Mark | None) -> None:
    """[T, Hkv, D] twice into the pages; arguments as `firetower.ops.attention.write_kv`."""
    if key.is_cpu and not kv.is_quantised and _write_on_host(key, value, kv, slot_mapping, mark):
        return
    slots = slot_mapping.long()
    fits = (slots >= 0) & (slots < kv.num_slots)
    stored = []
    for x, pages, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
        if scales is None:
            stored.append(x.to(pages.dtype).flatten(1))
            _scatter(pages, slots, fits, x.to(pages.dtype))
        else:
            steps, scale = quantise(x, pages.dtype, scales.dtype)
            stored.append(scale)
            _scatter(pages.view(torch.uint8), slots, fits, steps.view(torch.uint8))
            _scatter(scales, slots, fits, scale)
    rows = torch.cat(stored, 1)
    rows = torch.where(fits[:, None], rows, torch.where((slots < 0)[:, None], 0.0, _NAN).to(rows.dtype))
    mark_rows(rows, mark)


def _write_on_host(key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor, mark: Mark | None) -> bool:
    """The same where every slot is known to be a pad or within the pool; pads are left out."""
    slots = slot_mapping.tolist()
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    if any(slot >= kv.num_slots for slot in slots):
        return False
    size = kv.key.shape[1]
    page, offset = (torch.tensor([f(slots[i], size) for i in real], dtype=torch.int64) for f in _PLACES)
    index = None if len(real) == len(slots) else torch.tensor(real, dtype=torch.int64)
    stored = []
    for x, pages in ((key, kv.key), (value, kv.value)):
        rows = x if index is None else x.index_select(0, index)
        rows = rows.to(pages.dtype)
        pages[page, offset] = rows
        stored.append(rows.flatten(1))
    if mark is not None:
        rows = torch.cat(stored, 1)
        mark_rows(
            rows if index is None else rows.new_zeros(len(slots), rows.shape[1]).index_copy_(0, index, rows), mark
        )
    return True


def _scatter(pages: Tensor, slots: Tensor, fits: Tensor, rows: Tensor) -> None:
    """Rows with a slot into it. Without a host sync no row can be dropped: the others repeat the first that fits, or
    write back what stands in slot 0."""
    if not len(slots):
        return
    first, any_fits = fits.int().argmax(), fits.any()
    index = torch.where(fits, slots, torch.where(any_fits, slots[first], 0))
    dims = [1] * (rows.ndim - 1)
    spare = torch.where(any_fits, rows[first], pages[0, 0])
    values = torch.where(fits.view(-1, *dims), rows, spare)
    pages[index // pages.shape[1], index % pages.shape[1]] = values


def read_pages(kv: PagedKV, pages: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first ``length`` tokens of a row of the block table: [length, Hkv, D] twice."""
    both = []
    for x, x_scale in ((kv.key, kv.key_scale), (kv.value, kv.value_scale)):
        rows = x.view(torch.uint8)[pages].view(x.dtype) if x.itemsize == 1 else x[pages]
        rows = rows.flatten(0, 1)[:length]
        if x_scale is None:
            both.append(rows.to(dtype))
        else:
            both.append((rows.float() * x_scale[pages].flatten(0, 1)[:length].float()[..., None]).to(dtype))
    return both[0], both[1]
