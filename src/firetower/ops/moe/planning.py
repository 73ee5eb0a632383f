"""The plan: which rows each expert computes, in blocks of one expert, and the proof that no row is lost.

A token has ``num_slots`` places: its ``top_k`` experts, and one more for the shared expert, which the plan knows as
expert ``num_experts``. ``token * num_slots + slot`` is a *pair*: the row that gate_up and down write. The plan lists
the pairs sorted by expert, each expert's list padded to whole blocks; a pad is -1 and writes nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Rows of every expert in blocks of one expert; filled on the device, without a host sync.

    Attributes:
        pair_ids: int32 [num_blocks * block_m], the pair of each planned row, -1 for a pad and beyond the plan's end.
        block_experts: int32 [num_blocks], the expert of each block, -1 beyond the plan's end.
        expert_offsets: int32 [num_lists + 1], first planned row of each expert.
        totals: int32 [3]: blocks in use, planned rows with pads, planned rows without.
        row_ids: int32 [num_tokens * num_slots], row word of every pair, or None.
        num_tokens: T. top_k: K. num_experts: E.
        has_shared: whether every token also goes to the shared expert.
        block_m: rows of a block.
    """

    pair_ids: Tensor
    block_experts: Tensor
    expert_offsets: Tensor
    totals: Tensor
    row_ids: Tensor | None
    num_tokens: int
    top_k: int
    num_experts: int
    has_shared: bool
    block_m: int

    @property
    def num_slots(self) -> int:
        """Places of a token: its experts, and the shared one."""
        return self.top_k + self.has_shared

    @property
    def num_lists(self) -> int:
        """Experts that have a list, the shared one included."""
        return self.num_experts + self.has_shared

    @property
    def num_pairs(self) -> int:
        """Rows of what gate_up and down write."""
        return self.num_tokens * self.num_slots

    @property
    def num_blocks(self) -> int:
        """Blocks that there is room for."""
        return self.block_experts.numel()


def capacity_in_blocks(num_tokens: int, top_k: int, num_experts: int, *, has_shared: bool, block_m: int) -> int:
    """Most blocks that any routing can fill: known from shapes, so that the launch grid needs no host sync."""
    pairs = num_tokens * top_k
    hit = min(pairs, num_experts)
    routed = (pairs + (block_m - 1) * hit) // block_m
    return routed + (-(-num_tokens // block_m) if has_shared else 0)


def new_plan(
    topk_ids: Tensor, num_experts: int, *, has_shared: bool, block_m: int, has_rows: bool, num_blocks: int | None = None
) -> Plan:
    """A plan to be filled, every tensor uninitialised; ``num_blocks`` overrides the room that any routing needs."""
    num_tokens, top_k = topk_ids.shape
    if num_blocks is None:
        num_blocks = capacity_in_blocks(num_tokens, top_k, num_experts, has_shared=has_shared, block_m=block_m)

    def empty(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=topk_ids.device)

    return Plan(
        pair_ids=empty(num_blocks * block_m),
        block_experts=empty(num_blocks),
        expert_offsets=empty(num_experts + has_shared + 1),
        totals=empty(3),
        row_ids=empty(num_tokens * (top_k + has_shared)) if has_rows else None,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        has_shared=has_shared,
        block_m=block_m,
    )


def row_map(plan: Plan) -> Tensor:
    """(token, slot, expert) of every row that gate_up and down write, as the plan has it; no host sync.

    Returns:
        int32 [num_pairs, 3]; slot ``top_k`` and expert ``num_experts`` are the shared expert; a row that the plan
        leaves out has expert -1.
    """
    pair = plan.pair_ids.long()
    at = torch.where(pair < 0, plan.num_pairs, pair)
    expert = plan.block_experts.repeat_interleave(plan.block_m).to(torch.int32)
    experts = expert.new_full((plan.num_pairs + 1,), -1).scatter_(0, at, expert)[:-1]
    pairs = torch.arange(plan.num_pairs, dtype=torch.int32, device=expert.device)
    return torch.stack([pairs // plan.num_slots, pairs % plan.num_slots, experts], dim=-1)


def count_writes(plan: Plan) -> Tensor:
    """How often each row is written: int32 [num_pairs]; no host sync."""
    pair = plan.pair_ids.long()
    at = torch.where(pair < 0, plan.num_pairs, pair)
    counts = torch.zeros(plan.num_pairs + 1, dtype=torch.int32, device=pair.device)
    return counts.scatter_add_(0, at, torch.ones_like(plan.pair_ids))[:-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanAudit:
    """What is wrong with a plan; every row is given as (token, slot, expert) of the routing.

    Attributes:
        unwritten: rows that no block writes.
        doubled: rows that are written more than once.
        misplaced: rows computed with another expert's weights, that expert appended.
        pads: rows of pad tokens that were planned.
        rows_short: planned rows that the plan has no room for.
        stray: planned rows, or blocks with an expert, beyond the plan's end.
    """

    unwritten: tuple[tuple[int, int, int], ...] = ()
    doubled: tuple[tuple[int, int, int], ...] = ()
    misplaced: tuple[tuple[int, int, int, int], ...] = ()
    pads: tuple[tuple[int, int, int], ...] = ()
    rows_short: int = 0
    stray: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every destination row is written exactly once, with its own expert."""
        return self == PlanAudit()


def audit(plan: Plan, topk_ids: Tensor, row_ids: Tensor | None = None) -> PlanAudit:
    """Compare a plan with the routing it was made for. Copies the plan to the host: for tests and investigations.

    Args:
        plan: as filled by `firetower.ops.moe.plan`.
        topk_ids: [T, K], what the router chose; an id outside the experts is routed nowhere.
        row_ids: [T], negative for a pad token; None when there are none.
    """
    expected = _expected(plan, topk_ids.tolist(), None if row_ids is None else row_ids.tolist())
    writes, planned = count_writes(plan).tolist(), row_map(plan)[:, 2].tolist()
    blocks, rows, _ = plan.totals.tolist()
    slots = plan.num_slots
    unwritten, doubled, misplaced, pads = [], [], [], []
    for pair, (is_real, expert) in enumerate(expected):
        row = (pair // slots, pair % slots, expert)
        if not is_real:
            pads += [row] * (writes[pair] > 0)
            continue
        unwritten += [row] * (writes[pair] == 0)
        doubled += [row] * (writes[pair] > 1)
        misplaced += [(*row, planned[pair])] * (writes[pair] > 0 and planned[pair] != expert)
    return PlanAudit(
        unwritten=tuple(unwritten),
        doubled=tuple(doubled),
        misplaced=tuple(misplaced),
        pads=tuple(pads),
        rows_short=max(0, rows - plan.pair_ids.numel()),
        stray=int((plan.pair_ids[max(rows, 0) :] >= 0).sum() + (plan.block_experts[max(blocks, 0) :] >= 0).sum()),
    )


def _expected(plan: Plan, topk_ids: list[list[int]], row_ids: list[int] | None) -> list[tuple[bool, int]]:
    """(whether it must be written, expert) of every pair."""
    expected = []
    for token, ids in enumerate(topk_ids):
        is_pad = row_ids is not None and row_ids[token] < 0
        experts = [*ids, plan.num_experts] if plan.has_shared else ids
        for slot, expert in enumerate(experts):
            is_expert = slot == plan.top_k or 0 <= expert < plan.num_experts
            expected.append((is_expert and not is_pad, expert))
    return expected
