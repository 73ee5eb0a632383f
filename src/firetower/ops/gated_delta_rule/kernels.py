# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""First part of chunked prefill on CUDA: everything that does not depend on the state, all chunks side by side.

Import needs Triton.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule.chunks import Chunks, ChunkTable

CHUNK_SIZES = (16, 32, 64)
_MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the launches choose, in one place.

    Attributes:
        prepare_warps: warps of a chunk's program. prepare_registers: most registers of a thread, None for the
            compiler's choice.
        block_v: rows of the transposed state in a program of the scan.
        scan_warps: its warps. scan_stages: chunks that are in shared memory at a time, for bfloat16.
        burned_warps: warps of the second run.
    """

    prepare_warps: int = 4
    prepare_registers: int | None = None
    block_v: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    burned_warps: int = 8


TUNING = Tuning()
"""For an H200, of the trials of benchmarks/ops/gdn_prefill.py: with 32 rows of the state a program, 32 heads of 128
fill 128 programs, and the scan of 8,192 tokens took 228 us, with 64 rows 308; prepare with 8 warps took 339 us instead
of 196. With fewer stages a chunk's loads wait for the chunk before."""

_LARGE: tl.constexpr = tl.constexpr(2.0**50)
_SHRINK: tl.constexpr = tl.constexpr(2.0**-100)
_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _is_not_finite(b_x):
    return (tl.abs(b_x) < float("inf")) == 0


@triton.jit
def _normalised(b_x, USE_L2NORM: tl.constexpr):
    """Rows over their norm, and which rows hold a NaN or an Inf."""
    if USE_L2NORM:
        b_sum = tl.sum(b_x * b_x, 1)
        b_is_bad = _is_not_finite(b_sum)
        if tl.max(b_is_bad.to(tl.int32), 0) != 0:
            # two powers of two keep every square in range; only rows with a NaN or an Inf stay out of it
            b_shrink = tl.where(tl.max(tl.abs(b_x), 1) > _LARGE, _SHRINK, 1.0)
            b_x *= b_shrink[:, None]
            b_sum = tl.sum(b_x * b_x, 1)
            b_is_bad = _is_not_finite(b_sum)
            b_scale = tl.rsqrt(b_sum + _EPS * b_shrink * b_shrink)
        else:
            b_scale = tl.rsqrt(b_sum + _EPS)
        b_x *= b_scale[:, None]
    else:
        b_is_bad = tl.max(_is_not_finite(b_x).to(tl.int32), 1) != 0
    return b_x, b_is_bad


@triton.jit
def _log2_gates(b_g):
    """Gates to base 2. One below -1e30 counts as that: an exponential of a sum with it is exactly 0 either way."""
    return tl.where(b_g < -1e30, -1e30, b_g) * 1.4426950408889634


@triton.jit
def _segment_sums(b_g, b_is_up_to, b_is_behind):
    """Sum of g over j < l <= i at [i, j], each segment by itself: a product of which gates come up to i with those that
    lie behind j. In bfloat16 the gates go in two parts, good to a hundredth of what rounding the decays loses.

    Args:
        b_g: no Inf, which would meet a zero here.
        b_is_up_to: 1 at [i, l] for l <= i, in the type of the product. b_is_behind: bool at [l, j] for l > j.
    """
    if b_is_up_to.dtype == tl.bfloat16:
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
        b_sums = tl.dot(b_is_up_to, tl.where(b_is_behind, b_high[:, None], 0.0))
        b_sums = tl.dot(b_is_up_to, tl.where(b_is_behind, b_low[:, None], 0.0), b_sums)
    else:
        b_sums = tl.dot(b_is_up_to, tl.where(b_is_behind, b_g[:, None], 0.0), input_precision="tf32x3")
    return b_sums


