"""Every part of the MoE block in PyTorch: what serves the CPU, and what stands in for a missing kernel on CUDA.

Computes in fp32, in fp64 for fp64 inputs. Nothing syncs with the host on CUDA; on the CPU the plan is read on the host.

On the CPU a row's bits depend on that row alone, in every phase: products are made from blocks of a fixed number of
rows, each row on its own cache line (the math library picks kernels by shape and by alignment), and no function is used
whose vector and scalar forms differ (``sigmoid`` and ``silu`` do, ``exp`` does not).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from firetower.ops.moe.planning import Plan
from firetower.sensors.marks import Mark, mark_rows

CACHE_LINE = 16
"""Elements that row lengths are rounded up to: 64 bytes of fp32."""


def logits(
    hidden_states: Tensor,
    router: Tensor,
    gate: Tensor | None,
    *,
    out: Tensor,
    block_m: int,
    mark: Mark | None,
    ahead: Sequence[Tensor] = (),
) -> None:
    """Router logits, and the shared gate's in one column more, into ``out`` fp32 [T, E (+ 1)]; ``ahead`` is a hint."""
    dtype = _compute_type(hidden_states)
    num_tokens, num_experts = hidden_states.shape[0], router.shape[0]
    rows = -(-num_tokens // block_m) * block_m
    x = _lined(rows, hidden_states.shape[1], hidden_states, dtype)
    x[:num_tokens] = hidden_states
    for weight, columns in ((router, slice(num_experts)), (gate, slice(num_experts, None))):
        if weight is not None:
            y = _lined(rows, weight.shape[0], hidden_states, dtype)
            _multiply(x, weight.to(dtype), y, block_m)
            out[:, columns] = y[:num_tokens]
    mark_rows(out, mark)


def router(
    router_logits: Tensor,
    selection_bias: Tensor | None,
    *,
    top_k: int,
    is_sigmoid: bool,
    renormalise: bool,
    scale: float,
    weights: Tensor,
    ids: Tensor,
    mark: Mark | None,
) -> None:
    """Top-k weights fp32 [T, K] and ids int32 [T, K] into ``weights`` and ``ids``."""
    x = router_logits if router_logits.dtype is torch.float64 else router_logits.float()
    choice = x if selection_bias is None else _sigmoid(x) + selection_bias.to(x.dtype)
    is_nan = torch.isnan(choice).any(-1, keepdim=True)
    order = torch.where(torch.isnan(choice), -torch.inf, choice).sort(stable=True, dim=-1, descending=True).indices
    chosen = order[:, :top_k]
    ids.copy_(chosen)
    y = _scores(x, x.gather(-1, chosen), is_sigmoid=is_sigmoid, renormalise=renormalise) * scale
    weights.copy_(torch.where(is_nan, torch.nan, y))
    mark_rows(weights, mark)


def _scores(x: Tensor, chosen: Tensor, *, is_sigmoid: bool, renormalise: bool) -> Tensor:
    """Weights of the chosen logits; a row whose scores are all 0 is uniform."""
    if not renormalise:
        if is_sigmoid:
            return _sigmoid(chosen)
        top = x.amax(-1, keepdim=True)
        is_empty = top == -torch.inf
        x, chosen, top = (torch.where(is_empty, 0.0, t) for t in (x, chosen, top))
        return torch.exp(chosen - top) / torch.exp(x - top).sum(-1, keepdim=True)
    if is_sigmoid:
        # logarithm of the sigmoid: the quotient stays exact where the sigmoids themselves underflow to 0
        chosen = chosen.clamp_max(0) - torch.log1p(torch.exp(-chosen.abs()))
    top = chosen.amax(-1, keepdim=True)
    is_empty = top == -torch.inf
    chosen, top = torch.where(is_empty, 0.0, chosen), torch.where(is_empty, 0.0, top)
    share = torch.exp(chosen - top)
    total = share[:, :1]
    for slot in range(1, share.shape[1]):
        total = total + share[:, slot : slot + 1]
    return share / total


def plan(topk_ids: Tensor, row_ids: Tensor | None, *, into: Plan) -> None:
    """Fill a plan: a stable sort of the pairs by expert, each expert's list padded to whole blocks."""
    lists, slots, capacity = into.num_lists, into.num_slots, into.pair_ids.numel()
    ids = topk_ids.long()
    ids = torch.where((ids < 0) | (ids >= into.num_experts), lists, ids)
    if into.has_shared:
        ids = torch.cat([ids, ids.new_full((ids.shape[0], 1), into.num_experts)], 1)
    if row_ids is not None:
        ids = torch.where((row_ids < 0)[:, None], lists, ids)
        assert into.row_ids is not None
        into.row_ids.copy_(row_ids[:, None].expand(-1, slots).reshape(-1))
    flat = ids.reshape(-1)
    # the list after the last one holds what is routed nowhere
    counts = torch.zeros(lists + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + into.block_m - 1) // into.block_m
    blocks[lists:] = 0
    ends = blocks.cumsum(0)
    first = (ends - blocks) * into.block_m
    order = flat.argsort(stable=True)
    by = flat[order]
    rank = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[by]
    at = torch.where(by < lists, first[by] + rank, capacity).clamp_max(capacity)
    into.pair_ids.copy_(flat.new_full((capacity + 1,), -1).scatter_(0, at, order)[:-1])
    block = torch.arange(into.num_blocks, device=flat.device)
    expert = torch.searchsorted(ends[:lists].contiguous(), block, right=True)
    into.block_experts.copy_(torch.where(block < ends[-1], expert, -1))
    into.expert_offsets.copy_(first)
    into.totals.copy_(torch.stack([ends[-1], ends[-1] * into.block_m, counts[:lists].sum()]))


def route_plan(
    router_logits: Tensor,
    selection_bias: Tensor | None,
    row_ids: Tensor | None,
    *,
    top_k: int,
    is_sigmoid: bool,
    renormalise: bool,
    scale: float,
    weights: Tensor,
    ids: Tensor,
    into: Plan,
) -> None:
    """`router` and `plan`, one after the other."""
    router(
        router_logits,
        selection_bias,
        top_k=top_k,
        is_sigmoid=is_sigmoid,
        renormalise=renormalise,
        scale=scale,
        weights=weights,
        ids=ids,
        mark=None,
    )
    plan(ids, row_ids, into=into)


def gate_up(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    shared: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    gate_mark: Mark | None,
    up_mark: Mark | None,
    mark: Mark | None,
) -> None:
    """``silu(x @ gate) * (x @ up)`` of every planned row into ``out`` [num_pairs, W]."""
    dtype, width = _compute_type(hidden_states), out.shape[1]
    pairs = _planned(plan)
    x = _lined(pairs.numel(), hidden_states.shape[1], hidden_states, dtype)
    x.copy_(_rows_of(hidden_states, pairs // plan.num_slots, pairs >= 0))
    y = _lined(pairs.numel(), 2 * width, hidden_states, dtype)

    def weight_of(proj: Tensor) -> Tensor:
        if proj.shape[-2] == 2 * width:
            return proj.to(dtype)
        gate_part, up_part = proj.to(dtype).chunk(2)
        return torch.cat([_padded(gate_part.T, width).T, _padded(up_part.T, width).T])

    _multiply_blocks(x, y, plan, gate_up_proj, shared, weight_of)
    gate, up = y[:, :width].contiguous(), y[:, width:]
    is_written = _place(out, gate / (1 + torch.exp(-gate)) * up, plan)
    for part, part_mark in ((gate, gate_mark), (up, up_mark)):
        if part_mark is not None:
            placed = torch.zeros(out.shape, dtype=dtype, device=out.device)
            _place(placed, part, plan)
            mark_rows(placed, part_mark)
    _mark_planned(out, is_written, mark)


def down(
    act: Tensor,
    down_proj: Tensor,
    shared: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    mark: Mark | None,
    is_chained: bool = False,
) -> None:
    """``act @ down`` of every planned row into ``out`` [num_pairs, H]; ``is_chained`` changes nothing here."""
    dtype, width = _compute_type(act), act.shape[1]
    pairs = _planned(plan)
    x = _lined(pairs.numel(), width, act, dtype)
    x.copy_(_rows_of(act, pairs, pairs >= 0))
    y = _lined(pairs.numel(), out.shape[1], act, dtype)

    def weight_of(proj: Tensor) -> Tensor:
        return _padded(proj.to(dtype), width)

    _multiply_blocks(x, y, plan, down_proj, shared, weight_of)
    _mark_planned(out, _place(out, y, plan), mark)


def combine(
    down_out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_logits: Tensor | None,
    row_ids: Tensor | None,
    plan: Plan,
    *,
    out: Tensor,
    act: Tensor | None,
    late_marks: tuple[Mark | None, Mark | None, Mark | None],
    routed_mark: Mark | None,
    mark: Mark | None,
    is_chained: bool = False,
) -> None:
    """Weighted sum over each token's experts in the order of its slots into ``out`` [T, H].

    ``late_marks``: of ``topk_weights``, of ``act`` and of ``down_out``, with one row id a token.
    """
    dtype = _compute_type(down_out)
    is_real = torch.ones_like(topk_ids[:, :1], dtype=torch.bool) if row_ids is None else (row_ids >= 0)[:, None]
    by_slot = down_out.view(plan.num_tokens, plan.num_slots, down_out.shape[1])
    total = torch.zeros(out.shape, dtype=dtype, device=out.device)
    for slot in range(plan.top_k):
        expert = topk_ids[:, slot : slot + 1]
        is_written = is_real & (expert >= 0) & (expert < plan.num_experts)
        y = torch.where(is_written, by_slot[:, slot], 0).to(dtype)
        total = total + topk_weights[:, slot : slot + 1].to(dtype) * y
    total = torch.where(is_real, total, 0)
    weights_mark, act_mark, rows_mark = late_marks
    mark_rows(topk_weights, weights_mark)
    _mark_written(act, act_mark, topk_ids, is_real, plan)
    _mark_written(down_out, rows_mark, topk_ids, is_real, plan)
    mark_rows(total, routed_mark)
    if plan.has_shared:
        y = torch.where(is_real, by_slot[:, plan.top_k], 0).to(dtype)
        gate = 1.0 if shared_logits is None else _sigmoid(shared_logits.to(dtype))[:, None]
        total = torch.where(is_real, total + gate * y, 0)
    out.copy_(total)
    mark_rows(out, mark)


def _mark_written(x: Tensor | None, mark: Mark | None, topk_ids: Tensor, is_real: Tensor, plan: Plan) -> None:
    """Mark those rows of ``x`` [num_pairs, any] that an expert wrote; ``mark`` has one row id a token."""
    if x is None or mark is None:
        return
    is_written = is_real & (topk_ids >= 0) & (topk_ids < plan.num_experts)
    if plan.has_shared:
        is_written = torch.cat([is_written, is_real], 1)
    ids = None if mark.row_ids is None else mark.row_ids.repeat_interleave(plan.num_slots)
    _mark_planned(x, is_written.reshape(-1, 1), dataclasses.replace(mark, row_ids=ids))


def reads_on_host(x: Tensor) -> bool:
    """Whether the host may look at a tensor without waiting for a device."""
    return x.is_cpu


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _lined(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros [rows, columns], each row on its own cache line."""
    length = -(-columns // CACHE_LINE) * CACHE_LINE
    return torch.zeros(rows, length, dtype=dtype, device=like.device)[:, :columns]


def _planned(plan: Plan) -> Tensor:
    """int64 pairs to compute: on the CPU those in use, on CUDA, where the host must not ask, all there is room for."""
    used = int(plan.totals[1]) if reads_on_host(plan.pair_ids) else plan.pair_ids.numel()
    return plan.pair_ids[:used].long()


def _rows_of(x: Tensor, index: Tensor, is_row: Tensor) -> Tensor:
    return torch.where(is_row[:, None], x.index_select(0, index.clamp_min(0)), 0)


def _multiply(x: Tensor, weight: Tensor, y: Tensor, block_m: int) -> None:
    """``y = x @ weight.T`` in blocks of ``block_m`` rows, each the same call whatever the number of rows."""
    if block_m == 1:
        for row, into in zip(x, y, strict=True):
            torch.mv(weight, row, out=into)
        return
    for start in range(0, x.shape[0], block_m):
        torch.mm(x[start : start + block_m], weight.T, out=y[start : start + block_m])


def _multiply_blocks(
    x: Tensor, y: Tensor, plan: Plan, proj: Tensor, shared: Tensor | None, weight_of: Callable[[Tensor], Tensor]
) -> None:
    """``y = x @ weight.T`` with the weight of each block's expert."""
    experts = plan.block_experts[: x.shape[0] // plan.block_m]
    if reads_on_host(x):
        start = 0
        for expert, blocks in itertools.groupby(experts.tolist()):
            rows = slice(start, start + len(list(blocks)) * plan.block_m)
            weight = shared if shared is not None and expert == plan.num_experts else proj[expert]
            _multiply(x[rows], weight_of(weight), y[rows], plan.block_m)
            start = rows.stop
        return
    for block in range(experts.numel()):
        expert_id = experts[block : block + 1]
        weight = weight_of(proj.index_select(0, expert_id.clamp(0, plan.num_experts - 1))[0])
        if shared is not None:
            weight = torch.where(expert_id == plan.num_experts, weight_of(shared), weight)
        rows = slice(block * plan.block_m, (block + 1) * plan.block_m)
        _multiply(x[rows], weight, y[rows], plan.block_m)


def _padded(weight: Tensor, width: int) -> Tensor:
    """``weight`` [.., n, m] with zeros up to ``width``: rows of a gate or an up half, columns of down."""
    return weight if weight.shape[-1] == width else torch.nn.functional.pad(weight, (0, width - weight.shape[-1]))


def _place(out: Tensor, planned: Tensor, plan: Plan) -> Tensor:
    """Write planned rows to their pairs; rows that no block writes stay as they were. Returns which were written."""
    pairs, num_rows = plan.pair_ids[: planned.shape[0]].long(), planned.shape[0]
    at = torch.full((plan.num_pairs + 1,), num_rows, dtype=torch.int64, device=out.device)
    at.scatter_(0, torch.where(pairs < 0, plan.num_pairs, pairs), torch.arange(num_rows, device=out.device))
    is_written = (at[:-1] < num_rows)[:, None]
    if num_rows:
        rows = planned.index_select(0, at[:-1].clamp_max(num_rows - 1)).to(out.dtype)
        out.copy_(torch.where(is_written, rows, out))
    return is_written


def _mark_planned(out: Tensor, is_written: Tensor, mark: Mark | None) -> None:
    """Mark the rows that were written; the others hold what stood in the memory."""
    if mark is not None:
        mark_rows(torch.where(is_written, out, 0), mark)
