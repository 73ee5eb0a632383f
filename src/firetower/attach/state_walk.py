"""Walks from a call to every mutable object it can reach, noting how to put each back."""

from __future__ import annotations

import array
import collections
import dis
import functools
import io
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from firetower.attach.state_tensors import TensorState
from firetower.core.errors import InvestigateError

_MAX_OBJECTS = 1_000_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SKIPPED_PACKAGES = _words(
    "_abc _thread abc copyreg ctypes inspect logging re regex threading tokenizers typing weakref"
)
"""What objects of these hold is no state of a computation: a logger, a lock, a tokenizer."""

_STATELESS_PACKAGES = _words(
    "builtins collections datetime decimal enum fractions functools numpy operator pathlib torch uuid"
)
"""Objects from here that have no attributes and are not handled below are values."""

_IMMUTABLE = (
    bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType,
    range, slice, types.CodeType, property, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))


class Walk:
    """Collects undo actions.

    Attributes:
        modules: every ``nn.Module`` met from outside another one.
        notes: state inside modules that cannot be put back.
    """

    def __init__(self, tensors: TensorState) -> None:
        self.modules: list[nn.Module] = []
        self.notes: list[str] = []
        self._tensors = tensors
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []
        self._pending: collections.deque[tuple[Any, str, bool]] = collections.deque()

    def add(self, value: Any, path: str) -> None:
        """Take down everything reachable from ``value``.

        Raises:
            InvestigateError: state that cannot be put back; ``path`` and what follows from it names where.
        """
        self._pending.append((value, path, True))
        while self._pending:
            self._visit(*self._pending.popleft())

    def restore(self) -> None:
        """Undo every change to what was taken down."""
        for undo in self._undo:
            undo()

    def _visit(self, value: Any, path: str, is_strict: bool) -> None:
        if isinstance(value, _IMMUTABLE) or id(value) in self._seen:
            return
        package = type(value).__module__.partition(".")[0]
        if package in _SKIPPED_PACKAGES or package == "firetower" or value is sys.stdout or value is sys.stderr:
            self._seen[id(value)] = value
            return
        if len(self._seen) >= _MAX_OBJECTS:
            raise InvestigateError(f"{path}: reaches more than {_MAX_OBJECTS} objects; pass the tensors themselves")
        self._seen[id(value)] = value
        for kind, visit in _VISITORS:
            if isinstance(value, kind):
                visit(self, value, path, is_strict)
                return
        if _is_stream(value):
            self._refuse(path, _stream_word(value), is_strict)
            return
        self._visit_object(value, path, is_strict)

    def _later(self, value: Any, path: str, is_strict: bool) -> None:
        if not isinstance(value, _IMMUTABLE):
            self._pending.append((value, path, is_strict))

    def _refuse(self, path: str, what: str, is_strict: bool) -> None:
        if is_strict:
            raise InvestigateError(
                f"{path}: {what}, which cannot be put back for a second run; pass what it yields instead "
                f"(a list, a tensor), or make it inside the function"
            )
        self.notes.append(f"not put back for the second run: {path}, {what}")

    def _tensor(self, x: Tensor, path: str, is_strict: bool) -> None:
        self._tensors.add(x, path)

    def _module(self, module: nn.Module, path: str, is_strict: bool) -> None:
        if is_strict:
            self.modules.append(module)
        # what a module holds is noted rather than refused: a lock or a tokenizer there is no reason to stop
        self._attributes(module, path, is_strict=False)

    def _mapping(self, value: MutableMapping[Any, Any], path: str, is_strict: bool) -> None:
        saved = dict(value)

        def undo() -> None:
            if not _same_items(value, saved):
                # the plain type's methods: subclasses such as ModelOutput forbid their own
                base = next(b for b in (collections.OrderedDict, dict, MutableMapping) if isinstance(value, b))
                base.clear(value)
                base.update(value, saved)

        self._undo.append(undo)
        for key, item in saved.items():
            self._later(item, f"{path}[{key!r}]", is_strict)
        self._extra_attributes(value, path, is_strict)

    def _list(self, value: Any, path: str, is_strict: bool) -> None:
        saved = list(value)

        def undo() -> None:
            if len(value) != len(saved) or any(a is not b for a, b in zip(value, saved, strict=True)):
                value.clear()
                value.extend(saved)

        self._undo.append(undo)
        for i, item in enumerate(saved):
            self._later(item, f"{path}[{i}]", is_strict)
        self._extra_attributes(value, path, is_strict)

    def _bytes(self, value: Any, path: str, is_strict: bool) -> None:
        saved = value[:]

        def undo() -> None:
            value[:] = saved

        self._undo.append(undo)

    def _set(self, value: set[Any], path: str, is_strict: bool) -> None:
        saved = set(value)

        def undo() -> None:
            value.clear()
            value.update(saved)

        self._undo.append(undo)
        for item in saved:
            self._later(item, f"{path} member", is_strict)

    def _tuple(self, value: Any, path: str, is_strict: bool) -> None:
        for i, item in enumerate(value):
            self._later(item, f"{path}[{i}]", is_strict)

    def _proxy(self, value: Mapping[Any, Any], path: str, is_strict: bool) -> None:
        for key, item in value.items():
            self._later(item, f"{path}[{key!r}]", is_strict)

    def _generator(self, value: torch.Generator, path: str, is_strict: bool) -> None:
        state = value.get_state()
        self._undo.append(lambda: value.set_state(state))

    def _random(self, value: random.Random, path: str, is_strict: bool) -> None:
        state = value.getstate()
        self._undo.append(lambda: value.setstate(state))

    def _method(self, value: types.MethodType, path: str, is_strict: bool) -> None:
        self._later(value.__self__, path, is_strict)
        self._later(value.__func__, path, is_strict)

    def _partial(self, value: functools.partial[Any], path: str, is_strict: bool) -> None:
        for item in (value.func, value.args, value.keywords):
            self._later(item, path, is_strict)

    def _function(self, fn: types.FunctionType, path: str, is_strict: bool) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._cell(cell, f"variable {name} of {fn.__qualname__}", is_strict)
        defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        for item in defaults:
            self._later(item, f"a default of {fn.__qualname__}", is_strict)
        self._later(fn.__dict__, path, is_strict)
        if not fn.__code__.co_filename.startswith(_LIBRARIES):
            for name in _global_names(fn.__code__):
                self._global(fn.__globals__, name, is_strict)

    def _cell(self, cell: types.CellType, path: str, is_strict: bool) -> None:
        try:
            saved = cell.cell_contents
        except ValueError:
            return

        def undo() -> None:
            if cell.cell_contents is not saved:
                cell.cell_contents = saved

        self._undo.append(undo)
        self._later(saved, path, is_strict)

    def _global(self, names: dict[str, Any], name: str, is_strict: bool) -> None:
        if name not in names:
            return
        saved = names[name]

        def undo() -> None:
            if names.get(name) is not saved:
                names[name] = saved

        self._undo.append(undo)
        self._later(saved, f"global {name}", is_strict)

    def _visit_object(self, value: Any, path: str, is_strict: bool) -> None:
        if "numpy" in sys.modules and self._visit_numpy(value, path, is_strict):
            return
        package = type(value).__module__.partition(".")[0]
        has_attributes = hasattr(value, "__dict__") or any(True for _ in _slots(value))
        if has_attributes:
            self._attributes(value, path, is_strict=is_strict)
        elif package not in _STATELESS_PACKAGES:
            self._refuse(path, f"a {_type_name(value)} without visible state", is_strict)

    def _visit_numpy(self, value: Any, path: str, is_strict: bool) -> bool:
        np = sys.modules["numpy"]
        if isinstance(value, np.ndarray):
            saved = value.copy()
            if value.flags.writeable:
                self._undo.append(lambda: np.copyto(value, saved))
        elif isinstance(value, np.random.Generator):
            self._bit_generator(value.bit_generator)
        elif isinstance(value, np.random.RandomState):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        else:
            return False
        return True

    def _bit_generator(self, source: Any) -> None:
        state = source.state

        def undo() -> None:
            source.state = state

        self._undo.append(undo)

    def _extra_attributes(self, value: Any, path: str, is_strict: bool) -> None:
        if hasattr(value, "__dict__"):
            self._attributes(value, path, is_strict=is_strict)

    def _attributes(self, value: Any, path: str, *, is_strict: bool) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._seen[id(own)] = own
            saved = dict(own)

            def undo() -> None:
                if not _same_items(own, saved):
                    own.clear()
                    own.update(saved)

            self._undo.append(undo)
            for name, item in saved.items():
                self._later(item, f"{path}.{name}", is_strict)
        for name, item in _slots(value):
            self._slot(value, name, item)
            self._later(item, f"{path}.{name}", is_strict)

    def _slot(self, value: Any, name: str, saved: Any) -> None:
        def undo() -> None:
            if getattr(value, name, None) is not saved:
                object.__setattr__(value, name, saved)

        self._undo.append(undo)


