"""The convolution token by token, one sequence at a time, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None = None, *, is_silu: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence.

    Args:
        x: [T, channels]; weight: [channels, K]; bias: [channels].
        past: [K - 1, channels], oldest first; None: zeros.

    Returns:
        (float64 [T, channels], the past of what follows, [K - 1, channels] in the type of ``x``).
    """
    num_past = weight.shape[1] - 1
    past = x.new_zeros(num_past, x.shape[1]) if past is None else past
    answers = []
    for token in x:
        taps = torch.cat((past, token[None]))
        y = (taps.double() * weight.double().T).sum(0) + (0.0 if bias is None else bias.double())
        answers.append(F.silu(y) if is_silu else y)
        past = taps[1:]
    return (torch.stack(answers) if answers else x.double()), past
