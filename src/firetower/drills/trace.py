"""Every op of one call with its operands: what the lab asks about the first bad op and the ops around it.

A drill's run is small, so all of it is kept. Which op is the first bad one is the black box's own finding
(`sensors.ops_mode`); this file only remembers what that op read and wrote, and can compute it again.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from firetower.drills.arrays import to_array
from firetower.lab.subject import Array, Op
from firetower.sensors.ops_kinds import OpInfo, op_info
from firetower.sensors.ops_mode import OpsMode, quiet

_DEPTH_BACK, _DEPTH_ON, _MAX_CONSUMERS = 6, 2, 12
_NOT_USER_CODE = ("/torch/", "firetower/drills/trace.py", "firetower/sensors/")
WIDE = {"float32": torch.float32, "float64": torch.float64}
"""Types that a reference may be computed in."""


@dataclasses.dataclass(slots=True, eq=False)
class Operand:
    """One tensor that an op read, as it was. ``weight`` is the parameter's name where it is one."""

    name: str
    value: Tensor
    weight: str | None
    maker: Ran | None


@dataclasses.dataclass(slots=True, eq=False)
class Ran:
    """One op that ran, or one module that counts as one.

    ``first`` and ``last`` are numbers of the ops that it is made of; ``is_module``: it is a module that counts as
    one op. ``again`` computes it once more from operands of the caller's making.
    """

    first: int
    last: int
    name: str
    module: str
    source: str
    operands: list[Operand]
    outputs: list[Tensor]
    again: Callable[[Callable[[Operand], Tensor], torch.dtype | None], list[Tensor]]
    is_module: bool = False
    users: list[Ran] = dataclasses.field(default_factory=list)


