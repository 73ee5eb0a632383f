# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""First part of chunked prefill on CUDA: everything that does not depend on the state, all chunks side by side.

Two kernels: sums of the gates, then products of keys and queries under their decays. The sums are a kernel of their own
because what the second one loads arrives in the layout of its products; summed there, every vector crossed shared
memory with a barrier, 34 of them for a head and a chunk instead of 7. Import needs Triton.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule.chunks import Chunks, ChunkTable
from firetower.ops.overlap import overlap_options

CHUNK_SIZES = (16, 32, 64)
_MAX_HEAD_DIM = 256
_GATE_HEADS = 8
"""Value heads of a program that sums gates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the launches choose, in one place.

    Attributes:
        prepare_warps: warps of a chunk's program. prepare_registers: most registers of a thread, None for the
            compiler's choice.
        block_v: columns of the state in a program of the scan.
        scan_warps: its warps. scan_stages: chunks that are in shared memory at a time, for bfloat16.
        burned_warps: warps of the second run. With two it is built on the older matrix instruction, whose bits are
            the same: with four or eight, Triton 3.6 has it read shared memory beyond its own.
    """

    prepare_warps: int = 4
    prepare_registers: int | None = 168
    block_v: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    burned_warps: int = 2


TUNING = Tuning()
"""For an H200; others are timed by benchmarks/ops/gdn_prefill.py. With 32 columns a program, 32 heads of 128 fill 128
programs; each reads all of its head's keys, queries and matrices, so that fewer columns mean more traffic from the L2.
With fewer stages a chunk's loads wait for the chunk before."""

_LARGE: tl.constexpr = tl.constexpr(2.0**50)
_SHRINK: tl.constexpr = tl.constexpr(2.0**-100)
_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _is_not_finite(b_x):
    return (tl.abs(b_x) < float("inf")) == 0


@triton.jit
def _normalised(b_x, USE_L2NORM: tl.constexpr):
    """Rows over their norm, which rows hold a NaN or an Inf, and whether any does."""
    if USE_L2NORM:
        b_sum = tl.sum(b_x * b_x, 1)
        b_is_bad = _is_not_finite(b_sum)
        is_any_bad = tl.max(b_is_bad.to(tl.int32), 0)
        if is_any_bad != 0:
            # two powers of two keep every square in range; only rows with a NaN or an Inf stay out of it
            b_shrink = tl.where(tl.max(tl.abs(b_x), 1) > _LARGE, _SHRINK, 1.0)
            b_x *= b_shrink[:, None]
            b_sum = tl.sum(b_x * b_x, 1)
            b_is_bad = _is_not_finite(b_sum)
            is_any_bad = tl.max(b_is_bad.to(tl.int32), 0)
            b_scale = tl.rsqrt(b_sum + _EPS * b_shrink * b_shrink)
        else:
            b_scale = tl.rsqrt(b_sum + _EPS)
        b_x *= b_scale[:, None]
    else:
        b_is_bad = tl.max(_is_not_finite(b_x).to(tl.int32), 1) != 0
        is_any_bad = tl.max(b_is_bad.to(tl.int32), 0)
    return b_x, b_is_bad, is_any_bad


