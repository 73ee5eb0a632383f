# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Second part of chunked prefill on CUDA: one pass through a sequence's chunks that keeps the state in registers.

Every product's left operand is a tile as it was loaded, which a warpgroup's matrix instruction reads from shared memory
itself; the right one, of few columns, is what the product before it left in registers. Import needs Triton.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule import kernels
from firetower.ops.gated_delta_rule.chunks import Chunks
from firetower.sensors.mark_tile import codes, exponent_of, mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments


@triton.jit
def _head_tile(p_tile, b_d, DK: tl.constexpr, BK: tl.constexpr):
    """A [C, BK] tile of packed heads; a mask only where a head is no power of two."""
    if DK == BK:
        b_tile = tl.load(p_tile)
    else:
        b_tile = tl.load(p_tile, mask=(b_d < DK)[None, :], other=0.0)
    return b_tile


@triton.jit
def _through_chunks(
    b_s, p_q, p_k, p_v, p_solve, p_scores, p_factors, p_total, p_o, begin, num_local, v_stride, i_v, i_head,
    p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, IS_BURNED: tl.constexpr,
):  # fmt: skip
    """The state [BK, BV] after a sequence's tokens, whose outputs are stored, and the largest exponent field of these.

    ``IS_BURNED`` gives an output that is not finite to the token that it is due to, and marks it; everything else runs
    the other way, which costs a sound prompt nothing.
    """
    b_i, b_d = tl.arange(0, C), tl.arange(0, BK)
    b_dv = i_v * BV + tl.arange(0, BV)
    type: tl.constexpr = p_k.dtype.element_ty
    b_is_v = b_dv < DV
    b_exponent = tl.zeros([C, BV], tl.int32)
    b_from_k = b_i[:, None] * DK + b_d[None, :]
    b_from_row = b_i[:, None] * C + b_i[None, :]
    next_total = tl.load(p_total, mask=num_local > 0, other=0.0)
    for i_chunk in tl.range(0, tl.cdiv(num_local, C), num_stages=STAGES):
        b_state = kernels.operand(b_s, type, PRECISION)
        b_k = _head_tile(p_k + b_from_k, b_d, DK, BK)
        b_read = tl.dot(b_k, b_state, input_precision=PRECISION)
        b_is_token = b_i < num_local - i_chunk * C
        b_mask_v = b_is_token[:, None] & b_is_v[None, :]
        b_v = tl.load(p_v + b_i[:, None] * v_stride + b_dv[None, :], mask=b_mask_v, other=0.0)
        if IS_BURNED:
            b_is_bad = (tl.abs(b_v.to(tl.float32)) < float("inf")) == 0
            b_first_bad = tl.min(tl.where(b_is_bad, b_i[:, None], C), 0)
            b_v = tl.where(b_is_bad, 0.0, b_v)
        # beta on the residual: the solution's unit diagonal is exact in bfloat16
        b_in, b_beta = tl.load(p_factors + b_i * 4)[:, None], tl.load(p_factors + b_i * 4 + 3)[:, None]
        b_residual = (b_v.to(tl.float32) - b_read * b_in) * b_beta
        b_solve = tl.load(p_solve + b_from_row)
        b_new = tl.dot(b_solve, kernels.operand(b_residual, type, PRECISION), input_precision=PRECISION)
        b_q = _head_tile(p_q + b_from_k, b_d, DK, BK)
        b_o = tl.dot(b_q, b_state, input_precision=PRECISION)
        b_o *= tl.load(p_factors + b_i * 4 + 1)[:, None]
        b_scores = tl.load(p_scores + b_from_row)
        b_o = tl.dot(b_scores, kernels.operand(b_new, type, PRECISION), b_o, input_precision=PRECISION)
        total = next_total
        b_new *= tl.load(p_factors + b_i * 4 + 2)[:, None]
        b_s = tl.dot(tl.trans(b_k), kernels.operand(b_new, type, PRECISION), b_s * total, input_precision=PRECISION)
        p_k += HK * C * DK
        p_q += HK * C * DK
        p_solve += HV * C * C
        p_scores += HV * C * C
        p_factors += HV * C * 4
        p_total += HV
        next_total = tl.load(p_total, mask=(i_chunk + 1) * C < num_local, other=0.0)
        if IS_BURNED:
            b_o = tl.where(b_i[:, None] >= b_first_bad[None, :], float("nan"), b_o)
            b_s = tl.where((b_first_bad < C)[None, :], float("nan"), b_s)
        b_o = b_o.to(p_o.dtype.element_ty)
        tl.store(p_o + b_i[:, None] * (HV * DV) + b_dv[None, :], b_o, mask=b_mask_v)
        p_v += C * v_stride
        p_o += C * HV * DV
        if IS_BURNED:
            if p_panel is not None:
                b_token = (begin + i_chunk * C + b_i)[:, None]
                mark_tile(b_o, b_token, (i_head * DV + b_dv)[None, :], b_mask_v, HV * DV, p_panel, p_row_ids, slot,
                          num_signals, num_rows, neg_inf)  # fmt: skip
        else:
            b_exponent = tl.maximum(b_exponent, codes(b_o) & exponent_of(b_o))
    return b_s, tl.max(tl.max(b_exponent, 1), 0)


