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
    """The drills of these names, cases or families (``bad-weight``, ``M1``, ``M``), all when the list is empty.

    A case or family may have several drills. A drill asked for twice is returned once.

    Raises:
        FiretowerError: an unknown name.
    """
    if not names:
        return all_drills()
    found: list[Drill] = []
    for name in names:
        meant = [d for d in all_drills() if name.lower() in (d.name, d.case.lower(), d.family.lower())]
        if not meant:
            listed = ", ".join(d.name for d in all_drills())
            raise FiretowerError(f"name={name}: no such drill; known: {listed}")
        found += meant
    return tuple(dict.fromkeys(found))
