"""Places in a view as places in the tensor behind it: ``h[0, 3, 5] = inf`` wrote row 3, column 5."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from firetower.core.records import BadValue
from firetower.sensors.check import Frame, place
from firetower.sensors.ops_table import covers_storage, storage_key

_PURGE_AT = 512


class Bases:
    """Finds the tensor behind a view. torch knows it; under ``inference_mode`` views are noted here."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        self._purge_at = _PURGE_AT

    def note(self, x: Tensor) -> None:
        """``x`` is about to be viewed: the first view of a storage shows its shape."""
        key = storage_key(x)
        known = self._shapes.get(key)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            return
        if not (x.is_contiguous() and covers_storage(x)):
            return
        if len(self._shapes) >= self._purge_at:
            self._shapes = {k: v for k, v in self._shapes.items() if not v[0].expired()}  # type: ignore[no-untyped-call]
            self._purge_at = max(_PURGE_AT, 2 * len(self._shapes))
        self._shapes[key] = (StorageWeakRef(x.untyped_storage()), tuple(x.shape))  # type: ignore[no-untyped-call]

    def in_base(self, bad: BadValue, x: Tensor, frame: Frame | None) -> BadValue:
        """``bad``, found in ``x``, as a place in the tensor behind it; unchanged where that is not known."""
        if x.is_complex():
            return bad
        found = self._base_of(x)
        if found is None:
            return bad
        shape, start = found
        flat = _storage_offset(x, bad.flat_index) - start
        return place(flat, bad.bits, bad.dtype, bad.kind, shape, frame)

    def _base_of(self, x: Tensor) -> tuple[tuple[int, ...], int] | None:
        base = x._base
        if base is not None:
            usable = base.is_contiguous() and base.dtype is x.dtype and base.ndim > 0
            return (tuple(base.shape), int(base.storage_offset())) if usable else None
        known = self._shapes.get(storage_key(x))
        if known is None or known[0].expired() or not known[1]:  # type: ignore[no-untyped-call]
            return None
        return known[1], 0


def _storage_offset(x: Tensor, flat_index: int) -> int:
    offset = int(x.storage_offset())
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        offset += (flat_index % size) * stride
        flat_index //= size
    return offset