@triton.jit
def _span(p_cu_seqlens, p_first_chunks, i_sequence, length, chunks_per_sequence):
    """First token, number of tokens and first chunk of a sequence."""
    if p_cu_seqlens is None:
        begin, num_local = i_sequence * length, length
        first_chunk = i_sequence * chunks_per_sequence
    else:
        begin = tl.load(p_cu_seqlens + i_sequence).to(tl.int32)
        num_local = tl.load(p_cu_seqlens + i_sequence + 1).to(tl.int32) - begin
        first_chunk = tl.load(p_first_chunks + i_sequence).to(tl.int32)
    return begin, num_local, first_chunk


@triton.jit(do_not_specialize=[
    "num_tokens", "length", "chunks_per_sequence", "slot", "num_signals", "num_rows", "shape", "neg_inf",
    "state_slot", "state_num_signals", "state_num_rows", "state_shape", "state_neg_inf",
])  # fmt: skip
def gated_delta_rule_scan_fwd_kernel(
    p_q, p_k, p_v, p_solve, p_scores, p_factors, p_total, p_initial, p_final, p_o, p_is_burned, p_cu_seqlens,
    p_first_chunks, num_tokens, length, chunks_per_sequence, v_stride,
    p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
    p_state_panel, p_state_row_ids, state_slot, state_num_signals, state_num_rows, state_shape, state_neg_inf,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, IS_BURNED: tl.constexpr,
):  # fmt: skip
    """One program a block of the value dimension, a value head and a sequence.

    Without ``IS_BURNED`` it says in ``p_is_burned`` whether it stored anything that is not finite. With it, only such
    programs run, once more: they give each output to the token that it is due to, and mark.
    """
    i_v, i_head, i_sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_program = (i_sequence * HV + i_head) * tl.num_programs(0) + i_v
    if IS_BURNED:
        if p_panel is not None:  # noqa: SIM102 - the outer one is decided at compile time
            if i_program == 0:
                mark_ran(p_panel, slot, num_signals, num_rows, shape)
        if p_state_panel is not None:  # noqa: SIM102 - as above
            if i_program == 0:
                mark_ran(p_state_panel, state_slot, state_num_signals, state_num_rows, state_shape)
        if tl.load(p_is_burned + i_program) == 0:
            return
    begin, num_local, first_chunk = _span(p_cu_seqlens, p_first_chunks, i_sequence, length, chunks_per_sequence)
    b_d, b_dv = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    b_at = (i_sequence.to(tl.int64) * HV + i_head) * (DK * DV) + b_d[:, None] * DV + b_dv[None, :]
    b_mask = (b_d < DK)[:, None] & (b_dv < DV)[None, :]
    b_s = tl.zeros([BK, BV], tl.float32)
    if p_initial is not None:
        b_s = tl.load(p_initial + b_at, mask=b_mask, other=0.0)
    first = begin.to(tl.int64)
    to_key_head = first_chunk.to(tl.int64) * HK + i_head // (HV // HK)
    to_value_head = first_chunk.to(tl.int64) * HV + i_head
    b_s, exponent = _through_chunks(
        b_s, p_q + to_key_head * (C * DK), p_k + to_key_head * (C * DK), p_v + first * v_stride + i_head * DV,
        p_solve + to_value_head * (C * C), p_scores + to_value_head * (C * C), p_factors + to_value_head * (C * 4),
        p_total + to_value_head, p_o + (first * HV + i_head) * DV, begin, num_local, v_stride, i_v, i_head,
        p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf,
        HK, HV, DK, DV, BK, BV, C, PRECISION, STAGES, IS_BURNED)  # fmt: skip
    if p_final is not None:
        tl.store(p_final + b_at, b_s, mask=b_mask)
    if IS_BURNED:
        if p_state_panel is not None:
            b_column = i_head * (DK * DV) + b_d[:, None] * DV + b_dv[None, :]
            mark_tile(b_s, i_sequence + b_column * 0, b_column, b_mask, HV * DK * DV, p_state_panel,
                      p_state_row_ids, state_slot, state_num_signals, state_num_rows, state_neg_inf)  # fmt: skip
    else:
        is_bad_state = tl.max(tl.max(codes(b_s) & 0x7F800000, 1), 0) == 0x7F800000
        is_bad_output = exponent == exponent_of(tl.zeros([1], p_o.dtype.element_ty))
        tl.store(p_is_burned + i_program, (is_bad_state | is_bad_output).to(tl.int32))
        if p_cu_seqlens is not None:
            # tokens behind the last sequence: pads
            num_pads = tl.where(i_sequence == tl.num_programs(2) - 1, num_tokens - begin - num_local, 0)
            p_pad = p_o + (first + num_local) * (HV * DV) + i_head * DV
            b_i = tl.arange(0, C)
            for i_chunk in tl.range(0, tl.cdiv(num_pads, C), num_stages=1):
                b_from = (i_chunk * C + b_i)[:, None]
                b_is_pad = (b_from < num_pads) & (b_dv < DV)[None, :]
                b_zero = tl.zeros([C, BV], p_o.dtype.element_ty)
                tl.store(p_pad + b_from.to(tl.int64) * (HV * DV) + b_dv[None, :], b_zero, mask=b_is_pad)


