"""Parameters, inputs and tolerances of the tests and the benchmark of `rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Q36: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
"""Qwen3.5-MoE / 3.6 text: 64 of 256 dimensions."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": Q36,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn, all keys": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

MAX_POSITION_EMBEDDINGS = 32768

POSITIONS = (0, 1, 255, 1023, 1024, 1025, 4097, 65521, 100_001, 262_143, (1 << 20) - 1, 1 << 20)
"""Among them those that bf16 and fp16 cannot hold, and both sides of the tables' edges."""

ATOL_COS_SIN = 4e-7
"""Four float32 roundings of numbers at most 1 (3e-8 each), and the addition theorem's two products and sum."""

RTOL: dict[torch.dtype, float] = {
    torch.float32: 5e-7,  # the table's error and two products
    torch.float16: 5e-4,  # one rounding at the store, 2^-11
    torch.bfloat16: 4e-3,  # the same, 2^-8
}
"""Frobenius error against float64 angles, on the inputs as rounded."""


def inputs(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """(q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim]), standard normal."""
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(num_tokens, num_heads, head_dim, generator=made)
    k = torch.randn(num_tokens, num_kv_heads, head_dim, generator=made)
    return q.to(dtype).to(device), k.to(dtype).to(device)
