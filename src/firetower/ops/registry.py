"""Which implementation of a kernel runs: registered first, chosen once, frozen before its first call.

A kernel is named ``op`` or ``op.part``. Each part of a chain is chosen by itself: where a device lacks one, only that
one falls back. ``FIRETOWER_OPS=rms_norm=torch,moe.down=triton`` pins kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from firetower.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a backend has to run on.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        dtype: type of the op's main input.
        capability: compute capability of a CUDA device, else None.
        has_triton: whether Triton can be imported.
        is_interpreted: whether Triton runs kernels on the CPU (``TRITON_INTERPRET=1``).
        missing: kernels, as ``name/backend``, that the device lacks.
    """

    device: str
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    has_triton: bool = False
    is_interpreted: bool = False
    missing: frozenset[str] = frozenset()


Supports = Callable[[Target], str | None]
"""The reason why a backend cannot run on a target, or None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of one kernel; ``load`` is ``package.module:function``, imported when it is chosen."""

    kernel: str
    name: str
    load: str
    supports: Supports
    devices: Collection[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What runs a kernel on a target, and why others before it do not: ``(backend, reason)``."""

    kernel: str
    backend: str
    run: Callable[..., Any]
    passed_over: tuple[tuple[str, str], ...] = ()
    is_pinned: bool = False


class Registry:
    """Backends of every kernel. The first that a target supports wins, in the order of registration."""

    def __init__(self) -> None:
        self._backends: dict[str, list[Backend]] = {}
        self._choices: dict[tuple[str, Target], Choice] = {}
        self._references: dict[tuple[str, Target], Choice] = {}

    def is_frozen(self, kernel: str) -> bool:
        """Whether a choice was made for a kernel already."""
        return any(k == kernel for k, _ in self._choices)

    def register(
        self, kernel: str, name: str, load: str, *, supports: Supports, devices: Collection[str] = ("cpu", "cuda")
    ) -> None:
        """Add a backend of a kernel.

        Args:
            kernel: ``op`` or ``op.part``.
            name: ``triton``, ``torch``, or that of a library.
            load: ``package.module:function``; every backend of a kernel takes the same arguments.
            supports: the reason why a target cannot run it, or None.
            devices: where it is chosen without a pin.

        Raises:
            ConfigError: a backend of the kernel was chosen already, or it has one of this name.
        """
        if self.is_frozen(kernel):
            raise ConfigError(f"register {kernel}/{name}: a choice was made already; register before the first call")
        known = self._backends.setdefault(kernel, [])
        if any(b.name == name for b in known):
            raise ConfigError(f"register {kernel}/{name}: registered already; give the backend another name")
        known.append(Backend(kernel=kernel, name=name, load=load, supports=supports, devices=frozenset(devices)))

    def kernels(self) -> tuple[str, ...]:
        """Names of every kernel."""
        return tuple(self._backends)

    def backends(self, kernel: str) -> tuple[str, ...]:
        """Backends of a kernel in the order in which they are tried."""
        return tuple(b.name for b in self._backends[kernel])

    def choice(self, kernel: str, target: Target, pins: Mapping[str, str] | None = None) -> Choice:
        """What runs a kernel on a target; made once, then frozen.

        Args:
            kernel: ``op`` or ``op.part``.
            target: what it runs on.
            pins: kernel -> backend; default those of ``FIRETOWER_OPS``. Read when the choice is made.

        Raises:
            ConfigError: a pin that names no kernel or backend, or one that cannot run; a kernel that nothing can run.
        """
        key = kernel, target
        if key not in self._choices:
            pins = read_pins(os.environ) if pins is None else pins
            self._check_pins(pins)
            self._choices[key] = self._choose(kernel, target, pins.get(kernel))
        return self._choices[key]

    def reference(self, kernel: str, target: Target) -> Choice:
        """The plain PyTorch form of a kernel, or what `choice` says where it has none; made once."""
        key = kernel, target
        if key not in self._references:
            has_torch = "torch" in self.backends(kernel)
            self._references[key] = self._choose(kernel, target, "torch") if has_torch else self.choice(kernel, target)
        return self._references[key]

    def table(self, target: Target, pins: Mapping[str, str] | None = None) -> Mapping[str, Choice]:
        """The choice for every kernel that is registered by now; as `choice`."""
        return {k: self.choice(k, target, pins) for k in self._backends}

    def _check_pins(self, pins: Mapping[str, str]) -> None:
        if self is REGISTRY and not pins.keys() <= self._backends.keys():
            # the op that a pin names may not be imported yet
            load_all()
        for kernel, name in pins.items():
            if kernel not in self._backends:
                raise ConfigError(f"FIRETOWER_OPS: {kernel}: no such kernel; known: {', '.join(self._backends)}")
            if name not in self.backends(kernel):
                known = ", ".join(self.backends(kernel))
                raise ConfigError(f"FIRETOWER_OPS: {kernel}={name}: no such backend; known: {known}")

    def _choose(self, kernel: str, target: Target, pin: str | None) -> Choice:
        passed_over: list[tuple[str, str]] = []
        for backend in self._backends[kernel]:
            if pin is not None and backend.name != pin:
                continue
            reason = _why_not(backend, target, is_pinned=pin is not None)
            if reason is None:
                return Choice(
                    kernel=kernel,
                    backend=backend.name,
                    run=_load(backend.load),
                    passed_over=tuple(passed_over),
                    is_pinned=pin is not None,
                )
            passed_over.append((backend.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        if pin is not None:
            raise ConfigError(f"FIRETOWER_OPS: {kernel}={pin}: cannot run on {target.device}: {reasons}; unpin it")
        raise ConfigError(f"kernel={kernel}: nothing can run it on {target.device} in {target.dtype}: {reasons}")


def _why_not(backend: Backend, target: Target, *, is_pinned: bool) -> str | None:
    if f"{backend.kernel}/{backend.name}" in target.missing:
        return "the device lacks it"
    if not is_pinned and target.device not in backend.devices:
        return f"not for {target.device}"
    return backend.supports(target)


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    run: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return run


def read_pins(environ: Mapping[str, str]) -> dict[str, str]:
    """The pins of ``FIRETOWER_OPS``: ``kernel=backend`` pairs with commas between.

    Raises:
        ConfigError: an entry without ``=``.
    """
    pins = {}
    for entry in filter(None, (e.strip() for e in environ.get("FIRETOWER_OPS", "").split(","))):
        kernel, equals, name = entry.partition("=")
        if not (kernel and equals and name):
            raise ConfigError(f"FIRETOWER_OPS: {entry!r}: must be kernel=backend, with commas between pairs")
        pins[kernel] = name
    return pins


def always(_: Target) -> str | None:
    """Supports of a backend in plain PyTorch."""
    return None


def needs_triton(target: Target) -> str | None:
    """Supports of a Triton kernel that computes in fp32 and stores fp32, fp16 or bf16."""
    if not target.has_triton:
        return "triton is not installed: pip install triton"
    if target.device != "cuda" and not target.is_interpreted:
        return f"Triton compiles for CUDA, this is {target.device}; TRITON_INTERPRET=1 runs it on the CPU"
    if target.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {str(target.dtype).removeprefix('torch.')}: the kernel computes in float32"
    return None


@functools.cache
def target_of(device_type: str, dtype: torch.dtype) -> Target:
    """The target that a tensor's device and type make."""
    return Target(
        device=device_type,
        dtype=dtype,
        capability=torch.cuda.get_device_capability() if device_type == "cuda" else None,
        has_triton=importlib.util.find_spec("triton") is not None,
        is_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


OPS = ("attention", "causal_conv1d", "gated_delta_rule", "linear", "moe", "quant", "rms_norm", "rope", "sample")
"""Every op of this package, by the name of its folder."""

REGISTRY = Registry()
"""Every kernel of this package; an op's ``__init__`` adds its own on import."""


def load_all() -> None:
    """Import every op, so that all kernels are registered; imports no Triton."""
    for op in OPS:
        importlib.import_module(f"firetower.ops.{op}")


_IS_REFERENCE = contextvars.ContextVar("firetower_is_reference", default=False)


@contextlib.contextmanager
def reference_path() -> Iterator[None]:
    """Inside, in this thread, every kernel runs its plain PyTorch form: another way to the same numbers, for a redo.

    Nothing may be captured inside: a graph would keep the slow form.
    """
    token = _IS_REFERENCE.set(True)
    try:
        yield
    finally:
        _IS_REFERENCE.reset(token)


def kernel(name: str, x: Tensor) -> Callable[..., Any]:
    """What runs a kernel for a tensor's device and type; a dictionary lookup once chosen."""
    target = target_of(x.device.type, x.dtype)
    if _IS_REFERENCE.get():
        return REGISTRY.reference(name, target).run
    return REGISTRY.choice(name, target).run
