"""Dense projection, one row at a time: the truth that backends are held against."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y[t, n] = sum over k of x[t, k] w[n, k], + b[n]`` in float64; arguments as `firetower.ops.linear.linear`.

    Returns:
        [..., N] float64.
    """
    rows = hidden_states.double().reshape(-1, hidden_states.shape[-1])
    w = weight.double()
    y = torch.stack([(w * row).sum(-1) for row in rows]) if len(rows) else rows.new_empty(0, len(w))
    if bias is not None:
        y = y + bias.double()
    return y.view(*hidden_states.shape[:-1], len(w))
