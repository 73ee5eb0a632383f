"""Injected faults with known origins, each with a clean twin that must stay silent. One file a fault."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from firetower.core.errors import FiretowerError
from firetower.drills.spec import Case, Drill, Origin, Variant

__all__ = ["Case", "Drill", "Origin", "Variant", "all_drills", "find_drills"]


@lru_cache
def all_drills() -> tuple[Drill, ...]:
    """Every drill, by family and name. Reads metadata only: no torch, no model."""
    from firetower.drills import faults

    names = (m.name for m in pkgutil.iter_modules(faults.__path__))
    drills: list[Drill] = [importlib.import_module(f"{faults.__name__}.{name}").DRILL for name in names]
    return tuple(sorted(drills, key=lambda d: (d.family, d.name)))


def find_drills(names: list[str]) -> tuple[Drill, ...]:
    """The drills of these names or cases (``bad-weight``, ``M1``), all of them when the list is empty.

    Raises:
        FiretowerError: an unknown name.
    """
    known = {key.lower(): d for d in all_drills() for key in (d.name, d.case) if key}
    for name in names:
        if name.lower() not in known:
            listed = ", ".join(d.name for d in all_drills())
            raise FiretowerError(f"name={name}: no such drill; known: {listed}")
    # asked for twice, by name and by case, it still runs once
    return tuple(dict.fromkeys(known[name.lower()] for name in names)) if names else all_drills()
