"""What the two parts of chunked prefill hand each other, whichever backend runs each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """Where the chunks of a call lie. Tokens are counted through the batch: token t of sequence b is ``b * T + t``.

    With ``cu_seqlens`` on a device the number of chunks is not known to the host: ``num_chunks`` is then the most that
    can be, and chunks beyond the last have length 0.

    Attributes:
        num_tokens: B * T.
        num_sequences: B, or the sequences of ``cu_seqlens``.
        length: tokens of every sequence, 0 where ``cu_seqlens`` says.
        num_chunks: of all sequences together.
        chunk_size: tokens of a full chunk.
        cu_seqlens: int [num_sequences + 1] or None.
        starts: int64 [num_chunks], first token of each chunk; only with ``cu_seqlens``, as the next three.
        lengths: int64 [num_chunks], 0 for chunks beyond the last.
        sequences: int64 [num_chunks], the last one for chunks beyond the last.
        first_chunks: int64 [num_sequences].
    """

    num_tokens: int
    num_sequences: int
    length: int
    num_chunks: int
    chunk_size: int
    cu_seqlens: Tensor | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None
    sequences: Tensor | None = None
    first_chunks: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """All that does not depend on the state, computed once for every chunk; C is the chunk size. All contiguous.

    Tokens past a sequence's end have zero q, k, beta and scores. From the first token of a chunk whose k, g or beta is
    not finite, the output's factor is NaN, and so is the chunk's ``total``. All else is as if such tokens were absent,
    so that they cannot reach earlier ones through a product with zero.

    Attributes:
        q: [num_chunks, Hk, C, Dk], normalised if asked, not scaled. k: likewise.
        solve: [num_chunks, Hv, C, C]: ``(I + L)^-1`` with ``L[i, j] = beta_i (k_i . k_j) decay(j -> i)`` for j < i.
        scores: [num_chunks, Hv, C, C]: ``scale (q_i . k_j) decay(j -> i)`` for j <= i.
        factors: [num_chunks, Hv, C, 4] of each token: the decay from the chunk's start through it; ``scale`` times
            that, for the output; the decay from after it to the chunk's end; beta.
        total: [num_chunks, Hv]: decay of the whole chunk.
        table: where the chunks lie.
    """

    q: Tensor
    k: Tensor
    solve: Tensor
    scores: Tensor
    factors: Tensor
    total: Tensor
    table: ChunkTable


def make_table(batch: int, length: int, chunk_size: int, cu_seqlens: Tensor | None) -> ChunkTable:
    """Where the chunks of a call lie; no host sync.

    Args:
        batch: B. length: T.
        cu_seqlens: int [num_sequences + 1] or None.
    """
    if cu_seqlens is None:
        num_chunks = batch * -(-length // chunk_size)
        return ChunkTable(
            num_tokens=batch * length,
            num_sequences=batch,
            length=length,
            num_chunks=num_chunks,
            chunk_size=chunk_size,
        )
    num_sequences = cu_seqlens.numel() - 1
    num_chunks = length // chunk_size + num_sequences if length else 0
    edges = cu_seqlens.long()
    counts = (edges.diff() + chunk_size - 1) // chunk_size
    ends = counts.cumsum(0)
    index = torch.arange(num_chunks, device=edges.device)
    sequences = torch.searchsorted(ends, index, right=True).clamp_max(num_sequences - 1)
    first_chunks = ends - counts
    starts = edges[sequences] + (index - first_chunks[sequences]) * chunk_size
    return ChunkTable(
        num_tokens=length,
        num_sequences=num_sequences,
        length=0,
        num_chunks=num_chunks,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        starts=starts,
        lengths=(edges[sequences + 1] - starts).clamp(0, chunk_size),
        sequences=sequences,
        first_chunks=first_chunks,
    )
