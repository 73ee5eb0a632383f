"""Weights in GGUF's block formats, read in place: dequantising, products with windows and prompts, q8_1 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.quant import torch_path
from firetower.ops.quant.activations import BLOCK, Activations
from firetower.ops.quant.kinds import KINDS, Kind, columns_of, kind_of
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.sensors.marks import Mark

__all__ = [
    "KINDS",
    "Activations",
    "Kind",
    "columns_of",
    "dequantize",
    "kind_of",
    "quant_linear",
    "quant_linear_q8_1",
    "quantize_q8_1",
]

_KERNELS = "firetower.ops.quant.kernels"
_TORCH = "firetower.ops.quant.torch_path"
REGISTRY.register("quant.linear", "triton", f"{_KERNELS}:linear", supports=needs_triton, devices=("cuda",))
REGISTRY.register("quant.linear", "torch", f"{_TORCH}:linear", supports=always)
REGISTRY.register("quant.prompt", "torch", f"{_TORCH}:prompt", supports=always)
REGISTRY.register("quant.quantize", "triton", f"{_KERNELS}:quantize", supports=needs_triton, devices=("cuda",))
REGISTRY.register("quant.quantize", "torch", f"{_TORCH}:quantize", supports=always)
REGISTRY.register("quant.linear_q8_1", "triton", f"{_KERNELS}:linear_q8_1", supports=needs_triton, devices=("cuda",))
REGISTRY.register("quant.linear_q8_1", "torch", f"{_TORCH}:linear_q8_1", supports=always)

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def dequantize(raw: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights of raw blocks.

    Args:
        raw: uint8 [rows, row_bytes], the bytes of the file, contiguous.
        kind: ``Q8_0``, ``Q4_1``, ``Q4_K``, ``Q5_K``, ``Q6_K`` or ``IQ4_XS``.
        dtype: fp32, with the bits that the `gguf` package gives, or fp64.

    Returns:
        [rows, K] in ``dtype``.

    Raises:
        ConfigError: a format, bytes or a type that do not fit.

    Numerics: an fp16 scale that is NaN or Inf makes its whole block non-finite, code 0 included, and nothing else.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"dtype={dtype}: must be torch.float32 or torch.float64; cast the result")
    columns_of(raw, kind_of(kind))
    return torch_path.dequantize(raw, kind_of(kind), dtype)


def quant_linear(
    x: Tensor, raw: Tensor, kind: str, *, is_prompt: bool = False, out: Tensor | None = None, mark: Mark | None = None
) -> Tensor:
    """Activations times the transpose of quantised weights, which are read in place.

    Args:
        x: fp32, fp16 or bf16 [T, K].
        raw: uint8 [rows, row_bytes], contiguous, of rows of K weights.
        kind: format of the weights, as for `dequantize`.
        is_prompt: use the library's matrix product on dequantised tiles: faster from about a hundred tokens on, its
            bits depend on how many there are. Otherwise a token's bits depend on that token alone.
        out: [T, rows], type of ``x``, contiguous; written whole. None: a new tensor.
        mark: signal of the answer, ``[T, rows]``.

    Returns:
        [T, rows] in the type of ``x``.

    Raises:
        ConfigError: shapes, types or devices that do not fit.

    Numerics: codes, scales and the sums of a run of 16 or 32 products exact, then fp32. On CUDA a window's activations
    are split into three bytes over a power of two for each 32 of them: a value is rounded where 2**-22 of their
    largest stands, which spares bf16 down to 2**-14 of it. Only prompts in a 16-bit type on CUDA round the weights
    to it. A NaN in ``x`` stays in its token's row. A non-finite scale makes the columns of its weight rows NaN or Inf
    in every token, zeros included, and no others. A sum beyond the type of ``x`` is Inf, and marked.
    """
    form = kind_of(kind)
    columns = columns_of(raw, form)
    if x.ndim != 2 or x.shape[1] != columns or x.dtype not in _TYPES or x.device != raw.device:
        raise ConfigError(
            f"x: {x.dtype} {list(x.shape)} on {x.device}: must be fp32, fp16 or bf16 [T, {columns}] on {raw.device}"
        )
    y = _out(out, (len(x), len(raw)), x)
    part = "quant.prompt" if is_prompt else "quant.linear"
    kernel(part, x)(x if x.stride(1) == 1 else x.contiguous(), raw, form, y, mark)
    return y


def quantize_q8_1(x: Tensor, *, mark: Mark | None = None) -> Activations:
    """Quantise activations to int8 in blocks of 32, with an fp16 scale and an fp16 sum that saturate at 65504.

    Args:
        x: fp32, fp16 or bf16 [T, K], K a multiple of 32.
        mark: signal of the scales as stored, fp16 ``[T, K / 32]``.

    Returns:
        Codes, scales and sums.

    Raises:
        ConfigError: shape or type that do not fit.

    Numerics: ``scale = max|x| / 127``, rounded to fp16 and at most 65504; codes round to the nearest, ties to even, by
    the scale as stored. Beyond 65504 * 127 a value is cut there; where the sum saturates, the minimum of a weight is
    multiplied with too little: both finite, and counted by `Activations.saturated`. A block whose scale rounds to 0 in
    fp16 is zeros. A NaN or Inf in a block makes its scale and sum NaN and its codes 0: visible, and marked.
    """
    if x.ndim != 2 or x.shape[1] % BLOCK or x.shape[1] == 0 or x.dtype not in _TYPES:
        raise ConfigError(f"x: {x.dtype} {list(x.shape)}: must be fp32, fp16 or bf16 [T, K], K a multiple of {BLOCK}")
    found: Activations = kernel("quant.quantize", x)(x if x.stride(1) == 1 else x.contiguous(), mark)
    return found


def quant_linear_q8_1(
    x: Activations,
    raw: Tensor,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    mark: Mark | None = None,
) -> Tensor:
    """Quantised activations times the transpose of quantised weights, with integer products.

    Args:
        x: of T tokens, as from `quantize_q8_1`.
        raw: uint8 [rows, row_bytes], contiguous, of rows of K weights.
        kind: format of the weights, as for `dequantize`.
        dtype: of the answer.
        out: [T, rows] in ``dtype``, contiguous; written whole. None: a new tensor.
        mark: signal of the answer, ``[T, rows]``.

    Returns:
        [T, rows] in ``dtype``.

    Raises:
        ConfigError: shapes, types or devices that do not fit.

    Numerics: integer products exact, scales and sums in fp32; a token's bits depend on that token alone. Formats with
    minima take ``minimum * total``. A NaN scale makes its token's row NaN.
    """
    form = kind_of(kind)
    columns = columns_of(raw, form)
    if x.codes.shape[1] != columns or x.codes.device != raw.device:
        raise ConfigError(f"x: {list(x.codes.shape)} on {x.codes.device}: must be [T, {columns}] on {raw.device}")
    y = _out(out, (len(x.codes), len(raw)), x.scale.new_empty(0, dtype=dtype))
    kernel("quant.linear_q8_1", y)(x, raw, form, y, mark)
    return y


def _out(out: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype is not like.dtype or out.device != like.device or not out.is_contiguous():
        raise ConfigError(
            f"out: {out.dtype} {list(out.shape)}: must be contiguous {like.dtype} {list(shape)} on {like.device}"
        )
    return out
