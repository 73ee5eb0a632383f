"""Keeps tensors as they are now: a copy while memory allows, else a fingerprint that shows a change."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

MAX_COPY_BYTES = 2 << 30
"""How much is copied in all; larger tensors than what is left of it are only fingerprinted."""

_CHUNK = 1 << 22


@dataclasses.dataclass(slots=True)
class _Kept:
    path: str
    tensor: Tensor
    alias: Tensor
    copy: Tensor | None = None
    fingerprint: int = 0


class TensorState:
    """Tensors to put back, in place: the objects and their memory stay the same."""

    def __init__(self, max_copy_bytes: int = MAX_COPY_BYTES) -> None:
        self._kept: dict[int, _Kept] = {}
        self._left = max_copy_bytes

    def add(self, x: Tensor, path: str) -> None:
        """Remember a tensor; its values are taken by `take`."""
        if id(x) not in self._kept and not x.is_meta:
            self._kept[id(x)] = _Kept(path, x, x.detach())

    def take(self) -> None:
        """Copy the values, small tensors first so that caches and buffers are always copied."""
        for kept in sorted(self._kept.values(), key=lambda k: _nbytes(k.alias)):
            size = _nbytes(kept.alias)
            kept.copy = _try_clone(kept.alias) if size <= self._left or not _is_plain(kept.alias) else None
            if kept.copy is None:
                kept.fingerprint = _fingerprint(kept.alias)
            else:
                self._left -= size

    def restore(self) -> list[str]:
        """Put the values back; returns the paths of tensors that changed and had not been copied."""
        lost = []
        for kept in self._kept.values():
            if _memory(kept.tensor) != _memory(kept.alias):
                kept.tensor.data = kept.alias
            if kept.copy is None:
                if _fingerprint(kept.alias) != kept.fingerprint:
                    lost.append(kept.path)
            elif not _same_bits(kept.alias, kept.copy):
                _write(kept.alias, kept.copy)
        return lost


def _try_clone(x: Tensor) -> Tensor | None:
    try:
        return x.clone()
    except torch.OutOfMemoryError:
        return None


def _is_plain(x: Tensor) -> bool:
    has_own_dispatch = type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return x.layout is torch.strided and not x.is_quantized and not has_own_dispatch


def _write(target: Tensor, source: Tensor) -> None:
    # an expanded tensor holds each element once: write it once
    for dim, stride in enumerate(target.stride()) if _is_plain(target) else ():
        if stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext(), torch.no_grad():
        target.copy_(source)


def _memory(x: Tensor) -> tuple[object, ...]:
    if not _is_plain(x):
        return (tuple(x.shape), x.dtype)
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes_of(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().reshape(-1).view(torch.uint8)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if not _is_plain(a):
        return False
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return a.numel() == 0 or bool(torch.equal(_bytes_of(a), _bytes_of(b)))


def _fingerprint(x: Tensor) -> int:
    """A sum over all bytes, each chunk weighted by its place."""
    total = 0
    for i, chunk in enumerate(_bytes_of(x).split(_CHUNK)):  # type: ignore[no-untyped-call]
        weights = torch.arange(1, len(chunk) + 1, device=chunk.device, dtype=torch.int64)
        total = (total * 1_000_003 + i + int((chunk.to(torch.int64) * weights).sum().item())) & ((1 << 64) - 1)
    return total
