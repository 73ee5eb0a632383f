"""Keeps the ops around the first bad one with their operands, and computes them again in a wider type."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from firetower.lab.subject import Array, Op
from firetower.sensors.ops_kinds import OpInfo, op_info
from firetower.sensors.ops_mode import OpsMode, quiet
from firetower.sensors.ops_table import storage_key
from firetower.sensors.ops_values import named_arguments, tensors_in

NUM_BEFORE = 96
NUM_AFTER = 24
"""How many ops before and after the first bad one are kept."""

MAX_ELEMENTS = 1 << 24
"""Largest tensor whose values are kept; an op with a larger one is kept without it."""

MAX_UPSTREAM = 32
"""Most ops that are shown upstream of the first bad one."""

_PACKAGE = Path(__file__).parents[2]
_NOT_CALLERS = (str(Path(torch.__file__).parent), *(str(_PACKAGE / room) for room in ("lab", "sensors", "attach")))
_EXPONENTIALS = frozenset(("exp", "exp2", "softmax", "log_softmax", "logsumexp", "safe_softmax"))


@dataclasses.dataclass(slots=True)
class Record:
    """One op: what it was called with, copies of its tensors, and which records made and used them.

    ``tensors`` maps the place of a tensor among the arguments to (argument name, copy, name of the weight or
    None, index of the record that wrote it or None).
    """

    index: int
    func: Any
    info: OpInfo
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: dict[int, tuple[str, Tensor, str | None, int | None]]
    outputs: tuple[Tensor, ...] = ()
    used_by: list[int] = dataclasses.field(default_factory=list)
    source: str = ""


class Trace(OpsMode):  # type: ignore[no-untyped-call]
    """`OpsMode` that keeps records around one op.

    Args:
        model: see `OpsMode`.
        target: index of the first bad op as an earlier run of the same call counted it; None keeps nothing.
        weights: names by storage.

    Attributes:
        roots: names of all ops that ran.
        records: by index.
        history_absmax: largest finite magnitude of each earlier run of the target's op at the same line.
        exponentials: how many ops of each module path are exponentials.
    """

    def __init__(self, model: Any, target: int | None, weights: Mapping[int, str], op_name: str = "") -> None:
        super().__init__(model)
        self.target = target
        self.op_name = op_name
        self.roots: set[str] = set()
        self.integer_casts = False
        self.records: dict[int, Record] = {}
        self.exponentials: dict[str, int] = {}
        self._weights = weights
        self._writers: dict[int, int] = {}
        self._history: list[tuple[str, float]] = []
        # keeps the storages, so that no other tensor takes one that is linked; not the tensors: a factory whose
        # result is held elsewhere returns a detached alias, one op more than in a run that is not traced
        self._alive: deque[Any] = deque(maxlen=NUM_BEFORE + NUM_AFTER)
        self._linears: list[RemovableHandle] = []
        self.modules: dict[int, Op] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info, index = op_info(func), self.num_ops
        if info.is_composite or info.is_own:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kept = self._before(info, index, func, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self._guarded(lambda: self._after(info, index, kept, args, kwargs, out))
        return out

    def __enter__(self) -> Trace:
        linears = [(n, m) for r in self.stack.roots for n, m in r.named_modules() if isinstance(m, nn.Linear)]
        self._linears = (
            [m.register_forward_hook(self._linear(n)) for n, m in linears] if self.target is not None else []
        )
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for handle in self._linears:
            handle.remove()

    def _linear(self, name: str) -> Any:
        """A hook that notes what a linear layer answered, whatever ops it is made of."""

        def after(module: nn.Linear, args: Any, output: Any) -> None:
            writer = self._writers.get(storage_key(output)) if isinstance(output, Tensor) else None
            if writer in self.records and args and isinstance(args[0], Tensor):
                self._guarded(lambda: self._note_linear(writer, name, module, args[0], output))

        return after

    def _note_linear(self, writer: int, name: str, module: nn.Linear, x: Tensor, y: Tensor) -> None:
        with quiet():
            self.modules[writer] = Op(
                name="linear",
                module=name,
                inputs=(as_array("input", x),),
                weights=(as_array(f"{name}.weight", module.weight),),
                outputs=(as_array("output", y),),
            )

    @property
    def history_absmax(self) -> tuple[float, ...]:
        """Of the runs of the target's op at the target's line, before it."""
        target = None if self.target is None else self.records.get(self.target)
        return tuple(a for line, a in self._history if target is not None and line == target.source)

    def _before(self, info: OpInfo, index: int, func: Any, args: Any, kwargs: Any) -> Record | None:
        if self.target is None or not self.target - NUM_BEFORE <= index <= self.target + NUM_AFTER:
            return None
        with quiet():
            record = Record(index, func, info, self.stack.path, args, kwargs, {})
            flat = [(n, t) for n, v in named_arguments(info, args, kwargs) for t in tensors_in(v)]
            for place, (name, x) in enumerate(flat):
                key = storage_key(x) if x.layout is torch.strided else 0
                owner, writer = self._weights.get(key), self._writers.get(key)
                value = x if owner is not None and name not in info.mutated else _copy(x)
                record.tensors[place] = (name, value, owner, writer)
                if writer in self.records:
                    self.records[writer].used_by.append(index)
            return record

    def _after(self, info: OpInfo, index: int, record: Record | None, args: Any, kwargs: Any, out: Any) -> None:
        self.roots.add(info.root)
        found = tuple(tensors_in(out))
        self.integer_casts |= info.root == "_to_copy" and any(x.element_size() == 1 for x in found)
        if info.root in _EXPONENTIALS:
            self.exponentials[self.stack.path] = self.exponentials.get(self.stack.path, 0) + 1
        with quiet():
            if self.op_name == info.name and self.target is not None and index <= self.target:
                self._note_absmax(index, found, record)
            if record is None:
                return
            written = found or tuple(
                t for n, v in named_arguments(info, args, kwargs) if n in info.mutated for t in tensors_in(v)
            )
            record.outputs = tuple(_copy(x) for x in written)
        self.records[index] = record
        for x in written:
            if x.layout is torch.strided:
                self._alive.append(x.untyped_storage())
                if not info.is_view:
                    self._writers[storage_key(x)] = index

    def _note_absmax(self, index: int, found: tuple[Tensor, ...], record: Record | None) -> None:
        line = f"{self.stack.path} {caller_line()}"
        if record is not None and index == self.target:
            record.source = line
            return
        if found and found[0].is_floating_point() and found[0].numel():
            x = found[0].detach().float()
            self._history.append((line, float(torch.where(torch.isfinite(x), x, 0).abs().max())))


def caller_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's, nor the sensors', nor the lab's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone() if x.numel() <= MAX_ELEMENTS and not x.is_meta else x.detach()


def as_array(name: str, x: Tensor) -> Array:
    """A tensor as the lab's `Array`; bfloat16 and float8 are widened to float32."""
    dtype = str(x.dtype).removeprefix("torch.")
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16 or (plain.is_floating_point() and plain.element_size() == 1):
        plain = plain.float()
    return Array(name=name, values=plain.contiguous().numpy(), dtype=dtype)


