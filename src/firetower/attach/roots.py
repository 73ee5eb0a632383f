"""Which calls of a watched model are steps, and whether such a call is still running."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__


def step_roots(root: nn.Module, model: nn.Module, *, is_compiled: bool) -> list[nn.Module]:
    """The modules whose call is a step when no other one's is running.

    Besides the root these are what ``generate()`` calls past it: the language model inside an adapter's wrapper, and
    the encoder of an encoder-decoder.

    Args:
        root: the watched module.
        model: what the user gave: the root, or the compiled wrapper around it.
        is_compiled: whether parts are compiled; a traced graph empties its panel at one root only.
    """
    found = {id(m): m for m in (root, model)}
    if not is_compiled:
        for module in root.modules():
            found |= {id(m): m for m in _called_past_the_root(module)}
    return list(found.values())


def _called_past_the_root(module: nn.Module) -> Iterator[nn.Module]:
    if hasattr(type(module), "generate"):
        yield module
        config, get = getattr(module, "config", None), getattr(module, "get_encoder", None)
        encoder = get() if callable(get) and getattr(config, "is_encoder_decoder", False) else None
        if isinstance(encoder, nn.Module):
            yield encoder


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of what a module's ``forward`` takes by position, in order; empty where it does not say."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def num_running(modules: Iterable[nn.Module]) -> int:
    """How many calls of these modules are on this thread's stack.

    A call that ended by Ctrl-C, or by another exception that is no ``Exception``, ran no hook at its end.
    """
    wanted = {id(m) for m in modules}
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += frame.f_code is _CALL and id(frame.f_locals.get("self")) in wanted
        frame = frame.f_back
    return count
