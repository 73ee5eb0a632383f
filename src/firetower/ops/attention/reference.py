"""Attention, one query at a time over the keys that it sees: the truth that backends are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.ops.attention.cache import PagedKV


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One query over all of ``key``: [H, D], [L, Hkv, D] twice, to [H, D]; L = 0 gives zeros.

    Everything in the type of ``query``. Nothing is guarded: a NaN or Inf does what IEEE arithmetic makes of it.
    """
    if key.shape[0] == 0:
        return torch.zeros_like(query)
    group = query.shape[0] // key.shape[1]
    heads = []
    for h, q in enumerate(query):
        scores = (key[:, h // group] * q).sum(-1) * scale
        weights = (scores - scores.max()).exp()
        heads.append((weights[:, None] * value[:, h // group]).sum(0) / weights.sum())
    return torch.stack(heads)


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    gate: Tensor | None = None,
) -> Tensor:
    """As `firetower.ops.attention.prefill`, in float64."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for i in range(len(cu_seqlens_q) - 1):
        k, v = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].double() for x in (key, value))
        begin, end = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        for row in range(begin, end):
            seen = len(k) - (end - 1 - row) if causal else len(k)
            out[row] = attend(query[row].double(), k[:seen], v[:seen], scale)
    return out if gate is None else out * gate.double().sigmoid()


def read(kv: PagedKV, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, its scales applied: float64 [length, Hkv, D] each.

    Args:
        block_table: int [max_pages] of this sequence.
    """
    page_size = kv.key.shape[1]
    places = [(int(block_table[t // page_size]), t % page_size) for t in range(length)]
    both = []
    for x, x_scale in ((kv.key, kv.key_scale), (kv.value, kv.value_scale)):
        rows = [x[p].double() if x_scale is None else x[p].double() * x_scale[p].double()[:, None] for p in places]
        both.append(torch.stack(rows) if rows else torch.empty(0, *x.shape[2:], dtype=torch.float64, device=x.device))
    return both[0], both[1]


def window(
    query: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    slot_mapping: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """As `firetower.ops.attention.window`, in float64."""
    out = torch.zeros_like(query, dtype=torch.float64)
    num_sequences, width = query.shape[:2]
    for n in range(num_sequences):
        key, value = read(kv, block_table[n], int(seq_lens[n]))
        is_real = [True] * width if slot_mapping is None else (slot_mapping[n] >= 0).tolist()
        for w in range(width):
            seen = int(seq_lens[n]) - sum(is_real[w + 1 :])
            if is_real[w] and seen > 0:
                out[n, w] = attend(query[n, w].double(), key[:seen], value[:seen], scale)
    if gate is not None:
        real = torch.ones_like(out) if slot_mapping is None else (slot_mapping >= 0)[..., None, None].to(out)
        out = torch.where(real > 0, out * gate.double().sigmoid(), out)
    return out
