"""Module hooks that read taps: on the host at once, on a device by marking the panel.

A hook never raises into the model: what goes wrong in it is handed to ``on_failure`` and counted.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from firetower.attach.discover import Side, Tap
from firetower.attach.freezing import GenerateCall
from firetower.attach.isolate import RowGuard
from firetower.attach.step import Step
from firetower.attach.taps import cache_layer, first_tensor, float_tensors, input_tensor, written_state
from firetower.core.errors import NonFiniteError
from firetower.core.records import Legal
from firetower.sensors.check import SUM_DTYPE, is_clean

# looked up in every hook of every decode step, where an attribute of torch is one more cold cache line
_FLOAT32 = torch.float32

Mark = Callable[[int, Tensor, int], None]
"""Marks a tensor on its device: the slot of its tap, the tensor, which of the tap's tensors it is."""


class HostHooks(threading.local):
    """The running step of each thread, and the check that every hook on a host tensor makes."""

    def __init__(
        self,
        taps: list[Tap],
        on_failure: Callable[[BaseException], None],
        mark: Mark,
        on_stray: Callable[[], None] | None,
        *,
        may_wait: bool = True,
    ) -> None:
        self.step = Step(taps)
        self.legal = [t.signal.legal for t in taps]
        self.on_failure = on_failure
        self.mark = mark
        self.on_stray = on_stray
        self.may_wait = may_wait
        # of the running generate() in this thread: its arguments, its guard, and what burned since it last asked
        self.running: GenerateCall | None = None
        self.guard: RowGuard | None = None
        self.burned: list[tuple[int, set[int]]] = []

    def check(self, slot: int, x: Tensor, module: nn.Module, inputs: Iterable[Any], part: int = 0) -> bool:
        """Check one tensor of one signal and record the result in this thread's step; returns whether it is clean."""
        step = self.step
        if x is step.clean_tensor and step.open and step.clean_version == x._version:
            # the model's logits are those of its head
            step.ran[slot] = step.number
            return True
        if step.open and x.is_cpu and x.dtype in SUM_DTYPE and self.legal[slot] is Legal.FINITE:
            # the decode loop ends here: any NaN or Inf makes the sum non-finite
            try:
                total = (x.sum() if x.dtype is _FLOAT32 else x.sum(dtype=SUM_DTYPE[x.dtype])).item()
            except NotImplementedError:
                total = float("nan")  # a nested tensor has no sum: look closer
            if total - total == 0.0:
                step.ran[slot] = step.number
                return True
        if not step.open:
            step.begin_stray()
        if not x.is_cpu:
            self.mark(slot, x, part)
            return False
        is_good = is_clean(x, self.legal[slot])
        step.ran[slot] = step.number
        if is_good:
            return True
        if step.late.items or step.late.held:
            # what came before is found before
            error = step.late.settle(step, module, inputs)
            if error is not None:
                self.on_failure(error)
        step.add(slot, x, module, tuple(t for t in inputs if isinstance(t, Tensor)))
        if step.is_stray and self.on_stray is not None:
            self.on_stray()
        return False

    def check_input(self, slot: int, x: Tensor, module: nn.Module) -> None:
        """Check what a module receives; the next layer's input is the last layer's output and was seen already."""
        step = self.step
        if x is step.clean_tensor and step.open and step.clean_version == x._version:
            step.ran[slot] = step.number
        else:
            self.check(slot, x, module, ())

    def check_again(self, slot: int, x: Tensor, module: nn.Module, inputs: Iterable[Any]) -> None:
        """`check`, for a tensor that a shorter way could not read; never raises but for a fire."""
        try:
            self.check(slot, x, module, inputs)
        except NonFiniteError:
            raise
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            self.failed(e, (slot,))

    def failed(self, error: BaseException, slots: Iterable[int]) -> None:
        """Hand on what went wrong in a hook; signals that it left unchecked are not covered."""
        step = self.step
        reason = f"its check failed: {one_line(error)}"
        for slot in slots:
            if step.ran[slot] != step.number:
                step.not_checked(slot, reason)
        self.on_failure(error)

    def end_layer(self, step: Step, x: Tensor, *, is_good: bool | None) -> None:
        """Check the activations of a layer that waited for its end.

        Args:
            step: the running one.
            x: the layer's output.
            is_good: whether it is clean; None if it waits.
        """
        if step.late.read_held(step.ran, step.number):
            if is_good is not False:
                self.remember(x)
        elif (error := step.late.settle(step)) is not None:
            self.on_failure(error)

    def remember(self, x: Tensor) -> None:
        """Keep a clean output for `check_input`.

        An inference tensor counts no versions: a write between two taps would go unseen, so it is checked again. A
        stray step has no end at which the tensor would be let go.
        """
        if not (x.is_inference() or self.step.is_stray):
            self.step.clean_tensor, self.step.clean_version = x, x._version


