"""Checks that wait: a layer's small activations for its end, cache rows for the step's, each lot read in one sum.

A decode step has hundreds of small tensors, and a sum of its own for each costs more than reading them. Activations
wait no longer than their layer, where they are still in the CPU's caches, and only if they are small; keys and values
stay in the cache anyway. What waits is checked before any other signal's finding is recorded, in the order of the
hooks.

A tensor that was written to in between is not vouched for: its signal is not covered in that step and never waits
again. So that this does not cost coverage where a model works in place, a signal may wait only once it was seen to be
left alone in a step in which it was checked in its hook.
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

Held = tuple[int, Tensor, int, nn.Module, Iterable[Any], int]
"""Slot, tensor, its version; module, what that was given; how many cache rows came before it."""

MAX_HELD_TOKENS = 8
"""Most tokens of a step whose activations wait: a prompt's would be large, and leave the caches."""

_FLOAT32 = torch.float32


class Late:
    """What waits in one thread's running step.

    Attributes:
        items: cache rows that wait for the step's end.
        held: activations that wait for their layer's end.
        steady: by slot, whether its tensor may be put in ``held`` unseen; all False while none may.
    """

    def __init__(self, num_slots: int) -> None:
        self.items: list[Item] = []
        self.held: list[Held] = []
        self._none = [False] * num_slots
        # seen to be left alone by what runs between its hook and its layer's end
        self._is_steady = [False] * num_slots
        self.steady = self._none
        self._trial: list[tuple[int, Tensor, int]] = []
        self._never: set[int] = set()
        self._may_hold = False

    def begin(self, num_tokens: int) -> None:
        """Forget a step that never came to its end; the new one has so many tokens, 0 if that is not known."""
        self.items.clear()
        self.held.clear()
        self._trial.clear()
        # an inference tensor counts no versions
        self._may_hold = 0 < num_tokens <= MAX_HELD_TOKENS and not torch.is_inference_mode_enabled()
        self.steady = self._is_steady if self._may_hold else self._none

    def end(self) -> None:
        """Nothing may wait any more."""
        self._may_hold = False
        self.steady = self._none

    def try_out(self, slot: int, x: Tensor) -> None:
        """See whether a clean fp32 tensor is left alone until its layer's end; then its signal may wait from now on."""
        if self._may_hold and slot not in self._never and not x.is_inference():
            self._trial.append((slot, x, x._version))

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

    def clear(self) -> None:
        """Let everything go, of a step that never came to its end."""
        self.items.clear()
        self.held.clear()
        self._trial.clear()

    def read_held(self, ran: list[int], number: int) -> bool:
        """Whether the activations that wait are clean and were left alone; if not, `settle` them.

        Args:
            ran: of the step; ``ran[slot]`` becomes ``number`` for those that are.
            number: of the step.
        """
        if self._trial:
            self._learn()
        held = self.held
        if not held:
            return True
        tensors = []
        for slot, x, version, _, _, _ in held:
            if x._version != version or not x.is_cpu:
                return False
            tensors.append(x)
            ran[slot] = number
        try:
            total: float = torch.cat(tensors, -1).sum().item()
        except (RuntimeError, IndexError):
            # tensors of other shapes
            return False
        if total - total != 0.0:
            return False
        held.clear()
        return True

    def read_rows(self) -> bool:
        """Whether the cache rows that wait are clean and were left alone; if not, `settle` them."""
        items = self.items
        if not items:
            return True
        for _, _, keys, version, values, its_version, _, _ in items:
            if keys._version != version or values._version != its_version:
                return False
        if not _all_clean(items):
            return False
        items.clear()
        return True

    def _learn(self) -> None:
        for slot, x, version in self._trial:
            if x._version == version:
                self._is_steady[slot] = True
            else:
                self._never.add(slot)
        self._trial.clear()

    def settle(self, step: Step, running: nn.Module | None = None, inputs: Iterable[Any] = ()) -> Exception | None:
        """Check what waits, in the order of the hooks; returns what went wrong in it, which stops nothing.

        Args:
            step: the running one.
            running: the module whose hook asks, if it is one.
            inputs: that module's, for a finding in it.
        """
        items, self.items = self.items, []
        held, self.held = self.held, []
        self._trial.clear()
        given = {id(h[3]): h[4] for h in held}
        if running is not None:
            given[id(running)] = inputs
        failed: Exception | None = None
        for waiting in _in_order(items, held):
            try:
                if len(waiting) == 6:
                    self._check_held(waiting, step)
                    continue
                self._check_rows(waiting, step, _tensors(given.get(id(waiting[7]), ())))
            except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
                if waiting[0] not in step.findings:
                    step.not_checked(waiting[0], f"its check failed: {type(e).__name__}")
                failed = failed or e
        return failed

    def _check_held(self, held: Held, step: Step) -> None:
        slot, x, version, module, inputs, _ = held
        step.ran[slot] = step.number
        if x._version != version:
            self._is_steady[slot] = False
            self._never.add(slot)
            step.not_checked(slot, "it was written to again before its layer's end")
        elif not is_clean(x, Legal.FINITE):
            step.add(slot, x, module, _tensors(inputs))

    def _check_rows(self, rows: Item, step: Step, inputs: tuple[Tensor, ...]) -> None:
        slot, layer, keys, version, values, its_version, num_tokens, module = rows
        for stored in (keys, values):
            x = written_rows(layer, stored, num_tokens)
            if not is_clean(x, Legal.FINITE):
                step.add(slot, x, module, inputs)
        if keys._version != version or values._version != its_version:
            self._never.add(slot)
            step.not_checked(slot, "the cache was written to again before the step's end")


def _in_order(items: list[Item], held: list[Held]) -> Iterator[Item | Held]:
    """What waits, as the hooks came."""
    done = 0
    for h in held:
        yield from items[done : h[5]]
        done = h[5]
        yield h
    yield from items[done:]


def _tensors(inputs: Iterable[Any]) -> tuple[Tensor, ...]:
    return tuple(t for t in inputs if isinstance(t, Tensor))


def _all_clean(items: list[Item]) -> bool:
    """Whether every element is finite; False also where one sum cannot tell."""
    try:
        total: float = torch.cat(list(_rows(items)), 2).sum().item()
    except Exception:  # noqa: BLE001 - layers of different heads, values of another type: `settle` goes one by one
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
