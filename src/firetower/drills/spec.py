"""What a drill is: a named fault with random variants, each with a clean twin and what must be seen of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from firetower.core.records import Kind

if TYPE_CHECKING:
    from torch import nn

Level = Literal["layers", "ops"]
"""Level of the watch that finds a variant's origin."""

Host = Literal["pure", "smollm2", "qwen35moe", "qwen4exp"]
"""Where a variant lives: a tiny module of its own, the real model, or a small random hybrid one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the first bad value is, known without the watch; a None field is not asserted.

    ``row`` and ``column`` are those of the tensor as the signal holds it, ``bits`` its raw pattern. At level
    ``layers``, ``stage`` and ``layer`` name the signal; at ``ops``, ``op`` does (``aten.mul.Tensor``).
    ``module`` is the dotted path. ``laundered``: the bad value was gone at the logits. ``bad_weight``: a
    weight of the origin is itself non-finite. ``zero_input``: an input of the origin is all zeros.
    ``pad_before_real``: a pad row was bad first.
    """

    module: str | None = None
    stage: str | None = None
    layer: int | None = None
    op: str | None = None
    row: int | None = None
    column: int | None = None
    kind: Kind | None = None
    bits: int | None = None
    laundered: bool | None = None
    bad_weight: bool | None = None
    zero_input: bool | None = None
    pad_before_real: bool | None = None

    def mismatches(self, seen: Origin) -> tuple[str, ...]:
        """Names of the fields that this origin asserts and ``seen`` does not match."""
        pairs = {f.name: (getattr(self, f.name), getattr(seen, f.name)) for f in dataclasses.fields(self)}
        return tuple(name for name, (want, got) in pairs.items() if want is not None and want != got)

    def __str__(self) -> str:
        where = self.op or self.stage or ""
        if self.layer is not None and self.op is None:
            where = f"layer {self.layer} {where}"
        elif self.module:
            where = f"{where} in {self.module}"
        place = [f"{k} {v}" for k, v in (("row", self.row), ("column", self.column)) if v is not None]
        flags = ("laundered", "bad_weight", "zero_input", "pad_before_real")
        facts = [f.replace("_", " ") for f in flags if getattr(self, f)]
        return ", ".join([where, *([str(self.kind)] if self.kind else []), *place, *facts])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with or without the fault, and the call that runs it.

    ``expected`` is None in the clean twin: nothing may be reported.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = "__call__"
    expected: Origin | None = None

    def call(self) -> Any:
        """Run the model once, without gradients."""
        import torch

        with torch.no_grad():
            return getattr(self.model, self.method)(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One placing of a fault. ``build(True)`` plants it, ``build(False)`` makes the clean twin.

    ``level`` is the watch's level that must find the origin.
    """

    id: str
    host: Host
    level: Level
    build: Callable[[bool], Case]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fault. ``variants(seed)`` gives at least four placings, cheap until built.

    Attributes:
        name: what the command line calls it.
        family: letter of the family of causes.
        case: the known case that it plants (``A1``), "" for none in particular.
        title: the fault in one line.
        stages: stages (`firetower.attach.discover.STAGES`) that some variant has as its origin.
    """

    name: str
    family: str
    title: str
    stages: frozenset[str]
    variants: Callable[[int], list[Variant]]
    case: str = ""
