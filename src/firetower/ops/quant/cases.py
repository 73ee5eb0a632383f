"""Inputs and tolerances of the quantised ops' tests and benchmark."""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.ops.quant.kinds import KINDS, Kind

RTOL = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Relative error of a product against float64: fp32 sums of a few thousand terms; else the rounding of the answer."""

PROMPT_RTOL = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""As `RTOL`, where weights are rounded to the type of the activations as well."""

Q8_1_EXACT_RTOL = 2e-4
"""Against float64 of the quantised activations: only the fp16 sums are rounded, by 2**-11 of each."""

Q8_1_RTOL = 2e-2
"""Activations rounded to 1/127 of their block's largest: near 0.3% of each, over normal inputs."""

_SCALES = {"Q8_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Byte offsets of the fp16 fields of a block."""


def random_raw(rows: int, columns: int, kind: Kind, seed: int, device: str = "cpu") -> Tensor:
    """Raw blocks uint8 [rows, row_bytes] of random bytes, the fp16 fields near 0.01 with either sign."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // kind.block_elements, kind.block_bytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for at in _SCALES[kind.name]:
        values = 0.01 * torch.randn(*shape[:2], 1, generator=generator)
        raw[..., at : at + 2] = values.to(torch.float16).view(torch.uint8)
    return raw.view(rows, -1).to(device)


def set_scale(raw: Tensor, kind: Kind, row: int, block: int, value: float, field: int = 0) -> None:
    """Overwrite one fp16 field of one block."""
    at = block * kind.block_bytes + _SCALES[kind.name][field]
    raw[row, at : at + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8).to(raw.device)


def fields(kind: Kind) -> int:
    """How many fp16 fields a block has."""
    return len(_SCALES[kind.name])


def inputs(tokens: int, columns: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Normal activations [tokens, columns]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator).to(dtype).to(device)


ALL = tuple(KINDS.values())
"""Every format."""
