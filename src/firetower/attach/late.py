"""Cache rows checked together at a step's end: in one sum, sixty narrow views cost a decode step a third.

Keys and values stay in the cache anyway, and nothing else is kept: an activation that waits is memory that the next
module cannot use again while it is still in the CPU's caches. What waits is checked before any other signal's finding
is recorded, so that the order of findings is that of the hooks. A cache that was written to in between is not vouched
for: its signal is not covered in that step and never waits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from firetower.attach.taps import written_rows
from firetower.core.records import Legal
from firetower.sensors.check import is_clean

if TYPE_CHECKING:
    from firetower.attach.step import Step

Item = tuple[int, Any, Tensor, int, Tensor, int, int, nn.Module]
"""Slot; cache layer, its keys and their version, its values and theirs; rows written; module."""

_FLOAT32 = torch.float32


class LateRows:
    """The cache rows that wait in one thread's running step."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._never: set[int] = set()

    def take(self, slot: int, layer: Any, num_tokens: int, module: nn.Module) -> bool:
        """Whether the rows that this step wrote in a layer of the cache may wait; if not, check them now.

        Args:
            slot: of the signal.
            layer: one layer of a Transformers cache; it may wait if its keys and values are plain fp32 host tensors.
            num_tokens: rows that the step wrote.
            module: of the hook.
        """
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(keys) is not Tensor or type(values) is not Tensor or keys.dtype is not _FLOAT32 or not keys.is_cpu:
            return False
        # an inference tensor counts no versions
        if keys.ndim != 4 or keys.is_inference() or slot in self._never or values.is_inference():
            return False
        self.items.append((slot, layer, keys, keys._version, values, values._version, num_tokens, module))
        return True

    def settle(self, step: Step, running: nn.Module | None = None, inputs: Iterable[Any] = ()) -> Exception | None:
        """Check what waits, in the order of the hooks; returns what went wrong in it, which stops nothing.

        Args:
            step: the running one.
            running: the module whose hook asks, if it is one.
            inputs: that module's, for a finding in it.
        """
        items, self.items = self.items, []
        try:
            self._check(items, step, running, inputs)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            for slot in {item[0] for item in items} - step.findings.keys():
                step.not_checked(slot, f"its check failed: {type(e).__name__}")
            return e
        return None

    def _check(self, items: list[Item], step: Step, running: nn.Module | None, inputs: Iterable[Any]) -> None:
        if not _all_clean(items):
            for slot, layer, keys, _, values, _, num_tokens, module in items:
                for stored in (keys, values):
                    x = written_rows(layer, stored, num_tokens)
                    if not is_clean(x, Legal.FINITE):
                        known = tuple(t for t in inputs if isinstance(t, Tensor)) if module is running else ()
                        step.add(slot, x, module, known)
        for slot, _, keys, version, values, its_version, _, _ in items:
            if keys._version != version or values._version != its_version:
                self._never.add(slot)
                step.not_checked(slot, "the cache was written to again before the step's end")


def _all_clean(items: list[Item]) -> bool:
    """Whether every element is finite; False also where one sum cannot tell."""
    try:
        total: float = torch.cat(list(_rows(items)), 2).sum().item()
    except (RuntimeError, TypeError):
        # layers of different heads or widths, values of another type
        return False
    return total - total == 0.0


def _rows(items: list[Item]) -> Iterator[Tensor]:
    for _, layer, keys, _, values, _, num_tokens, _ in items:
        begin = keys.shape[2] - num_tokens
        if begin > 0 and getattr(layer, "max_cache_len", None) is None:
            # what `written_rows` does for a cache that grows
            yield keys.narrow(2, begin, num_tokens)
            yield values.narrow(2, begin, num_tokens)
        else:
            yield written_rows(layer, keys, num_tokens)
            yield written_rows(layer, values, num_tokens)