def install(
    taps: list[Tap], hooks: HostHooks, mark: Mark, around: Callable[[], AbstractContextManager[Any]] | None = None
) -> list[RemovableHandle]:
    """Put one hook, or two, on every module that has a tap; returns the handles that take them off again.

    Args:
        taps: what to read; the index is the slot.
        hooks: checks tensors on the host.
        mark: marks tensors on a device.
        around: entered around every hook; at op level it hides our own reads from the mode that watches ops.
    """
    by_module: dict[int, tuple[nn.Module, list[int]]] = {}
    waiting = _inside_layers(taps) if hooks.may_wait else set()
    for slot, tap in enumerate(taps):
        if isinstance(tap.module, torch.jit.ScriptModule):
            # takes no hooks: not covered
            continue
        by_module.setdefault(id(tap.module), (tap.module, []))[1].append(slot)
    handles: list[RemovableHandle] = []
    for module, slots in by_module.values():
        wrap = (lambda hook: hook) if around is None else functools.partial(_inside, around)
        before = [s for s in slots if taps[s].side is Side.INPUT]
        after = [s for s in slots if taps[s].side is not Side.INPUT]
        if before:
            hook = wrap(_before(taps, before, hooks, mark, waiting))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if any(taps[s].side is Side.CACHE for s in after):
            hook = wrap(_after_cache(taps, after, hooks, mark, waiting))
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        elif len(after) == 1 and taps[after[0]].side is Side.OUTPUT:
            hook = wrap(_after_one(taps[after[0]], after[0], hooks, mark, waiting))
            handles.append(module.register_forward_hook(hook))
        elif after:
            handles.append(module.register_forward_hook(wrap(_after(taps, after, hooks, mark))))
    return handles


def _inside_layers(taps: list[Tap]) -> set[int]:
    """Slots of tensors that may wait for the end of the decoder layer that they belong to; the layer's output too."""
    num_after = Counter(id(t.module) for t in taps if t.side is not Side.INPUT)
    outputs = [t for t in taps if t.signal.stage == "output" and t.side is Side.OUTPUT]
    layers = {t.signal.module for t in outputs if num_after[id(t.module)] == 1}
    plain = (Side.INPUT, Side.OUTPUT)
    return {
        slot
        for slot, t in enumerate(taps)
        if t.side in plain
        and t.signal.legal is Legal.FINITE
        and any(t.signal.module == layer or t.signal.module.startswith(f"{layer}.") for layer in layers)
    }


