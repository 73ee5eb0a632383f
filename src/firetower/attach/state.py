"""Takes a call's state down before a first run and puts it back before a second: random streams and mutable
objects.

What can be put back: random streams; tensors, arrays and containers reachable from the arguments, from what a
function closes over or names in its module, and from the modules it runs; caches and plain objects by their
attributes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from firetower.attach.state_tensors import TensorState
from firetower.attach.state_walk import Walk
from firetower.core.errors import InvestigateError


class RandomState:
    """The random streams of Python, numpy where it is loaded, torch on the CPU and on CUDA where in use."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else None

    def restore(self) -> None:
        """Set every stream back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class CallState:
    """State of one call: taken when made, put back by `restore` as often as wanted.

    Args:
        fn: what will be called.
        named: its arguments by name.

    Attributes:
        modules: the outermost modules found.
        notes: what was found in modules and cannot be put back, in words.

    Raises:
        InvestigateError: an argument or a variable of the function holds state that cannot be put back (an
            iterator, an open file, an object without visible state); names it.
    """

    def __init__(self, fn: Callable[..., Any], named: dict[str, Any]) -> None:
        tensors = TensorState()
        self._walk = Walk(tensors)
        self._tensors = tensors
        self._walk.add(fn, "the function")
        for name, value in named.items():
            self._walk.add(value, f"argument {name}")
        tensors.take()
        self._random = RandomState()

    @property
    def modules(self) -> list[nn.Module]:
        """Modules found that are inside no other."""
        found = self._walk.modules
        inner = {id(m) for root in found for m in root.modules() if m is not root}
        return [m for m in found if id(m) not in inner]

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be put back, though it was no reason to refuse."""
        return tuple(dict.fromkeys(self._walk.notes))

    def restore(self) -> None:
        """Put everything back.

        Raises:
            InvestigateError: a tensor too large to keep was changed by the run; names it.
        """
        self._walk.restore()
        changed = self._tensors.restore()
        if changed:
            raise InvestigateError(
                f"{changed[0]}: changed in place by the first run and too large to be kept, so that the call "
                f"cannot be run again from the same state; keep the tensor out of the call"
            )
        # autocast keeps cast weights from the first run: the second must be seen casting them
        torch.clear_autocast_cache()
        self._random.restore()