@triton.jit
def _inverse(b_lower, b_level, TYPE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` of a strictly lower triangle: two inverted blocks on the diagonal become one, from size 1 on.

    The factors to the left and right are block-diagonal, so each block of the product comes from the same block of
    ``lower``: the mask can wait until after it. ``b_level`` is the highest bit in which row and column differ.
    """
    b_inverse = tl.where(b_level < 0, 1.0, 0.0) - tl.where(b_level == 0, b_lower, 0.0)
    b_lower = b_lower.to(TYPE)
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            b_blocks = b_inverse.to(TYPE)
            b_product = tl.dot(b_blocks, b_lower, input_precision=PRECISION).to(TYPE)
            b_product = tl.dot(b_product, b_blocks, input_precision=PRECISION)
            b_inverse = tl.where(b_level == level, b_inverse - b_product, b_inverse)
    return b_inverse


@triton.jit(do_not_specialize=["length", "chunks_per_sequence"])
def gated_delta_rule_prepare_fwd_kernel(
    p_q, p_k, p_g, p_beta, p_starts, p_lengths, p_q_out, p_k_out, p_solve, p_scores, p_factors, p_total,
    scale, length, chunks_per_sequence, q_stride, k_stride, g_stride, beta_stride,
    HK: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    USE_L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and key head: `firetower.ops.gated_delta_rule.chunks.Chunks` of its GROUP value heads."""
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    if p_starts is None:
        i_local = i_chunk % chunks_per_sequence
        start = ((i_chunk // chunks_per_sequence) * length + i_local * C).to(tl.int64)
        left = length - i_local * C
    else:
        start = tl.load(p_starts + i_chunk).to(tl.int64)
        left = tl.load(p_lengths + i_chunk).to(tl.int32)
    type: tl.constexpr = p_k_out.dtype.element_ty
    b_i, b_d = tl.arange(0, C), tl.arange(0, BK)
    b_row, b_column = b_i[:, None], b_i[None, :]
    b_is_token = b_i < left
    b_mask = b_is_token[:, None] & (b_d < DK)[None, :]
    b_to = (i_chunk.to(tl.int64) * HK + i_head) * (C * DK) + b_row * DK + b_d[None, :]
    b_is_stored = (b_row >= 0) & (b_d < DK)[None, :]

    b_x = tl.load(p_k + start * k_stride + i_head * DK + b_row * k_stride + b_d[None, :], mask=b_mask, other=0.0)
    b_x, b_is_bad_key = _normalised(b_x.to(tl.float32), USE_L2NORM)
    if tl.max(b_is_bad_key.to(tl.int32), 0) != 0:
        b_x = tl.where(b_is_bad_key[:, None], 0.0, b_x)
    b_k = b_x.to(type)
    tl.store(p_k_out + b_to, b_k, mask=b_is_stored)
    b_keys = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_x = tl.load(p_q + start * q_stride + i_head * DK + b_row * q_stride + b_d[None, :], mask=b_mask, other=0.0)
    b_x, _ = _normalised(b_x.to(tl.float32), USE_L2NORM)
    b_q = b_x.to(type)
    tl.store(p_q_out + b_to, b_q, mask=b_is_stored)
    b_queries = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale

    b_is_up_to = (b_row >= b_column).to(type)
    # the exponent of a float32 is the highest bit of the integer that it holds
    b_level = ((b_row ^ b_column).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    p_g += start * g_stride + i_head * GROUP
    p_beta += start * beta_stride + i_head * GROUP
    to_head = (i_chunk.to(tl.int64) * HK + i_head) * GROUP
    p_total += to_head
    p_factors += to_head * (C * 4)
    p_scores += to_head * (C * C)
    p_solve += to_head * (C * C)
    b_to_row = b_row * C + b_column
    for i_group in tl.range(0, GROUP, num_stages=1):
        b_g = tl.load(p_g + i_group + b_i * g_stride, mask=b_is_token, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + i_group + b_i * beta_stride, mask=b_is_token, other=0.0).to(tl.float32)
        b_is_bad = b_is_bad_key | ((b_g < float("inf")) == 0) | _is_not_finite(b_beta)
        first_bad = tl.min(tl.where(b_is_bad, b_i, C), 0)
        b_is_burned = b_i >= first_bad
        b_g = _log2_gates(tl.where(b_is_bad, 0.0, b_g))
        b_beta = tl.where(b_is_bad, 0.0, b_beta)
        b_decay = tl.exp2(_segment_sums(b_g, b_is_up_to, b_row > b_column))
        b_in = tl.exp2(tl.cumsum(b_g, 0))
        # where a gate is bad this can be NaN, as then the state is
        b_next_g = tl.load(p_g + i_group + (b_i + 1) * g_stride, mask=b_i + 1 < tl.minimum(left, C), other=0.0)
        b_end = tl.exp2(tl.cumsum(_log2_gates(b_next_g.to(tl.float32)), 0, reverse=True))
        b_to_factors = p_factors + i_group * (C * 4) + b_i * 4
        tl.store(b_to_factors, b_in)
        tl.store(b_to_factors + 1, tl.where(b_is_burned, float("nan"), scale * b_in))
        tl.store(b_to_factors + 2, b_end)
        tl.store(b_to_factors + 3, b_beta)
        # the last token's decay is the chunk's
        tl.store(p_total + i_group + b_i * 0, tl.where(b_is_burned, float("nan"), b_in), mask=b_i == C - 1)

        b_scores = tl.where(b_row >= b_column, b_queries * b_decay, 0.0)
        tl.store(p_scores + i_group * (C * C) + b_to_row, b_scores.to(p_scores.dtype.element_ty))
        b_lower = tl.where(b_row > b_column, b_beta[:, None] * b_keys * b_decay, 0.0)
        b_solve = _inverse(b_lower, b_level, type, C, PRECISION)
        tl.store(p_solve + i_group * (C * C) + b_to_row, b_solve.to(p_solve.dtype.element_ty))


def packed_tokens(x: Tensor) -> Tensor:
    """[B, T, heads, D] as [tokens, heads, D] with packed heads; a copy only where the strides ask for one."""
    x = x.flatten(0, 1)
    is_packed = x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2])
    return x if is_packed else x.contiguous()


def precision(dtype: torch.dtype) -> str:
    """How products of float32 operands are made: of three in TF32 where they must be as good as float32."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


def prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, table: ChunkTable, *, scale: float, use_l2norm: bool
) -> Chunks:
    """Everything that does not depend on the state; see `Chunks`. Operands are kept in bfloat16 for bfloat16 inputs,
    else in float32: a state or a residual does not fit the range of float16.

    Args:
        q: [B, T, Hk, Dk]. k: likewise. g: [B, T, Hv]. beta: likewise. At least one token.
        table: where the chunks lie.

    Raises:
        ConfigError: a chunk size or head that the kernels have no tile for.
    """
    size, (num_k_heads, head_k_dim), num_v_heads = table.chunk_size, k.shape[2:], g.shape[2]
    if size not in CHUNK_SIZES or head_k_dim > _MAX_HEAD_DIM:
        raise ConfigError(
            f"chunk_size={size}, Dk={head_k_dim}: the Triton kernel takes {CHUNK_SIZES} and heads up to "
            f"{_MAX_HEAD_DIM}; FIRETOWER_OPS=gated_delta_rule.prepare=torch,gated_delta_rule.scan=torch takes any"
        )
    kept = torch.bfloat16 if q.dtype is torch.bfloat16 else torch.float32

    def new(*shape: int, dtype: torch.dtype = kept) -> Tensor:
        return torch.empty((table.num_chunks, *shape), dtype=dtype, device=q.device)

    chunks = Chunks(
        q=new(num_k_heads, size, head_k_dim),
        k=new(num_k_heads, size, head_k_dim),
        solve=new(num_v_heads, size, size),
        scores=new(num_v_heads, size, size),
        factors=new(num_v_heads, size, 4, dtype=torch.float32),
        total=new(num_v_heads, dtype=torch.float32),
        table=table,
    )
    q, k, g, beta = (packed_tokens(x) for x in (q, k, g, beta))
    gated_delta_rule_prepare_fwd_kernel[(table.num_chunks, num_k_heads)](
        q, k, g, beta, table.starts, table.lengths, chunks.q, chunks.k, chunks.solve, chunks.scores, chunks.factors,
        chunks.total, scale, table.length, table.num_chunks // table.num_sequences,
        q.stride(0), k.stride(0), g.stride(0), beta.stride(0),
        HK=num_k_heads, GROUP=num_v_heads // num_k_heads, DK=head_k_dim, BK=block(head_k_dim), C=size,
        USE_L2NORM=use_l2norm, PRECISION=precision(q.dtype), num_warps=TUNING.prepare_warps,
        maxnreg=TUNING.prepare_registers,
    )  # fmt: skip
    return chunks


def block(head_dim: int) -> int:
    """The least tile that holds a head."""
    power: int = triton.next_power_of_2(head_dim)
    return max(16, power)
