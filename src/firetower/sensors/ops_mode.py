"""Op-level sensing: checks what every ATen op stores; tells the op that made a bad value from those that
spread it.

    with OpsMode(model) as mode:
        model(**inputs)
    mode.origin          # the op where it began, or None

Slow next to signals at module level (every op is followed by a pass over its output), and it synchronises
with the device: it is for finding the line, not for serving. Results and random streams are those of a run
without it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from firetower.sensors.check import Frame, is_clean
from firetower.sensors.ops_events import LaunderEvent, OpEvent
from firetower.sensors.ops_judge import Judge, is_bad
from firetower.sensors.ops_kinds import OpInfo, op_info, run_composite
from firetower.sensors.ops_modules import ModuleStack
from firetower.sensors.ops_names import Owners
from firetower.sensors.ops_report import Ran, Report
from firetower.sensors.ops_table import StorageTable, covers_storage
from firetower.sensors.ops_values import (
    Operand,
    Snapshots,
    flags_of,
    has_nonfinite_number,
    is_float,
    named_arguments,
    operands,
    plain,
    readable,
    snapshot,
    tensors_in,
    why_unreadable,
)

_LITERALS = ("lift_fresh", "scalar_tensor")
_logger = logging.getLogger("firetower")


class OpsMode(TorchDispatchMode):
    """Checks every ATen op between ``__enter__`` and ``__exit__``, in eager mode, in this thread.

    Args:
        model: names modules, weights and the caller's inputs, and its output is checked; None takes the
            outermost modules that run.

    Attributes:
        num_ops: ops that ran.
        num_checked: float outputs whose values were read.
        not_covered: reason -> how many outputs could not be read.
        failures, last_failure: how often sensing itself failed; the run went on.
        frame: set by a caller who knows how rows map to tokens.
    """

    # higher-order operators (flex attention, cond) pass through and are checked like any op
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack = ModuleStack(model)
        self.stack.on_root_call = self.note_inputs
        self.stack.on_root_return = self.check_output
        self.stack.on_signal = lambda path, value: self.check_output(value, f"signal {path}")
        self.num_ops = 0
        self.num_checked = 0
        self.not_covered: dict[str, int] = {}
        self.failures = 0
        self.last_failure: str | None = None
        self._table = StorageTable()
        self._owners = Owners()
        self._report = Report(self.stack)
        self._judge = Judge(self._table, self._report, lambda x: self._owners.of(x, self.stack.roots))
        self._depth = 0
        if model is not None and _uses_flex_attention(model):
            # flex attention must be compiled, and torch compiles nothing under a mode that looks inside
            self.ignore_compile_internals = lambda: True  # type: ignore[method-assign]

    @property
    def events(self) -> list[OpEvent]:
        """Bad ops in the order found, culprits and propagators; capped, `num_events` has the count."""
        return self._report.events

    @property
    def num_events(self) -> int:
        """How many bad ops there were."""
        return self._report.num_events

    @property
    def origin(self) -> OpEvent | None:
        """The op where the first bad value began, or None."""
        return self._report.origin

    @property
    def propagators(self) -> list[OpEvent]:
        """The ops that only spread a bad value."""
        return [e for e in self.events if e.is_propagator]

    @property
    def laundered(self) -> list[LaunderEvent]:
        """Ops that made a bad value disappear, one for each place in the code."""
        return self._report.laundered

    @property
    def frame(self) -> Callable[[], Frame | None] | None:
        """Maps rows to tokens: called when a value is bad."""
        return self._report.frame

    @frame.setter
    def frame(self, frame: Callable[[], Frame | None] | None) -> None:
        self._report.frame = frame

    def reset(self) -> None:
        """Start a new step: events and counts are forgotten, what tensors hold is not."""
        self._report.clear()
        self._judge.clear()
        self._table.new_step()
        self.num_ops = self.num_checked = 0
        self.not_covered = {}

    def note_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what the caller passes, so that a bad input is told from a bad weight."""
        self._guarded(lambda: self._owners.note_inputs(args, kwargs))

    def check_output(self, output: Any, place: str = "the model's output") -> None:
        """Check what leaves the model: a +Inf harmless so far, or memory nobody wrote, is a fire here."""
        self._guarded(lambda: self._check_output(output, place))

    def watch_signals(self, modules: Iterable[str]) -> None:
        """Check what enters and leaves these modules, by dotted path, as the model's output is checked."""
        self.stack.signals = frozenset(modules)

    def __enter__(self) -> OpsMode:
        if self._depth == 0:
            self.stack.install()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self.stack.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented  # the subclass unwraps itself, and the ops it is made of come back here
        info = op_info(func)
        if info.is_composite:
            # under inference_mode composite ops arrive whole: take them apart as they are everywhere else
            with self:
                return run_composite(func, args, kwargs)
        if info.is_own or (info.is_view and info.root not in _LITERALS):
            self.num_ops += 1
            if torch.is_inference_mode_enabled() and info.is_view and readable(args[0]):
                self._report.bases.note(args[0])
            return func(*args, **kwargs)
        before = self._snapshot(info, args, kwargs) if info.mutated else None
        out = func(*args, **kwargs)
        index = self.num_ops
        self.num_ops += 1
        try:
            with quiet():
                self._observe(info, index, args, kwargs, out, before)
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            self._failed(e)
        return out

    def _snapshot(self, info: OpInfo, args: Any, kwargs: Any) -> Snapshots | None:
        def take() -> Snapshots:
            with quiet():
                return snapshot(info, args, kwargs)

        kept: Snapshots | None = self._guarded(take)
        return kept

    def _observe(self, info: OpInfo, index: int, args: Any, kwargs: Any, out: Any, before: Snapshots | None) -> None:
        outputs = self._float_outputs(info, args, kwargs, out)
        if info.is_allocator:
            self._allocated(info, index, outputs)
            return
        dirty = [(i, x) for i, x in outputs if not is_clean(plain(x))]
        self.num_checked += len(outputs)
        if not dirty and not self._table and not (info.launders or not outputs):
            return
        if dirty:
            ran = Ran(info, index, _arguments(info, args, kwargs, before))
            self._judge_all(ran, dirty, args, kwargs, before)
        elif (self._table.num_bad or info.launders or not outputs) and info.reads_values:
            self._find_laundering(info, index, args, kwargs, before)
        if self._table and info.mutated:
            self._written(outputs, dirty)

    def _float_outputs(self, info: OpInfo, args: Any, kwargs: Any, out: Any) -> list[tuple[int, Tensor]]:
        found = list(tensors_in(out))
        if not found and info.mutated:
            found = [t for n, v in named_arguments(info, args, kwargs) if n in info.mutated for t in tensors_in(v)]
        if info.first_output_only:
            found = found[:1]
        outputs = []
        for i, x in enumerate(found):
            if x.is_meta:
                continue
            reason = why_unreadable(x)
            if reason is not None and isinstance(x, FakeTensor):
                continue
            if reason is not None:
                self.not_covered[reason] = self.not_covered.get(reason, 0) + 1
            elif is_float(x):
                outputs.append((i, x))
        return outputs

    def _allocated(self, info: OpInfo, index: int, outputs: list[tuple[int, Tensor]]) -> None:
        for _, x in outputs:
            if x.numel():
                ran = Ran(info, index, ())
                self._table.entry(x).unwritten = self._report.writer(ran)

    def _judge_all(
        self, ran: Ran, dirty: list[tuple[int, Tensor]], args: Any, kwargs: Any, before: Snapshots | None
    ) -> None:
        if ran.info.root in _LITERALS and dirty[0][1].numel() == 1:
            self._table.entry(dirty[0][1]).is_literal = True
            return
        is_made = ran.info.root in _LITERALS
        read = [] if is_made else operands(ran.info, args, kwargs, before, self._table)
        has_constant = is_made or has_nonfinite_number(args, kwargs)
        for number, x in dirty:
            self._judge.output(ran, x, number, read, has_constant=has_constant)

    def _find_laundering(self, info: OpInfo, index: int, args: Any, kwargs: Any, before: Snapshots | None) -> None:
        if info.is_inspector or _compares_for_nonfinite(info, args):
            return
        read = operands(info, args, kwargs, before, self._table)
        if info.by_place or (info.root == "index_put" and not _has_mask(args)):
            return
        ran = Ran(info, index, ())
        for operand in read:
            if is_bad(operand):
                assert operand.entry is not None
                self._report.launder(ran, operand, operand.entry.bad)
        found = self._judge.outsider([o for o in read if not is_bad(o)])
        if found is not None:
            event = self._report.bad_input(ran, *found)
            self._judge.blame_outsider(*found, event)
            self._report.launder(ran, found[0], event)

    def _written(self, outputs: list[tuple[int, Tensor]], dirty: list[tuple[int, Tensor]]) -> None:
        """A write that covers its storage ends what was known of it; a partial one joins."""
        bad = {i for i, _ in dirty}
        for i, x in outputs:
            entry = self._table.get(x)
            if entry is None or not covers_storage(x):
                continue
            if i not in bad:
                self._table.forget(x)
            else:
                entry.unwritten = None if entry.bad or entry.legal or entry.pending else entry.unwritten

    def _check_output(self, output: Any, place: str) -> None:
        with quiet():
            for number, x in enumerate(_top_tensors(output)):
                if not readable(x):
                    continue
                flags = flags_of(x)
                operand = Operand("output", x, x, flags, self._table.get(x))
                if flags and not is_bad(operand):
                    self._judge.leaving(operand, number, self.num_ops, place)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as e:  # noqa: BLE001 - our failure must not stop inference; it is counted and shown
            self._failed(e)
            return None

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        if self.failures == 1:
            _logger.warning("firetower: op-level sensing failed and goes on without: %s", self.last_failure)


