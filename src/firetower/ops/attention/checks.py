"""What the attention ops refuse, by shape and type alone: nothing on a device is waited for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.attention.cache import PagedKV

MAX_WINDOW = 8
"""Tokens of one sequence that a window may hold."""

MAX_HEAD_DIM = 256
"""Widest head that a tile of the window kernel holds."""

_INTEGERS = (torch.int32, torch.int64)


def check_heads(name: str, query: Tensor, heads: Sequence[int]) -> None:
    """Query ``[..., H, D]`` against ``(Hkv, D)``.

    Raises:
        ConfigError: D differs, or Hkv does not divide H.
    """
    if query.ndim < 3 or not query.is_floating_point():
        raise ConfigError(f"query={tuple(query.shape)} {query.dtype}: must be float [..., H, D]")
    num_heads, dim = query.shape[-2:]
    if len(heads) != 2 or heads[1] != dim or not heads[0] or num_heads % heads[0]:
        raise ConfigError(
            f"{name} with (heads, width) {tuple(heads)}: must have width {dim} and heads that divide {num_heads}"
        )
    if query.stride(-1) != 1:
        raise ConfigError(f"query with strides {query.stride()}: the last must be 1; call .contiguous()")


def check_like(name: str, x: Tensor | None, like: Tensor) -> None:
    """A tensor of another's shape, type and device, with its last stride 1.

    Raises:
        ConfigError: it is not.
    """
    if x is None:
        return
    if x.shape != like.shape or x.dtype != like.dtype or x.device != like.device:
        raise ConfigError(
            f"{name}={tuple(x.shape)} {x.dtype} on {x.device}: must be {tuple(like.shape)} {like.dtype} on "
            f"{like.device}"
        )
    if x.numel() and x.stride(-1) != 1:
        raise ConfigError(f"{name} with strides {x.stride()}: the last must be 1; call .contiguous()")


def check_bounds(
    bounds_q: Sequence[int], bounds_k: Sequence[int], num_queries: int, num_keys: int, *, causal: bool
) -> None:
    """Where packed sequences begin and end.

    Raises:
        ConfigError: not ascending from 0, beyond the rows, or a causal sequence with fewer keys than queries.
    """
    for name, bounds, rows in (("cu_seqlens_q", bounds_q, num_queries), ("cu_seqlens_k", bounds_k, num_keys)):
        if isinstance(bounds, Tensor):
            raise ConfigError(f"{name}: must be host integers; keep the list beside the tensor")
        steps = [b - a for a, b in itertools.pairwise(bounds)]
        if len(bounds) < 2 or bounds[0] != 0 or min(steps) < 0 or bounds[-1] > rows:
            raise ConfigError(f"{name}={list(bounds)}: must ascend from 0 to at most {rows}, one more than sequences")
    if len(bounds_q) != len(bounds_k):
        raise ConfigError(f"cu_seqlens_k has {len(bounds_k)} entries, cu_seqlens_q {len(bounds_q)}: must be alike")
    for i in range(len(bounds_q) - 1):
        queries, keys = bounds_q[i + 1] - bounds_q[i], bounds_k[i + 1] - bounds_k[i]
        if causal and queries > keys:
            raise ConfigError(
                f"sequence {i}: {queries} queries and {keys} keys: a causal query needs its own key; pass causal=False"
            )


def check_window(
    query: Tensor, kv: PagedKV, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor | None
) -> None:
    """Arguments of a window.

    Raises:
        ConfigError: shapes or types that do not fit.
    """
    if query.ndim != 4 or not 1 <= query.shape[1] <= MAX_WINDOW:
        raise ConfigError(f"query={tuple(query.shape)}: must be [N, 1 to {MAX_WINDOW}, H, D]; use prefill() for more")
    check_heads("kv", query, kv.key.shape[-2:])
    if query.shape[-1] > MAX_HEAD_DIM:
        raise ConfigError(f"head_dim={query.shape[-1]}: must be at most {MAX_HEAD_DIM}")
    is_exact = kv.is_quantised or kv.key.dtype == query.dtype or query.dtype is torch.float32
    if not is_exact and query.dtype is not torch.float64:
        raise ConfigError(f"kv of {kv.key.dtype}: a query of {query.dtype} would round it; keep both in one type")
    num = query.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] != num or block_table.dtype not in _INTEGERS:
        raise ConfigError(
            f"block_table={tuple(block_table.shape)} {block_table.dtype}: must be int32 [{num}, max_pages]"
        )
    if seq_lens.shape != (num,) or seq_lens.dtype not in _INTEGERS:
        raise ConfigError(f"seq_lens={tuple(seq_lens.shape)} {seq_lens.dtype}: must be int32 [{num}]")
    if slot_mapping is not None:
        check_slots(slot_mapping, query.shape[:2])


def check_slots(slot_mapping: Tensor, shape: Sequence[int]) -> None:
    """Slots of tokens.

    Raises:
        ConfigError: another shape, or no contiguous integers.
    """
    if slot_mapping.shape != torch.Size(shape) or slot_mapping.dtype not in _INTEGERS:
        raise ConfigError(
            f"slot_mapping={tuple(slot_mapping.shape)} {slot_mapping.dtype}: must be int32 or int64 {list(shape)}"
        )
    if not slot_mapping.is_contiguous():
        raise ConfigError(f"slot_mapping with strides {slot_mapping.stride()}: must be contiguous")


def check_rows(key: Tensor, value: Tensor, kv: PagedKV, slot_mapping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a write.

    Returns:
        Keys and values as [T, Hkv, D], slots as [T].

    Raises:
        ConfigError: shapes or types that do not fit.
    """
    if key.ndim < 3 or key.shape[-2:] != kv.key.shape[-2:] or not key.is_floating_point():
        raise ConfigError(f"key={tuple(key.shape)} {key.dtype}: must be float {['...', *kv.key.shape[-2:]]}")
    check_like("value", value, key)
    check_slots(slot_mapping, key.shape[:-2])
    if key.stride(-1) != 1:
        raise ConfigError(f"key with strides {key.stride()}: the last must be 1; call .contiguous()")
    rows = (x.reshape(-1, *x.shape[-2:]) for x in (key, value))
    return next(rows), next(rows), slot_mapping.view(-1)


def output(out: Tensor | None, like: Tensor) -> Tensor:
    """Where an answer goes.

    Raises:
        ConfigError: an ``out`` that is not contiguous or not alike.
    """
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    check_like("out", out, like)
    if not out.is_contiguous():
        raise ConfigError(f"out with strides {out.stride()}: must be contiguous")
    return out
