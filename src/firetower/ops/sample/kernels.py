# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The sampler's Triton kernels: one pass over the logits where no row is filtered, else a search for thresholds.

``sample_scan`` reads each logit once: marks it, classifies it, applies penalties, bias and mask, and leaves a few
numbers a tile. ``sample_row`` makes a token of them. With filters the processed scores are stored; ``sample_select``
finds a row's threshold by eight steps of four bits of the score's key, counting tokens or adding up integer masses, so
that no order of sums matters; ``sample_race`` draws among what is left. Import needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.sample import torch_path
from firetower.ops.sample.params import Sampled, SampleParams
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments

# H200, by reasoning: 122 tiles of a 248,320 vocabulary occupy 132 multiprocessors at batch 1; 64 shares of 8 loads each
# in the search, whose 16 bins of int64 take 96 registers a thread
_NUM_WARPS, _SELECT_TILE, _SELECT_WARPS, _SPLITS, _STEPS = 4, 512, 8, 64, 8
_MARK = ["slot", "num_signals", "num_rows", "shape", "neg_inf"]


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _bit(p_words, row, b_col, b_mask, words):
    """Bit of each token in a packed mask ``[N, words]``."""
    b_word = tl.load(p_words + row * words + b_col // 32, mask=b_mask, other=0)
    return ((b_word >> (b_col % 32)) & 1) != 0


@triton.jit
def _processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts, p_prompt, p_bias,
               p_allowed):  # fmt: skip
    """Scores of a tile after penalties, bias and mask, as `torch_path.processed`; and where the bias is NaN."""
    b_z = b_x.to(tl.float32)
    b_banned = (b_z == float("-inf")) | (b_mask == 0)
    b_wrong = b_banned & (b_banned == 0)
    words = (vocab + 31) // 32
    if p_counts is not None:
        b_count = tl.load(p_counts + row * vocab + b_col, mask=b_mask, other=0)
    if p_repetition is not None:
        b_seen = b_wrong
        if p_counts is not None:
            b_seen = b_count > 0
        if p_prompt is not None:
            b_seen = b_seen | _bit(p_prompt, row, b_col, b_mask, words)
        penalty = tl.load(p_repetition + row)
        b_z = tl.where(b_seen, tl.where(b_z > 0, tl.math.div_rn(b_z, penalty), b_z * penalty), b_z)
    if p_frequency is not None:
        b_z = b_z - tl.load(p_frequency + row) * b_count.to(tl.float32)
    if p_presence is not None:
        b_z = b_z - tl.where(b_count > 0, tl.load(p_presence + row), 0.0)
    if p_bias is not None:
        b_bias = tl.load(p_bias + row * vocab + b_col, mask=b_mask, other=0.0)
        b_wrong = b_bias != b_bias
        b_banned = b_banned | (b_bias == float("-inf"))
        b_z = b_z + b_bias
    if p_allowed is not None:
        b_banned = b_banned | (_bit(p_allowed, row, b_col, b_mask, words) == 0)
    largest: tl.constexpr = 3.4028234663852886e38
    b_z = tl.where(b_z > largest, largest, tl.where(b_z < -largest, -largest, b_z))
    # a NaN, flagged by its bits, takes part in no search: it would make the place of a maximum arbitrary
    b_banned = b_banned | (b_z != b_z)
    # no -0: its key would be below that of 0, to which it is equal
    return tl.where(b_banned, float("-inf"), tl.where(b_z == 0, 0.0, b_z)), b_wrong


@triton.jit
def random_words(seed, position, i_tile, TILE: tl.constexpr):
    """uint32 words of a tile of tokens, as `philox.random_words`."""
    b_block = i_tile * (TILE // 4) + tl.arange(0, TILE // 4)
    b_zero = b_block * 0
    b_low, b_high = b_zero + position.to(tl.int32), b_zero + (position >> 32).to(tl.int32)
    b_0, b_1, b_2, b_3 = tl.philox(seed, b_block, b_low, b_high, b_zero)
    return tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [TILE])


