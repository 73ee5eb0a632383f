"""What a forward pass reads of a step: `WindowBatch`, a few new tokens of many sequences; `PrefillBatch`, prompts.

Shapes: N sequences (rows of a bucket), W tokens of a window, S sequences and T tokens of a prefill.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule import MAX_WINDOW

CHUNK = 64
"""A prompt is cut into calls at multiples of this absolute position, so that its recurrent states keep their bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowBatch:
    """One step of N sequences, W tokens each; device tensors with fixed addresses, to capture a CUDA graph over.

    A row of the bucket that holds no sequence is a pad: negative in ``row_ids``, ``slot_mapping`` and ``state_slots``.
    A sequence with fewer than W tokens has pads at its end: negative in ``row_ids`` and ``slot_mapping``. Pads write
    nothing and reach nothing; token 0 and position 0 do for them.

    Attributes:
        token_ids: int64 [N, W].
        positions: int64 [N, W], absolute, from 0.
        row_ids: int32 [N * W], row word of the panel for each token; negative for a pad.
        block_table: int32 [N, max_pages].
        seq_lens: int32 [N], tokens of each sequence, the window's real ones included; 0 for a pad row.
        slot_mapping: int64 [N, W], ``page * page_size + offset``; negative for a pad.
        state_slots: int32 [N], slot of recurrent and convolution state, none twice; negative for a pad row.
        num_accepted: int32 [N], how many of the slot's pending window count; 0 after a prefill.
        max_seq_len: no ``seq_lens`` is larger; fixed with the graph.
    """

    token_ids: Tensor
    positions: Tensor
    row_ids: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    state_slots: Tensor
    num_accepted: Tensor
    max_seq_len: int

    def __post_init__(self) -> None:
        rows, window = self.token_ids.shape if self.token_ids.ndim == 2 else (0, 0)
        if rows < 1 or not 1 <= window <= MAX_WINDOW:
            raise ConfigError(f"token_ids: {list(self.token_ids.shape)}: must be [N, 1 to {MAX_WINDOW}]")
        _check(self, "token_ids", torch.int64, (rows, window))
        _check(self, "positions", torch.int64, (rows, window))
        _check(self, "slot_mapping", torch.int64, (rows, window))
        _check(self, "row_ids", torch.int32, (rows * window,))
        for name in ("seq_lens", "state_slots", "num_accepted"):
            _check(self, name, torch.int32, (rows,))
        _check(self, "block_table", torch.int32, (rows, *self.block_table.shape[1:2]))
        if self.max_seq_len < 1:
            raise ConfigError(f"max_seq_len={self.max_seq_len}: must be at least 1")

    @property
    def num_sequences(self) -> int:
        """N, pad rows included."""
        return self.token_ids.shape[0]

    @property
    def window(self) -> int:
        """W."""
        return self.token_ids.shape[1]


