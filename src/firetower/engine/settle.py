"""The end of a window on the device: which rows burned, whose state may go on, what the next window starts from.

All of it without the host: a row that burned is dead in the steps that were launched before the host could know. In
plain PyTorch here; on CUDA each function is one small kernel (`firetower.engine.settle_kernels`).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from firetower.core.words import CLEAN
from firetower.engine.buffers import StepBuffers
from firetower.models.state import ModelState, commit
from firetower.ops.sample import Sampled

_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Chain:
    """What the last window of one token a row chose, for a window that is launched before the host has read it.

    Attributes:
        tokens: int64 [capacity], by row of that window; -1 where none could be chosen.
        dead: int32 [capacity], 1 for rows that burned or have no token.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.dead = torch.zeros(capacity, dtype=torch.int32, device=device)


def settle(buffers: StepBuffers, sampled: Sampled, state: ModelState, chain: Chain | None) -> None:
    """End a window: tokens and events go beside the panel, rows that are well commit their states.

    A row is dead with a bad value in one of its row words, or without a token. A first bad signal that no row word
    names kills every row: none can be told to be clean.

    Args:
        buffers: of the step; its panel is complete, ``tokens`` and ``events`` are written.
        sampled: tokens and events of the rows.
        state: ``side`` of the slots of rows that are not dead is flipped.
        chain: written for windows of one token; None for a window that nobody follows.
    """
    link = chain if buffers.shape.window == 1 else None
    if buffers.out.is_cuda and _HAS_TRITON:
        from firetower.engine.settle_kernels import settle as on_device

        on_device(buffers, sampled, state, link)
        return
    buffers.tokens.copy_(sampled.tokens)
    buffers.events.copy_(sampled.events)
    dead = dead_rows(buffers)
    commit(state, buffers.batch.state_slots, dead)
    if link is not None:
        rows = buffers.shape.num_rows
        link.tokens[:rows] = buffers.tokens
        link.dead[:rows] = 0 if dead is None else dead


def dead_rows(buffers: StepBuffers) -> Tensor | None:
    """Rows that are dead: bool [B]; None where the host sees at once that there is none (on the CPU)."""
    shape = buffers.shape
    num_signals = buffers.num_signals
    if buffers.out.is_cpu and _is_all_well(buffers):
        return None
    words = buffers.panel[2 * num_signals : 2 * num_signals + shape.num_rows * shape.window]
    dead = ((words < CLEAN) | (buffers.events != 0)).view(shape.num_rows, shape.window).any(1)
    signals = torch.arange(num_signals, device=words.device)
    origin = torch.where(buffers.panel[:num_signals] < CLEAN, signals, num_signals).amin()
    # a row word begins with the slot of its first bad signal
    is_unowned = (origin < num_signals) & (origin < words.amin() >> 32)
    return torch.logical_or(dead, is_unowned)


def _is_all_well(buffers: StepBuffers) -> bool:
    words, events = buffers.panel[: buffers.num_signals].numpy(), buffers.events.numpy()
    return not (words < CLEAN).any() and not events.any()


def follow(buffers: StepBuffers, chain: Chain) -> None:
    """Give the rows of a window the tokens that the window before it chose; a dead row becomes a pad.

    Rows whose ``source`` is negative have their token already.
    """
    if buffers.out.is_cuda and _HAS_TRITON:
        from firetower.engine.settle_kernels import follow as on_device

        on_device(buffers, chain)
        return
    x = buffers.device.tensors
    window = buffers.shape.window
    source = x["source"]
    is_chained = source >= 0
    at = source.clamp_min(0).long()
    dead = is_chained & (chain.dead[at] != 0)
    first = buffers.batch.token_ids[:, 0]
    first.copy_(torch.where(is_chained & ~dead, chain.tokens[at], first))
    x["row_ids"].view(-1, window).masked_fill_(dead[:, None], -1)
    buffers.batch.slot_mapping.masked_fill_(dead[:, None], -1)
    x["state_slots"].masked_fill_(dead, -1)
    x["seq_lens"].masked_fill_(dead, 0)
