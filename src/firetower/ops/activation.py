"""SiLU whose bits depend on the element alone, on the CPU too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LANES = 64
"""PyTorch's vector loops take at most 64 numbers a turn; what is left over goes through a scalar exp of other bits."""

_SERIAL = 16384
"""PyTorch cuts 32,768 numbers and more among its threads, at places that are no multiple of a vector."""


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``.

    Args:
        x: float32 or float64, any shape.

    Returns:
        Same shape and type. -200 gives -0, NaN gives NaN, -Inf gives NaN as in PyTorch.
    """
    if not x.is_cpu:
        return F.silu(x)
    if x.numel() % _LANES == 0 and x.numel() <= _SERIAL:
        return F.silu(x.contiguous())
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -flat.numel() % _LANES))
    done = torch.cat([F.silu(piece) for piece in torch.split(padded, _SERIAL)]) if flat.numel() else flat
    return done[: flat.numel()].view(x.shape)
