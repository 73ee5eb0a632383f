"""`attach`: watch any ``nn.Module`` and act on the first bad value."""

from __future__ import annotations

import functools
import logging
import sys
import types
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from firetower.attach.burned import BurnedRows
from firetower.attach.device import DevicePanels, is_capturing, reset_compiled
from firetower.attach.discover import Tap, discover
from firetower.attach.firelog import FireLog
from firetower.attach.frame import Call
from firetower.attach.freezing import GenerateCall, capture_folder, freeze
from firetower.attach.hooks import HostHooks, install, one_line
from firetower.attach.incident import build_fire, describe_fire
from firetower.attach.isolate import RowGuard, by_name, can_isolate, generation_option, guarded_generate, takes_guard
from firetower.attach.ops import OpsWatch
from firetower.attach.roots import num_running, parameter_names, step_roots
from firetower.attach.step import Step
from firetower.capture.store import CaptureFolder
from firetower.core.errors import AttachError, NonFiniteError
from firetower.core.records import BurnedRow, Fire, Outcome, Reading
from firetower.fires.store import Store
from firetower.sensors.ops_mode import quiet
from firetower.sensors.panel import Snapshot

Level = Literal["logits", "layers", "ops"]
OnFire = Literal["raise", "record", "isolate"]

_OUTCOMES = {"raise": Outcome.RAISED, "record": Outcome.RECORDED, "isolate": Outcome.ISOLATED}
_logger = logging.getLogger("firetower")


