"""What a drill is: a named fault with random variants, each with a clean twin and what must be seen of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from firetower.core.records import Kind

if TYPE_CHECKING:
    from torch import nn

    from firetower.drills.evidence import Evidence
    from firetower.lab.subject import Switch

Level = Literal["layers", "ops", "finite"]
"""Level of the watch that finds a variant's origin; ``finite`` where no value is bad and a watch sees nothing."""

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
    """A model with or without the fault, the call that runs it, and what else can be learned of it.

    Attributes:
        model: what a watch is attached to.
        args, kwargs, method: the call.
        serve: runs the request in place of that call, and is given the number of the replay.
        expected: where the first bad value is; None in the clean twin and where the fault stays finite.
        places: words that a verdict's statement must hold, where the fault is finite: they are its origin.
        switches: other ways to run the request; each is given the number of the replay, and returns what the
            call returns.
        parts: parts of the lab's `Subject` as values or functions; see `evidence.subject_of` for the others.
        kernels: module path -> name of the op that this module is; what it does inside is nobody's to see.
        right: what the call should have returned, computed afresh.
        real_rows: bool [rows]; False rows are pads, which may hold anything as long as no real row does.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = "__call__"
    serve: Callable[[int], Any] | None = None
    expected: Origin | None = None
    places: tuple[str, ...] = ()
    switches: Mapping[Switch, Callable[[int], Any]] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    right: Callable[[], Any] | None = None
    real_rows: Any = None

    def call(self, number: int = 0) -> Any:
        """Run the request once, without gradients."""
        import torch

        with torch.no_grad():
            if self.serve is not None:
                return self.serve(number)
            return getattr(self.model, self.method)(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refuter:
    """The observation that overturns a drill's verdict.

    ``test`` is the discriminating test that makes it; ``flip`` gives the same subject, except that this test
    comes out the other way.
    """

    test: str
    flip: Callable[[Evidence], Evidence]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One placing of a fault. ``build(True)`` plants it, ``build(False)`` makes the clean twin.

    ``level`` is the watch's level that must find the origin. ``verdict`` and ``refuter`` are those of the
    drill where None. ``undecided_between``: the pair of causes that this variant's evidence leaves open, said
    beforehand.
    """

    id: str
    host: Host
    level: Level
    build: Callable[[bool], Case]
    verdict: str | None = None
    refuter: Refuter | None = None
    undecided_between: tuple[str, ...] = ()


def level_in(host: Host) -> Level:
    """Level of a watch for a fault that burns: a tiny module is told by its op, a host by its stage."""
    return "ops" if host == "pure" else "layers"


def distinct(variants: list[Variant]) -> list[Variant]:
    """The same variants; one whose id and host are those of an earlier one gets a number behind its id."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for v in variants:
        count = seen[v.host, v.id] = seen.get((v.host, v.id), 0) + 1
        found.append(v if count == 1 else dataclasses.replace(v, id=f"{v.id}-no{count}"))
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fault. ``variants(seed)`` gives at least five placings, cheap until built.

    Attributes:
        name: what the command line calls it.
        family: letter of the family of causes that it is listed under.
        case: the known case that it plants (``A1``), "" for none in particular.
        title: the fault in one line.
        verdict: ``FAMILY/DETAIL`` of the cause (`core.families`) that the lab must name.
        refuter: what must overturn it.
        stages: stages (`firetower.attach.discover.STAGES`) that some variant has as its origin.
    """

    name: str
    family: str
    title: str
    verdict: str
    refuter: Refuter
    variants: Callable[[int], list[Variant]]
    stages: frozenset[str] = frozenset()
    case: str = ""

    def verdict_of(self, variant: Variant) -> str:
        """The cause of a variant: ``FAMILY/DETAIL``."""
        return variant.verdict or self.verdict

    def refuter_of(self, variant: Variant) -> Refuter:
        """What must overturn it."""
        return variant.refuter or self.refuter
