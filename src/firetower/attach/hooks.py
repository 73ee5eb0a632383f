"""Module hooks that read taps: on the host at once, on a device by marking the panel.

A hook never raises into the model: what goes wrong in it is handed to ``on_failure`` and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from firetower.attach.discover import Side, Tap
from firetower.attach.step import Step
from firetower.attach.taps import first_tensor, float_tensors, input_tensor, written_state
from firetower.core.records import Legal
from firetower.sensors.check import is_clean

Mark = Callable[[int, Tensor], None]


class HostHooks(threading.local):
    """The running step of each thread, and the check that every hook on a host tensor makes."""

    def __init__(self, taps: list[Tap], on_failure: Callable[[BaseException], None], mark: Mark) -> None:
        self.step = Step(taps)
        self.legal = [t.signal.legal for t in taps]
        self.on_failure = on_failure
        self.mark = mark

    def check(self, slot: int, x: Tensor, module: nn.Module, inputs: Iterable[Any]) -> None:
        """Check one tensor of one signal and record the result in this thread's step."""
        step = self.step
        if not step.open:
            step.begin_implicit()
        if not x.is_cpu:
            self.mark(slot, x)
            step.ran[slot] = step.number
            return
        legal = self.legal[slot]
        if x is step.clean_tensor and legal is Legal.FINITE and step.clean_version == x._version:
            step.ran[slot] = step.number
            return
        if is_clean(x, legal):
            # an inference tensor counts no versions: a write between two taps would go unseen, so check it again
            if not x.is_inference():
                step.clean_tensor, step.clean_version = x, x._version
        else:
            step.add(slot, x, module, tuple(t for t in inputs if isinstance(t, Tensor)))
        step.ran[slot] = step.number


def install(taps: list[Tap], hooks: HostHooks, mark: Mark) -> list[RemovableHandle]:
    """Put one hook, or two, on every module that has a tap; returns the handles that take them off again."""
    by_module: dict[int, tuple[nn.Module, list[int]]] = {}
    for slot, tap in enumerate(taps):
        by_module.setdefault(id(tap.module), (tap.module, []))[1].append(slot)
    handles: list[RemovableHandle] = []
    for module, slots in by_module.values():
        before = [s for s in slots if taps[s].side is Side.INPUT]
        after = [s for s in slots if taps[s].side is not Side.INPUT]
        if before:
            handles.append(module.register_forward_pre_hook(_before(before, hooks, mark), with_kwargs=True))
        if any(taps[s].side is Side.CACHE for s in after):
            handles.append(module.register_forward_hook(_after_cache(taps, after, hooks, mark), with_kwargs=True))
        elif after:
            handles.append(module.register_forward_hook(_after(taps, after, hooks, mark)))
    return handles


def _before(slots: list[int], hooks: HostHooks, mark: Mark) -> Callable[..., None]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = input_tensor(args, kwargs)
        if x is None:
            return
        if torch.compiler.is_compiling():
            for slot in slots:
                mark(slot, x)
            return
        try:
            for slot in slots:
                hooks.check(slot, x, module, ())
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.on_failure(e)

    return before


def _after(taps: list[Tap], slots: list[int], hooks: HostHooks, mark: Mark) -> Callable[..., None]:
    whole = [s for s in slots if taps[s].side is Side.OUTPUTS]
    first = [s for s in slots if taps[s].side is Side.OUTPUT]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = output if type(output) is Tensor else first_tensor(output)
        if torch.compiler.is_compiling():
            _mark_all(x, output, first, whole, mark)
            return
        try:
            if x is not None:
                for slot in first:
                    hooks.check(slot, x, module, args)
            for slot in whole:
                for tensor in float_tensors(output):
                    hooks.check(slot, tensor, module, args)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            hooks.on_failure(e)

    return after


def _mark_all(x: Tensor | None, output: Any, first: list[int], whole: list[int], mark: Mark) -> None:
    if x is not None:
        for slot in first:
            mark(slot, x)
    for slot in whole:
        for tensor in float_tensors(output):
            mark(slot, tensor)


def _after_cache(taps: list[Tap], slots: list[int], hooks: HostHooks, mark: Mark) -> Callable[..., None]:
    outputs = [s for s in slots if taps[s].side is not Side.CACHE]
    plain = _after(taps, outputs, hooks, mark)
    states = [(s, taps[s].signal.stage, taps[s].cache_layer or 0) for s in slots if taps[s].side is Side.CACHE]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling():
            try:
                x = input_tensor(args, kwargs)
                num_tokens = x.shape[1] if x is not None and x.ndim >= 3 else 1
                for slot, stage, layer in states:
                    for tensor in written_state(stage, kwargs, layer, num_tokens):
                        hooks.check(slot, tensor, module, ())
            except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
                hooks.on_failure(e)
        plain(module, tuple(kwargs.values()) if not args else args, output)

    return after