def one_line(error: BaseException) -> str:
    """Type and first line of an error; PyTorch's own may go on for pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _inside(around: Callable[[], AbstractContextManager[Any]], hook: Callable[..., None]) -> Callable[..., None]:
    def inside(*args: Any) -> None:
        with around():
            hook(*args)

    return inside


def _before(
    taps: list[Tap], slots: list[int], hooks: HostHooks, mark: Mark, waiting: set[int]
) -> Callable[..., None]:
    is_finite_only = all(taps[s].signal.legal is Legal.FINITE for s in slots)
    may_wait = len(slots) == 1 and slots[0] in waiting

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args and type(args[0]) is Tensor else input_tensor(args, kwargs)
        if x is None:
            return
        if is_compiling():
            for slot in slots:
                mark(slot, x, 0)
            return
        try:
            step = hooks.step
            if is_finite_only and x.dtype is _FLOAT32 and step.open and x.is_cpu:
                # the next layer's input is the last layer's output and was seen already
                if x is step.clean_tensor and step.clean_version == x._version:
                    is_good = True
                elif may_wait and step.late.steady[slots[0]]:
                    step.late.held.append((slots[0], x, x._version, module, (), len(step.late.items)))
                    return
                else:
                    total = x.sum().item()
                    is_good = total - total == 0.0
                    if may_wait:
                        step.late.try_out(slots[0], x)
                if is_good:
                    for slot in slots:
                        step.ran[slot] = step.number
                    return
            for slot in slots:
                hooks.check_input(slot, x, module)
        except NonFiniteError:
            raise
        except NotImplementedError:
            # a nested tensor has no sum
            for slot in slots:
                hooks.check_again(slot, x, module, ())
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.failed(e, slots)

    return before


def _after_one(tap: Tap, slot: int, hooks: HostHooks, mark: Mark, waiting: set[int]) -> Callable[..., None]:
    """The common case, written for the decode loop: one tensor that waits, or a sum that says clean; one store."""
    is_finite_only = tap.signal.legal is Legal.FINITE
    may_wait = slot in waiting
    feeds_next_layer = tap.signal.stage == "output"
    is_seen_again = is_finite_only and tap.signal.stage == "logits"

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = output if type(output) is Tensor else first_tensor(output)
        if x is None:
            return
        if is_compiling():
            mark(slot, x, 0)
            return
        try:
            step = hooks.step
            late = step.late
            if late.steady[slot]:
                late.held.append((slot, x, x._version, module, args, len(late.items)))
                if feeds_next_layer:
                    hooks.end_layer(step, x, is_good=None)
                return
            is_good = False
            if is_finite_only and x.dtype is _FLOAT32 and step.open and x.is_cpu:
                total = x.sum().item()
                if total - total == 0.0:
                    is_good = True
                    step.ran[slot] = step.number
                    if may_wait:
                        late.try_out(slot, x)
            if not is_good:
                is_good = hooks.check(slot, x, module, args)
            if feeds_next_layer:
                hooks.end_layer(step, x, is_good=is_good)
            elif is_seen_again and is_good:
                hooks.remember(x)
        except NonFiniteError:
            raise
        except NotImplementedError:
            # a nested tensor has no sum
            hooks.check_again(slot, x, module, args)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.failed(e, (slot,))

    return after


Found = list[tuple[int, int, Tensor]]
"""(slot, part, tensor) of the taps of one module."""


def _after(taps: list[Tap], slots: list[int], hooks: HostHooks, mark: Mark) -> Callable[..., None]:
    whole = [s for s in slots if taps[s].side is Side.OUTPUTS]
    first = [s for s in slots if taps[s].side is Side.OUTPUT]

    def find(output: Any) -> Found:
        x = output if type(output) is Tensor else first_tensor(output)
        found = [(slot, 0, x) for slot in first if x is not None]
        return found + [(slot, part, t) for slot in whole for part, t in enumerate(float_tensors(output))]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            _mark_all(find(output), mark)
            return
        try:
            for slot, part, x in find(output):
                hooks.check(slot, x, module, args, part)
        except NonFiniteError:
            raise
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.failed(e, slots)

    return after


def _after_cache(
    taps: list[Tap], slots: list[int], hooks: HostHooks, mark: Mark, waiting: set[int]
) -> Callable[..., None]:
    outputs = [s for s in slots if taps[s].side is not Side.CACHE]
    states = [(s, taps[s].signal.stage, taps[s].cache_layer or 0) for s in slots if taps[s].side is Side.CACHE]
    is_finite_only = all(taps[s].signal.legal is Legal.FINITE for s in slots)

    kv_slot, _, kv_layer = states[0]
    may_wait = is_finite_only and hooks.may_wait and [stage for _, stage, _ in states] == ["kv"] and len(outputs) == 1

    def find(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Found:
        x = hidden_of(args, kwargs)
        num_tokens = x.shape[1] if x is not None and x.ndim >= 3 else 1
        found = [
            (slot, part, tensor)
            for slot, stage, layer in states
            for part, tensor in enumerate(written_state(stage, kwargs, layer, num_tokens))
        ]
        y = first_of(output)
        return found + [(slot, 0, y) for slot in outputs if y is not None]

    def check_late(step: Step, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """The decode loop's way: cache rows wait for the step's end, the output is summed; False for the long way."""
        x, y, cache = hidden_of(args, kwargs), first_of(output), cache_layer(kwargs, kv_layer)
        if x is None or y is None or cache is None or y.dtype is not _FLOAT32 or not y.is_cpu:
            return False
        if x.ndim < 3 or y.is_nested:
            return False
        if not step.late.take(kv_slot, cache, x.shape[1], module):
            return False
        step.ran[kv_slot] = step.number
        late = step.late
        if late.steady[outputs[0]]:
            late.held.append((outputs[0], y, y._version, module, args or kwargs.values(), len(late.items)))
            return True
        total = y.sum().item()
        if total - total == 0.0:
            step.ran[outputs[0]] = step.number
            if outputs[0] in waiting:
                late.try_out(outputs[0], y)
        else:
            hooks.check(outputs[0], y, module, args or kwargs.values())
        return True

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_compiling():
            _mark_all(find(args, kwargs, output), mark)
            return
        try:
            step = hooks.step
            if may_wait and step.open and not step.is_stray and check_late(step, module, args, kwargs, output):
                return
            inputs = args or kwargs.values()
            for slot, part, tensor in find(args, kwargs, output):
                hooks.check(slot, tensor, module, inputs, part)
        except NonFiniteError:
            raise
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.failed(e, slots)

    return after


def first_of(output: Any) -> Tensor | None:
    """`first_tensor`, short for the tuple that attention modules return."""
    if type(output) is tuple and output and type(output[0]) is Tensor:
        return output[0] if output[0].is_floating_point() else first_tensor(output)
    return first_tensor(output)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states that an attention or mixer module was called with."""
    x = kwargs.get("hidden_states")
    return x if type(x) is Tensor else input_tensor(args, kwargs)


def _mark_all(found: Found, mark: Mark) -> None:
    for slot, part, x in found:
        mark(slot, x, part)
