"""Whose tensor is it that no op wrote: a weight, a buffer, something the caller gave, or unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from firetower.sensors.ops_events import Cause
from firetower.sensors.ops_table import storage_key


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """Role of a tensor, its dotted or argument name, and the weight or buffer itself."""

    cause: Cause
    name: str | None
    tensor: Tensor | None = None

    @property
    def culprit(self) -> str:
        """The sentence that tells a bad tensor from a bad op."""
        of = f": {self.name}" if self.name else ""
        return {
            Cause.WEIGHT: f"the weight itself is non-finite{of}",
            Cause.BUFFER: f"the buffer itself is non-finite{of}",
            Cause.CALLER: f"input given by the caller{of}",
            Cause.CARRIED: f"left by an earlier step{of}",
        }.get(self.cause, "read from a tensor that was made before the watch, or written out of its sight")


class Owners:
    """Finds the owner of a tensor by its storage; looks weights up when asked, so swapped ones are found."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[StorageWeakRef, str]] = {}

    def note_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what a caller passed; replaces what was remembered before.

        Only memory that the caller keeps is recognised: an expired storage is no one's.
        """
        self._given = {}
        named = [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]
        for name, value in named:
            for path, x in tensors_under(value, name):
                self._given.setdefault(storage_key(x), (StorageWeakRef(x.untyped_storage()), path))  # type: ignore[no-untyped-call]

    def of(self, x: Tensor, roots: list[nn.Module]) -> Owner:
        """Owner of the storage of ``x`` among the weights and buffers of ``roots`` and the noted inputs."""
        key = storage_key(x)
        for cause, named in (
            (Cause.WEIGHT, [p for r in roots for p in r.named_parameters(remove_duplicate=False)]),
            (Cause.BUFFER, [b for r in roots for b in r.named_buffers(remove_duplicate=False)]),
        ):
            found = {n: p for n, p in named if _has_storage(p) and storage_key(p) == key}
            if found:
                first, *tied = found
                return Owner(cause, first + (f" (tied with {', '.join(tied)})" if tied else ""), found[first])
        given = self._given.get(key)
        if given is not None and not given[0].expired():  # type: ignore[no-untyped-call]
            return Owner(Cause.CALLER, given[1])
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return Owner(Cause.WEIGHT, None)
        return Owner(Cause.OUTSIDE, None)


def tensors_under(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of strided tensors in nested tuples, lists, mappings and objects such as caches."""
    if isinstance(value, Tensor):
        if _has_storage(value):
            yield path, value
    elif isinstance(value, nn.Module) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_under(item, f"{path}[{key!r}]", depth - 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors_under(item, f"{path}[{i}]", depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for key, item in vars(value).items():
            yield from tensors_under(item, f"{path}.{key}", depth - 1)


def _has_storage(x: Tensor) -> bool:
    return x.layout is torch.strided and type(x).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
