"""Builds the events of op-level sensing and keeps them: capped, in order, with what they say in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from firetower.core.records import BadValue, Kind, TensorSummary
from firetower.sensors.check import Frame
from firetower.sensors.ops_bases import Bases
from firetower.sensors.ops_events import Cause, LaunderEvent, OpEvent, Writer
from firetower.sensors.ops_kinds import OpInfo
from firetower.sensors.ops_modules import ModuleStack, layer_of, source_line, stage_of
from firetower.sensors.ops_names import Owner
from firetower.sensors.ops_values import Operand, bad_places, first_at
from firetower.sensors.summary import summarize

MAX_EVENTS = 256
"""How many propagators, how many other events and how many launderers are kept; all are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One op that ran: what it is, its place in the run, and the float tensors it read."""

    info: OpInfo
    index: int
    arguments: tuple[tuple[str, Tensor], ...]


class Report:
    """Events of one run, in the order in which they were found.

    Attributes:
        events: bad ops, culprits and propagators; ``num_events`` counts those beyond the cap too.
        laundered: ops that made a bad value disappear, one for each place in the code.
        frame: maps rows to tokens where the caller knows how.
    """

    def __init__(self, stack: ModuleStack) -> None:
        self.stack = stack
        self.bases = Bases()
        self.frame: Callable[[], Frame | None] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all events."""
        self.events: list[OpEvent] = []
        self.laundered: list[LaunderEvent] = []
        self.num_events = 0
        self._num_kept = {True: 0, False: 0}

    @property
    def origin(self) -> OpEvent | None:
        """The first event that spreads no other."""
        return next((e for e in self.events if not e.is_propagator), None)

    def writer(self, ran: Ran, output: Tensor | None = None, owner: Owner | None = None) -> Writer:
        """Note who wrote a value that is harmless so far; with ``output`` for a +Inf."""
        return Writer(
            op=ran.info.name,
            module=self.stack.path,
            source=source_line(),
            index=ran.index,
            first=None if output is None else self._first(output, bad_places(output, neg_inf=False), ran),
            output=None if output is None else summarize("output", output),
            cause=Cause.CONSTANT if owner is None else owner.cause,
            tensor=None if owner is None else owner.name,
        )

    def bad_op(
        self,
        ran: Ran,
        output: Tensor,
        output_index: int,
        places: Tensor,
        cause: Cause,
        culprit: str,
        *,
        source: Operand | None = None,
        owner: Owner | None = None,
        notes: tuple[str, ...] = (),
    ) -> OpEvent:
        """An op whose output is bad at ``places``; ``source`` is the operand that was bad already, if any."""
        inputs = tuple(summarize(name, x) for name, x in ran.arguments)
        first = self._first(output, places, ran)
        event = self._event(
            ran,
            first=first,
            cause=cause,
            culprit=culprit,
            output_index=output_index,
            inputs=inputs,
            output=summarize("output", output),
            **self._tensor_fields(source, owner),
            notes=(*notes, *_notes(inputs, first, cause)),
        )
        return self._keep(event)

    def bad_input(self, ran: Ran, source: Operand, owner: Owner) -> OpEvent:
        """An op that read a bad value from outside, though its output is clean."""
        first = self._first(source.value, bad_places(source.value, neg_inf=True))
        event = self._event(
            ran,
            first=first,
            cause=owner.cause,
            culprit=owner.culprit,
            **self._tensor_fields(source, owner),
        )
        return self._keep(event)

    def bad_output(self, source: Operand, number: int, where: Writer | int, owner: Owner, place: str) -> OpEvent:
        """A bad value that leaves the model without any op having been seen to make it.

        ``where`` is the allocation of memory that nobody wrote, or the number of ops that ran before.
        """
        first = self._first(source.value, bad_places(source.value, neg_inf=False))
        is_empty = isinstance(where, Writer)
        module = where.module if isinstance(where, Writer) else ""
        return self._keep(
            OpEvent(
                index=where.index if isinstance(where, Writer) else where,
                op=where.op if isinstance(where, Writer) else "output",
                module=module,
                source=where.source if isinstance(where, Writer) else source_line(),
                stage=stage_of(module),
                layer=layer_of(module),
                first=first,
                cause=owner.cause,
                culprit="returned memory nobody wrote" if is_empty else owner.culprit,
                output_index=number,
                output=summarize("output", source.value),
                tensor=owner.name,
                seen_at=place,
            )
        )

    def harmful(self, writer: Writer, seen_at: str) -> OpEvent:
        """A +Inf written earlier has done damage, or has left the model: its writer is the origin."""
        assert writer.first is not None
        owner = Owner(writer.cause, writer.tensor)
        own = "wrote a +Inf constant" if writer.cause is Cause.CONSTANT else owner.culprit
        if writer.cause is Cause.OWN:
            own = "turned a legal -Inf into +Inf"
        event = OpEvent(
            index=writer.index,
            op=writer.op,
            module=writer.module,
            source=writer.source,
            stage=stage_of(writer.module, writer.op.split(".")[1] if "." in writer.op else ""),
            layer=layer_of(writer.module),
            first=writer.first,
            cause=writer.cause,
            culprit=own,
            output_index=0,
            output=writer.output,
            tensor=writer.tensor,
            seen_at=seen_at,
        )
        return self._keep(event)

    def propagated(self, ran: Ran, output: Tensor, output_index: int, root: OpEvent) -> None:
        """An op that only spread what ``root`` made."""
        self.num_events += 1
        if self._num_kept[True] >= MAX_EVENTS:
            return
        self._num_kept[True] += 1
        self.events.append(
            self._event(
                ran,
                first=self._first(output, bad_places(output, neg_inf=True)),
                cause=Cause.PROPAGATED,
                culprit=f"spreads what op {root.index} ({root.op}) made",
                output_index=output_index,
                output=summarize("output", output),
                origin_index=root.index,
            )
        )

    def launder(self, ran: Ran, source: Operand, origin: OpEvent | None) -> None:
        """An op that read a bad value and shows none."""
        place = (ran.info.name, self.stack.path, source_line())
        for i, old in enumerate(self.laundered):
            if (old.op, old.module, old.source) == place:
                self.laundered[i] = dataclasses.replace(old, count=old.count + 1)
                return
        if len(self.laundered) >= MAX_EVENTS:
            return
        self.laundered.append(
            LaunderEvent(
                index=ran.index,
                op=place[0],
                module=place[1],
                source=place[2],
                stage=stage_of(place[1], ran.info.root),
                layer=layer_of(place[1]),
                first=self._first(source.value, bad_places(source.value, neg_inf=True)),
                origin_index=None if origin is None else origin.index,
            )
        )

    def _tensor_fields(self, source: Operand | None, owner: Owner | None) -> dict[str, Any]:
        """Name, first bad value and summary of what was bad already; a weight as stored, not as viewed."""
        if source is None:
            return {}
        value = source.value
        if owner is not None and owner.tensor is not None and bool(bad_places(owner.tensor, neg_inf=True).any()):
            value = owner.tensor.detach()
        name = None if owner is None else owner.name
        return {
            "tensor": name,
            "tensor_first": first_at(value, bad_places(value, neg_inf=True), None),
            "tensor_summary": summarize(name or source.name, value),
        }

    def _first(self, x: Tensor, places: Tensor, ran: Ran | None = None) -> BadValue:
        frame = self.frame() if self.frame is not None else None
        bad = first_at(x, places, frame)
        is_written = ran is not None and bool(ran.info.mutated)
        return self.bases.in_base(bad, x, frame) if is_written else bad

    def _event(self, ran: Ran, *, first: BadValue, cause: Cause, culprit: str, **more: Any) -> OpEvent:
        path = self.stack.path
        return OpEvent(
            index=ran.index,
            op=ran.info.name,
            module=path,
            source=source_line(),
            stage=stage_of(path, ran.info.root),
            layer=layer_of(path),
            first=first,
            cause=cause,
            culprit=culprit,
            **more,
        )

    def _keep(self, event: OpEvent) -> OpEvent:
        self.num_events += 1
        if self._num_kept[False] < MAX_EVENTS:
            self._num_kept[False] += 1
            self.events.append(event)
        return event


def _notes(inputs: tuple[TensorSummary, ...], first: BadValue, cause: Cause) -> tuple[str, ...]:
    notes = []
    if cause is Cause.OWN and inputs and all(s.num_nonfinite == 0 for s in inputs):
        notes.append("every input is finite")
        if first.kind is not Kind.NAN:
            ranges = ", ".join(f"{s.name} {s.absmax:.6g}" for s in inputs if s.absmax is not None)
            notes.append(f"overflow or a pole: absmax of the inputs is {ranges}")
    if cause is Cause.OWN:
        notes += [f"input {s.name} is all zeros" for s in inputs if s.zero_frac == 1.0 and len(s.shape)]
    return tuple(notes)
