"""Which storages hold something other than clean values, and who wrote it."""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from firetower.sensors.ops_events import OpEvent, Writer

_PURGE_AT = 512


@dataclasses.dataclass(slots=True)
class Entry:
    """State of one storage; several fields are set when different parts of it were written by different ops.

    Attributes:
        unwritten: the allocation, while some part may never have been written.
        legal: who wrote a legal -Inf.
        pending: who wrote a +Inf that did no damage yet.
        is_literal: a constant of one element; whoever writes it somewhere is its writer.
        bad: the event that made it bad; ``has_bad_neg_inf`` says that -Inf in it is bad as well.
        carried: ``bad`` of an earlier step.
    """

    ref: StorageWeakRef
    unwritten: Writer | None = None
    legal: Writer | None = None
    pending: Writer | None = None
    is_literal: bool = False
    bad: OpEvent | None = None
    has_bad_neg_inf: bool = False
    carried: OpEvent | None = None


class StorageTable:
    """Entries by storage. An entry's weak reference keeps the storage's address from being used again."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.num_bad = 0
        self._purge_at = _PURGE_AT

    def __bool__(self) -> bool:
        return bool(self.entries)

    def get(self, x: Tensor) -> Entry | None:
        """The entry of the storage of ``x``, or None where all that was written is clean."""
        return self.entries.get(storage_key(x))

    def entry(self, x: Tensor) -> Entry:
        """The entry of the storage of ``x``, made where there is none."""
        key = storage_key(x)
        found = self.entries.get(key)
        if found is None:
            if len(self.entries) >= self._purge_at:
                self._purge()
            found = self.entries[key] = Entry(StorageWeakRef(x.untyped_storage()))  # type: ignore[no-untyped-call]
        return found

    def forget(self, x: Tensor) -> None:
        """Everything in the storage of ``x`` was written anew."""
        entry = self.entries.pop(storage_key(x), None)
        if entry is not None and entry.bad is not None:
            self.num_bad -= 1

    def mark_bad(self, x: Tensor, event: OpEvent, *, neg_inf: bool) -> None:
        """The storage of ``x`` holds what ``event`` made."""
        entry = self.entry(x)
        if entry.bad is None:
            self.num_bad += 1
        entry.bad = event
        entry.has_bad_neg_inf = entry.has_bad_neg_inf or neg_inf

    def new_step(self) -> None:
        """What is bad now was made in an earlier step from here on."""
        for entry in self.entries.values():
            if entry.bad is not None:
                entry.carried, entry.bad = entry.bad, None
        self.num_bad = 0

    def _purge(self) -> None:
        for key in [k for k, e in self.entries.items() if e.ref.expired()]:  # type: ignore[no-untyped-call]
            entry = self.entries.pop(key)
            self.num_bad -= entry.bad is not None
        self._purge_at = max(_PURGE_AT, 2 * len(self.entries))


def storage_key(x: Tensor) -> int:
    """Identity of the storage that ``x`` is a view of."""
    return int(x.untyped_storage()._cdata)


def covers_storage(x: Tensor) -> bool:
    """Whether writing every element of ``x`` writes its whole storage."""
    if x.numel() * x.element_size() != x.untyped_storage().nbytes():
        return False
    return x.is_contiguous() or _is_dense(x)


def _is_dense(x: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
