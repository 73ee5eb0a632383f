"""Attention with grouped query heads: prefill, windows over paged keys and values, writing and reading the pages.

Numerics, all backends:

- Scores, softmax and sums in float32; weights are rounded to the query's type before they meet the values, as the
  tensor cores ask. One rounding at the store. The output gate, ``* sigmoid(gate)``, is applied in float32 before it.
- A query that sees nothing, a pad and a sequence of length 0 give zeros. A query whose visible scores are all -Inf has
  no answer and gives NaN: only emptiness is zero, never 0/0.
- A NaN in a query burns its row and head; in a key, every row from its token on, of the heads that read it; in a value,
  one column of those rows. Rows before it, other sequences and pads keep their bits. Nothing beyond a sequence's length
  is read into a result, whatever stands there.
- Windows are row-invariant: tiles, units and splits of the keys follow absolute position, and every form of the kernel
  sums in one order, so that a row's bits depend neither on the batch nor on the window's length nor on ``max_seq_len``.

Source: Dao et al., "FlashAttention" (2022), algorithm 1, and "Flash-Decoding" (2023) for splits; gate as in
transformers 5.24, ``Qwen3NextAttention``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.attention import prefill as _prefill
from firetower.ops.attention.cache import PagedKV, new_kv
from firetower.ops.attention.checks import check_bounds, check_heads, check_like, check_rows, check_window, output
from firetower.ops.attention.torch_path import read_pages
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = ["PagedKV", "gather_kv", "new_kv", "prefill", "window", "write_kv"]

_HERE = "firetower.ops.attention"
for _part, _file in (("window", "kernels"), ("finish", "kernels"), ("write_kv", "write_kernels")):
    _name = f"attention.{_part}"
    REGISTRY.register(_name, "triton", f"{_HERE}.{_file}:{_part}", supports=needs_triton, devices=("cuda",))
    REGISTRY.register(_name, "torch", f"{_HERE}.torch_path:{_part}", supports=always)
REGISTRY.register("attention.prefill", "sdpa", f"{_HERE}.torch_path:sdpa", supports=always)


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int] | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    mark: Mark | None = None,
) -> Tensor:
    """Attention of packed prompts, through the library's kernel (PyTorch SDPA), a sequence at a time.

    A sequence may have more keys than queries: its prefix is in the cache already (`gather_kv`), and the last query
    sees every key. Not row-invariant: the library chooses its kernel by shape. Cut prompts at multiples of absolute
    position.

    Args:
        query: [T, H, D], float16, bfloat16 or float32; last stride 1.
        key: [Tk, Hkv, D], same type; Hkv divides H.
        value: [Tk, Hkv, D].
        cu_seqlens_q: host integers, S + 1 of them from 0 on: sequence i has queries ``[i]`` to ``[i + 1]``. Rows beyond
            the last are pads and give zeros.
        cu_seqlens_k: the same for keys; ``cu_seqlens_q`` where None.
        scale: of the scores; D^-0.5 where None.
        causal: whether a query sees only the keys up to its own.
        gate: [T, H, D] or None: the answer is multiplied with its sigmoid.
        out: contiguous [T, H, D], made where None; every element is written once.
        mark: signal of the answer as stored, ``[T, H * D]``.

    Returns:
        [T, H, D]. A query or key with a NaN or Inf, or whose squares sum beyond float32, gives NaN in the rows that see
        it; so does a value, in its column. NaN in ``gate`` stays in its element.

    Raises:
        ConfigError: shapes, types or lengths that do not fit; more queries than keys where ``causal``.
    """
    check_heads("key", query, key.shape[-2:])
    check_like("value", value, key)
    check_like("gate", gate, query)
    bounds_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_bounds(cu_seqlens_q, bounds_k, query.shape[0], key.shape[0], causal=causal)
    y = output(out, query)
    if query.shape[0]:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        _prefill.run(query, key, value, cu_seqlens_q, bounds_k, scale, gate, y, mark, causal=causal)
    return y


def window(
    query: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    slot_mapping: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    mark: Mark | None = None,
) -> Tensor:
    """Attention of 1 to 8 new tokens a sequence over its pages, which hold their keys and values already (`write_kv`).

    Args:
        query: [N, W, H, D], float16, bfloat16 or float32. The last real token of a sequence is at position
            ``seq_lens - 1``, the one before it at ``seq_lens - 2``; each sees the keys up to its own.
        kv: the layer's pages, in the type of ``query``, in any float type under a float32 query, or in 8 bits.
        block_table: int32 [N, max_pages], page of each ``page_size`` tokens. Entries beyond the length are not read;
            one within it that is not a page of the pool makes the row NaN.
        seq_lens: int32 [N], keys of each sequence, those of the window's real tokens included.
        slot_mapping: int [N, W] as `write_kv` takes it, of which only the sign is read: negative for a pad. None: no
            pads.
        gate: [N, W, H, D] or None: the answer is multiplied with its sigmoid.
        scale: of the scores; D^-0.5 where None.
        max_seq_len: host integer that no length exceeds, to launch fewer programs; what the block table holds where
            None. A row that sees more keys is NaN. Changes no bit.
        out: contiguous [N, W, H, D], made where None; every element is written once.
        mark: signal of the answer as stored, ``[N * W, H * D]``.

    Returns:
        [N, W, H, D]; zeros for pads and for rows that see nothing.

    Raises:
        ConfigError: shapes or types that do not fit.
    """
    check_window(query, kv, block_table, seq_lens, slot_mapping)
    check_like("gate", gate, query)
    capacity = block_table.shape[1] * kv.key.shape[1]
    limit = capacity if max_seq_len is None else min(max_seq_len, capacity)
    if limit < 1:
        raise ConfigError(f"max_seq_len={max_seq_len}: must be at least 1; leave it out to take the block table's size")
    y = output(out, query)
    if query.numel():
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        kernel("attention.window", query)(
            query, kv, block_table, seq_lens, slot_mapping, gate, scale, limit, y, mark
        )
    return y


def write_kv(key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor, *, mark: Mark | None = None) -> None:
    """Store new keys and values in their pages, in 8 bits where the pages are.

    The scale of an 8-bit row is its largest magnitude over 127 (int8) or 448 (float8_e4m3fn), one for each token and
    head, from the data itself: it cannot be mis-calibrated. It saturates at its type's largest, the elements then at
    theirs: finite in, finite out. A row of zeros has the smallest scale. A row with a NaN or Inf has zeros and the
    scale NaN: every query that sees it becomes NaN, and none before.

    Args:
        key: [..., Hkv, D], float16, bfloat16 or float32; D contiguous.
        value: likewise.
        kv: written in place; each slot by one token.
        slot_mapping: int32 or int64 [...]: ``page * page_size + offset``; negative for a pad, which writes nothing. One
            beyond the pool writes nothing and is marked as NaN.
        mark: signal of what is stored: ``[T, 2 * Hkv * D]`` of keys, then values, or of 8-bit pages the scales, ``[T, 2
            * Hkv]``. Pads are not marked.

    Raises:
        ConfigError: shapes or types that do not fit.
    """
    rows_key, rows_value, slots = check_rows(key, value, kv, slot_mapping)
    kernel("attention.write_kv", key)(rows_key, rows_value, kv, slots, mark)


def gather_kv(
    kv: PagedKV, block_table: Tensor, seq_lens: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """Read the keys and values of sequences out of their pages, for `prefill` behind a prefix.

    Args:
        kv: the layer's pages.
        block_table: int [N, max_pages].
        seq_lens: host integers, tokens to read of each sequence.
        dtype: of the answer; 8-bit elements are multiplied with their scales in float32.

    Returns:
        (key [Tk, Hkv, D], value [Tk, Hkv, D], cu_seqlens_k).

    Raises:
        ConfigError: a length beyond the block table.
    """
    page_size = kv.key.shape[1]
    keys, values, bounds = [kv.key.new_empty(0, *kv.key.shape[2:], dtype=dtype)], [], [0]
    values.append(keys[0])
    for n, length in enumerate(seq_lens):
        pages = math.ceil(length / page_size)
        if length < 0 or pages > block_table.shape[1]:
            raise ConfigError(
                f"seq_lens[{n}]={length}: must be from 0 to {block_table.shape[1] * page_size}; widen the block table"
            )
        key, value = read_pages(kv, block_table[n, :pages].long(), length, dtype)
        keys.append(key)
        values.append(value)
        bounds.append(bounds[-1] + length)
    return torch.cat(keys), torch.cat(values), bounds
