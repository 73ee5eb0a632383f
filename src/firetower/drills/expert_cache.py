"""Experts behind a cache of slots: a map, hits and misses, an eviction policy and its log, a destination plan.

Stands in the experts of a host, or in `pure` form over seeded matrices. Shapes: T tokens, K experts a token, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firetower.drills.arrays import tensor_hash
from firetower.drills.placing import generator
from firetower.drills.pure import linear
from firetower.lab.subject import POISON, Event, RoutedRow, Slot

Weights = tuple[Tensor, Tensor]
"""gate-and-up [2 I, D], down [D, I] of one expert."""


class TinyExperts(nn.Module):
    """E seeded experts of the shape that hosts have, chosen by a seeded router: [T, D] -> [T, D]."""

    def __init__(self, num_experts: int, top_k: int, hidden_size: int, seed: int) -> None:
        super().__init__()
        g, inner = generator(seed), hidden_size // 2
        self.router = linear(num_experts, hidden_size, seed + 1)
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inner, hidden_size, generator=g) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden_size, inner, generator=g) * 0.2)
        self.top_k = top_k
        self.experts = Through(self)

    def forward(self, x: Tensor) -> Tensor:
        """The chosen experts' sum, weighted."""
        values, ids = torch.softmax(self.router(x), -1).topk(self.top_k, dim=-1)
        y: Tensor = self.experts(x, ids, values)
        return y


class Through(nn.Module):
    """Where a host has its experts; replaced by a cache."""

    def __init__(self, owner: TinyExperts) -> None:
        super().__init__()
        self.owner = (owner,)  # in a tuple, so that the module is not its own child

    @property
    def gate_up_proj(self) -> Tensor:
        """[E, 2 I, D]."""
        return self.owner[0].gate_up_proj

    @property
    def down_proj(self) -> Tensor:
        """[E, D, I]."""
        return self.owner[0].down_proj


@dataclasses.dataclass
class Flaws:
    """What the cache does wrong; everything off is the clean twin.

    ``swapped``: slot -> expert whose weights were loaded into it in place of the map's. ``unprotected``: experts
    that this step still needs may be evicted. ``unwritten``: routed rows whose destination the plan misses.
    """

    swapped: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unprotected: bool = False
    unwritten: frozenset[int] = frozenset()


class ExpertCache:
    """Resident experts in slots, others from their source; stands for the experts' forward.

    Args:
        experts: the module with ``gate_up_proj`` [E, 2 I, D] and ``down_proj`` [E, D, I].
        resident: experts in the slots at the start of every run, coldest first.
        flaws: what goes wrong.
        loads: whether a miss is loaded into a slot first, with an eviction; else it is computed from the source.
    """

    def __init__(self, experts: Any, resident: list[int], flaws: Flaws, *, loads: bool) -> None:
        self.experts, self.flaws, self.loads = experts, flaws, loads
        self.resident = list(resident)
        self.all_miss = False
        self.fill: float = 0.0
        self.destinations = torch.zeros(0)
        self.log: list[Event] = []
        self.rows: list[RoutedRow] = []
        self.map: dict[int, int] = {}
        self.content: list[Weights] = []

    def source(self, expert: int) -> Weights:
        """The weights of an expert as loaded from the file."""
        return self.experts.gate_up_proj[expert], self.experts.down_proj[expert]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], ids [T, K], weights [T, K] -> [T, D]."""
        self._start()
        needed = list(dict.fromkeys(ids.flatten().tolist()))
        self.log = [Event(kind="need", what=f"expert {e}", step=1) for e in needed]
        held = set(self.map)
        for expert in needed:
            if self.loads and expert not in self.map and not self.all_miss:
                self._load(expert, needed)
        destinations = x.new_full((ids.numel(), x.shape[1]), self.fill)
        self.rows = []
        for row, expert in enumerate(ids.flatten().tolist()):
            is_hit = expert in held and not self.all_miss
            self.log.append(Event(kind="read", what=f"expert {expert}", step=1))
            y = _run(self._weights(expert), x[row // ids.shape[1]])
            if row not in self.flaws.unwritten:
                destinations[row] = y
            truth = _run(self.source(expert), x[row // ids.shape[1]])
            is_bad = not torch.allclose(destinations[row], truth, rtol=1e-3, atol=1e-5)
            path = "hit" if is_hit else "miss"
            slot = self.map.get(expert) if is_hit else None
            self.rows.append(RoutedRow(row=row, expert=expert, path=path, is_bad=is_bad, slot=slot))  # type: ignore[arg-type]
        self.destinations = destinations
        combined = destinations.reshape(*ids.shape, -1) * weights.unsqueeze(-1).to(x.dtype)
        summed: Tensor = combined.sum(1).to(x.dtype)
        return summed

    def _start(self) -> None:
        """The slots as they are before the step: every run starts from the same cache."""
        self.map = {e: i for i, e in enumerate(self.resident)}
        held = [self.flaws.swapped.get(i, e) for i, e in enumerate(self.resident)]
        self.content = [self.source(e) for e in held]

    def _load(self, expert: int, needed: list[int]) -> None:
        by_slot = {slot: e for e, slot in self.map.items()}
        # the most recent newcomer goes first, as frequency says nothing for it yet
        order = [by_slot[s] for s in reversed(range(len(self.content)))]
        newest = [e for e in order if e not in self.resident]
        candidates = [*newest, *order]
        free = [e for e in candidates if self.flaws.unprotected or e not in needed]
        if not free:
            return  # computed from the source
        gone = free[0]
        slot = self.map[gone] if self.flaws.unprotected else self.map.pop(gone)
        self.log.append(Event(kind="evict", what=f"expert {gone}", step=1, by=f"load of expert {expert}"))
        self.log.append(Event(kind="load", what=f"expert {expert}", step=1))
        self.map[expert] = slot
        self.content[slot] = self.source(expert)

    def _weights(self, expert: int) -> Weights:
        if expert in self.map and not self.all_miss:
            return self.content[self.map[expert]]
        return self.source(expert)

    def slots(self) -> tuple[Slot, ...]:
        """The slots that the step used, hashed now."""
        known = {e: _hash(self.source(e)) for e in range(len(self.experts.down_proj))}
        used = {r.expert for r in self.rows}
        return tuple(
            Slot(slot=s, expert=e, hash_now=_hash(self.content[s]), source_hash=known[e], known=known)
            for e, s in self.map.items()
            if e in used
        )

    def poisoned(self, run: Callable[[], Any]) -> Any:
        """Run with `POISON` in every destination beforehand; the destinations after it."""
        self.fill = POISON
        try:
            run()
            return self.destinations
        finally:
            self.fill = 0.0

    def missing(self, run: Callable[[], Any]) -> Any:
        """Run with every expert from its source."""
        self.all_miss = True
        try:
            return run()
        finally:
            self.all_miss = False


def _run(weights: Weights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, weights[0]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weights[1])


def _hash(weights: Weights) -> str:
    return tensor_hash(torch.cat([w.reshape(-1) for w in weights]))
