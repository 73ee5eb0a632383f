"""Chunked prefill in plain PyTorch: the CPU path, and any device's when a kernel is missing. No host sync on a device.

Computes in float32, or in float64 where the inputs are.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.ops.gated_delta_rule.chunks import Chunks, ChunkTable
from firetower.ops.gated_delta_rule.reference import L2NORM_EPS
from firetower.sensors.marks import Mark, mark_rows

_BLOCK = 16
# x * x stays finite below the first and (2^128 * 2^-100)^2 far below the range's end; a select between two
# powers of two leaves ordinary rows their bits
_LARGE, _SHRINK = 2.0**50, 2.0**-100


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis, right for every finite float32 ``x``.

    A row with a NaN or an Inf comes out with a NaN in it.
    """
    shrink = torch.where(x.abs().amax(-1, keepdim=True) > _LARGE, _SHRINK, 1.0).to(x.dtype)
    x = x * shrink
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS * shrink.square()).rsqrt()


def segment_sums(g: Tensor) -> Tensor:
    """Sums of the gates of each segment: ``[..., i, j] = sum of g[l] over j < l <= i``, -Inf where j > i.

    Each is a sum of its own, so that neither an Inf nor a large gate outside the segment can touch it.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    sums = torch.where(lower, g[..., :, None], 0.0).cumsum(-2)
    return torch.where(lower.mT, -torch.inf, sums)


def solve_unit_lower(lower: Tensor) -> Tensor:
    """``(I + lower)^-1`` of strictly lower triangular [..., C, C]: blocks of 16, by rows inside, exact substitution."""
    size = lower.shape[-1]
    num_blocks = -(-size // _BLOCK)
    pad = num_blocks * _BLOCK - size
    lower = torch.nn.functional.pad(lower, (0, pad, 0, pad))
    blocks = lower.reshape(*lower.shape[:-2], num_blocks, _BLOCK, num_blocks, _BLOCK)
    diagonal = _solve_rows(torch.stack([blocks[..., b, :, b, :] for b in range(num_blocks)], dim=-3))
    inverse = torch.zeros_like(lower)
    for b in range(num_blocks):
        at, end = b * _BLOCK, (b + 1) * _BLOCK
        inverse[..., at:end, at:end] = diagonal[..., b, :, :]
        if b:
            above = lower[..., at:end, :at] @ inverse[..., :at, :at]
            inverse[..., at:end, :at] = -(diagonal[..., b, :, :] @ above)
    return inverse[..., :size, :size].contiguous()


def _solve_rows(lower: Tensor) -> Tensor:
    inverse = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device).expand(lower.shape).clone()
    for i in range(1, _BLOCK):
        inverse[..., i, :i] = -(lower[..., i, None, :i] @ inverse[..., :i, :i]).squeeze(-2)
    return inverse


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Tokens of each chunk, int64 and bool [num_chunks, C], and each chunk's sequence and whether it begins one."""

    tokens: Tensor
    valid: Tensor
    sequences: Tensor
    is_first: Tensor


