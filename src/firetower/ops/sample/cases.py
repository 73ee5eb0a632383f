"""Inputs and tolerances of the sampler's tests and benchmark."""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.ops.sample.params import SampleParams, pack_mask

Q36_VOCAB = 248_320

LOGPROB_ATOL = 1e-5
"""fp32: differences and a sum over the vocabulary, each rounded at 6e-8 of values below 100."""

LEAD_ATOL = 2e-6
"""fp32 logarithms of values in [-4, 23], the kernel's two approximations a few roundings apart."""

MASS_SLACK = 1e-6
"""Top-p oracles add up fp32 probabilities: a token whose mass lies this near the edge may fall either way."""

LARGEST = torch.finfo(torch.float32).max


def make_logits(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Logits [rows, vocab] with a heavy head, as a model's: standard deviation 3."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(device)


def make_keys(rows: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Seeds and positions int64 [rows], both halves of the words in use, negative seeds among them."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 2**40, (rows,), generator=generator)
    return seeds.to(device), positions.to(device)


def make_params(rows: int, vocab: int, seed: int, device: str = "cpu", *, with_off: bool = True) -> SampleParams:
    """Every parameter at once, rows differing; ``with_off`` switches each of them off in some rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, off: float) -> Tensor:
        x = low + (high - low) * torch.rand(rows, generator=generator)
        is_off = torch.rand(rows, generator=generator) < 0.3
        return torch.where(is_off & torch.tensor(with_off), off, x).float().to(device)

    def mask(share: float) -> Tensor:
        return pack_mask(torch.rand(rows, vocab, generator=generator) < share).to(device)

    return SampleParams(
        temperature=uniform(0.2, 2.0, 0.0),
        top_k=uniform(1, max(2, vocab / 2), 0).int(),
        top_p=uniform(0.05, 0.99, 1.0),
        min_p=uniform(0.001, 0.2, 0.0),
        repetition_penalty=uniform(0.7, 1.6, 1.0),
        frequency_penalty=uniform(-1.0, 1.0, 0.0),
        presence_penalty=uniform(-1.0, 1.0, 0.0),
        token_counts=torch.randint(-4, 4, (rows, vocab), generator=generator).clamp_min(0).int().to(device),
        prompt_mask=mask(0.2),
        logit_bias=(torch.randn(rows, vocab, generator=generator) * 2).to(device),
        allowed_mask=mask(0.8),
    )


def row_of(params: SampleParams, rows: Tensor) -> SampleParams:
    """The parameters of some rows alone."""
    names = [name for name in SampleParams.__slots__ if getattr(params, name) is not None]
    return SampleParams(**{name: getattr(params, name)[rows] for name in names})