@triton.jit
def leads(seed, position, i_tile, TILE: tl.constexpr):
    """``-log`` of the exponential variates of a tile, as `philox.exponentials`."""
    b_word = random_words(seed, position, i_tile, TILE)
    b_u = (b_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_rest = ((b_word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_series = b_u * (1.0 + b_u * (0.5 + b_u * (0.3333333333333333 + b_u * 0.25)))
    return -tl.log(tl.where(b_u < 0.03125, b_series, -tl.log(b_rest)))


@triton.jit
def _temperature(p_temperature, row):
    """1 for a greedy row and for one with an event: what it draws is not used."""
    temperature = tl.load(p_temperature + row)
    is_usable = (temperature >= 1.1754943508222875e-38) & (temperature <= 3.4028234663852886e38)
    return tl.where(is_usable, temperature, 1.0)


@triton.jit
def _above_empty(x):
    """0 for the maximum of nothing, so that a difference of two is no NaN."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def _scaled(b_gap, temperature):
    return tl.math.div_rn(b_gap, temperature)


@triton.jit
def _race(b_z, b_keep, top, row, i_tile, p_temperature, p_seeds, p_positions, TILE: tl.constexpr):
    """Best bid of a tile and its place: the exponential race in logarithms, relative to the tile's maximum."""
    b_lead = leads(tl.load(p_seeds + row), tl.load(p_positions + row), i_tile, TILE)
    b_bid = _scaled(b_z - _above_empty(top), _temperature(p_temperature, row)) + b_lead
    return tl.max(tl.where(b_keep, b_bid, float("-inf")), axis=0, return_indices=True)


@triton.jit
def _keys(b_z):
    """int64 keys in [0, 2**32) that order as the scores do."""
    b_bits = b_z.to(tl.int32, bitcast=True)
    b_wide = b_bits.to(tl.int64)
    return tl.where(b_bits >= 0, b_wide + 2147483648, -1 - b_wide)


@triton.jit
def _row_top(p_floats, row, num_tiles, BLOCK_T: tl.constexpr):
    b_tile = tl.arange(0, BLOCK_T)
    b_top = tl.load(p_floats + row * 4 * num_tiles + b_tile, mask=b_tile < num_tiles, other=float("-inf"))
    return tl.max(b_top, axis=0)


@triton.jit(do_not_specialize=_MARK)
def sample_scan_fwd_kernel(p_x, p_temperature, p_repetition, p_frequency, p_presence, p_counts, p_prompt, p_bias,
                           p_allowed, p_seeds, p_positions, p_z, p_floats, p_ints, stride, vocab, num_tiles, p_panel,
                           p_row_ids, slot, num_signals, num_rows, shape, neg_inf, DRAWS: tl.constexpr,
                           LOGPROBS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program (row, tile). Leaves floats [N, 4, tiles]: maximum, best bid, then maximum and sum of exponentials of the
    logits as given; ints [N, 3, tiles]: flags, place of the maximum, place of the best bid."""
    i_row = tl.program_id(0)
    i_tile = tl.program_id(1)
    row = i_row.to(tl.int64)
    b_col = i_tile * TILE + tl.arange(0, TILE)
    b_mask = b_col < vocab
    b_x = tl.load(p_x + row * stride + b_col, mask=b_mask, other=0.0)
    if p_panel is not None:
        if (i_tile == 0) & (i_row == 0):
            mark_ran(p_panel, slot, num_signals, num_rows, shape)
        mark_tile(b_x, i_row, b_col, b_mask, vocab, p_panel, p_row_ids, slot, num_signals, num_rows, neg_inf)
    b_z, b_wrong = _processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts, p_prompt,
                              p_bias, p_allowed)  # fmt: skip
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_flags = tl.where(b_size > 0x7F800000, 1, tl.where(b_size < 0x7F800000, 2, tl.where(b_bits > 0, 4, 0)))
    b_flags = tl.where(b_mask, b_flags | tl.where(b_wrong, 8, 0), 0)
    top, place = tl.max(b_z, axis=0, return_indices=True)
    p_float = p_floats + row * 4 * num_tiles + i_tile
    p_int = p_ints + row * 3 * num_tiles + i_tile
    tl.store(p_float, top)
    tl.store(p_int, tl.reduce(b_flags, 0, _or))
    tl.store(p_int + num_tiles, i_tile * TILE + place)
    if p_z is not None:
        tl.store(p_z + row * vocab + b_col, b_z, mask=b_mask)
    if DRAWS:
        bid, place = _race(b_z, b_mask, top, row, i_tile, p_temperature, p_seeds, p_positions, TILE)
        tl.store(p_float + num_tiles, bid)
        tl.store(p_int + 2 * num_tiles, i_tile * TILE + place)
    if LOGPROBS:
        b_raw = tl.where(b_mask, b_x.to(tl.float32), float("-inf"))
        raw_top = tl.max(b_raw, axis=0)
        tl.store(p_float + 2 * num_tiles, raw_top)
        tl.store(p_float + 3 * num_tiles, tl.sum(tl.exp(b_raw - _above_empty(raw_top)), axis=0))


@triton.jit(do_not_specialize=["step"])
def sample_select_fwd_kernel(p_z, p_floats, p_temperature, p_goal, p_left, p_state, p_parts, p_found, step, vocab,
                             num_rows, num_tiles, num_loads, IS_MASS: tl.constexpr, BLOCK_T: tl.constexpr,
                             SPLITS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program (row, share of the row) of one step: the largest key with as many tokens, or as much mass, at or above it
    as the goal says. A step first reads what all shares found in the last one, then counts in sixteen bins below it.

    The ninth step only answers: found [N, 2]: key, mass at or above it. State [2, N, 4]: bits known so far, tokens and
    mass above, goal. Parts [2, N, shares, 2, 16]: tokens and mass of each bin. Both take turns.
    """
    row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    i_now = step % 2
    b_bin = tl.arange(0, 16)
    known, above_count, above_mass, goal, reached = row * 0, row * 0, row * 0, row * 0, row * 0
    if step == 0:
        if not IS_MASS:
            wanted = tl.load(p_goal + row).to(tl.int64)
            goal = tl.where((wanted > 0) & (wanted < vocab), wanted, row * 0 + vocab)
    else:
        i_before = (1 - i_now) * num_rows + row
        b_split = tl.arange(0, SPLITS)
        p_part = p_parts + (i_before * SPLITS + b_split[:, None]) * 32 + b_bin[None, :]
        b_counts = tl.sum(tl.load(p_part), axis=0)
        b_masses = tl.sum(tl.load(p_part + 16), axis=0)
        known = tl.load(p_state + i_before * 4)
        above_count = tl.load(p_state + i_before * 4 + 1)
        above_mass = tl.load(p_state + i_before * 4 + 2)
        goal = tl.load(p_state + i_before * 4 + 3)
        if IS_MASS:
            if step == 1:
                left = tl.sum(b_masses, axis=0)
                if p_left is not None:
                    left = tl.load(p_left + row * 2 + 1)
                share = tl.load(p_goal + row).to(tl.float64) * left.to(tl.float64)
                goal = tl.maximum(share.to(tl.int64), 1)
            b_have, above = b_masses, above_mass
        else:
            b_have, above = b_counts, above_count
        b_reach = above + tl.sum(tl.where(b_bin[None, :] >= b_bin[:, None], b_have[None, :], 0), axis=1)
        i_bin = tl.max(tl.where(b_reach >= goal, b_bin, 0), axis=0)
        above_count += tl.sum(tl.where(b_bin > i_bin, b_counts, 0), axis=0)
        above_mass += tl.sum(tl.where(b_bin > i_bin, b_masses, 0), axis=0)
        reached = above_mass + tl.sum(tl.where(b_bin == i_bin, b_masses, 0), axis=0)
        known += i_bin.to(tl.int64) << (32 - 4 * step)
    i_state = i_now * num_rows + row
    if i_split == 0:
        if step == 8:
            tl.store(p_found + row * 2, known)
            tl.store(p_found + row * 2 + 1, reached)
        else:
            tl.store(p_state + i_state * 4, known)
            tl.store(p_state + i_state * 4 + 1, above_count)
            tl.store(p_state + i_state * 4 + 2, above_mass)
            tl.store(p_state + i_state * 4 + 3, goal)
    if step < 8:
        shift = 28 - 4 * step
        base = _above_empty(_row_top(p_floats, row, num_tiles, BLOCK_T))
        temperature = _temperature(p_temperature, row)
        b_count_acc = tl.zeros([16, TILE], tl.int32)
        b_mass_acc = tl.zeros([16, TILE], tl.int64)
        for i in range(num_loads):
            b_col = (i_split * num_loads + i) * TILE + tl.arange(0, TILE)
            b_z = tl.load(p_z + row * vocab + b_col, mask=b_col < vocab, other=float("-inf"))
            b_key = _keys(b_z)
            b_in = ((b_key >> (shift + 4)) == (known >> (shift + 4))) & (b_col < vocab)
            if tl.max(b_in.to(tl.int32), axis=0) != 0:
                b_digit = ((b_key >> shift) & 15).to(tl.int32)
                b_here = (b_digit[None, :] == b_bin[:, None]) & b_in[None, :]
                b_mass = (tl.exp(_scaled(b_z - base, temperature)) * 4398046511104.0).to(tl.int64)
                b_mass_acc += tl.where(b_here, b_mass[None, :], 0)
                if not IS_MASS:
                    b_count_acc += tl.where(b_here, 1, 0)
        p_mine = p_parts + (i_state * SPLITS + i_split) * 32 + b_bin
        tl.store(p_mine, tl.sum(b_count_acc, axis=1).to(tl.int64))
        tl.store(p_mine + 16, tl.sum(b_mass_acc, axis=1))


@triton.jit
def sample_race_fwd_kernel(p_z, p_floats, p_ints, p_temperature, p_top_p, p_min_p, p_seeds, p_positions, p_by_count,
                           p_by_mass, vocab, num_tiles, BLOCK_T: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program (row, tile): the best bid among the tokens at or above the thresholds ``[N, 2]``."""
    row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    b_col = i_tile * TILE + tl.arange(0, TILE)
    b_z = tl.load(p_z + row * vocab + b_col, mask=b_col < vocab, other=float("-inf"))
    b_key = _keys(b_z)
    b_keep = b_col < vocab
    if p_by_count is not None:
        b_keep = b_keep & (b_key >= tl.load(p_by_count + row * 2))
    if p_by_mass is not None:
        least = tl.where(tl.load(p_top_p + row) < 1, tl.load(p_by_mass + row * 2), row * 0)
        b_keep = b_keep & (b_key >= least)
    if p_min_p is not None:
        base = _above_empty(_row_top(p_floats, row, num_tiles, BLOCK_T))
        b_gap = _scaled(b_z - base, _temperature(p_temperature, row))
        b_keep = b_keep & (tl.exp(b_gap) >= tl.load(p_min_p + row))
    bid, place = _race(b_z, b_keep, tl.max(b_z, axis=0), row, i_tile, p_temperature, p_seeds, p_positions, TILE)
    tl.store(p_floats + (row * 4 + 1) * num_tiles + i_tile, bid)
    tl.store(p_ints + (row * 3 + 2) * num_tiles + i_tile, i_tile * TILE + place)


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
def sample_row_fwd_kernel(p_x, p_floats, p_ints, p_row_ids, p_temperature, p_top_p, p_min_p, p_repetition, p_frequency,
                          p_presence, p_tokens, p_events, p_logprobs, p_totals, stride, num_tiles,
                          BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (row): event and token of what the tiles left."""
    row = tl.program_id(0).to(tl.int64)
    b_tile = tl.arange(0, BLOCK_T)
    b_mask = b_tile < num_tiles
    p_float = p_floats + row * 4 * num_tiles + b_tile
    p_int = p_ints + row * 3 * num_tiles
    b_top = tl.load(p_float, mask=b_mask, other=float("-inf"))
    flags = tl.reduce(tl.load(p_int + b_tile, mask=b_mask, other=0), 0, _or)
    top, i_tile = tl.max(b_top, axis=0, return_indices=True)
    token = tl.load(p_int + num_tiles + i_tile)
    if p_temperature is not None:
        b_bid = tl.load(p_float + num_tiles, mask=b_mask, other=float("-inf"))
        b_behind = tl.where(b_top > float("-inf"), b_top - top, 0.0)
        b_total = b_bid + _scaled(b_behind, _temperature(p_temperature, row))
        _, i_drawn = tl.max(b_total, axis=0, return_indices=True)
        drawn = tl.load(p_int + 2 * num_tiles + i_drawn)
        token = tl.where(tl.load(p_temperature + row) < 1.1754943508222875e-38, token, drawn)
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
    ints = torch.empty(rows, 3, num_tiles, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        _scan(logits, params, seeds, positions, num_logprobs, mark, floats, ints, tile)
        totals = torch.empty_like(found.logprobs) if found.logprobs is not None else None
        sample_row_fwd_kernel[(rows,)](
            logits, floats, ints, row_ids, params.temperature, params.top_p, params.min_p, params.repetition_penalty,
            params.frequency_penalty, params.presence_penalty, found.tokens, found.events, found.logprobs, totals,
            logits.stride(0), num_tiles, BLOCK_T=triton.next_power_of_2(num_tiles), num_warps=_NUM_WARPS,
        )  # fmt: skip
    if num_logprobs is not None and totals is not None:
        found = torch_path.with_top(found, logits, totals, num_logprobs)
    return found


def tile_of(vocab: int) -> int:
    """Tokens of a tile: a vocabulary that fits one tile takes the smallest that holds it."""
    return min(torch_path.TILE, max(16, int(triton.next_power_of_2(vocab))))


def _scan(
    logits: Tensor,
    params: SampleParams,
    seeds: Tensor | None,
    positions: Tensor | None,
    num_logprobs: int | None,
    mark: Mark | None,
    floats: Tensor,
    ints: Tensor,
    tile: int,
) -> None:
    """Fill the numbers of every tile, by one pass, or by a search and a second pass where a row may be filtered."""
    rows, vocab = logits.shape
    num_tiles = floats.shape[-1]
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device) if params.is_filtered else None
    # rows first: a grid's first axis alone may be longer than 65,535
    sample_scan_fwd_kernel[(rows, num_tiles)](
        logits, params.temperature, params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
        params.token_counts, params.prompt_mask, params.logit_bias, params.allowed_mask, seeds, positions, scores,
        floats, ints, logits.stride(0), vocab, num_tiles, *mark_arguments(mark, logits.dtype, rows, vocab),
        DRAWS=params.temperature is not None and scores is None, LOGPROBS=num_logprobs is not None, TILE=tile,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    if scores is None:
        return
    by_count, by_mass = thresholds(scores, floats, params)
    sample_race_fwd_kernel[(rows, num_tiles)](
        scores, floats, ints, params.temperature, params.top_p, params.min_p, seeds, positions, by_count, by_mass,
        vocab, num_tiles, BLOCK_T=triton.next_power_of_2(num_tiles), TILE=tile, num_warps=_NUM_WARPS,
    )  # fmt: skip


def thresholds(scores: Tensor, floats: Tensor, params: SampleParams) -> tuple[Tensor | None, Tensor | None]:
    """Smallest key kept by top-k and by top-p, each int64 [N, 2] (key, mass at or above it), or None where off.

    Args:
        scores: processed, fp32 [N, V].
        floats: fp32 [N, 4, tiles], the first of the four the maximum of each tile.
        params: with a temperature.
    """
    by_count = None if params.top_k is None else _search(scores, floats, params, params.top_k, None)
    by_mass = None if params.top_p is None else _search(scores, floats, params, params.top_p, by_count)
    return by_count, by_mass


def _search(scores: Tensor, floats: Tensor, params: SampleParams, goal: Tensor, left: Tensor | None) -> Tensor:
    rows, vocab = scores.shape
    state = torch.empty(2, rows, 4, dtype=torch.int64, device=scores.device)
    tile = min(_SELECT_TILE, tile_of(vocab))
    num_tiles, num_loads = floats.shape[-1], triton.cdiv(triton.cdiv(vocab, tile), _SPLITS)
    splits = triton.next_power_of_2(triton.cdiv(vocab, tile * num_loads))
    parts = torch.empty(2, rows, splits, 2, 16, dtype=torch.int64, device=scores.device)
    found = torch.empty(rows, 2, dtype=torch.int64, device=scores.device)
    for step in range(_STEPS + 1):
        sample_select_fwd_kernel[(rows, splits if step < _STEPS else 1)](
            scores, floats, params.temperature, goal, left, state, parts, found, step, vocab, rows, num_tiles,
            num_loads, IS_MASS=goal.dtype.is_floating_point,
            BLOCK_T=triton.next_power_of_2(num_tiles), SPLITS=splits, TILE=tile, num_warps=_SELECT_WARPS,
        )  # fmt: skip
    return found
