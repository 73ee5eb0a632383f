"""Decides what a non-finite output means: legal, harmless so far, spread from elsewhere, or an origin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from firetower.sensors.ops_events import Cause, OpEvent, Writer
from firetower.sensors.ops_kinds import OpInfo
from firetower.sensors.ops_names import Owner
from firetower.sensors.ops_report import Ran, Report
from firetower.sensors.ops_table import StorageTable
from firetower.sensors.ops_values import Flags, Operand, bad_places, flags_of, plain

_OWN = "made by this op"
_NOBODY = Owner(Cause.UNWRITTEN, None)
_READS_UNWRITTEN = "reads memory nobody wrote"


class Judge:
    """Knows the state of every storage and turns outputs into states and events.

    Args:
        table: state of storages; written here.
        report: where events go.
        owner_of: finds whose tensor it is that no op wrote.
    """

    def __init__(self, table: StorageTable, report: Report, owner_of: Callable[[Tensor], Owner]) -> None:
        self.table = table
        self.report = report
        self._owner_of = owner_of
        self._fired: dict[Writer, OpEvent] = {}

    def clear(self) -> None:
        """Forget which harmless values turned harmful; their storages keep their states."""
        self._fired = {}

    def output(self, ran: Ran, x: Tensor, number: int, operands: list[Operand], *, has_constant: bool) -> None:
        """Judge one non-finite output.

        Args:
            ran: the op.
            x: the output as stored.
            number: its index among the outputs.
            operands: the non-finite tensors that the op read.
            has_constant: a Python number among its arguments is NaN or infinite.
        """
        flags = flags_of(x)
        relevant = [o for o in operands if not ran.info.is_mover or _overlap(o.flags, flags)]
        if self._spread(ran, x, number, flags, relevant):
            return
        if self._from_outside(ran, x, number, flags, relevant):
            return
        if self._from_unwritten(ran, x, number, flags, relevant):
            return
        if self._from_constant(ran, x, number, flags, relevant, has_constant):
            return
        if self._from_pos_inf(ran, x, number, flags, relevant):
            return
        self._from_neg_inf(ran, x, number, flags, relevant)

    def _spread(self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand]) -> bool:
        source = next((o for o in operands if is_bad(o)), None)
        if source is None:
            return False
        assert source.entry is not None
        assert source.entry.bad is not None
        root = source.entry.bad
        self.report.propagated(ran, x, number, root)
        self.table.mark_bad(x, root, neg_inf=flags.neg_inf)
        return True

    def _from_outside(self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand]) -> bool:
        found = self.outsider(operands)
        if found is None:
            return False
        source, owner = found
        event = self.report.bad_op(
            ran,
            x,
            number,
            bad_places(x, neg_inf=not (flags.nan or flags.pos_inf) or owner.cause is Cause.WEIGHT),
            owner.cause,
            owner.culprit,
            source=source,
            owner=owner,
        )
        self.blame_outsider(source, owner, event)
        self.table.mark_bad(x, event, neg_inf=flags.neg_inf)
        return True

    def outsider(self, operands: list[Operand]) -> tuple[Operand, Owner] | None:
        """The operand that was bad before any op wrote it, weights first."""
        found = [(o, self._owner(o)) for o in operands if _is_unexplained_state(o)]
        bad = [(o, w) for o, w in found if o.flags.nan or w.cause in (Cause.WEIGHT, Cause.CARRIED)]
        return min(bad, key=lambda f: f[1].cause is not Cause.WEIGHT, default=None)

    def blame_outsider(self, source: Operand, owner: Owner, event: OpEvent) -> None:
        """From now on the tensor is known as bad: other ops that read it spread ``event``."""
        self.table.mark_bad(source.tensor, event, neg_inf=owner.cause is Cause.WEIGHT)

    def _owner(self, operand: Operand) -> Owner:
        owner = self._owner_of(operand.tensor)
        if owner.cause in (Cause.OUTSIDE, Cause.CALLER) and operand.entry and operand.entry.carried:
            return Owner(Cause.CARRIED, str(operand.entry.carried))
        return owner

    def _from_unwritten(self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand]) -> bool:
        source = next((o for o in operands if o.entry is not None and o.entry.unwritten), None)
        if source is None:
            return False
        assert source.entry is not None
        writer = source.entry.unwritten
        assert writer is not None
        if ran.info.is_mover:
            self.table.entry(x).unwritten = writer
            return True
        places = bad_places(x, neg_inf=True)
        text = f"{_READS_UNWRITTEN}: allocated by {writer}"
        event = self.report.bad_op(ran, x, number, places, Cause.UNWRITTEN, text, source=source)
        self.table.mark_bad(source.tensor, event, neg_inf=True)
        self.table.mark_bad(x, event, neg_inf=flags.neg_inf)
        return True

    def _from_constant(
        self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand], has_number: bool
    ) -> bool:
        """A constant that is NaN or infinite: a Python number, or a tensor of one element made of one."""
        literals = [o for o in operands if o.entry is not None and o.entry.is_literal]
        if not (has_number or literals) or any(_is_pending(o) and o not in literals for o in operands):
            return False
        if literals and ran.info.root in ("_to_copy", "clone") and x.numel() == 1:
            self.table.entry(x).is_literal = True
            return True
        if flags.only_neg_inf:
            self._set_legal(ran, x, operands)
            return True
        if flags.nan or not ran.info.is_mover:
            text = "wrote a NaN constant" if ran.info.is_mover else "computed with a non-finite constant"
            places = bad_places(x, neg_inf=False)
            event = self.report.bad_op(ran, x, number, places, Cause.CONSTANT, text)
            self.table.mark_bad(x, event, neg_inf=False)
            return True
        self._set_pending(x, self.report.writer(ran, x))
        if flags.neg_inf:
            self._set_legal(ran, x, operands)
        return True

    def _from_pos_inf(self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand]) -> bool:
        """A +Inf that did no damage so far: moved on, or doing it now."""
        source = next((o for o in operands if _is_pending(o)), None)
        if source is None:
            return False
        if self._own_places(ran, x, number, operands):
            return True
        if flags.only_neg_inf and ran.info.is_sign:
            self._set_legal(ran, x, operands)
            return True
        writer = self._writer_of(ran, source)
        # a +Inf times a negative number is still the same value on its way, not a mask
        if flags.only_neg_inf or (ran.info.is_mover and not flags.nan):
            self._set_pending(x, writer)
            if flags.pos_inf and flags.neg_inf:
                self._set_legal(ran, x, operands)
            return True
        if writer in self._fired:
            self.report.propagated(ran, x, number, self._fired[writer])
        self.table.mark_bad(x, self._harm(writer, self._here(ran)), neg_inf=flags.neg_inf)
        return True

    def _writer_of(self, ran: Ran, source: Operand) -> Writer:
        if source.entry is not None and source.entry.pending is not None:
            return source.entry.pending
        writer = self.report.writer(ran, source.value, self._owner_of(source.tensor))
        self.table.entry(source.tensor).pending = writer
        return writer

    def _from_neg_inf(self, ran: Ran, x: Tensor, number: int, flags: Flags, operands: list[Operand]) -> None:
        """What is left: legal -Inf in, or nothing but finite values."""
        masks = [o for o in operands if o.flags.neg_inf]
        if flags.only_neg_inf and _adds_masks(ran, x, operands):
            self._set_legal(ran, x, operands)
            return
        if not masks:
            self._own(ran, x, number, bad_places(x, neg_inf=True), _OWN)
            return
        if self._own_places(ran, x, number, operands):
            return
        if flags.only_neg_inf:
            self._set_legal(ran, x, operands)
            return
        if ran.info.is_sign and not flags.nan:
            writer = self.report.writer(ran, x, Owner(Cause.OWN, None))
            self._set_pending(x, writer)
            return
        mask_writer = masks[0].entry.legal if masks[0].entry is not None else None
        by = f"written by {mask_writer}" if mask_writer is not None else f"from {self._mask_owner(masks[0])}"
        text = f"turned a legal -Inf into {'NaN' if flags.nan else '+Inf'}; the -Inf was {by}"
        notes = ("a row of its input is all -Inf",) if _has_empty_row(masks[0].value) else ()
        places = bad_places(x, neg_inf=False)
        event = self.report.bad_op(ran, x, number, places, Cause.MASK, text, source=masks[0], notes=notes)
        self.table.mark_bad(x, event, neg_inf=False)

    def _mask_owner(self, mask: Operand) -> str:
        owner = self._owner_of(mask.tensor)
        return owner.name or "a tensor made before the watch"

    def _own(self, ran: Ran, x: Tensor, number: int, places: Tensor, text: str) -> None:
        event = self.report.bad_op(ran, x, number, places, Cause.OWN, text)
        self.table.mark_bad(x, event, neg_inf=True)

    def _own_places(self, ran: Ran, x: Tensor, number: int, operands: list[Operand]) -> bool:
        """Whether a pointwise op made bad values where none of its inputs had one; then it is an origin."""
        places = _unexplained_places(ran.info, x, operands)
        if places is None or not bool(places.any()):
            return False
        self._own(ran, x, number, places, _OWN)
        return True

    def _set_legal(self, ran: Ran, x: Tensor, operands: list[Operand]) -> None:
        entry = self.table.entry(x)
        known = next((o.entry.legal for o in operands if o.entry is not None and o.entry.legal), None)
        entry.legal = known or entry.legal or self.report.writer(ran)

    def _set_pending(self, x: Tensor, writer: Writer) -> None:
        self.table.entry(x).pending = writer

    def leaving(self, operand: Operand, number: int, index: int, place: str) -> None:
        """Judge a non-finite tensor, not reported so far, that leaves the model or stands in a signal.

        Args:
            operand: the tensor.
            number: its index among those that leave.
            index: how many ops ran before.
            place: where it was seen, in words.
        """
        entry, flags = operand.entry, operand.flags
        if flags.only_neg_inf and not _is_pending(operand):
            return
        if entry is not None and entry.pending is not None and not flags.nan:
            event = self._harm(entry.pending, place)
        elif entry is not None and entry.unwritten is not None:
            event = self.report.bad_output(operand, number, entry.unwritten, _NOBODY, place)
        else:
            event = self.report.bad_output(operand, number, index, self._owner(operand), place)
        self.table.mark_bad(operand.tensor, event, neg_inf=False)

    def _harm(self, writer: Writer, seen_at: str) -> OpEvent:
        """The event of a +Inf that did damage; one event a writer."""
        if writer not in self._fired:
            self._fired[writer] = self.report.harmful(writer, seen_at)
        return self._fired[writer]

    def _here(self, ran: Ran) -> str:
        path = self.report.stack.path
        return ran.info.name + (f" in {path}" if path else "")


def is_bad(operand: Operand) -> bool:
    """Whether what the operand holds was reported already."""
    entry, flags = operand.entry, operand.flags
    if entry is None or entry.bad is None:
        return False
    if flags.only_neg_inf:
        return entry.has_bad_neg_inf
    return True


def _is_pending(operand: Operand) -> bool:
    """Holds a +Inf that did no damage so far, or the -Inf that arithmetic made of one."""
    entry, flags = operand.entry, operand.flags
    if flags.nan:
        return False
    return flags.pos_inf or (entry is not None and entry.pending is not None and entry.legal is None)


def _is_unexplained_state(operand: Operand) -> bool:
    """Holds a value that no op was seen to write; -Inf alone counts only in a storage without a state."""
    entry, flags = operand.entry, operand.flags
    if entry is None:
        return True
    if entry.is_literal or entry.unwritten is not None:
        return False
    if entry.carried is not None and (flags.pos_inf or entry.has_bad_neg_inf):
        return True
    return flags.nan


def _overlap(a: Flags, b: Flags) -> bool:
    return (a.nan and b.nan) or (a.pos_inf and b.pos_inf) or (a.neg_inf and b.neg_inf)


def _adds_masks(ran: Ran, x: Tensor, operands: list[Operand]) -> bool:
    """Whether a sum is -Inf only where an input was -Inf, or the type's lowest value: masked, and then overflowed.

    Float16 scores below -16 plus a mask of -65504 are -Inf, and so is the sum of two such masks.
    """
    places = _unexplained_places(ran.info, x, operands)
    if places is None or ran.info.root not in ("add", "sub") or x.is_complex():
        return False
    for _, argument in ran.arguments:
        if argument.is_floating_point() and argument.element_size() > 1:
            lowest = (argument == torch.finfo(argument.dtype).min).to(places.device)
            places = places & ~lowest.broadcast_to(places.shape)
    return not bool(places.any())


def _unexplained_places(info: OpInfo, x: Tensor, operands: list[Operand]) -> Tensor | None:
    is_cast = info.root == "_to_copy"
    if not info.is_pointwise or (info.is_mover and not is_cast) or info.root.startswith("_foreach"):
        return None
    places = bad_places(x, neg_inf=True)
    for operand in operands:
        theirs = bad_places(operand.value, neg_inf=True).to(places.device)
        try:
            places = places & ~theirs.broadcast_to(places.shape)
        except RuntimeError:
            # complex with real operands, or an out= of another shape: places do not correspond
            return None
    return places


def _has_empty_row(x: Tensor) -> bool:
    values = plain(x)
    return values.ndim > 0 and bool(torch.isneginf(values).all(-1).any())
