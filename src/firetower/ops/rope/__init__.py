"""Rotary position embedding of part of each head, from tables exact to 2^20 positions and beyond.

Numerics, all backends:

- Cosine and sine in float32 from two float64-made tables, error below 4e-7 at every position; positions stay integers.
  Products in float32 and one rounding, at the store.
- Dimension i of the first half of the rotated part turns with dimension i of the second half; the rest is copied.
- A negative position is a pad: its row is copied bit for bit. A position beyond the table gives NaN in the rotated
  part, which the sensor names; nothing outside the tables is ever read.
- A NaN or Inf in one element burns the two elements of its pair, nothing else.
- Text needs no sections of multimodal RoPE: temporal, height and width positions of a text token are equal, so that
  the interleaved frequencies of Qwen3.5 are those of plain RoPE.

Source: Su et al., "RoFormer" (2021), section 3.2.2; halves as in transformers 5.24, ``apply_rotary_pos_emb``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.ops.rope.frequencies import rope_frequencies
from firetower.ops.rope.table import MAX_POSITIONS, RopeTable, rope_table
from firetower.sensors.marks import Mark

__all__ = ["MAX_POSITIONS", "RopeTable", "rope", "rope_frequencies", "rope_table"]

REGISTRY.register("rope", "triton", "firetower.ops.rope.kernels:rope", supports=needs_triton, devices=("cuda",))
REGISTRY.register("rope", "torch", "firetower.ops.rope.torch_path:rope", supports=always)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: RopeTable,
    *,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    mark_q: Mark | None = None,
    mark_k: Mark | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q: [T, num_heads, head_dim], float; head_dim stride 1, others any.
        k: [T, num_kv_heads, head_dim] of the same type.
        positions: int32 or int64 [T]; negative for a pad.
        table: from `rope_table`, on the same device.
        q_out, k_out: like ``q`` and ``k``, any strides but 1 in head_dim; may be ``q`` and ``k`` themselves.
        mark_q, mark_k: signals of the answers as stored, ``[T * heads, head_dim]``: one row id a head.

    Returns:
        (q, k), rotated.

    Raises:
        ConfigError: shapes or types that do not fit, positions that are not integers.
    """
    _check("q", q, q.shape[0], table)
    _check("k", k, q.shape[0], table)
    if k.shape[2] != q.shape[2] or k.dtype is not q.dtype:
        raise ConfigError(f"k: {k.dtype} {list(k.shape)}: must be {q.dtype} with heads of {q.shape[2]} like q")
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != q.shape[:1]:
        raise ConfigError(
            f"positions: {positions.dtype} {list(positions.shape)}: must be int32 or int64 [{q.shape[0]}]; bf16 and "
            "fp16 cannot count past 256 and 2048"
        )
    q_out, k_out = _output("q_out", q_out, q), _output("k_out", k_out, k)
    kernel("rope", q)(q, k, positions.contiguous(), table, q_out, k_out, mark_q=mark_q, mark_k=mark_k)
    return q_out, k_out


def _check(name: str, x: Tensor, num_tokens: int, table: RopeTable) -> None:
    if x.ndim != 3 or x.shape[0] != num_tokens or not x.is_floating_point() or x.stride(2) != 1:
        raise ConfigError(
            f"{name}: {x.dtype} {list(x.shape)}: must be float [{num_tokens}, heads, head_dim], stride 1 in head_dim"
        )
    if x.shape[2] < table.rotary_dim:
        raise ConfigError(f"{name}: head_dim={x.shape[2]}: must be at least the table's rotary_dim={table.rotary_dim}")
    if table.low.device.type != x.device.type:
        raise ConfigError(f"table: on {table.low.device}, {name} on {x.device}; move it with table.to()")


def _output(name: str, out: Tensor | None, x: Tensor) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype is not x.dtype or out.stride(2) != 1:
        raise ConfigError(
            f"{name}: {out.dtype} {list(out.shape)}: must be {x.dtype} {list(x.shape)} with stride 1 last"
        )
    return out
