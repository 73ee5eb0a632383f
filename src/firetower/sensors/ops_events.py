"""What op-level sensing reports: an op that made or spread a bad value, and an op that made one disappear."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from firetower.core.records import BadValue, Kind, Signal, TensorSummary

KIND_NAMES = {Kind.NAN: "NaN", Kind.POS_INF: "+Inf", Kind.NEG_INF: "-Inf"}
"""How people write the classes."""


class Cause(StrEnum):
    """Why an op's output is bad; `OpEvent.culprit` says it in a sentence."""

    OWN = "own"
    WEIGHT = "weight"
    BUFFER = "buffer"
    CALLER = "caller"
    OUTSIDE = "outside"
    CONSTANT = "constant"
    MASK = "mask"
    UNWRITTEN = "unwritten"
    CARRIED = "carried"
    PROPAGATED = "propagated"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The op that wrote a value which is harmless so far: a mask's -Inf, a +Inf fill, an allocation.

    ``first`` and ``output`` are filled for a +Inf only, since only that can become an origin itself;
    ``cause`` and ``tensor`` say where one came from that no op wrote.
    """

    op: str
    module: str
    source: str
    index: int
    first: BadValue | None = None
    output: TensorSummary | None = None
    cause: Cause = Cause.CONSTANT
    tensor: str | None = None

    def __str__(self) -> str:
        return f"{self.op} at {self.source}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpEvent:
    """One op whose output is bad, or that read a bad value from outside.

    Attributes:
        index: the how-manieth op of the run this was, from 0.
        op: ``aten.mul.Tensor``. module: dotted path, "" outside any. source: ``file.py:120 in forward``.
        output_index: which output; None where the output is clean and only an input was bad.
        first: first bad element of the output (of the input where the output is clean).
        inputs, output: summaries at the time of the op.
        cause, culprit: why, as a class and as a sentence.
        tensor: name of the weight, buffer or argument that was bad already, with its first bad element in
            ``tensor_first`` and its summary in ``tensor_summary``.
        origin_index: for a propagator, the ``index`` of the event that it spreads.
        seen_at: the op where a value written earlier did its damage, where that is another one.
        notes: further findings in words.
    """

    index: int
    op: str
    module: str
    source: str
    stage: str
    layer: int | None
    first: BadValue
    cause: Cause
    culprit: str
    output_index: int | None = None
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    tensor: str | None = None
    tensor_first: BadValue | None = None
    tensor_summary: TensorSummary | None = None
    origin_index: int | None = None
    seen_at: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_propagator(self) -> bool:
        """Whether the op only spread what an earlier event made."""
        return self.cause is Cause.PROPAGATED

    @property
    def signal(self) -> Signal:
        """The op as a signal of a reading."""
        return Signal(stage=self.stage, layer=self.layer, module=self.module, op=self.op, source=self.source)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        seen = f"; seen at {self.seen_at}" if self.seen_at else ""
        return f"{self.op}{where} at {self.source}: {self.culprit}{seen}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunderEvent:
    """An op that read a bad value and whose output shows none. ``count``: how often at this very place."""

    index: int
    op: str
    module: str
    source: str
    stage: str
    layer: int | None
    first: BadValue
    origin_index: int | None
    count: int = 1

    @property
    def signal(self) -> Signal:
        """The op as a signal of a reading."""
        return Signal(stage=self.stage, layer=self.layer, module=self.module, op=self.op, source=self.source)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        times = f", {self.count} times" if self.count > 1 else ""
        kind = KIND_NAMES[self.first.kind]
        return f"{self.op}{where} at {self.source}: {kind} went in, nothing bad came out{times}"