def scan(
    chunks: Chunks,
    v: Tensor,
    *,
    initial_state: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """Carry the state through the chunks and write every output.

    Args:
        v: [B, T, Hv, Dv]. out: likewise, contiguous, written.
        initial_state: [num_sequences, Hv, Dk, Dv] or None.
        final_state: float32, likewise, written; None where nobody asks.

    Raises:
        ConfigError: a chunk size that the kernel has no tile for.
    """
    table, (num_v_heads, head_v_dim) = chunks.table, v.shape[2:]
    num_k_heads, head_k_dim = chunks.k.shape[1], chunks.k.shape[3]
    if table.chunk_size not in kernels.CHUNK_SIZES:
        raise ConfigError(f"chunk_size={table.chunk_size}: the Triton kernel takes {kernels.CHUNK_SIZES}")
    tuning = kernels.TUNING
    block_v, block_k = min(tuning.block_v, kernels.block(head_v_dim)), kernels.block(head_k_dim)
    # tiles of more than 256 bytes a row do not fit shared memory several times
    num_stages = 1 if block_k * chunks.k.element_size() > 256 else tuning.scan_stages
    state_width = num_v_heads * head_k_dim * head_v_dim
    state_mark = state_mark if final_state is not None else None
    v = kernels.packed_tokens(v)
    grid = (triton.cdiv(head_v_dim, block_v), num_v_heads, table.num_sequences)
    is_burned = torch.empty(math.prod(grid), dtype=torch.int32, device=v.device)
    arguments: list[Any] = [
        chunks.q, chunks.k, v, chunks.solve, chunks.scores, chunks.factors, chunks.total,
        None if initial_state is None else initial_state.float().contiguous(), final_state, out, is_burned,
        table.cu_seqlens, table.first_chunks, table.num_tokens, table.length,
        table.num_chunks // table.num_sequences, v.stride(0),
        *mark_arguments(mark, out.dtype, table.num_tokens, num_v_heads * head_v_dim),
        *mark_arguments(state_mark, torch.float32, table.num_sequences, state_width),
    ]  # fmt: skip
    for burned in (False, True):
        gated_delta_rule_scan_fwd_kernel[grid](
            *arguments, HK=num_k_heads, HV=num_v_heads, DK=head_k_dim, DV=head_v_dim, BK=block_k, BV=block_v,
            C=table.chunk_size, PRECISION=kernels.precision(v.dtype), STAGES=1 if burned else num_stages,
            IS_BURNED=burned,
            num_warps=tuning.burned_warps if burned else tuning.scan_warps,
        )  # fmt: skip
