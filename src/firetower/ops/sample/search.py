# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Thresholds of top-k and top-p, exact: a bound from the maxima of groups, the few scores above it, a search in those.

The k-th largest of the maxima of groups of 32 tokens is at most the k-th largest score, and rarely much less: k tokens,
the maxima, stand at or above it. Likewise a score at or above which the maxima alone have the mass that top-p asks for.
So ``sample_collect`` copies the scores at or above the bound, as a rule little more than k, and ``sample_thresholds``
looks for the threshold among them, counting tokens or adding up integer masses: no order of sums matters. Where maxima
bound nothing the whole row is copied, and the search takes longer. Import needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firetower.ops.sample import scores
from firetower.ops.sample.params import SampleParams

GROUP = 32
"""Tokens whose maximum bounds thresholds."""

# Timed on an H200 among 14 choices: 8 warps keep 8,192 maxima in 32 registers a thread; lists of 256 scores at a time
# were a tenth faster for one row than of 1,024, and as fast for 64
_BOUND_WARPS, _LIST_TILE, _LIST_WARPS, _NUM_WARPS, _WAYS = 8, 256, 4, 4, 8


@triton.jit
def sample_bound_fwd_kernel(p_groups, p_shares, p_floats, p_temperature, p_top_k, p_top_p, p_bound, p_num, vocab,
                            num_groups, num_tiles, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Program (row): int32 [N], a place in the order of scores at or below both thresholds; 0 for the list's length.

    Only the upper 16 bits are searched. ``p_shares`` are what each tile adds to the mass, in fp32: a thousandth more
    than the mass that they say is asked for, against their roundings.
    """
    row = tl.program_id(0).to(tl.int64)
    by_count, by_mass, k = scores.cuts(row, vocab, p_top_k, p_top_p)
    tl.store(p_num + row, 0)
    bound = 0
    if by_count | by_mass:
        b_group = tl.arange(0, BLOCK_G)
        b_mask = b_group < num_groups
        b_z = tl.load(p_groups + row * num_groups + b_group, mask=b_mask, other=float("-inf"))
        b_place = tl.where(b_mask, (scores.order(b_z) >> 16) + 32768, -1)
        if by_count:
            for i in range(16):
                tried = bound | (32768 >> i)
                bound = tl.where(tl.sum((b_place >= tried).to(tl.int32), axis=0) >= k, tried, bound)
        else:
            if p_shares is not None:
                b_tile = tl.arange(0, BLOCK_T)
                b_here = b_tile < num_tiles
                b_top = tl.load(p_floats + row * 4 * num_tiles + b_tile, mask=b_here, other=float("-inf"))
                top = tl.max(b_top, axis=0)
                base, temperature = scores.above_empty(top), scores.temperature_of(p_temperature, row)
                b_share = tl.load(p_shares + row * num_tiles + b_tile, mask=b_here, other=0.0)
                total = tl.sum(b_share * tl.exp(scores.scaled(b_top - base, temperature)), axis=0)
                # the most likely token is always kept: at least half its mass
                goal = tl.maximum(tl.load(p_top_p + row) * total * 1.001, 0.5)
                b_mass = tl.exp(scores.scaled(b_z - base, temperature))
                most = tl.max(b_place, axis=0)
                for i in range(16):
                    tried = bound | (32768 >> i)
                    enough = tl.sum(tl.where(b_place >= tried, b_mass, 0.0), axis=0) >= goal
                    bound = tl.where(enough & (tried <= most), tried, bound)
    tl.store(p_bound + row, (bound - 32768) << 16)


@triton.jit
def sample_collect_fwd_kernel(p_x, p_temperature, p_top_k, p_top_p, p_repetition, p_frequency, p_presence, p_counts,
                              p_prompt, p_bias, p_allowed, p_floats, p_bound, p_list, p_num, p_masses, stride, vocab,
                              num_tiles, BLOCK_T: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program (row, tile): adds the tile's scores at or above the bound to the row's list [N, V], in any order; where
    top-p alone cuts the row, leaves the tile's mass."""
    row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    by_count, by_mass, _k = scores.cuts(row, vocab, p_top_k, p_top_p)
    is_total = by_mass & (by_count == 0)
    bound = tl.load(p_bound + row)
    has_any = (by_count | by_mass) & (scores.order(tl.load(p_floats + row * 4 * num_tiles + i_tile)) >= bound)
    if has_any | is_total:
        b_col = i_tile * TILE + tl.arange(0, TILE)
        b_mask = b_col < vocab
        b_x = tl.load(p_x + row * stride + b_col, mask=b_mask, other=0.0)
        b_z, _wrong = scores.processed(b_x, row, b_col, b_mask, vocab, p_repetition, p_frequency, p_presence, p_counts,
                                  p_prompt, p_bias, p_allowed)  # fmt: skip
        b_keep = (scores.order(b_z) >= bound) & (b_z > float("-inf"))
        num = tl.sum(b_keep.to(tl.int32), axis=0)
        if num > 0:
            first = tl.atomic_add(p_num + row, num, sem="relaxed")
            b_at = first + tl.cumsum(b_keep.to(tl.int32), axis=0) - 1
            tl.store(p_list + row * vocab + b_at, b_z, mask=b_keep)
        if p_masses is not None:  # noqa: SIM102 - the one is known when compiling, the other is not
            if is_total:
                base = scores.above_empty(scores.row_top(p_floats, row, num_tiles, BLOCK_T))
                b_mass = scores.masses(b_z, base, scores.temperature_of(p_temperature, row))
                tl.store(p_masses + row * num_tiles + i_tile, tl.sum(b_mass, axis=0))


@triton.jit
def _search(p_mine, b_first, b_worth, num, low, high, goal, base, temperature, IS_MASS: tl.constexpr,
            WAYS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Largest place from ``low`` to ``high`` with at least ``goal`` at or above it; ``low`` if there is none above it.

    ``b_first`` and ``b_worth`` are the places of the list's first tile and what each counts; the others are read again
    in every step.
    """
    b_way = tl.arange(0, WAYS)
    while low < high:
        step = (high - low) // WAYS + 1
        b_least = tl.minimum(low + b_way * step, 2147483647).to(tl.int32)
        b_reached = tl.sum(tl.where(b_first[None, :] >= b_least[:, None], b_worth[None, :], 0), axis=1)
        for i in range(1, tl.cdiv(num, TILE)):
            b_at = i * TILE + tl.arange(0, TILE)
            b_z = tl.load(p_mine + b_at, mask=b_at < num, other=float("-inf"))
            if IS_MASS:
                b_more = tl.where(b_at < num, scores.masses(b_z, base, temperature), 0)
            else:
                b_more = (b_at < num).to(tl.int32)
            b_in = scores.order(b_z)[None, :] >= b_least[:, None]
            b_reached += tl.sum(tl.where(b_in, b_more[None, :], 0), axis=1)
        passed = tl.sum(((b_way > 0) & (b_reached >= goal)).to(tl.int64), axis=0)
        low += passed * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _mass(p_mine, b_first, b_worth, num, least, base, temperature, TILE: tl.constexpr):
    """Mass of the list at or above ``least``, int64."""
    mass = tl.sum(tl.where(b_first >= least, b_worth, 0), axis=0)
    for i in range(1, tl.cdiv(num, TILE)):
        b_at = i * TILE + tl.arange(0, TILE)
        b_z = tl.load(p_mine + b_at, mask=b_at < num, other=float("-inf"))
        mass += tl.sum(tl.where(scores.order(b_z) >= least, scores.masses(b_z, base, temperature), 0), axis=0)
    return mass


@triton.jit
def sample_thresholds_fwd_kernel(p_list, p_num, p_bound, p_masses, p_floats, p_temperature, p_top_k, p_top_p, p_found,
                                 vocab, num_tiles, BLOCK_T: tl.constexpr, WAYS: tl.constexpr,
                                 TILE: tl.constexpr):  # fmt: skip
    """Program (row): the largest places in the order of scores with as many tokens, and with as much mass, at or above
    them as asked for: int32 [N, 2], `scores.NOTHING` where a filter is off. Between the bound and the row's maximum."""
    row = tl.program_id(0).to(tl.int64)
    by_count, by_mass, k = scores.cuts(row, vocab, p_top_k, p_top_p)
    at_count, at_mass = row * 0 + scores.NOTHING, row * 0 + scores.NOTHING
    if by_count | by_mass:
        top = scores.row_top(p_floats, row, num_tiles, BLOCK_T)
        base, temperature = scores.above_empty(top), scores.temperature_of(p_temperature, row)
        most, low = scores.order(top).to(tl.int64), tl.load(p_bound + row).to(tl.int64)
        num = tl.load(p_num + row)
        p_mine = p_list + row * vocab
        b_at = tl.arange(0, TILE)
        b_here = b_at < num
        b_z = tl.load(p_mine + b_at, mask=b_here, other=float("-inf"))
        b_first = scores.order(b_z)
        if by_count:
            at_count = _search(p_mine, b_first, b_here.to(tl.int32), num, low, most, k, base, temperature, False, WAYS,
                               TILE)  # fmt: skip
        if p_top_p is not None:  # noqa: SIM102 - the one is known when compiling, the other is not
            if by_mass:
                b_worth = tl.where(b_here, scores.masses(b_z, base, temperature), 0)
                left = row * 0
                if by_count:
                    left = _mass(p_mine, b_first, b_worth, num, at_count.to(tl.int32), base, temperature, TILE)
                else:
                    if p_masses is not None:
                        b_tile = tl.arange(0, BLOCK_T)
                        b_masses = tl.load(p_masses + row * num_tiles + b_tile, mask=b_tile < num_tiles, other=0)
                        left = tl.sum(b_masses, axis=0)
                share = tl.load(p_top_p + row).to(tl.float64) * left.to(tl.float64)
                goal = tl.maximum(share.to(tl.int64), 1)
                at_mass = _search(p_mine, b_first, b_worth, num, tl.maximum(low, at_count), most, goal, base,
                                  temperature, True, WAYS, TILE)  # fmt: skip
    tl.store(p_found + row * 2, at_count.to(tl.int32))
    tl.store(p_found + row * 2 + 1, at_mass.to(tl.int32))


def bounds(params: SampleParams, floats: Tensor, groups: Tensor, shares: Tensor | None,
           vocab: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Places at or below both thresholds, and lengths of lists that are still empty: both int32 [N]; arguments as for
    `thresholds`."""
    rows, num_groups = groups.shape
    num_tiles = floats.shape[-1]
    bound = torch.empty(rows, dtype=torch.int32, device=groups.device)
    num = torch.empty_like(bound)
    sample_bound_fwd_kernel[(rows,)](
        groups, shares, floats, params.temperature, params.top_k, params.top_p, bound, num, vocab, num_groups,
        num_tiles, BLOCK_G=triton.next_power_of_2(num_groups), BLOCK_T=triton.next_power_of_2(num_tiles),
        num_warps=_BOUND_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return bound, num


def thresholds(logits: Tensor, params: SampleParams, floats: Tensor, groups: Tensor, shares: Tensor | None,
               tile: int) -> Tensor:  # fmt: skip
    """Where top-k and top-p end: int32 [N, 2], places in `scores.order`; tokens there or above stay.

    Args:
        logits: [N, V] as given.
        params: with a temperature, and top-k or top-p.
        floats: fp32 [N, 4, tiles], the first of the four the maximum of each tile.
        groups: fp32 [N, tiles * tile / GROUP], maxima of groups of scores.
        shares: fp32 [N, tiles], sums of ``exp((score - maximum of the tile) / temperature)``; needed with top-p.
        tile: tokens of a tile.
    """
    rows, vocab = logits.shape
    num_tiles = floats.shape[-1]
    block_t = triton.next_power_of_2(num_tiles)
    bound, num = bounds(params, floats, groups, shares, vocab)
    above = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    masses = torch.empty(rows, num_tiles, dtype=torch.int64, device=logits.device) if shares is not None else None
    found = torch.empty(rows, 2, dtype=torch.int32, device=logits.device)
    sample_collect_fwd_kernel[(rows, num_tiles)](
        logits, params.temperature, params.top_k, params.top_p, params.repetition_penalty, params.frequency_penalty,
        params.presence_penalty, params.token_counts, params.prompt_mask, params.logit_bias, params.allowed_mask,
        floats, bound, above, num, masses, logits.stride(0), vocab, num_tiles, BLOCK_T=block_t, TILE=tile,
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    sample_thresholds_fwd_kernel[(rows,)](
        above, num, bound, masses, floats, params.temperature, params.top_k, params.top_p, found, vocab, num_tiles,
        BLOCK_T=block_t, WAYS=_WAYS, TILE=min(_LIST_TILE, max(16, triton.next_power_of_2(vocab))),
        num_warps=_LIST_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return found
