"""A tensor in a few numbers: shape, type, non-finite counts, range and headroom, never its content."""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.records import TensorSummary


def summarize(name: str, tensor: Tensor) -> TensorSummary:
    """Describe a tensor without keeping any of it.

    Args:
        name: what to call it: ``input 0``, ``mlp.down_proj.weight``.
        tensor: any shape; float, complex, integer or bool. Complex tensors count real and imaginary parts,
            and their ``zero_frac`` is the share of zero parts. A tensor without readable elements (meta,
            sparse, quantised, fp4) has all counts 0 and no ``absmax``.

    Returns:
        Counts of NaN and infinities, ``absmax`` over the finite elements (None without any), ``headroom`` =
        the type's maximum / ``absmax`` (None for integers and all-zero tensors) and the share of exact zeros.

    Numerics: maxima are taken in fp32 (fp64 for fp64 and integers), exact for every stored value.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = _readable(tensor)
    if values is None or values.numel() == 0:
        return TensorSummary(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            num_nan=0,
            num_pos_inf=0,
            num_neg_inf=0,
            absmax=None,
            zero_frac=0.0,
            headroom=None,
        )
    finite = torch.isfinite(values)
    absmax = float(torch.where(finite, values, 0).abs().max().item()) if bool(finite.any()) else None
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return TensorSummary(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype,
        num_nan=int(torch.isnan(values).sum().item()),
        num_pos_inf=int(torch.isposinf(values).sum().item()),
        num_neg_inf=int(torch.isneginf(values).sum().item()),
        absmax=absmax,
        zero_frac=int((values == 0).sum().item()) / values.numel(),
        headroom=torch.finfo(tensor.dtype).max / absmax if absmax and is_real else None,
    )


def _readable(tensor: Tensor) -> Tensor | None:
    x = tensor.detach()
    if x.is_meta or x.layout is not torch.strided or x.is_quantized or "float4" in str(x.dtype):
        return None
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype is torch.float64 or not x.is_floating_point():
        return x.to(torch.float64)
    # float16 has no isposinf for every build and fp8 no comparisons at all: fp32 holds all of them exactly
    return x.to(torch.float32)