class Around:
    """The ops around the target of a trace as the lab's `Op`, and as computed again."""

    def __init__(self, trace: Trace) -> None:
        assert trace.target is not None
        self.trace = trace
        self.records = trace.records
        self.target = trace.records[trace.target]
        self._left = MAX_UPSTREAM

    def op(self) -> Op:
        """The first bad op with what is up- and downstream of it."""
        self._left = MAX_UPSTREAM
        consumers = (self._plain(self.records[i]) for i in self._users(self.target))
        return dataclasses.replace(
            self._op(self.target, {self.target.index}),
            consumers=tuple(consumers),
            history_absmax=self.trace.history_absmax,
        )

    def _users(self, record: Record) -> list[int]:
        return [i for i in dict.fromkeys(record.used_by) if i in self.records and not self.records[i].info.is_view]

    def _plain(self, record: Record) -> Op:
        """An op downstream, with those that use it in turn."""
        users = (self._bare(self.records[i]) for i in self._users(record))
        return dataclasses.replace(self._bare(record), consumers=tuple(users))

    def _bare(self, record: Record) -> Op:
        inputs: list[Array] = []
        weights: list[Array] = []
        for name, x, owner, _ in record.tensors.values():
            if x.is_meta or (x.numel() > MAX_ELEMENTS and owner is None):
                continue
            (inputs if owner is None else weights).append(as_array(owner or name, x))
        outputs = tuple(as_array("output", x) for x in record.outputs)
        return Op(
            name=record.info.name,
            module=record.module,
            source=record.source,
            inputs=(*inputs, *_scalars(record)),
            outputs=outputs,
            weights=tuple(weights),
        )

    def _op(self, record: Record, seen: set[int]) -> Op:
        # breadth first, and each op once: the graph is no tree, and far ops tell little
        children = []
        for index in self._makers(record):
            if index not in seen and self._left > 0:
                seen.add(index)
                self._left -= 1
                children.append(index)
        producers = tuple(self._op(self.records[i], seen) for i in children)
        # a product is one op, whatever it is made of
        whole = self.trace.modules.get(record.index)
        bare = self._bare(record) if whole is None or record is self.target else whole
        return dataclasses.replace(bare, producers=producers)

    def _makers(self, record: Record) -> Iterator[int]:
        for _, _, _, writer in record.tensors.values():
            if writer is not None and writer in self.records and writer != record.index:
                yield writer

    def again(self, dtype: torch.dtype, *, chain: bool) -> Tensor | None:
        """The target's first output computed in ``dtype`` from its stored inputs, or with its producers' too."""
        return self._compute(self.target, dtype, {} if chain else None)

    def with_zero_inputs(self) -> Tensor | None:
        """The target's first output for zeros in place of its activations."""
        zeros = {
            place: torch.zeros_like(x)
            for place, (_, x, owner, _) in self.target.tensors.items()
            if owner is None and x.is_floating_point()
        }
        return _call(self.target, {p: x for p, (_, x, _, _) in self.target.tensors.items()} | zeros)

    def _compute(self, record: Record, dtype: torch.dtype, done: dict[int, Tensor | None] | None) -> Tensor | None:
        wide = {}
        for place, (_, x, _, writer) in record.tensors.items():
            value: Tensor | None = x
            if done is not None and writer is not None and writer in self.records and writer < record.index:
                value = self._chained(writer, x, dtype, done)
            value = x if value is None else value
            wide[place] = value.to(dtype) if value.is_floating_point() else value
        return _call(record, wide, dtype)

    def _chained(self, writer: int, x: Tensor, dtype: torch.dtype, done: dict[int, Tensor | None]) -> Tensor | None:
        maker = self.records[writer]
        if writer not in done:
            done[writer] = None if maker.info.mutated else self._compute(maker, dtype, done)
        made = done[writer]
        # a view of what was made cannot be told from it by shape alone: only the whole is taken over
        return made if made is not None and made.numel() == x.numel() and made.shape == x.shape else None


def _scalars(record: Record) -> Iterator[Array]:
    """Python numbers among the arguments, as the output's type holds them."""
    if not record.outputs or not record.outputs[0].is_floating_point():
        return
    for name, value in named_arguments(record.info, record.args, dict(record.kwargs)):
        if isinstance(value, float) and value != 0:
            yield as_array(name, torch.tensor([value], dtype=torch.float64).to(record.outputs[0].dtype))


def _call(record: Record, tensors: Mapping[int, Tensor], dtype: torch.dtype | None = None) -> Tensor | None:
    """Run an op on other tensors; None where it does not take them."""
    places = iter(range(len(tensors)))

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensors[next(places)]
        if isinstance(value, list | tuple):
            return type(value)(swap(v) for v in value)
        return value

    args = tuple(swap(a) for a in record.args)
    kwargs = {k: swap(v) for k, v in record.kwargs.items()}
    if dtype is not None and isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
        kwargs["dtype"] = dtype
    if record.info.mutated:
        args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    try:
        with torch.no_grad():
            out = record.func(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    found: Sequence[Tensor] = list(tensors_in(out))
    return found[0].detach() if found else None


def to_numpy(x: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Values of a tensor as `as_array` has them."""
    return as_array("", x).values