def attach(
    model: nn.Module,
    *,
    level: Level = "layers",
    on_fire: OnFire = "raise",
    store: Store | str | Path | Literal[False] | None = None,
    captures: CaptureFolder | str | Path | bool | None = None,
    name: str | None = None,
) -> Watch:
    """Watch ``model`` from now on; use the result as a context manager, or call ``detach()``.

    Args:
        model: any ``nn.Module``. Compiled modules are recompiled with the watch inside.
        level: ``logits`` (the model's output), ``layers`` (the signals of each decoder layer; every leaf module of a
            model of unknown shape) or ``ops`` (every ATen op; slow, for finding the line).
        on_fire: ``raise`` ends the call with `NonFiniteError`; ``record`` only stores the fire; ``isolate`` stops, in a
            ``generate()`` batch, only the burned rows and cuts their output before the bad token.
        store: where fires go: the default store (None), a path, a `Store`, or False to keep them in memory only.
        captures: where the capture of a burned call goes (prompt ids, sampling, seeds; private, mode 0600): beside the
            fires (None), a folder, the default folder (True), or nowhere (False). One for each origin.
        name: what to call the model in the fire; default its config's name, or its class.

    Returns:
        The watch, already attached.

    Raises:
        AttachError: an unknown level or action, or something that is no ``nn.Module``.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise AttachError(f"model={type(model).__name__}: takes no hooks; attach to the module before scripting it")
    if not isinstance(model, nn.Module):
        raise AttachError(f"model={type(model).__name__}: must be a torch.nn.Module; pass the module that runs")
    for option, value, known in (("level", level, get_args(Level)), ("on_fire", on_fire, get_args(OnFire))):
        if value not in known:
            raise AttachError(f"{option}={value!r}: must be one of {', '.join(known)}")
    return Watch(model, level=level, on_fire=on_fire, store=store, captures=captures, name=name)


class Watch:
    """A watch on one model. Made by `attach`.

    Attributes:
        failures: how often the watch itself failed; inference went on.
        last_failure: what went wrong last, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        level: Level,
        on_fire: OnFire,
        store: Store | str | Path | Literal[False] | None,
        captures: CaptureFolder | str | Path | bool | None,
        name: str | None,
    ) -> None:
        self.model = model
        self.level = level
        self.on_fire = on_fire
        self.name = name or _model_name(model)
        self.failures = 0
        self.last_failure: str | None = None
        self._root: nn.Module = getattr(model, "_orig_mod", model)
        self._taps: list[Tap] = discover(self._root, "layers" if level == "ops" else level)
        self._skipped_hook_guards = bool(torch._dynamo.config.skip_nnmodule_hook_guards)
        self._compiled = reset_compiled(model)
        if self._compiled:
            # else a watched module runs code that was compiled for an unwatched one of its class
            torch._dynamo.config.skip_nnmodule_hook_guards = False
        self._device = DevicePanels(self._root, self._taps, is_compiled=self._compiled)
        on_stray = self._raise_stray if on_fire == "raise" else None
        # at op level a check at the step's end would be one of the ops that are watched
        may_wait = level != "ops"
        self._hooks = HostHooks(self._taps, self._failed, self._device.mark, on_stray, may_wait=may_wait)
        self._ops = OpsWatch(self._root) if level == "ops" else None
        self._log = FireLog(store)
        self._captures = capture_folder(captures, store)
        self._burned = BurnedRows()
        self._pending: Snapshot | None = None
        self._last: Step | None = None
        self._last_reading: Reading | None = None
        self._handles: list[RemovableHandle] = install(
            self._taps, self._hooks, self._device.mark, around=quiet if level == "ops" else None
        )
        self._roots = step_roots(self._root, model, is_compiled=self._compiled)
        self._names = {id(m): parameter_names(m) for m in self._roots}
        for module in self._roots:
            self._handles.append(
                module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
            )
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        self._generate_before: Any = None
        self._generate = self._wrap_generate()

    @property
    def fires(self) -> list[Fire]:
        """Fires of this watch, oldest first; repeats of one origin are merged and counted."""
        self._settle_pending()
        self._settle_stray()
        return self._log.fires

    @property
    def last(self) -> Reading | None:
        """Reading of the last finished step, or None before the first."""
        self._settle_pending()
        self._settle_stray()
        if self._last_reading is None and self._last is not None:
            self._last_reading = self._reading_of(self._last)
        return self._last_reading

    def read(self) -> Reading:
        """The reading of the last step; after a replay of a user's own CUDA graph, that of the replay.

        Copies the device panel (one small copy a device) where signals were marked on one. A bad reading that no
        Python saw before is stored as a fire; it never raises `NonFiniteError`.

        Raises:
            AttachError: the model did not run yet.
        """
        self._settle_pending()
        self._settle_stray()
        if self._device.should_read:
            self._look_at_panel()
        elif self._last is None:
            raise AttachError("no step to read: run the model first")
        assert self.last is not None
        return self.last

    def coverage(self) -> tuple[int, int]:
        """(signals that ran in the last step, signals declared)."""
        return self.last.coverage if self.last is not None else (0, len(self._taps))

    def status(self) -> dict[str, object]:
        """State of the watch in plain values: level, signals, fires, and its own failures."""
        ran, declared = self.coverage()
        store = self._log.store
        return {
            "model": self.name,
            "level": self.level,
            "on_fire": self.on_fire,
            "attached": bool(self._handles),
            "signals_ran": ran,
            "signals_declared": declared,
            "fires": len(self.fires),
            "failures": self.failures,
            "last_failure": self.last_failure,
            "store_failures": store.failures if store is not None else 0,
            "store_last_error": store.last_error if store is not None else None,
            "captures": None if self._captures is None else str(self._captures.path),
            "capture_failures": 0 if self._captures is None else self._captures.num_failed,
        }

    def detach(self) -> None:
        """Take every hook off again; the model is exactly as before. Safe to call twice, and inside a call."""
        self._settle_pending()
        self._settle_stray()
        self._leave_open_step()
        for handle in self._handles:
            handle.remove()
        self._unwrap_generate()
        if self._handles and (self._compiled or self._device.traced):
            reset_compiled(self.model)
            torch._dynamo.config.skip_nnmodule_hook_guards = self._skipped_hook_guards
        self._handles.clear()
        self._log.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._device.begin_traced(Call(args, kwargs))
            return
        step = self._hooks.step
        step.depth += 1
        if step.depth > 1:
            step.depth = num_running(self._roots)
            if step.depth > 1:
                return
            step.depth = 1
            self._stop_ops()
        try:
            if not is_capturing():
                self._settle_pending()
                self._settle_stray()
            step.begin(args, kwargs, self._names[id(module)])
            assert step.call is not None
            self._device.begin(step.call)
            if self._ops:
                self._ops.begin(step)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            self._failed(e)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            self._device.end_traced()
            return
        step = self._hooks.step
        if step.depth == 0:
            # another's hook raised before ours could begin the step
            return
        step.depth -= 1
        if step.depth:
            return
        fire = None
        try:
            if (failure := step.end(output)) is not None:
                self._failed(failure)
            self._last, self._last_reading = step, None
            if self._ops:
                self._ops.end(output)
            if self._device.in_use:
                self._device.flush()
            if self._device.should_read:
                self._pending = self._device.snapshot()
            if self._pending is None or self.on_fire == "raise":
                fire = self._settle_pending() or self._settle(step)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            self._failed(e)
        if fire is not None and self.on_fire == "raise":
            error = sys.exc_info()[1] if output is None else None
            if error is None:
                raise NonFiniteError(fire, describe_fire(fire))
            # the forward failed by itself: its error goes on, with the likely cause beside it
            error.add_note(describe_fire(fire))

    def _settle_pending(self) -> Fire | None:
        """Wait for a copy that is under way and act on it."""
        pending, self._pending = self._pending, None
        if pending is None or self._last is None:
            return None
        self._device.put_into(self._last, pending.result())
        self._last_reading = None
        return self._settle(self._last)

    def _settle_stray(self) -> Fire | None:
        """Close a step that submodules opened on their own (an encoder, a base model) and act on it."""
        step = self._hooks.step
        if not (step.open and step.is_stray):
            return None
        if (failure := step.end()) is not None:
            self._failed(failure)
        self._last, self._last_reading = step, None
        return self._settle(step)

    def _leave_open_step(self) -> None:
        """Settle a step that will not come to its end: the watch is detached inside it, or it was interrupted."""
        step = self._hooks.step
        if step.open:
            step.is_stray = True
            self._stop_ops()
            self._settle_stray()
        step.depth = 0

    def _stop_ops(self) -> None:
        if self._ops:
            self._ops.end(None)

    def _raise_stray(self) -> None:
        fire = self._settle_stray()
        if fire is not None:
            raise NonFiniteError(fire, describe_fire(fire))

    def _look_at_panel(self) -> Fire | None:
        """Read the panel now, for steps that ran without our Python."""
        self._last = self._last or self._hooks.step
        self._pending = self._device.snapshot()
        return self._settle_pending()

    def _settle(self, step: Step) -> Fire | None:
        """Turn a bad step into a fire, or into a repeat of the last one; returns the fire to raise."""
        event = self._ops.origin if self._ops else None
        if step.origin() is None and event is None:
            self._burned.note_clean(step)
            return None
        rows = self._rows_burned(step)
        guard = self._hooks.guard
        if guard is not None:
            self._hooks.burned.append((_batch(step), rows))
        known = self._burned.of(step)
        new = rows - known.rows
        # beams change places: what burned one of a prompt's rows goes on in any of them
        unit = 1 if guard is None else guard.num_beams
        known.rows |= {row - row % unit + i for row in rows for i in range(unit)}
        if not new and self.on_fire != "raise":
            self._log.repeat(known.fire_id)
            return None
        reading = self._reading_of(step)
        which: list[BurnedRow | None] = [None]
        if self.on_fire == "isolate" and all(b.first is not None for b in step.burned.values()):
            which = [b for b in step.burned.values() if b.sequence in new] or [None]
        is_isolated = guard is not None and guard.isolate
        outcome = Outcome.RECORDED if self.on_fire == "isolate" and not is_isolated else _OUTCOMES[self.on_fire]
        fire = None
        for row in which:
            built = build_fire(self.name, self._root, step, reading, outcome, row=row, ops=self._ops)
            fire = self._log.record(built)
            known.fire_id = fire.id
            self._capture(fire, step)
        return fire

    def _capture(self, fire: Fire, step: Step) -> None:
        if self._captures is None or fire.count > 1:
            return
        try:
            self._captures.add_safely(freeze(fire, self._root, self.level, step.call, self._hooks.running))
        except Exception as e:  # noqa: BLE001 - a capture that cannot be made must not stop inference; it is counted
            self._failed(e)

    def _rows_burned(self, step: Step) -> set[int]:
        rows = step.rows_burned() | (self._ops.rows_burned() if self._ops else set())
        if not rows and self._ops and self._ops.origin and step.call is not None:
            return set(range(_batch(step)))
        return rows

    def _reading_of(self, step: Step) -> Reading:
        self._last_reading = self._ops.reading(step) if self._ops else step.reading()
        return self._last_reading

    def _burned_since(self) -> tuple[set[int], int]:
        """Sequences burned since a token was last chosen, and how many sequences the last step had.

        More than one step may lie between two tokens: chunks of a prompt, a guidance processor's own call. Reads the
        panel where no Python ran in the last step.
        """
        fire = self._settle_pending() if self._pending is not None else None
        if self._device.traced:
            fire = self._look_at_panel()
        if fire is not None and self.on_fire == "raise":
            raise NonFiniteError(fire, describe_fire(fire))
        step = self._hooks.step
        batch, rows = _batch(step), self._rows_burned(step)
        burned, self._hooks.burned = self._hooks.burned, []
        for num_rows, some in burned:
            # an encoder ran before its rows were repeated for beams or several answers
            each = max(1, batch // max(1, num_rows))
            rows |= {row * each + i for row in some for i in range(each)}
        return rows, batch

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_failure = one_line(error)
        if self.failures == 1:
            _logger.warning("firetower: the watch failed and goes on without: %s", self.last_failure)

    def _wrap_generate(self) -> Any:
        """Put the guard around the model's own ``generate``, or around another watch's; returns what stands there."""
        generate = getattr(self.model, "generate", None)
        if not isinstance(generate, types.MethodType):
            return None
        can_stop = takes_guard(generate, self.model) and can_isolate(generate)
        if self.on_fire == "isolate" and not can_stop:
            _logger.warning("firetower: %s.generate has a loop of its own: fires are recorded, not isolated", self.name)
        if not takes_guard(generate, self.model):
            return None
        self._generate_before = self.model.__dict__.get("generate")

        @functools.wraps(generate.__func__)
        def guarded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = types.MethodType(generate.__func__, model)
            named = by_name(inner, args, kwargs)
            if named is None or not self._handles:
                return inner(*args, **kwargs)
            isolate = self.on_fire == "isolate" and can_stop
            return self._generate_guarded(model, inner, *named, isolate=isolate)

        guarded.watch = self  # type: ignore[attr-defined]
        bound = types.MethodType(guarded, generate.__self__)
        self.model.__dict__["generate"] = bound
        return bound

    def _generate_guarded(
        self, model: nn.Module, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, isolate: bool
    ) -> Any:
        hooks = self._hooks
        num_beams = int(generation_option(model, kwargs, "num_beams") or 1)
        guard = RowGuard(num_beams, self._burned_since, isolate=isolate, on_failure=self._failed)
        outer = hooks.running, hooks.guard, hooks.burned
        hooks.running, hooks.guard, hooks.burned = GenerateCall.begin(args, kwargs), guard, []
        try:
            return guarded_generate(model, generate, guard, args, kwargs)
        finally:
            hooks.running, hooks.guard, hooks.burned = outer
            if hooks.step.depth and num_running(self._roots) == 0:
                self._leave_open_step()

    def _unwrap_generate(self) -> None:
        # a watch that was attached later still stands around ours: ours then passes calls on
        if self._generate is None or self.model.__dict__.get("generate") is not self._generate:
            return
        before = self._generate_before
        while isinstance(getattr(before, "watch", None), Watch) and not before.watch._handles:
            before = before.watch._generate_before
        if before is None:
            del self.model.__dict__["generate"]
        else:
            self.model.__dict__["generate"] = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # a copied model keeps its hooks: they report to this watch
        return self


def _batch(step: Step) -> int:
    return 1 if step.call is None else step.call.shape()[0]


def _model_name(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None)
    return Path(str(name)).name if name else type(getattr(model, "_orig_mod", model)).__name__