def new_window_batch(
    num_sequences: int, window: int, max_pages: int, *, max_seq_len: int, device: torch.device | str = "cpu"
) -> WindowBatch:
    """A batch of pads alone, to be filled in place.

    Args:
        num_sequences: N. window: W.
        max_pages: entries of the block table a sequence.
        max_seq_len: longest sequence that it will hold.
        device: where.
    """

    def full(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return WindowBatch(
        token_ids=full(0, torch.int64, num_sequences, window),
        positions=full(0, torch.int64, num_sequences, window),
        row_ids=full(-1, torch.int32, num_sequences * window),
        block_table=full(0, torch.int32, num_sequences, max_pages),
        seq_lens=full(0, torch.int32, num_sequences),
        slot_mapping=full(-1, torch.int64, num_sequences, window),
        state_slots=full(-1, torch.int32, num_sequences),
        num_accepted=full(0, torch.int32, num_sequences),
        max_seq_len=max_seq_len,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillBatch:
    """Prompts, or parts of them, one behind the other. Not for a captured graph: lengths are host integers.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], absolute.
        row_ids: int32 [T], row word of each token; negative for a pad. The words of a sequence's state are those of its
            first token.
        cu_seqlens: S + 1 host integers from 0 on: sequence i has the rows ``[i]`` to ``[i + 1]``, at least one. Rows
            beyond the last are pads.
        cu_seqlens_device: the same, int32 [S + 1].
        prefix_lens: S host integers: tokens that pages and state hold already, multiples of `CHUNK`. 0 starts a
            sequence: nothing that its slot or pages held before can matter.
        block_table: int32 [S, max_pages].
        slot_mapping: int64 [T], negative for a pad.
        state_slots: int32 [S], none twice, none negative.
    """

    token_ids: Tensor
    positions: Tensor
    row_ids: Tensor
    cu_seqlens: tuple[int, ...]
    cu_seqlens_device: Tensor
    prefix_lens: tuple[int, ...]
    block_table: Tensor
    slot_mapping: Tensor
    state_slots: Tensor

    def __post_init__(self) -> None:
        tokens, sequences = self.token_ids.numel(), len(self.cu_seqlens) - 1
        edges = self.cu_seqlens
        if sequences < 1 or edges[0] != 0 or edges[-1] > tokens or any(a >= b for a, b in itertools.pairwise(edges)):
            raise ConfigError(
                f"cu_seqlens={edges}: must rise from 0 to at most the {tokens} tokens; leave empty prompts out"
            )
        if len(self.prefix_lens) != sequences or any(n < 0 or n % CHUNK for n in self.prefix_lens):
            raise ConfigError(f"prefix_lens={self.prefix_lens}: must be {sequences} multiples of {CHUNK}, from 0 on")
        for name in ("token_ids", "positions", "slot_mapping"):
            _check(self, name, torch.int64, (tokens,))
        _check(self, "row_ids", torch.int32, (tokens,))
        _check(self, "cu_seqlens_device", torch.int32, (sequences + 1,))
        _check(self, "state_slots", torch.int32, (sequences,))
        _check(self, "block_table", torch.int32, (sequences, *self.block_table.shape[1:2]))

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T, pads included."""
        return self.token_ids.numel()


def new_prefill_batch(
    prompts: Sequence[Sequence[int]],
    *,
    block_tables: Sequence[Sequence[int]],
    state_slots: Sequence[int],
    page_size: int,
    prefix_lens: Sequence[int] | None = None,
    first_row: int = 0,
    device: torch.device | str = "cpu",
) -> PrefillBatch:
    """A batch from host lists.

    Args:
        prompts: the new tokens of each sequence, none empty.
        block_tables: pages of each sequence, enough for prefix and new tokens.
        state_slots: slot of each sequence.
        page_size: tokens a page.
        prefix_lens: tokens that each sequence has in pages and state already; None for none.
        first_row: row word of the first token; the others follow.
        device: where.

    Raises:
        ConfigError: lists of different lengths, an empty prompt, too few pages.
    """
    prefixes = tuple(prefix_lens) if prefix_lens is not None else (0,) * len(prompts)
    if not len(prompts) == len(block_tables) == len(state_slots) == len(prefixes) or not prompts:
        raise ConfigError(
            f"prompts={len(prompts)}, block_tables={len(block_tables)}, state_slots={len(state_slots)}, "
            f"prefix_lens={len(prefixes)}: must be as many of each, at least one"
        )
    edges = (0, *itertools.accumulate(len(p) for p in prompts))
    width = max(map(len, block_tables))
    positions: list[int] = []
    slots: list[int] = []
    for prompt, pages, prefix in zip(prompts, block_tables, prefixes, strict=True):
        end = prefix + len(prompt)
        if end > len(pages) * page_size:
            raise ConfigError(f"block_tables: {len(pages)} pages of {page_size}: too few for {end} tokens")
        positions += range(prefix, end)
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(prefix, end)]

    # a tensor of its own for each: kernels are compiled anew for addresses that are no multiple of 16
    def longs(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PrefillBatch(
        token_ids=longs([t for p in prompts for t in p]),
        positions=longs(positions),
        row_ids=ints(range(first_row, first_row + edges[-1])),
        cu_seqlens=edges,
        cu_seqlens_device=ints(edges),
        prefix_lens=prefixes,
        block_table=ints([[*pages, *[0] * (width - len(pages))] for pages in block_tables]),
        slot_mapping=longs(slots),
        state_slots=ints(state_slots),
    )


def _check(batch: WindowBatch | PrefillBatch, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x: Tensor = getattr(batch, name)
    if x.dtype is not dtype or tuple(x.shape) != shape or not x.is_contiguous():
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{name}: {x.dtype} {list(x.shape)}: must be contiguous {kind} {list(shape)}")