_VISITORS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (Tensor, Walk._tensor),
    (nn.Module, Walk._module),
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    (functools.partial, Walk._partial),
    (MutableMapping, Walk._mapping),
    ((list, collections.deque), Walk._list),
    ((bytearray, array.array), Walk._bytes),
    (set, Walk._set),
    ((tuple, frozenset), Walk._tuple),
    (types.MappingProxyType, Walk._proxy),
    (torch.Generator, Walk._generator),
    (random.Random, Walk._random),
)


def _is_stream(value: Any) -> bool:
    if isinstance(value, io.IOBase | types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        return True
    if isinstance(value, Iterator):
        return True
    return type(value).__module__.partition(".")[0] in (
        "socket",
        "_socket",
        "queue",
        "_queue",
        "multiprocessing",
    )


def _stream_word(value: Any) -> str:
    if isinstance(value, io.IOBase):
        return f"an open file ({_type_name(value)})"
    if isinstance(value, types.GeneratorType):
        return "a generator"
    return f"an iterator ({_type_name(value)})" if isinstance(value, Iterator) else f"a {_type_name(value)}"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _same_items(value: Mapping[Any, Any], saved: dict[Any, Any]) -> bool:
    # the order counts: hooks run in the order of their dictionary
    return list(value) == list(saved) and all(value[k] is v for k, v in saved.items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
