# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The end of a window and the beginning of a chained one as Triton kernels of one program each.

What they compute is defined by `firetower.engine.settle`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firetower.core.words import CLEAN, NOT_RUN
from firetower.engine.buffers import StepBuffers
from firetower.engine.settle import Chain
from firetower.models.state import ModelState
from firetower.ops.sample import Sampled


@triton.jit(do_not_specialize=["num_signals", "num_rows", "window"])
def settle_kernel(
    p_out, p_tokens, p_events, p_slots, p_side, p_chain_tokens, p_chain_dead, num_signals, num_rows, window,
    LINK: tl.constexpr, BAD_BELOW: tl.constexpr, EMPTY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program: the panel's words, rows [BLOCK_N] by tokens [BLOCK_W]."""
    i_signal = tl.arange(0, BLOCK_S)
    b_signal = tl.load(p_out + i_signal, mask=i_signal < num_signals, other=EMPTY)
    origin = tl.min(tl.where(b_signal < BAD_BELOW, i_signal, num_signals), axis=0)
    i_row = tl.arange(0, BLOCK_N)
    i_token = tl.arange(0, BLOCK_W)
    at = i_row[:, None] * window + i_token[None, :]
    is_real = (i_row[:, None] < num_rows) & (i_token[None, :] < window)
    b_word = tl.load(p_out + 2 * num_signals + at, mask=is_real, other=EMPTY)
    b_token = tl.load(p_tokens + at, mask=is_real, other=0)
    b_event = tl.load(p_events + at, mask=is_real, other=0).to(tl.int64)
    p_back = p_out + 3 * num_signals + num_rows * window + 1
    tl.store(p_back + at, b_token, mask=is_real)
    tl.store(p_back + num_rows * window + at, b_event, mask=is_real)
    b_dead = tl.max(((b_word < BAD_BELOW) | (b_event != 0)).to(tl.int32), axis=1)
    first_row = tl.min(tl.min(b_word, axis=1), axis=0) >> 32
    is_unowned = (origin < num_signals) & (origin.to(tl.int64) < first_row)
    b_dead = tl.where(is_unowned, 1, b_dead)
    b_slot = tl.load(p_slots + i_row, mask=i_row < num_rows, other=-1)
    goes_on = (b_slot >= 0) & (b_dead == 0)
    b_side = tl.load(p_side + b_slot, mask=goes_on, other=0)
    tl.store(p_side + b_slot, 1 - b_side, mask=goes_on)
    if LINK:
        b_first = tl.load(p_tokens + i_row * window, mask=i_row < num_rows, other=0)
        tl.store(p_chain_tokens + i_row, b_first, mask=i_row < num_rows)
        tl.store(p_chain_dead + i_row, b_dead, mask=i_row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "window"])
def follow_kernel(
    p_token_ids, p_row_ids, p_slot_mapping, p_state_slots, p_seq_lens, p_source, p_chain_tokens, p_chain_dead, num_rows,
    window, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program: rows [BLOCK_N] by tokens [BLOCK_W]."""
    i_row = tl.arange(0, BLOCK_N)
    i_token = tl.arange(0, BLOCK_W)
    b_source = tl.load(p_source + i_row, mask=i_row < num_rows, other=-1)
    is_chained = b_source >= 0
    b_dead = tl.load(p_chain_dead + b_source, mask=is_chained, other=0)
    b_token = tl.load(p_chain_tokens + b_source, mask=is_chained, other=0)
    is_dead = is_chained & (b_dead != 0)
    tl.store(p_token_ids + i_row * window, b_token, mask=is_chained & (b_dead == 0))
    at = i_row[:, None] * window + i_token[None, :]
    goes = is_dead[:, None] & (i_token[None, :] < window)
    none = tl.zeros([BLOCK_N, BLOCK_W], dtype=tl.int32) - 1
    tl.store(p_row_ids + at, none, mask=goes)
    tl.store(p_slot_mapping + at, none.to(tl.int64), mask=goes)
    tl.store(p_state_slots + i_row, tl.zeros([BLOCK_N], dtype=tl.int32) - 1, mask=is_dead)
    tl.store(p_seq_lens + i_row, tl.zeros([BLOCK_N], dtype=tl.int32), mask=is_dead)


def settle(buffers: StepBuffers, sampled: Sampled, state: ModelState, chain: Chain | None) -> None:
    """See `firetower.engine.settle.settle`."""
    shape = buffers.shape
    linked = (sampled.tokens, sampled.events) if chain is None else (chain.tokens, chain.dead)
    settle_kernel[(1,)](
        buffers.out, sampled.tokens, sampled.events, buffers.batch.state_slots, state.side, *linked,
        buffers.num_signals, shape.num_rows, shape.window, LINK=chain is not None, BAD_BELOW=CLEAN, EMPTY=NOT_RUN,
        BLOCK_S=triton.next_power_of_2(buffers.num_signals), BLOCK_N=triton.next_power_of_2(shape.num_rows),
        BLOCK_W=triton.next_power_of_2(shape.window),
    )  # fmt: skip


def follow(buffers: StepBuffers, chain: Chain) -> None:
    """See `firetower.engine.settle.follow`."""
    shape, x = buffers.shape, buffers.device.tensors
    follow_kernel[(1,)](
        x["token_ids"], x["row_ids"], x["slot_mapping"], x["state_slots"], x["seq_lens"], x["source"], chain.tokens,
        chain.dead, shape.num_rows, shape.window, BLOCK_N=triton.next_power_of_2(shape.num_rows),
        BLOCK_W=triton.next_power_of_2(shape.window),
    )  # fmt: skip
