"""The black box on foreign runtimes: any PyTorch module, Transformers, llama.cpp. One file a runtime.

``firetower.attach`` is this package *and* the function `firetower.attach.watch.attach`: the package is callable,
so that both ``firetower.attach(model)`` and ``import firetower.attach.llama`` work in any order.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from firetower.attach.watch import attach

        return attach(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
