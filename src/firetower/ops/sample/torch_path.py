"""The sampler in plain PyTorch, for the CPU and for devices without Triton; no host sync."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.ops.sample.params import SMALLEST_TEMPERATURE, Event, Sampled, SampleParams, unpack_mask
from firetower.ops.sample.philox import exponentials
from firetower.sensors.marks import Mark, mark_rows

TILE = 2048
"""Tokens whose scores are relative to one maximum; part of the definition, the kernel has the same."""

MASS_ONE = 2.0**42
"""Fixed-point weight of the most likely token: integer sums do not depend on their order."""

_LARGEST = torch.finfo(torch.float32).max
_INDEX = (1 << 31) - 1


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
    scores = processed(logits, params)
    greedy = is_greedy(params, logits)
    tokens = first_place(scores)
    if params.temperature is not None:
        assert seeds is not None
        assert positions is not None
        drawn = _race(scores, _temperature(params, logits), seeds, positions, kept(scores, params, logits))
        tokens = torch.where(greedy, tokens, drawn)
    events = events_of(logits, scores, params)
    if row_ids is not None:
        events = torch.where(row_ids < 0, int(Event.OK), events)
        tokens = torch.where(row_ids < 0, -1, tokens)
    tokens = torch.where(events == Event.OK, tokens, -1)
    found = Sampled(tokens=tokens, events=events)
    if num_logprobs is not None:
        total = log_sum_exp(logits)
        chosen = logits.float().gather(1, tokens.clamp_min(0)[:, None])[:, 0] - total
        found = dataclasses.replace(found, logprobs=torch.where(tokens < 0, -torch.inf, chosen))
        found = with_top(found, logits, total, num_logprobs)
    mark_rows(logits, mark)
    return found


def processed(logits: Tensor, params: SampleParams) -> Tensor:
    """Logits after penalties, bias and mask: fp32 [N, V], -Inf where a token cannot be chosen.

    What would overflow stays at the largest float; a NaN stays NaN.
    """
    scores = logits.float()
    banned = scores == -torch.inf
    vocab = logits.shape[1]
    counts = params.token_counts
    if params.repetition_penalty is not None:
        seen = torch.zeros_like(banned) if counts is None else counts > 0
        if params.prompt_mask is not None:
            seen = seen | unpack_mask(params.prompt_mask, vocab)
        penalty = params.repetition_penalty[:, None]
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if params.frequency_penalty is not None:
        assert counts is not None
        scores = scores - params.frequency_penalty[:, None] * counts
    if params.presence_penalty is not None:
        assert counts is not None
        scores = scores - params.presence_penalty[:, None] * (counts > 0)
    if params.logit_bias is not None:
        scores = scores + params.logit_bias
        banned = banned | (params.logit_bias == -torch.inf)
    if params.allowed_mask is not None:
        banned = banned | ~unpack_mask(params.allowed_mask, vocab)
    scores = scores.clamp(-_LARGEST, _LARGEST)
    return torch.where(banned, -torch.inf, scores)


def is_greedy(params: SampleParams, logits: Tensor) -> Tensor:
    """Rows that take the most likely token: bool [N]."""
    if params.temperature is None:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return params.temperature < SMALLEST_TEMPERATURE


def _temperature(params: SampleParams, logits: Tensor) -> Tensor:
    """fp32 [N], 1 for greedy rows and for those with an event: what they draw is not used, but must stay finite."""
    assert params.temperature is not None
    is_usable = ~is_greedy(params, logits) & (params.temperature < torch.inf)
    return torch.where(is_usable, params.temperature, 1.0)


def kept(scores: Tensor, params: SampleParams, logits: Tensor) -> Tensor:
    """Tokens that top-k, top-p and min-p leave: bool [N, V], of processed scores [N, V].

    Each filter is a threshold on the score, so tokens of equal score stay or go together. Top-p is of the mass that
    top-k left; masses are integers, exact in any order.
    """
    keep = scores > -torch.inf
    if not params.is_filtered:
        return keep
    vocab = scores.shape[1]
    top = scores.amax(-1, keepdim=True)
    gap = (scores - torch.where(top > -torch.inf, top, 0.0)) / _temperature(params, logits)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    if params.top_k is not None:
        k = torch.where(params.top_k > 0, params.top_k, vocab).clamp_max(vocab).long()
        keep = keep & (scores >= ordered.gather(1, k[:, None] - 1))
    if params.top_p is not None:
        mass = torch.where(keep, (gap.exp() * MASS_ONE), 0.0).long().gather(1, order)
        until = mass.cumsum(-1)
        goal = (params.top_p.double() * until[:, -1].double()).long().clamp_min(1)
        # a token is kept while the mass before it falls short of the goal
        num_kept = (until - mass < goal[:, None]).sum(-1, keepdim=True).clamp_min(1)
        nucleus = scores >= ordered.gather(1, num_kept - 1)
        keep = keep & (nucleus | (params.top_p >= 1)[:, None])
    if params.min_p is not None:
        keep = keep & (gap.exp() >= params.min_p[:, None])
    return keep


def _race(scores: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """The exponential race: arg max of ``p / e``, as logarithms relative to the maximum of each tile."""
    lead = -torch.log(exponentials(seeds, positions, scores.shape[1]))
    tiles = in_tiles(scores, -torch.inf)  # [N, tiles, TILE]
    tops = tiles.amax(-1)
    base = torch.where(tops > -torch.inf, tops, 0.0)
    gaps = (tiles - base[..., None]) / temperature[:, None, None]
    bids = torch.where(in_tiles(keep, False), gaps + in_tiles(lead, 0.0), -torch.inf)
    totals = bids.amax(-1) + (tops - tops.amax(-1, keepdim=True)) / temperature[:, None]
    tile = first_place(totals)
    column = first_place(bids).gather(1, tile[:, None])[:, 0]
    return tile * tiles.shape[-1] + column


def in_tiles(x: Tensor, fill: float | bool) -> Tensor:
    """``[N, V]`` as ``[N, tiles, TILE]``, padded; a vocabulary of one tile or less as it is."""
    rows, vocab = x.shape
    if vocab <= TILE:
        return x[:, None]
    return torch.nn.functional.pad(x, (0, -vocab % TILE), value=fill).view(rows, -1, TILE)


def first_place(x: Tensor) -> Tensor:
    """Lowest index of the maximum along the last dimension; some index in a row with a NaN."""
    index = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), index, x.shape[-1] - 1).amin(-1)


def events_of(logits: Tensor, scores: Tensor, params: SampleParams) -> Tensor:
    """int32 [N] of `Event`, pads not looked at."""
    nan = logits.isnan().any(-1)
    finite = logits.isfinite().any(-1)
    events = torch.where(scores.amax(-1) == -torch.inf, int(Event.EMPTY_MASK), int(Event.OK))
    events = torch.where(bad_parameters(params, logits), int(Event.BAD_PARAMETER), events)
    events = torch.where((logits == torch.inf).any(-1), int(Event.POS_INF), events)
    events = torch.where(nan, torch.where(finite, int(Event.NAN_BESIDE_FINITE), int(Event.ALL_NAN)), events)
    return events.to(torch.int32)


def bad_parameters(params: SampleParams, logits: Tensor) -> Tensor:
    """Rows with a parameter that is NaN or out of its range: bool [N]."""
    bad = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if params.temperature is not None:
        bad = bad | ~((params.temperature >= 0) & (params.temperature < torch.inf))
    for fraction in (params.top_p, params.min_p):
        if fraction is not None:
            bad = bad | ~((fraction >= 0) & (fraction <= 1))
    if params.repetition_penalty is not None:
        bad = bad | ~((params.repetition_penalty > 0) & (params.repetition_penalty < torch.inf))
    for penalty in (params.frequency_penalty, params.presence_penalty):
        if penalty is not None:
            bad = bad | ~penalty.isfinite()
    if params.logit_bias is not None:
        bad = bad | params.logit_bias.isnan().any(-1)
    return bad


def log_sum_exp(logits: Tensor) -> Tensor:
    """fp32 [N] of logits [N, V], tile by tile, as the kernel sums."""
    tiles = in_tiles(logits.float(), -torch.inf)
    tops = tiles.amax(-1)
    base = torch.where(tops > -torch.inf, tops, 0.0)
    sums = (tiles - base[..., None]).exp().sum(-1)
    top = tops.amax(-1, keepdim=True)
    return top[:, 0] + (sums * (tops - top).exp()).sum(-1).log()


def with_top(found: Sampled, logits: Tensor, total: Tensor, num: int) -> Sampled:
    """Add the ``num`` most likely tokens of rows that have a token; equal logits by index."""
    if num == 0:
        return found
    values = logits.float()
    bits = torch.where(values == 0, 0.0, values).view(torch.int32).long()
    order = torch.where(bits >= 0, bits, -1 - (bits & _INDEX))
    index = torch.arange(logits.shape[1], device=logits.device)
    # one integer a token: its rank by value above, by index below, so that no two are equal
    ids = _INDEX - ((order << 31 | (_INDEX - index)).topk(num, dim=-1).values & _INDEX)
    logprobs = values.gather(1, ids) - total[:, None]
    possible = (found.tokens >= 0)[:, None] & (logprobs > -torch.inf)
    return dataclasses.replace(
        found,
        top_ids=torch.where(possible, ids, -1),
        top_logprobs=torch.where(possible, logprobs, -torch.inf),
    )
