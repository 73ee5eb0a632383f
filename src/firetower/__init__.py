"""Firetower keeps LLM inference finite: spots the first bad value, stops only what it burned, keeps the incident.

    import firetower

    with firetower.attach(model) as watch:      # any nn.Module
        model.generate(**inputs)                # raises NonFiniteError with the Fire, if there is one

The package imports no torch until `attach`, `investigate` or `Engine` is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firetower.attach.investigate import Investigation
    from firetower.attach.watch import Watch, attach
    from firetower.core.errors import FiretowerError, NonFiniteError
    from firetower.core.records import BadValue, Fire, Reading, Signal
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling
    from firetower.fires.store import Store
    from firetower.lab.investigate import investigate

_EXPORTS = {
    "BadValue": "firetower.core.records",
    "Engine": "firetower.engine.engine",
    "Fire": "firetower.core.records",
    "FiretowerError": "firetower.core.errors",
    "Investigation": "firetower.attach.investigate",
    "NonFiniteError": "firetower.core.errors",
    "Reading": "firetower.core.records",
    "Sampling": "firetower.engine.request",
    "Signal": "firetower.core.records",
    "Store": "firetower.fires.store",
    "Watch": "firetower.attach.watch",
    "attach": "firetower.attach.watch",
    "investigate": "firetower.lab.investigate",
}

__all__ = [
    "BadValue",
    "Engine",
    "Fire",
    "FiretowerError",
    "Investigation",
    "NonFiniteError",
    "Reading",
    "Sampling",
    "Signal",
    "Store",
    "Watch",
    "attach",
    "investigate",
]


def __getattr__(name: str) -> Any:
    if name == "attach":
        # the room and the function share a name: the package is callable and answers as the function
        return importlib.import_module("firetower.attach")
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'firetower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
