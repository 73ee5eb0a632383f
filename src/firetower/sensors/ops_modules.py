"""Where an op runs: the module stack, the stage and layer that follow from its path, the caller's line."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")
_STAGES = (
    (r"lm_head|embed_out", "logits"),
    (r"q_proj|k_proj|v_proj|o_proj|self_attn|linear_attn|attention|attn", "attention"),
    (r"shared_expert", "shared"),
    (r"experts", "routed"),
    (r"gate|router", "router"),
    (r"gate_proj", "gate"),
    (r"up_proj", "up"),
    (r"down_proj", "down"),
    (r"input_layernorm", "input"),
)
_SHARED_STEPS = ("gate_proj", "up_proj", "down_proj")
_MLPS = re.compile(r"(?:^|\.)(?:mlp|feed_forward|experts|shared_expert)$")

OnRootCall = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
OnRootReturn = Callable[[Any], None]
OnSignal = Callable[[str, Any], None]


def layer_of(module: str) -> int | None:
    """Number of the decoder layer in a dotted path: 12 in ``model.layers.12.mlp``; None outside any."""
    found = _LAYER.search(module)
    return int(found.group(1)) if found else None


def stage_of(module: str, root: str = "") -> str:
    """Stage that a module path and the op's root name belong to, ``op`` where the path says nothing.

    A product computed by an MLP itself, outside its projections, is its ``swiglu``.
    """
    if _MLPS.search(module) and root == "mul":
        return "swiglu"
    parts = module.split(".")
    if parts[-1] in _SHARED_STEPS:
        return {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}[parts[-1]]
    for pattern, stage in _STAGES:
        if any(re.fullmatch(pattern, p) for p in parts):
            return stage
    return "op"


class ModuleStack:
    """Follows which modules run, through hooks that are there between `install` and `remove`.

    Args:
        model: whose modules to follow; None follows every module of the process through global hooks and
            takes the outermost one that runs as the root that names are relative to.

    Attributes:
        roots: the models seen: ``model``, or every outermost module.
        on_root_call, on_root_return: called with the arguments and the output of each call of a root.
        signals: paths of modules for which ``on_signal`` is called, with what enters and what leaves them.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.roots: list[nn.Module] = [] if model is None else [model]
        self.on_root_call: OnRootCall | None = None
        self.on_root_return: OnRootReturn | None = None
        self.on_signal: OnSignal | None = None
        self.signals: frozenset[str] = frozenset()
        self._names: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []

    @property
    def path(self) -> str:
        """Dotted path of the innermost module that runs, "" outside any and for the root."""
        return self._names.get(id(self._stack[-1]), "") if self._stack else ""

    def install(self) -> None:
        """Put the hooks on."""
        if self.model is None:
            self._handles = [
                nn_module.register_module_forward_pre_hook(self._enter_global),
                nn_module.register_module_forward_hook(self._leave, always_call=True),
            ]
            return
        self._name(self.model)
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _name(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    def _enter_global(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._stack and not any(module is r for r in self.roots):
            self.roots.append(module)
            self._name(module)
        self._enter(module, args, {})

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._is_root(module) and self.on_root_call is not None:
            self.on_root_call(args, kwargs)
        self._stack.append(module)
        if self.signals:
            self._signal(module, (*args, *kwargs.values()))

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        # an exception can skip the exit of inner modules: unwind to the one that left
        if not any(m is module for m in self._stack):
            return
        while self._stack.pop() is not module:
            pass
        if self.signals:
            self._signal(module, output)
        if self._is_root(module) and self.on_root_return is not None:
            self.on_root_return(output)

    def _signal(self, module: nn.Module, value: Any) -> None:
        path = self._names.get(id(module), "")
        if path in self.signals and self.on_signal is not None:
            self.on_signal(path, value)

    def _is_root(self, module: nn.Module) -> bool:
        # hooks put on while the root is running miss its own entry: an inner module is no root for that
        return not self._stack and (self.model is None or module is self.model)


def source_line() -> str:
    """``file:line in function`` of the innermost frame outside torch and firetower, "" where there is none.

    Files of installed packages are given relative to site-packages, files below the working folder relative
    to it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_TORCH = str(Path(torch.__file__).parent) + os.sep
_FIRETOWER = str(Path(__file__).parents[1]) + os.sep
_OURS = tuple(_FIRETOWER + room + os.sep for room in ("sensors", "attach", "lab", "cli"))
_SITE = sysconfig.get_paths()["purelib"] + os.sep
# contextlib and functools stand between a decorated function (inference_mode, no_grad) and its caller
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _is_inside(filename: str) -> bool:
    if filename.startswith((_TORCH, *_OURS)):
        return True
    return filename.startswith(_STDLIB) and not filename.startswith(_SITE)


def _short(filename: str) -> str:
    if filename.startswith(_SITE):
        return filename[len(_SITE) :]
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if relative.startswith("..") else relative
