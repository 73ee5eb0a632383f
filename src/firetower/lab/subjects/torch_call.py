"""A call of a PyTorch module or function as a subject: most parts are had from running it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from firetower.attach.state import CallState
from firetower.attach.state_tensors import TensorState
from firetower.core.errors import SubjectError
from firetower.core.records import Fire
from firetower.lab.subject import FILLS, PARTS, Array, Op, Outcome, Request, Rows, Switch, Weight, hash_of
from firetower.lab.subjects.torch_trace import Around, Trace, as_array, to_numpy
from firetower.sensors.ops_events import Cause, OpEvent
from firetower.sensors.ops_kinds import op_info
from firetower.sensors.ops_names import tensors_under
from firetower.sensors.ops_table import storage_key
from firetower.sensors.ops_values import is_float, tensors_in

MAX_KEPT_BYTES = 256 << 20
"""Weights up to this size together are kept as loaded; of larger models only hashes are."""

Context = Callable[[], AbstractContextManager[Any]]

_BUILT_IN = (Switch.FILL_A, Switch.FILL_B, Switch.ZERO_UNREAD, Switch.ZERO_INPUTS)


class TorchSubject:
    """Runs one call again and again, each time from the same state, with every op checked.

    Args:
        fn: a module, a bound method such as ``model.generate``, or any function; run without gradients.
        *args: passed on unchanged.
        kwargs: keyword arguments of the call.
        name: for people.
        model: the module whose weights are watched; found from ``fn`` where it can be.
        at_load: the weights as loaded, by name; ``"now"`` where the model was loaded just now. When left out,
            a weight that the call itself changes is still seen, but nothing is said of what came before.
        switches: further ways to run the call: a context manager factory for each.
        parts: further parts (`lab.subject`) by name, each a function like the method of that name: what only
            the engine or a drill knows (``states``, ``slots``, ``valid_rows``, ``laws``, ...). They replace
            what is had here.
        fire: the stored incident, where there is one.

    Raises:
        SubjectError: ``parts`` names something that is no part.
        InvestigateError: the call holds state that cannot be put back.
    """

    clean_twin_bit_stable = True
    """Deterministic on the CPU and one thread; pass ``parts`` otherwise."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        name: str = "",
        model: nn.Module | None = None,
        at_load: Mapping[str, Tensor] | Literal["now"] | None = None,
        switches: Mapping[Switch, Context] | None = None,
        parts: Mapping[str, Any] | None = None,
        fire: Fire | None = None,
    ) -> None:
        for part in parts or ():
            if part not in PARTS:
                raise SubjectError(f"parts={part!r}: is no part of a subject; known: {', '.join(PARTS)}")
        self.name = name or getattr(fn, "__qualname__", type(fn).__name__)
        self.fire = fire
        self._call: Callable[[], Any] = functools.partial(fn, *args, **(kwargs or {}))
        named = {**{str(i): a for i, a in enumerate(args)}, **(kwargs or {})}
        self._state = CallState(fn, named)
        self._model = model if model is not None else _model_of(fn, self._state)
        self._tensors = TensorState()
        if self._model is not None and self._model not in self._state.modules:
            # a model that the call does not show, or whose class the walk passes over
            for path, x in (*self._model.named_parameters(), *self._model.named_buffers()):
                self._tensors.add(x, path)
            self._tensors.take()
        self._switches = dict(switches or {})
        self._knows_load = at_load is not None
        self._loaded = _kept(at_load if isinstance(at_load, Mapping) else self._parameters())
        self._inputs = named
        self._served: Outcome | None = None
        self._event: OpEvent | None = None
        self._trace: Trace | None = None
        self._weights: tuple[Weight, ...] = ()
        self._changed = False
        for part, given in (parts or {}).items():
            setattr(self, part, given)

    def reset(self) -> None:
        """Put the call's state, and the random streams, back."""
        self._state.restore()
        if changed := self._tensors.restore():
            raise SubjectError(f"{changed[0]}: changed by the run and too large to be kept; run it on a smaller model")

    def switches(self) -> Sequence[Switch]:
        """Those built in, and those given."""
        return (*_BUILT_IN, *self._switches)

    def run(self, request: Request) -> Outcome | None:
        """Run under one switch; the outcome is wrong where an op made, or read, a bad value.

        An exception of the call is an outcome without outputs.
        """
        if request.switch is Switch.ZERO_INPUTS:
            return self._zero_inputs()
        if request.switch is None and request.number == 0:
            self._ensure_served()
            return self._served
        self.reset()
        with self._context(request.switch):
            return self._run(Trace(self._model, None, {}))[0]

    def _ensure_served(self) -> None:
        """The run as served, once: its first bad op and what it did to the weights are what all parts show."""
        if self._served is not None:
            return
        self.reset()
        first = Trace(self._model, None, {})
        self._served, self._event = self._run(first)
        self._weights = tuple(self._weight(n, p) for n, p in self._parameters().items())
        self._trace = first
        if self._event is None:
            return
        self.reset()
        second = Trace(self._model, self._event.index, self._weight_names(), self._event.op)
        self._run(second)
        if self._event.index in second.records:
            self._trace = second

    def _run(self, mode: Trace) -> tuple[Outcome, OpEvent | None]:
        mode.note_inputs((), self._inputs)
        error: str | None = None
        result: Any = None
        with torch.no_grad(), mode:
            try:
                result = self._call()
            except Exception as e:  # noqa: BLE001 - whatever the call raises is a finding
                error = f"{type(e).__name__}: {e}"
            mode.check_output(result)
        outputs = tuple(as_array(path, x) for path, x in tensors_under(result, "result") if x.dtype is not torch.bool)
        event = mode.origin
        if event is None and error is None:
            # what is non-finite and yet no fire is a legal -Inf
            legal = any(not _finite(a) for a in outputs)
            return Outcome(outputs=outputs, is_wrong=False if legal else None), None
        where = error if event is None else f"{event.module} {event.op}"
        kind = "" if event is None else str(event.first.kind)
        return Outcome(outputs=outputs, origin=where, kind=kind, is_wrong=True), event

    def launderers(self) -> Sequence[str]:
        """The ops that a bad value went into and did not come out of."""
        self._ensure_served()
        assert self._trace is not None
        found = self._trace.laundered
        return tuple(f"{e.op} in {e.module or 'the call'} took a {e.first.kind} in and shows none" for e in found)

    @contextlib.contextmanager
    def _context(self, switch: Switch | None) -> Iterator[None]:
        if switch is None:
            yield
        elif switch in self._switches:
            with self._switches[switch]():
                yield
        else:
            value = FILLS[switch]
            self._fill_buffers(value)
            with _FilledAllocations(value):
                yield

    def _fill_buffers(self, value: float) -> None:
        """Give a value to what is non-finite in run-time buffers; masks of -Inf stay."""
        for buffer in self._buffers():
            bad = torch.isnan(buffer) | torch.isposinf(buffer)
            buffer.masked_fill_(bad, value)

    def _buffers(self) -> list[Tensor]:
        found = [] if self._model is None else list(self._model.buffers())
        return [b for b in found if is_float(b) and b.element_size() > 1]

    def _parameters(self) -> dict[str, Tensor]:
        return {} if self._model is None else {n: p.detach() for n, p in self._model.named_parameters()}

    def _weight_names(self) -> dict[int, str]:
        found = {} if self._model is None else {storage_key(b): n for n, b in self._model.named_buffers()}
        return found | {storage_key(p): n for n, p in self._parameters().items()}

    def _weight(self, name: str, now: Tensor) -> Weight:
        hash_now = hash_of(to_numpy(now))
        then, copy = self._loaded.get(name, (None, None))
        if not self._knows_load and then == hash_now:
            # unchanged by the call; what it was at load nobody knows
            then, copy = None, None
        return Weight(
            name=name,
            now=as_array(name, now.clone() if then != hash_now else now),
            hash_now=hash_now,
            hash_at_load=then,
            at_load=None if copy is None else as_array(name, copy),
        )

    def weights(self) -> Sequence[Weight] | None:
        """Every parameter as the run as served left it, against what it was at load where that is known."""
        self._ensure_served()
        return self._weights if self._model is not None else None

    def first_bad_op(self) -> Op | None:
        """The op, its operands, and the ops around it."""
        self._ensure_served()
        return self._around().op() if self._has_records() else None

    def reference(
        self, dtype: Literal["float32", "float64"], what: Literal["op", "chain", "outputs"]
    ) -> Sequence[Array] | None:
        """The op, or the op with its producers, computed again; whole outputs only through ``parts``."""
        self._ensure_served()
        if what == "outputs" or not self._has_records():
            return None
        found = self._around().again(getattr(torch, dtype), chain=what == "chain")
        return None if found is None else (as_array("output", found),)

    def quantised(self) -> Sequence[Any] | None:
        """``()`` where nothing is rounded or turned into 8 bits; else only the engine can tell."""
        self._ensure_served()
        assert self._trace is not None
        ran = self._trace.roots
        quantises = self._trace.integer_casts or bool(ran & {"round", "bucketize"}) or any("quant" in r for r in ran)
        return None if quantises else ()

    def splits(self) -> Sequence[Any] | None:
        """``()`` where the module of the first bad op has one exponential at most: its softmax is not split."""
        self._ensure_served()
        assert self._trace is not None
        module = self._event.module if self._event is not None else ""
        return () if self._trace.exponentials.get(module, 0) <= 1 else None

    def valid_rows(self) -> Sequence[Rows] | None:
        """Rows of the memory that nobody wrote, where that is what burned; ``()`` where an op burned by itself."""
        self._ensure_served()
        event = self._event
        if event is None or not self._has_records():
            return None
        if event.cause is Cause.UNWRITTEN:
            return tuple(self._unwritten())
        return () if event.cause in (Cause.OWN, Cause.MASK, Cause.WEIGHT, Cause.CONSTANT) else None

    def _unwritten(self) -> Iterator[Rows]:
        for _, x, owner, _ in self._around().target.tensors.values():
            if owner is None and is_float(x) and x.ndim and not bool(torch.isfinite(x).all()):
                rows = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
                written = [bool(torch.isfinite(r).all()) for r in rows]
                yield Rows(
                    name="memory",
                    step=0,
                    is_valid=tuple(written),
                    written_at=tuple(0 if w else None for w in written),
                    values=as_array("memory", x),
                )

    def _has_records(self) -> bool:
        return self._trace is not None and self._trace.target is not None

    def _around(self) -> Around:
        assert self._trace is not None
        return Around(self._trace)

    def _zero_inputs(self) -> Outcome | None:
        self._ensure_served()
        found = self._around().with_zero_inputs() if self._has_records() else None
        return None if found is None else Outcome(outputs=(as_array("output", found),))


def _model_of(fn: Any, state: CallState) -> nn.Module | None:
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    return state.modules[0] if len(state.modules) == 1 else None


class _FilledAllocations(TorchDispatchMode):
    """Fills every allocation, so that what is read before it is written has a known value."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if op_info(func).is_allocator:
            for x in tensors_in(out):
                if is_float(x) and not x.is_meta:
                    x.fill_(self.value)
        return out


def _kept(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor | None]]:
    """Hash of each weight, and a copy where all of them together are small."""
    small = sum(w.numel() * w.element_size() for w in weights.values()) <= MAX_KEPT_BYTES
    return {n: (hash_of(to_numpy(w)), w.detach().clone() if small else None) for n, w in weights.items()}


def _finite(a: Array) -> bool:
    import numpy as np

    return not np.issubdtype(a.values.dtype, np.floating) or bool(np.isfinite(a.values).all())
