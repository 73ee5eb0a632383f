"""The order of tries: arms interleaved at random by permuted blocks, and a seed for each try."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTry:
    """One place of the plan: its number, block and arm."""

    number: int
    round: int
    arm: str


def make_plan(arms: Sequence[str], tries: int, seed: int) -> tuple[PlannedTry, ...]:
    """``tries`` blocks; each holds every arm once, in an order drawn for that block.

    So arms meet the same drift of the machine, and after each block they are balanced. The same arguments give
    the same plan, on any machine: a resumed campaign goes on in its order.
    """
    rng = random.Random(f"firetower plan {seed}")
    plan = []
    for block in range(tries):
        order = list(arms)
        rng.shuffle(order)
        plan += [PlannedTry(number=block * len(arms) + i, round=block, arm=arm) for i, arm in enumerate(order)]
    return tuple(plan)


def fresh_seed(seed: int, number: int, attempt: int) -> int:
    """A seed of 31 bits for one attempt: the same for the same arguments, unlike any other."""
    digest = hashlib.sha256(f"firetower try {seed} {number} {attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