def _uses_flex_attention(model: nn.Module) -> bool:
    configs = (getattr(m, "config", None) for m in model.modules())
    return any(getattr(c, "_attn_implementation", None) == "flex_attention" for c in configs)


def quiet() -> AbstractContextManager[Any]:
    """Hides our own reads from every dispatch and function mode that is on, this one and the user's."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        stack = contextlib.ExitStack()
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C.DisableTorchFunction())
        return stack
    return _NOTHING


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def _arguments(info: OpInfo, args: Any, kwargs: Any, before: Snapshots | None) -> tuple[tuple[str, Tensor], ...]:
    found = []
    for name, value in named_arguments(info, args, kwargs):
        if name in info.outs or (info.overwrites and name in info.mutated):
            continue
        for i, x in enumerate(tensors_in(value)):
            old = x if before is None else before.get(id(x), x)
            if old is not None and readable(old):
                found.append((name if isinstance(value, Tensor) else f"{name}[{i}]", old))
    return tuple(found)


def _compares_for_nonfinite(info: OpInfo, args: Any) -> bool:
    """``x != x``, ``x == inf``: how isnan and isfinite are written."""
    if info.root not in ("eq", "ne") or len(args) < 2:
        return False
    return args[0] is args[1] or has_nonfinite_number(tuple(args[1:2]), {})


def _has_mask(args: Any) -> bool:
    return len(args) > 1 and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))


def _top_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Mapping):
        return [t for v in output.values() for t in tensors_in(v)]
    return list(tensors_in(output))
