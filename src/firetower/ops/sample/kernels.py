# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The sampler's Triton kernels: one pass over the logits where no row is filtered, else thresholds first.

``sample_scan`` reads each logit once: marks it, classifies it, applies penalties, bias and mask, and leaves a few
numbers a tile. ``sample_row`` makes a token of them. With filters `search` finds what stays, and ``sample_race`` draws
among that, in the tiles that have any of it. Import needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.sample import scores, search, torch_path
from firetower.ops.sample.params import Sampled, SampleParams
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

# Timed on an H200 against 2 and 8 warps: 122 tiles of a 248,320 vocabulary occupy 132 multiprocessors at batch 1
_NUM_WARPS = 4
_MARK = ["slot", "num_signals", "num_rows", "shape", "neg_inf"]


@triton.jit(do_not_specialize=_MARK)
def sample_scan_fwd_kernel(p_x, p_temperature, p_repetition, p_frequency, p_presence, p_counts, p_prompt, p_bias,
                           p_allowed, p_seeds, p_positions, p_floats, p_flags, p_places, p_groups, p_shares, stride,
                           vocab, num_tiles, p_panel, p_row_ids, slot, num_signals, num_rows, shape, neg_inf,
                           DRAWS: tl.constexpr, LOGPROBS: tl.constexpr, GROUP: tl.constexpr,
                           TILE: tl.constexpr):  # fmt: skip
    """Program (row, tile). Leaves floats [N, 4, tiles]: maximum, best bid, then maximum and sum of exponentials of the
    logits as given; flags [N, tiles]; the place of the best bid [N, tiles]; maxima of groups and the tile's share of
    the mass where there are pointers for them."""
    i_row = tl.program_id(0)
    i_tile = tl.program_id(1)
    row = i_row.to(tl.int64)
    b_col = i_tile * TILE + tl.arange(0, TILE)
    b_mask = b_col < vocab
    b_x = tl.load(p_x + row * stride + b_col, mask=b_mask, other=0.0)
    if p_panel is not None:  # noqa: SIM102 - the one is known when compiling, the other is not
        if (i_tile == 0) & (i_row == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    flags = i_tile * 0 + 2
    # what is not finite is rare: one compare in a tile without it
    if tl.max(b_size, axis=0) >= 0x7F800000:
        b_flags = tl.where(b_size > 0x7F800000, 1, tl.where(b_size < 0x7F800000, 2, tl.where(b_bits > 0, 4, 0)))
        flags = tl.reduce(tl.where(b_mask, b_flags, 0), 0, scores.either)
        if p_panel is not None:
            mark_tile(b_x, i_row, b_col, b_mask, vocab, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)
    b_z, b_wrong = scores.processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts,
                                    p_prompt, p_bias, p_allowed)  # fmt: skip
    if p_bias is not None:
        flags = flags | tl.where(tl.max(b_wrong.to(tl.int32), axis=0) > 0, 8, 0)
    if p_groups is not None:
        b_highest = tl.max(tl.reshape(b_z, [TILE // GROUP, GROUP]), axis=1)
        b_group = i_tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        tl.store(p_groups + row * num_tiles * (TILE // GROUP) + b_group, b_highest)
        top = tl.max(b_highest, axis=0)
    else:
        top = tl.max(b_z, axis=0)
    p_float = p_floats + row * 4 * num_tiles + i_tile
    tl.store(p_float, top)
    tl.store(p_flags + row * num_tiles + i_tile, flags)
    if p_shares is not None:
        b_behind = (b_z - scores.above_empty(top)) / scores.temperature_of(p_temperature, row)
        tl.store(p_shares + row * num_tiles + i_tile, tl.sum(tl.exp(b_behind), axis=0))
    if DRAWS:
        bid, place = scores.race(b_z, b_mask, top, row, i_tile, p_temperature, p_seeds, p_positions, TILE)
        tl.store(p_float + num_tiles, bid)
        tl.store(p_places + row * num_tiles + i_tile, i_tile * TILE + place)
    if LOGPROBS:
        b_raw = tl.where(b_mask, b_x.to(tl.float32), float("-inf"))
        raw_top = tl.max(b_raw, axis=0)
        tl.store(p_float + 2 * num_tiles, raw_top)
        tl.store(p_float + 3 * num_tiles, tl.sum(tl.exp(b_raw - scores.above_empty(raw_top)), axis=0))


@triton.jit
def sample_race_fwd_kernel(p_x, p_temperature, p_min_p, p_repetition, p_frequency, p_presence, p_counts, p_prompt,
                           p_bias, p_allowed, p_seeds, p_positions, p_floats, p_places, p_least, stride, vocab,
                           num_tiles, BLOCK_T: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program (row, tile): the best bid among the tokens at or above both thresholds int32 [N, 2], if there are any."""
    row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    p_float = p_floats + row * 4 * num_tiles + i_tile
    top = tl.load(p_float)
    least = i_tile * 0 + scores.NOTHING
    if p_least is not None:
        least = tl.maximum(tl.load(p_least + row * 2), tl.load(p_least + row * 2 + 1))
    is_open = (scores.order(top) >= least) & (top > float("-inf"))
    if p_min_p is not None:
        share = tl.load(p_min_p + row)
        base = scores.above_empty(scores.row_top(p_floats, row, num_tiles, BLOCK_T))
        temperature = scores.temperature_of(p_temperature, row)
        is_open = is_open & (tl.exp(scores.scaled(top - base, temperature)) >= share)
    bid, place = top * 0 - float("inf"), i_tile * 0
    if is_open:
        b_col = i_tile * TILE + tl.arange(0, TILE)
        b_mask = b_col < vocab
        b_x = tl.load(p_x + row * stride + b_col, mask=b_mask, other=0.0)
        b_z, _wrong = scores.processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts,
                                  p_prompt, p_bias, p_allowed)  # fmt: skip
        b_keep = b_mask & (scores.order(b_z) >= least)
        if p_min_p is not None:
            b_keep = b_keep & (tl.exp(scores.scaled(b_z - base, temperature)) >= share)
        bid, place = scores.race(b_z, b_keep, top, row, i_tile, p_temperature, p_seeds, p_positions, TILE)
    tl.store(p_float + num_tiles, bid)
    tl.store(p_places + row * num_tiles + i_tile, i_tile * TILE + place)


@triton.jit
def _bad_parameters(row, p_temperature, p_top_p, p_min_p, p_repetition, p_frequency, p_presence):
    """Whether a parameter of the row is NaN or out of its range, as `torch_path.bad_parameters`."""
    bad = row < 0
    if p_temperature is not None:
        x = tl.load(p_temperature + row)
        bad = bad | (((x >= 0) & (x < float("inf"))) == 0)
    if p_top_p is not None:
        x = tl.load(p_top_p + row)
        bad = bad | (((x >= 0) & (x <= 1)) == 0)
    if p_min_p is not None:
        x = tl.load(p_min_p + row)
        bad = bad | (((x >= 0) & (x <= 1)) == 0)
    if p_repetition is not None:
        x = tl.load(p_repetition + row)
        bad = bad | (((x > 0) & (x < float("inf"))) == 0)
    if p_frequency is not None:
        bad = bad | ((tl.abs(tl.load(p_frequency + row)) < float("inf")) == 0)
    if p_presence is not None:
        bad = bad | ((tl.abs(tl.load(p_presence + row)) < float("inf")) == 0)
    return bad


@triton.jit
def sample_row_fwd_kernel(p_x, p_floats, p_flags, p_places, p_row_ids, p_temperature, p_top_p, p_min_p, p_repetition,
                          p_frequency, p_presence, p_counts, p_prompt, p_bias, p_allowed, p_tokens, p_events,
                          p_logprobs, p_totals, stride, vocab, num_tiles, BLOCK_T: tl.constexpr,
                          TILE: tl.constexpr):  # fmt: skip
    """Program (row): event and token of what the tiles left."""
    row = tl.program_id(0).to(tl.int64)
    b_tile = tl.arange(0, BLOCK_T)
    b_mask = b_tile < num_tiles
    p_float = p_floats + row * 4 * num_tiles + b_tile
    b_top = tl.load(p_float, mask=b_mask, other=float("-inf"))
    flags = tl.reduce(tl.load(p_flags + row * num_tiles + b_tile, mask=b_mask, other=0), 0, scores.either)
    top, i_tile = tl.max(b_top, axis=0, return_indices=True)
    token, is_greedy = i_tile * 0, row >= 0
    if p_temperature is not None:
        b_bid = tl.load(p_float + num_tiles, mask=b_mask, other=float("-inf"))
        b_behind = tl.where(b_top > float("-inf"), b_top - top, 0.0)
        b_total = b_bid + scores.scaled(b_behind, scores.temperature_of(p_temperature, row))
        _, i_drawn = tl.max(b_total, axis=0, return_indices=True)
        token = tl.load(p_places + row * num_tiles + i_drawn)
        is_greedy = tl.load(p_temperature + row) < 1.1754943508222875e-38
    if is_greedy:
        # the place of the maximum is looked for here, in one tile, and not kept by every tile
        b_col = i_tile * TILE + tl.arange(0, TILE)
        b_x = tl.load(p_x + row * stride + b_col, mask=b_col < vocab, other=0.0)
        b_z, _wrong = scores.processed(b_x, row, b_col, b_col < vocab, vocab, p_repetition, p_frequency, p_presence,
                                  p_counts, p_prompt, p_bias, p_allowed)  # fmt: skip
        _, place = tl.max(b_z, axis=0, return_indices=True)
        token = i_tile * TILE + place
    bad = _bad_parameters(row, p_temperature, p_top_p, p_min_p, p_repetition, p_frequency, p_presence)
    event = tl.where(top == float("-inf"), 5, 0)
    event = tl.where(bad | ((flags & 8) != 0), 4, event)
    event = tl.where((flags & 4) != 0, 3, event)
    event = tl.where((flags & 1) != 0, tl.where((flags & 2) != 0, 2, 1), event)
    is_pad = row < 0
    if p_row_ids is not None:
        is_pad = tl.load(p_row_ids + row) < 0
    is_token = (event == 0) & (is_pad == 0)
    tl.store(p_events + row, tl.where(is_pad, 0, event))
    tl.store(p_tokens + row, tl.where(is_token, token, -1).to(tl.int64))
    if p_logprobs is not None:
        b_raw = tl.load(p_float + 2 * num_tiles, mask=b_mask, other=float("-inf"))
        b_sum = tl.load(p_float + 3 * num_tiles, mask=b_mask, other=0.0)
        raw_top = tl.max(b_raw, axis=0)
        total = raw_top + tl.log(tl.sum(b_sum * tl.exp(tl.where(b_raw > float("-inf"), b_raw - raw_top, 0.0)), axis=0))
        chosen = tl.load(p_x + row * stride + tl.where(is_token, token, 0)).to(tl.float32)
        tl.store(p_totals + row, total)
        tl.store(p_logprobs + row, tl.where(is_token, chosen - total, float("-inf")))


def sample(
    logits: Tensor,
    params: SampleParams,
    seeds: Tensor | None,
    positions: Tensor | None,
    row_ids: Tensor | None,
    num_logprobs: int | None,
    mark: Mark | None,
) -> Sampled:
    """As `firetower.ops.sample.sample`, arguments checked."""
    rows, vocab = logits.shape
    found = Sampled(
        tokens=torch.empty(rows, dtype=torch.int64, device=logits.device),
        events=torch.empty(rows, dtype=torch.int32, device=logits.device),
        logprobs=None if num_logprobs is None else torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    if rows == 0:
        return found if num_logprobs is None else torch_path.with_top(found, logits, logits.sum(-1), num_logprobs)
    tile = tile_of(vocab)
    num_tiles = triton.cdiv(vocab, tile)
    floats = torch.empty(rows, 4, num_tiles, dtype=torch.float32, device=logits.device)
    flags = torch.empty(rows, num_tiles, dtype=torch.int32, device=logits.device)
    places = torch.empty_like(flags) if params.temperature is not None else None
    with torch.cuda.device_of(logits):
        _scan(logits, params, seeds, positions, num_logprobs, mark, floats, flags, places, tile)
        totals = torch.empty_like(found.logprobs) if found.logprobs is not None else None
        sample_row_fwd_kernel[(rows,)](
            logits, floats, flags, places, row_ids, params.temperature, params.top_p, params.min_p,
            *_processing(params), found.tokens, found.events, found.logprobs, totals, logits.stride(0), vocab,
            num_tiles, BLOCK_T=triton.next_power_of_2(num_tiles), TILE=tile, num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    if num_logprobs is not None and totals is not None:
        found = torch_path.with_top(found, logits, totals, num_logprobs)
    return found


def tile_of(vocab: int) -> int:
    """Tokens of a tile: a vocabulary that fits one tile takes the smallest that holds it."""
    return min(torch_path.TILE, max(16, int(triton.next_power_of_2(vocab))))


def _processing(params: SampleParams) -> tuple[Tensor | None, ...]:
    """What makes scores of logits, in the order of the kernels' arguments."""
    return (
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty, params.token_counts,
        params.prompt_mask, params.logit_bias, params.allowed_mask,
    )  # fmt: skip


def _scan(
    logits: Tensor,
    params: SampleParams,
    seeds: Tensor | None,
    positions: Tensor | None,
    num_logprobs: int | None,
    mark: Mark | None,
    floats: Tensor,
    flags: Tensor,
    places: Tensor | None,
    tile: int,
) -> None:
    """Fill the numbers of every tile, by one pass, or by a search and a second pass where a row may be filtered."""
    rows, vocab = logits.shape
    num_tiles = floats.shape[-1]
    group = min(search.GROUP, tile)
    groups, shares = None, None
    if params.is_filtered and (params.top_k is not None or params.top_p is not None):
        groups = torch.empty(rows, num_tiles * tile // group, dtype=torch.float32, device=logits.device)
        shares = torch.empty_like(floats[:, 0]) if params.top_p is not None else None
    # rows first: a grid's first axis alone may be longer than 65,535
    sample_scan_fwd_kernel[(rows, num_tiles)](
        logits, params.temperature, *_processing(params), seeds, positions, floats, flags, places, groups, shares,
        logits.stride(0), vocab, num_tiles, *mark_arguments(mark, logits.dtype, rows, vocab),
        DRAWS=params.temperature is not None and not params.is_filtered, LOGPROBS=num_logprobs is not None, GROUP=group,
        TILE=tile, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if not params.is_filtered:
        return
    least = None if groups is None else search.thresholds(logits, params, floats, groups, shares, tile)
    sample_race_fwd_kernel[(rows, num_tiles)](
        logits, params.temperature, params.min_p, *_processing(params), seeds, positions, floats, places, least,
        logits.stride(0), vocab, num_tiles, BLOCK_T=triton.next_power_of_2(num_tiles), TILE=tile, num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