@triton.jit
def operand(b_x, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A factor of a product in the type that it is multiplied in. The device takes a float32 for TF32 by cutting its
    last 13 bits off, which is off by up to an ulp and always towards zero, so that errors add up; this rounds it first.
    """
    if TYPE == tl.float32 and PRECISION == "tf32":  # noqa: SIM300 - the type is the compile-time argument
        b_cut = ((b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        # a carry would make another number of a NaN
        b_x = tl.where(_is_not_finite(b_x), b_x, b_cut)
    else:
        b_x = b_x.to(TYPE)
    return b_x


@triton.jit
def _inverse(b_minus_lower, C: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` of a strictly lower triangle: two inverted blocks on the diagonal become one, from size 1 on.

    Blocks up to 16 are inverted side by side, a warp each. Beyond, the factors to the left and right are
    block-diagonal, so each block of the product comes from the same block of ``lower``: the mask can wait until after.
    """
    num_blocks: tl.constexpr = C // 16
    b_i, b_block = tl.arange(0, 16), tl.arange(0, num_blocks)
    # the exponent of a float32 is the highest bit of the integer that it holds: in which row and column differ
    b_level = (((b_i[:, None] ^ b_i[None, :]).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)[None, :, :]
    b_is_diagonal = (b_block[:, None] == b_block[None, :])[:, None, :, None]
    b_small = tl.where(b_is_diagonal, tl.reshape(b_minus_lower, (num_blocks, 16, num_blocks, 16)), 0.0)
    b_small = tl.sum(b_small, 2)
    b_minus_lower = operand(b_minus_lower, TYPE, PRECISION)
    b_inverse = tl.where(b_level < 0, 1.0, tl.where(b_level == 0, b_small, 0.0))
    b_small = operand(b_small, TYPE, PRECISION)
    for level in tl.static_range(1, 4):
        b_sides = operand(b_inverse, TYPE, PRECISION)
        b_product = operand(tl.dot(b_sides, b_small, input_precision=PRECISION), TYPE, PRECISION)
        b_product = tl.dot(b_product, b_sides, input_precision=PRECISION)
        b_inverse = tl.where(b_level == level, b_product, b_inverse)
    b_inverse = tl.reshape(tl.where(b_is_diagonal, b_inverse[:, :, None, :], 0.0), (C, C))
    b_of = tl.arange(0, C) // 16
    b_apart = b_of[:, None] ^ b_of[None, :]
    for level in tl.static_range(0, 2):
        if (16 << level) < C:
            b_sides = operand(b_inverse, TYPE, PRECISION)
            b_product = operand(tl.dot(b_sides, b_minus_lower, input_precision=PRECISION), TYPE, PRECISION)
            b_product = tl.dot(b_product, b_sides, input_precision=PRECISION)
            b_inverse = tl.where((b_apart >> level) == 1, b_product, b_inverse)
    return b_inverse


@triton.jit
def _chunk(p_starts, p_lengths, i_chunk, length, chunks_per_sequence, C: tl.constexpr):
    """First token of a chunk, and how many are left of its sequence."""
    if p_starts is None:
        i_local = i_chunk % chunks_per_sequence
        start = ((i_chunk // chunks_per_sequence) * length + i_local * C).to(tl.int64)
        left = length - i_local * C
    else:
        start = tl.load(p_starts + i_chunk).to(tl.int64)
        left = tl.load(p_lengths + i_chunk).to(tl.int32)
    return start, left


@triton.jit(do_not_specialize=["length", "chunks_per_sequence"])
def gated_delta_rule_gates_fwd_kernel(
    p_g, p_beta, p_starts, p_lengths, p_sums, p_factors, p_total, scale, length, chunks_per_sequence, g_stride,
    beta_stride, HV: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk and BH value heads: its factors, and the sums of its gates up to each token, to base 2.
    With ``OVERLAP`` the next kernel may start at once, and waits for this one where it needs it.

    These are in two parts whose difference between two tokens is as exact as a sum of the gates between them alone: the
    high parts are multiples of 2^-7 and stay below 2^16, so that their sums and the differences of these are exact; the
    low parts' sums stay below 1/4. A gate below -690 counts as that: a decay over it is exactly 0 either way.
    """
    if OVERLAP:
        gdc_launch_dependents()
    i_chunk = tl.program_id(0)
    start, left = _chunk(p_starts, p_lengths, i_chunk, length, chunks_per_sequence, C)
    b_i, b_h = tl.arange(0, C)[:, None], tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    b_is_head = (b_h < HV) & (b_i >= 0)
    b_mask = b_is_head & (b_i < left)
    b_g = tl.load(p_g + start * g_stride + b_i * g_stride + b_h, mask=b_mask, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + start * beta_stride + b_i * beta_stride + b_h, mask=b_mask, other=0.0).to(tl.float32)
    b_is_bad = ((b_g < float("inf")) == 0) | _is_not_finite(b_beta)
    b_is_burned = tl.cumsum(b_is_bad.to(tl.int32), 0) > 0
    b_g = tl.maximum(tl.where(b_is_bad, 0.0, b_g), -690.0) * 1.4426950408889634
    b_high = tl.floor(b_g * 128.0 + 0.5) * 0.0078125
    b_low = b_g - b_high
    b_high_sum, b_low_sum = tl.cumsum(b_high, 0), tl.cumsum(b_low, 0)
    b_in = tl.exp2(b_high_sum + b_low_sum)
    b_end = tl.exp2((tl.sum(b_high, 0)[None, :] - b_high_sum) + (tl.sum(b_low, 0)[None, :] - b_low_sum))
    b_head = i_chunk.to(tl.int64) * HV + b_h
    tl.store(p_sums + b_head * (2 * C) + b_i, b_high_sum, mask=b_is_head)
    tl.store(p_sums + b_head * (2 * C) + C + b_i, b_low_sum, mask=b_is_head)
    b_at = b_head * C + b_i
    tl.store(p_factors + b_at * 4, b_in, mask=b_is_head)
    tl.store(p_factors + b_at * 4 + 1, tl.where(b_is_burned, float("nan"), scale * b_in), mask=b_is_head)
    tl.store(p_factors + b_at * 4 + 2, b_end, mask=b_is_head)
    tl.store(p_factors + b_at * 4 + 3, tl.where(b_is_bad, 0.0, b_beta), mask=b_is_head)
    # the last token's decay is the chunk's
    b_is_last = b_is_head & (b_i == C - 1)
    tl.store(p_total + b_head + b_i * 0, tl.where(b_is_burned, float("nan"), b_in), b_is_last)


@triton.jit(do_not_specialize=["length", "chunks_per_sequence"])
def gated_delta_rule_prepare_fwd_kernel(
    p_q, p_k, p_starts, p_lengths, p_sums, p_q_out, p_k_out, p_solve, p_scores, p_factors, p_total,
    scale, length, chunks_per_sequence, q_stride, k_stride,
    HK: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    USE_L2NORM: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk and key head: `firetower.ops.gated_delta_rule.chunks.Chunks` of its GROUP value heads, whose
    gates have been summed."""
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    start, left = _chunk(p_starts, p_lengths, i_chunk, length, chunks_per_sequence, C)
    type: tl.constexpr = p_k_out.dtype.element_ty
    b_i, b_d = tl.arange(0, C), tl.arange(0, BK)
    b_row, b_column = b_i[:, None], b_i[None, :]
    b_mask = (b_row < left) & (b_d < DK)[None, :]
    b_to = (i_chunk.to(tl.int64) * HK + i_head) * (C * DK) + b_row * DK + b_d[None, :]
    b_is_stored = (b_row >= 0) & (b_d < DK)[None, :]
    to_head = (i_chunk.to(tl.int64) * HK + i_head) * GROUP
    p_sums += to_head * (C * 2)
    p_factors += to_head * (C * 4)
    p_scores += to_head * (C * C)
    p_solve += to_head * (C * C)

    b_x = tl.load(p_k + start * k_stride + i_head * DK + b_row * k_stride + b_d[None, :], mask=b_mask, other=0.0)
    b_x, b_is_bad_key, is_any_bad = _normalised(b_x.to(tl.float32), USE_L2NORM)
    if OVERLAP:
        gdc_wait()
    if is_any_bad != 0:
        b_x = tl.where(b_is_bad_key[:, None], 0.0, b_x)
        # from the first bad key on every output is burned, and the state
        b_is_burned = tl.cumsum(b_is_bad_key.to(tl.int32), 0) > 0
        for i_group in range(GROUP):
            tl.store(p_factors + (i_group * C + b_i) * 4 + 1, float("nan"), mask=b_is_burned)
            tl.store(p_total + to_head + i_group, float("nan"))
    b_k = operand(b_x, type, PRECISION)
    tl.store(p_k_out + b_to, b_k, mask=b_is_stored)
    b_keys = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_keys = tl.where(b_row > b_column, b_keys, 0.0)
    b_x = tl.load(p_q + start * q_stride + i_head * DK + b_row * q_stride + b_d[None, :], mask=b_mask, other=0.0)
    b_x, _, _ = _normalised(b_x.to(tl.float32), USE_L2NORM)
    b_q = operand(b_x, type, PRECISION)
    tl.store(p_q_out + b_to, b_q, mask=b_is_stored)
    b_queries = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale

    b_to_row = b_row * C + b_column
    for _ in tl.range(0, GROUP, num_stages=1):
        b_high, b_low = tl.load(p_sums + b_i)[:, None], tl.load(p_sums + C + b_i)[:, None]
        b_from_high, b_from_low = tl.load(p_sums + b_i)[None, :], tl.load(p_sums + C + b_i)[None, :]
        b_beta = tl.load(p_factors + b_i * 4 + 3)[:, None]
        b_sums = (b_high - b_from_high) + (b_low - b_from_low)
        b_decay = tl.exp2(tl.where(b_row >= b_column, b_sums, -float("inf")))
        tl.store(p_scores + b_to_row, operand(b_queries * b_decay, type, PRECISION))
        b_solve = _inverse(b_keys * (-b_beta) * b_decay, C, type, PRECISION)
        tl.store(p_solve + b_to_row, operand(b_solve, type, PRECISION))
        p_sums += C * 2
        p_factors += C * 4
        p_scores += C * C
        p_solve += C * C


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
    starts, lengths, per_sequence = table.starts, table.lengths, table.num_chunks // table.num_sequences
    sums = new(num_v_heads, 2, size, dtype=torch.float32)
    overlap = overlap_options(q)
    heads = min(_GATE_HEADS, triton.next_power_of_2(num_v_heads))
    gated_delta_rule_gates_fwd_kernel[(table.num_chunks, triton.cdiv(num_v_heads, heads))](
        g, beta, starts, lengths, sums, chunks.factors, chunks.total, scale, table.length, per_sequence, g.stride(0),
        beta.stride(0), HV=num_v_heads, BH=heads, C=size, OVERLAP=overlap["OVERLAP"], num_warps=4,
    )  # fmt: skip
    gated_delta_rule_prepare_fwd_kernel[(table.num_chunks, num_k_heads)](
        q, k, starts, lengths, sums, chunks.q, chunks.k, chunks.solve, chunks.scores, chunks.factors, chunks.total,
        scale, table.length, per_sequence, q.stride(0), k.stride(0),
        HK=num_k_heads, GROUP=num_v_heads // num_k_heads, DK=head_k_dim, BK=block(head_k_dim), C=size,
        USE_L2NORM=use_l2norm, PRECISION=precision(q.dtype), num_warps=TUNING.prepare_warps,
        maxnreg=TUNING.prepare_registers, **overlap,
    )  # fmt: skip
    return chunks


def block(head_dim: int) -> int:
    """The least tile that holds a head."""
    power: int = triton.next_power_of_2(head_dim)
    return max(16, power)