def _layout(table: ChunkTable, device: torch.device) -> _Layout:
    position = torch.arange(table.chunk_size, device=device)
    chunk = torch.arange(table.num_chunks, device=device)
    if table.starts is None or table.lengths is None or table.sequences is None or table.first_chunks is None:
        sequences = chunk // (table.num_chunks // table.num_sequences)
        local = chunk % (table.num_chunks // table.num_sequences)
        starts = sequences * table.length + local * table.chunk_size
        lengths, is_first = table.length - local * table.chunk_size, local == 0
    else:
        starts, lengths, sequences = table.starts, table.lengths, table.sequences
        is_first = chunk == table.first_chunks[sequences]
    tokens = (starts[:, None] + position).clamp_max(table.num_tokens - 1)
    return _Layout(tokens, position < lengths[:, None], sequences, is_first)


def _gather(x: Tensor, layout: _Layout, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, ...] as [num_chunks, heads, C, ...], zero past each sequence's end."""
    valid = layout.valid.view(*layout.valid.shape, *[1] * (x.ndim - 1))
    return torch.where(valid, x[layout.tokens].to(dtype), 0.0).transpose(1, 2).contiguous()


def _scatter(x: Tensor, layout: _Layout, num_tokens: int) -> Tensor:
    """[num_chunks, heads, C, D] as [tokens, heads, D]; zero for tokens of no sequence.

    What is past a sequence's end goes to one row more, which is cut off: no mask, no host sync.
    """
    into = x.new_zeros((num_tokens + 1, x.shape[1], x.shape[3]))
    into[torch.where(layout.valid, layout.tokens, num_tokens)] = x.transpose(1, 2)
    return into[:num_tokens]


def prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, table: ChunkTable, *, scale: float, use_l2norm: bool
) -> Chunks:
    """Everything that does not depend on the state; see `Chunks`.

    Args:
        q: [B, T, Hk, Dk]. k: likewise. g: [B, T, Hv]. beta: likewise. At least one token.
        table: where the chunks lie.
    """
    dtype, layout = torch.float64 if q.dtype is torch.float64 else torch.float32, _layout(table, q.device)
    q, k, g, beta = (_gather(x.flatten(0, 1), layout, dtype) for x in (q, k, g, beta))
    if use_l2norm:
        q, k = l2norm(q), l2norm(k)
    is_bad_key = _is_bad(k).any(-1)
    k = torch.where(is_bad_key[..., None], 0.0, k)
    group = g.shape[1] // k.shape[1]
    is_bad = is_bad_key.repeat_interleave(group, dim=1) | _is_bad(beta) | g.isnan() | (g == torch.inf)
    g, beta = (torch.where(is_bad, 0.0, x) for x in (g, beta))
    decay = segment_sums(g).exp()
    keys, queries = ((x @ k.mT).repeat_interleave(group, dim=1) for x in (k, q))
    solve = solve_unit_lower((beta[..., None] * keys * decay).tril(-1))
    decay_in = g.cumsum(-1).exp()
    burned = torch.where(is_bad.cummax(-1).values, torch.nan, 0.0).to(dtype)
    factors = torch.stack([decay_in, scale * decay_in + burned, decay[..., -1, :], beta], dim=-1)
    return Chunks(
        q=q,
        k=k,
        solve=solve,
        scores=(scale * queries * decay).tril(),
        factors=factors,
        total=(decay_in + burned)[..., -1].contiguous(),
        table=table,
    )


def _is_bad(x: Tensor) -> Tensor:
    return ~x.isfinite()


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
        v: [B, T, Hv, Dv]. out: likewise, written.
        initial_state: [num_sequences, Hv, Dk, Dv] or None.
        final_state: likewise, written; None where nobody asks.
    """
    table, dtype = chunks.table, torch.float64 if v.dtype is torch.float64 else torch.float32
    shape = (table.num_sequences, v.shape[2], chunks.k.shape[-1], v.shape[3])
    states = torch.zeros(shape, dtype=dtype, device=v.device)
    if initial_state is not None:
        states.copy_(initial_state)
    _scan_chunks(chunks, v, states, out)
    mark_rows(out.view(table.num_tokens, -1), mark)
    if final_state is not None:
        final_state.copy_(states)
        mark_rows(final_state.view(table.num_sequences, -1), state_mark)


def _scan_chunks(chunks: Chunks, v: Tensor, states: Tensor, out: Tensor) -> None:
    """Outputs of every token; ``states`` goes from initial to final."""
    table, dtype = chunks.table, states.dtype
    layout, group = _layout(table, v.device), v.shape[2] // chunks.k.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group, dim=1) for x in (chunks.q, chunks.k))
    solve, scores = chunks.solve.to(dtype), chunks.scores.to(dtype)
    decay_in, decay_out, decay_end, beta = chunks.factors.to(dtype)[..., None].unbind(3)
    total = chunks.total.to(dtype)[..., None, None]
    values = _gather(v.flatten(0, 1), layout, dtype)
    is_bad = _is_bad(values)
    values = torch.where(is_bad, 0.0, values)
    outputs = torch.empty_like(values)
    num_steps = table.num_chunks if table.cu_seqlens is not None else table.num_chunks // table.num_sequences
    first_states = states.clone()
    for i in range(num_steps):
        # one chunk of each sequence at once; with cu_seqlens one chunk after the other
        at = slice(i, None, num_steps)
        sequences = layout.sequences[at]
        state = torch.where(layout.is_first[at, None, None, None], first_states[sequences], states[sequences])
        new = solve[at] @ (beta[at] * (values[at] - decay_in[at] * (k[at] @ state)))
        outputs[at] = decay_out[at] * (q[at] @ state) + scores[at] @ new
        state = total[at] * state + (decay_end[at] * k[at]).mT @ new
        states[sequences] = torch.where(is_bad[at].any(-2, keepdim=True), torch.nan, state)
    # a bad value burns its own column, from its own token on
    outputs = torch.where(is_bad.cummax(-2).values, torch.nan, outputs).to(v.dtype)
    out.view(table.num_tokens, *v.shape[2:]).copy_(_scatter(outputs, layout, table.num_tokens))
