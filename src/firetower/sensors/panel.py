"""The device panel: first-bad words that kernels write and one small copy brings to the host.

Declare the signals, `Panel.freeze`, then in each step: `Panel.reset`, `Panel.mark` for every tensor,
`Panel.flush`, `Panel.read`. All but the last are recorded in CUDA graphs and traced by ``torch.compile``;
none of them syncs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from firetower.core.errors import AttachError
from firetower.core.records import Kind, Legal, Status
from firetower.core.words import MAX_ELEMENTS, NOT_RUN, unpack_row_word, unpack_word
from firetower.sensors.check import Layout
from firetower.sensors.mark import MANY, shape_of_word, unmarkable, view_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first bad element of one signal, as its words tell it.

    ``shape`` is None when the signal was marked more than once in the step with different shapes: then
    ``flat_index`` is the smallest of them, and row and column cannot be told.
    """

    slot: int
    flat_index: int
    bits: int
    kind: Kind | None
    dtype: str
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurnedSequence:
    """The first bad signal of one sequence; ``offset`` counts elements inside the sequence's part of the
    tensor."""

    sequence: int
    slot: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PanelReading:
    """One panel on the host. Slots stand in execution order.

    ``step`` is (sequences, tokens) of the step that the panel was emptied for, None before the first.
    """

    step: tuple[int, int] | None
    ran: tuple[bool, ...]
    first: tuple[Found, ...] = ()
    first_pads: tuple[Found, ...] = ()
    burned: tuple[BurnedSequence, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True when no signal is bad in a real row; says nothing of signals that did not run."""
        return not self.first

    @property
    def origin(self) -> Found | None:
        """The first bad signal, or None."""
        return self.first[0] if self.first else None

    @property
    def pad_before_real(self) -> bool:
        """Whether a pad row was bad before, or in the same signal as, the first bad real row."""
        return bool(self.first and self.first_pads) and self.first_pads[0].slot <= self.first[0].slot


def decode_panel(words: Sequence[int], num_signals: int, num_rows: int) -> PanelReading:
    """Take the words of a panel apart; the layout is that of `firetower.sensors.mark`."""
    rows_at, shapes_at = 2 * num_signals, 2 * num_signals + num_rows
    signals, pads = words[:num_signals], words[num_signals:rows_at]
    shapes, step = words[shapes_at : shapes_at + num_signals], words[-1]
    burned = []
    for sequence, word in enumerate(words[rows_at:shapes_at]):
        row = unpack_row_word(word)
        if row.execution_index is not None and row.column is not None:
            burned.append(BurnedSequence(sequence=sequence, slot=row.execution_index, offset=row.column))
    return PanelReading(
        step=None if step == NOT_RUN else (step >> 32, step & 0xFFFFFFFF),
        ran=tuple(word != NOT_RUN for word in signals),
        first=_found(signals, shapes),
        first_pads=_found(pads, shapes),
        burned=tuple(burned),
    )


def _found(words: Sequence[int], shapes: Sequence[int]) -> tuple[Found, ...]:
    found = []
    for slot, word in enumerate(words):
        if unpack_word(word, "float64").status is not Status.BAD:
            continue
        dtype, shape = shape_of_word(shapes[slot])
        taken = unpack_word(word, dtype)
        assert taken.flat_index is not None
        assert taken.bits is not None
        found.append(
            Found(
                slot=slot,
                flat_index=taken.flat_index,
                bits=taken.bits,
                kind=taken.kind,
                dtype=dtype,
                shape=shape,
            )
        )
    return tuple(found)


class Snapshot:
    """A copy of the panel on its way to the host; made by `Panel.snapshot_async`."""

    def __init__(self, panel: Panel, copies: list[Tensor], events: list[torch.cuda.Event]) -> None:
        self._panel = panel
        self._copies = copies
        self._events = events

    def is_ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def result(self) -> PanelReading:
        """Wait for the copy and decode it. The words of several devices are merged: the smallest is the
        first."""
        for event in self._events:
            event.synchronize()
        words = self._copies[0]
        for other in self._copies[1:]:
            words = torch.minimum(words, other)
        return decode_panel(words.tolist(), self._panel.num_signals, self._panel.num_rows)


class Panel:
    """First-bad words of every signal, one copy on each device that runs a part of the model.

    Slots are numbered in the order of declaration, which should be the order of execution: the origin is the
    bad signal with the smallest slot. A signal that yields several tensors in one step should get a slot for
    each.
    """

    def __init__(self, *, num_rows: int) -> None:
        """Make an empty panel; ``num_rows`` is the largest batch whose burned sequences are told apart."""
        if num_rows < 0:
            raise AttachError(f"num_rows={num_rows}: must be 0 or more")
        self.num_rows = num_rows
        self._legal: list[bool] = []
        self._layouts: list[Layout] = []
        self._buffers: dict[torch.device, Tensor] | None = None
        self._waiting: list[tuple[Tensor, int, int, int, int, int, bool]] = []
        self._waiting_pad: Tensor | None = None
        self._waiting_on: Tensor | None = None
        self._versions: list[int] = []
        self.overwritten: set[int] = set()

    @property
    def num_signals(self) -> int:
        """Number of declared signals."""
        return len(self._legal)

    @property
    def num_words(self) -> int:
        """Number of int64 words on each device."""
        return 3 * self.num_signals + self.num_rows + 1

    def declare(
        self, *, legal: Legal = Legal.FINITE, layout: Layout = Layout.TOKENS, num_elements: int | None = None
    ) -> int:
        """Add a signal and return its slot.

        Args:
            legal: what may stand in it.
            layout: how its dimensions map to sequences and tokens.
            num_elements: size of the largest tensor, where it is known already.

        Raises:
            AttachError: after `freeze`, or a tensor too large for a word.
        """
        if self._buffers is not None:
            raise AttachError("panel: is frozen; declare every signal before freeze()")
        if num_elements is not None and num_elements > MAX_ELEMENTS:
            raise AttachError(
                f"num_elements={num_elements}: must be at most {MAX_ELEMENTS}; split the tensor by rows"
            )
        self._legal.append(legal is Legal.NEG_INF)
        self._layouts.append(layout)
        return len(self._legal) - 1

    def freeze(self, devices: Iterable[torch.device | str]) -> None:
        """Allocate the words on each device and empty them; no signal can be declared afterwards.

        Raises:
            AttachError: no signal, or frozen already.
        """
        if self._buffers is not None:
            raise AttachError("panel: is frozen already; make a new one")
        if not self._legal:
            raise AttachError("panel: has no signal; declare at least one before freeze()")
        self._buffers = {}
        for device in devices:
            words = torch.full((self.num_words,), NOT_RUN, dtype=torch.int64, device=device)
            # its address never changes: compiled CUDA graphs may write to it in place
            torch._dynamo.mark_static_address(words)
            self._buffers[words.device] = words

    def words(self, device: torch.device) -> Tensor | None:
        """The words on one device, int64 [num_words], or None when the panel has none there."""
        return (self._buffers or {}).get(device)

    def reset(self, num_sequences: int, num_tokens: int) -> None:
        """Empty the panel for a step of ``num_sequences`` B and ``num_tokens`` T; one tiny kernel a
        device."""
        assert self._buffers is not None
        # marks of a step that was cut short by an exception
        self._waiting, self._versions, self._waiting_on, self._waiting_pad = [], [], None, None
        for words in self._buffers.values():
            torch.ops.firetower.reset.default(words, num_sequences, num_tokens)

    def mark(
        self, slot: int, x: Tensor, *, num_sequences: int, num_tokens: int, pad: Tensor | None = None
    ) -> str | None:
        """Check a tensor on its device and leave the first bad word in the panel; returns at once.

        Marks are collected and go out `MANY` a launch: call `flush` at the end of the step. Until then a collected
        tensor must not be written in place. While ``torch.compile`` traces it is a value and cannot be; in eager
        mode its version is compared at the flush, and a tensor that was overwritten is put into `overwritten`. An
        inference tensor counts no versions and goes out at once.

        Args:
            slot: from `declare`.
            x: the tensor, any strides; a non-contiguous one is copied.
            num_sequences: B of this step.
            num_tokens: T of this step.
            pad: [B, T] bool on the device of ``x``, True where a row is a pad.

        Returns:
            None, or the reason why this tensor is not covered.
        """
        reason = unmarkable(x)
        if reason is not None:
            return reason
        words = self.words(x.device)
        if words is None:
            return f"device {x.device}: the panel has no words there"
        b, heads, tokens, width = view_of(x.shape, self._layouts[slot], num_sequences, num_tokens)
        has_pad = pad is not None and tokens > 0
        if has_pad and pad is not None and tokens < num_tokens:
            # the last K tokens only (logits)
            pad = pad[:, num_tokens - tokens :]
        tracing = torch.compiler.is_compiling()
        # the compiler drops this clone where nothing is written in place
        x = x.detach().clone() if tracing else x.detach()
        entry = (x, slot, self.num_rows if b else 0, heads, max(tokens, 1), width, has_pad)
        if not tracing and x.is_inference():
            _send_one(words, self.num_signals, entry, pad, self._legal[slot])
            return None
        if not self._fits(slot, words, pad if has_pad else None):
            self.flush()
        self._waiting_on = words
        if has_pad:
            self._waiting_pad = pad
        self._waiting.append(entry)
        if not tracing:
            self._versions.append(x._version)
        if len(self._waiting) == MANY:
            self.flush()
        return None

    def _fits(self, slot: int, words: Tensor, pad: Tensor | None) -> bool:
        """Whether a mark may join the waiting ones: one device, one pad mask, each slot once in a launch."""
        return (
            (self._waiting_on is None or self._waiting_on is words)
            and (pad is None or self._waiting_pad is None or self._waiting_pad is pad)
            and all(entry[1] != slot for entry in self._waiting)
        )

    def flush(self) -> None:
        """Send the marks that were collected."""
        waiting, words, pad = self._waiting, self._waiting_on, self._waiting_pad
        if not waiting or words is None:
            return
        self._waiting, self._waiting_on, self._waiting_pad = [], None, None
        if self._versions:
            versions, self._versions = self._versions, []
            changed = {e[1] for e, v in zip(waiting, versions, strict=True) if e[0]._version != v}
            self.overwritten |= changed
            waiting = [e for e in waiting if e[1] not in changed]
            if not waiting:
                return
        if not any(entry[6] for entry in waiting):
            pad = None
        torch.ops.firetower.mark_many.default(
            [e[0] for e in waiting],
            words,
            pad,
            [e[1] for e in waiting],
            self.num_signals,
            [e[2] for e in waiting],
            [e[3] for e in waiting],
            [e[4] for e in waiting],
            [e[5] for e in waiting],
            [self._legal[e[1]] for e in waiting],
            [e[6] for e in waiting],
        )

    def snapshot_async(self) -> Snapshot:
        """Start the copy to the host on the current stream of each device; does not wait.

        Raises:
            AttachError: before `freeze`.
        """
        if self._buffers is None:
            raise AttachError("panel: is not frozen; call freeze() first")
        self.flush()
        copies, events = [], []
        for device, words in self._buffers.items():
            if device.type != "cuda":
                copies.append(words.clone())
                continue
            host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            stream = torch.cuda.current_stream(device)
            copies.append(host.copy_(words, non_blocking=True))
            events.append(stream.record_event())
        return Snapshot(self, copies, events)

    def read(self) -> PanelReading:
        """Copy the panel to the host and decode it; waits for what was enqueued before on the current
        stream."""
        return self.snapshot_async().result()


def _send_one(
    words: Tensor,
    num_signals: int,
    entry: tuple[Tensor, int, int, int, int, int, bool],
    pad: Tensor | None,
    neg_inf_legal: bool,
) -> None:
    x, slot, num_rows, heads, tokens, width, has_pad = entry
    torch.ops.firetower.mark.default(
        x, words, pad if has_pad else None, slot, num_signals, num_rows, heads, tokens, width, neg_inf_legal
    )