class Recording(TorchDispatchMode):
    """Ops of one call. Enter it, run, leave it, then ask for `first_bad`.

    Args:
        model: names modules and weights.
        kernels: module path -> name: such a module is one op.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, kernels: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sensed = OpsMode(model)
        self.ran: list[Ran] = []
        self._weights = {_storage(p): n for n, p in model.named_parameters()}
        self._makers: dict[int, Ran] = {}
        self._kept: list[Tensor] = []  # a freed storage's address must not come back as another tensor's
        self._path: list[str] = []
        self._inside: list[tuple[str, int, list[Operand], tuple[Any, Any]]] = []
        self._hooks: list[Any] = []
        self._model, self._kernels = model, kernels

    def __enter__(self) -> Recording:
        for path, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._begin(path), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end(path)))
        self.sensed.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.sensed.__exit__(*exc)
        for hook in self._hooks:
            hook.remove()

    @property
    def first_bad(self) -> Ran | None:
        """The op where the first bad value began, by the black box."""
        event = self.sensed.origin
        found = [r for r in self.ran if event is not None and r.first <= event.index <= r.last]
        # a module that counts as one op stands for those inside of it, and stores no legal -Inf
        found += [r for r in self.ran if r.is_module and any(_is_bad(x) or _has_neg_inf(x) for x in r.outputs)]
        return min(found, key=lambda r: r.first, default=None)

    def first_bad_in(self, real_rows: Tensor | None) -> Ran | None:
        """The op where the first bad value of a real row began, when pads may hold anything."""
        if real_rows is None:
            return self.first_bad
        return next((r for r in self.ran if any(_is_bad(x, real_rows) for x in r.outputs)), None)

    def _begin(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(path)
            if path in self._kernels and not self._inside:
                with quiet():
                    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                    operands = [self._operand(f"input{i or ''}", x) for i, x in enumerate(tensors)]
                    operands += [
                        Operand(f"{path}.{n}".strip("."), p.detach(), f"{path}.{n}".strip("."), None)
                        for n, p in module.named_parameters()
                    ]
                    self._inside.append((path, self.sensed.num_ops, operands, (args, kwargs)))

        return hook

    def _end(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._path.pop()
            if self._inside and self._inside[-1][0] == path:
                _, first, operands, given = self._inside.pop()
                again = _module_again(module, given, operands)
                last = max(first, self.sensed.num_ops - 1)
                with quiet():
                    ran = Ran(first, last, self._kernels[path], path, "", operands, [], again, is_module=True)
                    self._add(ran, [x for x in tree_leaves(output) if isinstance(x, Tensor)])

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info, number = op_info(func), self.sensed.num_ops
        if self._inside or info.is_view or info.is_own or info.is_composite:
            return func(*args, **kwargs)
        with quiet():
            operands = self._operands(info, args, kwargs)
        out = func(*args, **kwargs)
        if not info.is_allocator:
            with quiet():
                self._record(info, func, number, args, kwargs, operands, out)
        else:
            self._kept += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out

    def _operands(self, info: OpInfo, args: Any, kwargs: Any) -> dict[int, Operand]:
        named = {**dict(zip(info.arg_names, args, strict=False)), **kwargs}
        found = {}
        for name, value in named.items():
            tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
            for i, x in enumerate(tensors):
                found[id(x)] = self._operand(name if len(tensors) == 1 else f"{name}[{i}]", x)
        return found

    def _operand(self, name: str, x: Tensor) -> Operand:
        weight = self._weights.get(_storage(x))
        value = x.detach() if weight else x.detach().clone()
        return Operand(weight or name, value, weight, self._makers.get(_storage(x)))

    def _record(
        self,
        info: OpInfo,
        func: Any,
        number: int,
        args: Any,
        kwargs: Any,
        operands: dict[int, Operand],
        out: Any,
    ) -> None:
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        named = {**dict(zip(info.arg_names, args, strict=False)), **kwargs}
        if info.mutated and not outputs:
            outputs = [x for n in info.mutated for x in tree_leaves(named.get(n)) if isinstance(x, Tensor)]
        # what is only written was not read
        written = {id(named[n]) for n in info.mutated if info.overwrites and n in named}
        read = [o for key, o in operands.items() if key not in written]
        again = _op_again(func, args, kwargs, operands)
        module = self._path[-1] if self._path else ""
        self._add(Ran(number, number, info.name, module, _source(), read, [], again), outputs)

    def _add(self, ran: Ran, outputs: list[Tensor]) -> None:
        ran.outputs = [x.detach().clone() for x in outputs]
        for maker in {id(o.maker): o.maker for o in ran.operands if o.maker is not None}.values():
            maker.users.append(ran)
        for x in outputs:
            self._makers[_storage(x)] = ran
            self._kept.append(x)
        self.ran.append(ran)

    def op(self, ran: Ran) -> Op:
        """An op as the lab sees it, with its neighbours."""
        return _to_op(ran, _DEPTH_BACK, _DEPTH_ON, self._history(ran))

    def _history(self, ran: Ran) -> tuple[float, ...]:
        same = [
            r.outputs[0]
            for r in self.ran[: self.ran.index(ran)]
            if (r.name, r.module, r.source) == (ran.name, ran.module, ran.source) and r.outputs
        ]
        return tuple(_absmax(x) for x in same if x.is_floating_point())


def again(ran: Ran, dtype: torch.dtype, *, chain: bool) -> Tensor:
    """The op computed once more in ``dtype``; with ``chain`` what made its inputs as well."""
    memo: dict[int, list[Tensor]] = {}

    def value_of(operand: Operand) -> Tensor:
        maker = operand.maker
        if not chain or maker is None or operand.value.numel() != sum(x.numel() for x in maker.outputs[:1]):
            return operand.value
        if id(maker) not in memo:
            memo[id(maker)] = maker.again(value_of, dtype)
        return memo[id(maker)][0].reshape(operand.value.shape)

    return ran.again(value_of, dtype)[0]


def zero_inputs(ran: Ran) -> list[Tensor]:
    """What the op stores when its activations are zeros; weights and integers stay."""
    return ran.again(
        lambda o: torch.zeros_like(o.value) if o.weight is None and o.value.is_floating_point() else o.value,
        None,
    )


def _op_again(func: Any, args: Any, kwargs: Any, operands: dict[int, Operand]) -> Any:
    # the call's tensors are replaced by what they held then: they may be written to later
    shape = tree_map(lambda x: operands.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))

    def run(value_of: Callable[[Operand], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        def fill(x: Any) -> Any:
            if isinstance(x, Operand):
                value = value_of(x)
                return value.to(dtype) if dtype and value.is_floating_point() else value.clone()
            is_type = isinstance(x, torch.dtype) and x.is_floating_point
            return dtype if dtype is not None and is_type else x

        filled, named = tree_map(fill, shape, is_leaf=lambda x: isinstance(x, Operand))
        if func is torch.ops.aten._softmax.default:
            filled = [*filled[:2], False]
        with quiet(), torch.no_grad():
            out = func(*filled, **named)
        return [x for x in tree_leaves(out) if isinstance(x, Tensor)]

    return run


def _module_again(module: nn.Module, given: tuple[Any, Any], operands: list[Operand]) -> Any:
    """The module's own forward, as its class has it, whatever stands in its place in this instance."""

    def run(value_of: Callable[[Operand], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        values = iter([value_of(o) for o in operands if o.weight is None])
        wide = copy.deepcopy(module)
        wide = wide.to(dtype) if dtype else wide

        def fill(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            value = next(values)
            return value.to(dtype) if dtype and value.is_floating_point() else value

        with torch.no_grad():
            filled, named = tree_map(fill, given)
            out = type(module).forward(wide, *filled, **named)
        return [x for x in tree_leaves(out) if isinstance(x, Tensor)]

    return run


def _to_op(ran: Ran, back: int, on: int, history: tuple[float, ...] = ()) -> Op:
    makers = {id(o.maker): o.maker for o in ran.operands if o.maker is not None}.values() if back else ()
    return Op(
        name=ran.name,
        module=ran.module,
        source=ran.source,
        inputs=tuple(_arrays(o for o in ran.operands if o.weight is None)),
        weights=tuple(_arrays(o for o in ran.operands if o.weight is not None)),
        outputs=tuple(to_array(f"output{i or ''}", x) for i, x in enumerate(ran.outputs)),
        producers=tuple(_to_op(m, back - 1, 0) for m in sorted(makers, key=lambda m: -m.last)),
        consumers=tuple(_to_op(u, 0, on - 1) for u in ran.users[:_MAX_CONSUMERS]) if on else (),
        history_absmax=history,
    )


def _arrays(operands: Iterator[Operand]) -> Iterator[Array]:
    # an empty tensor, such as a cache that starts, has no rows to look at
    return (to_array(o.name, o.value) for o in operands if o.value.numel())


def _has_neg_inf(x: Tensor) -> bool:
    return x.is_floating_point() and bool(x.isneginf().any())


def _is_bad(x: Tensor, real_rows: Tensor | None = None) -> bool:
    if not x.is_floating_point() or not x.numel():
        return False
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    rows = rows[real_rows] if real_rows is not None and len(rows) == len(real_rows) else rows
    return bool((rows.isnan() | rows.isposinf()).any())


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _absmax(x: Tensor) -> float:
    finite = x.double().abs()[x.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _source() -> str:
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_USER_CODE):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
