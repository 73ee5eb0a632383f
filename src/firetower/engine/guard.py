"""From the panel that came back with the tokens to names: request, position, layer, signal, row, column, bits.

A clean step costs two comparisons over the panel's words. Everything else here runs on a bad one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from firetower.core.records import (
    BadValue,
    BurnedRow,
    Kind,
    Legal,
    Phase,
    Reading,
    Signal,
    SignalReading,
    Status,
)
from firetower.core.words import CLEAN
from firetower.engine.flight import Flight
from firetower.ops.registry import REGISTRY, target_of
from firetower.sensors.panel import Found, PanelReading, decode_panel

Ints = npt.NDArray[np.int64]

KERNELS: dict[str, tuple[str, str]] = {
    "input": ("rms_norm", "rms_norm"),
    "projection": ("linear", "linear"),
    "conv_state": ("causal_conv1d.window", "causal_conv1d.prefill"),
    "conv": ("causal_conv1d.window", "causal_conv1d.prefill"),
    "decay": ("models.gates", "models.gates"),
    "recurrent_state": ("gated_delta_rule.window", "gated_delta_rule.scan"),
    "recurrence": ("gated_delta_rule.window", "gated_delta_rule.scan"),
    "kv": ("attention.write_kv", "attention.write_kv"),
    "context": ("attention.window", "attention.prefill"),
    "attention": ("linear", "linear"),
    "residual": ("rms_norm", "rms_norm"),
    "router": ("moe.logits", "moe.logits"),
    "gate": ("moe.gate_up", "moe.gate_up"),
    "up": ("moe.gate_up", "moe.gate_up"),
    "swiglu": ("moe.gate_up", "moe.gate_up"),
    "down": ("moe.down", "moe.down"),
    "routed": ("moe.combine", "moe.combine"),
    "output": ("moe.combine", "moe.combine"),
    "hidden": ("rms_norm", "rms_norm"),
    "logits": ("linear", "linear"),
}
"""Stage -> kernel that marks it, in a window and in a prompt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """One bad value, as far as it can be named.

    Attributes:
        request: id; None for a pad that belongs to none.
        position: absolute, in the sequence; None for a pad.
        step: number of the step. phase: what it did.
        signal: where first for this row. row: of the step's sequences. token: of the row's window, or of the chunk.
        column: along the signal's last dimension.
        bits, kind, dtype: of the value. A panel keeps bits of a signal's first bad row alone: where ``is_own_bits`` is
            False they are those of that row, in the same signal.
        is_pad: whether no request owns the row.
        backend: kernel and backend that marked it, and how the step ran.
    """

    request: str | None
    position: int | None
    step: int
    phase: Phase
    signal: Signal
    row: int
    token: int
    column: int
    flat_index: int
    shape: tuple[int, ...]
    bits: int
    kind: Kind
    dtype: str
    is_own_bits: bool
    is_pad: bool
    backend: str

    @property
    def first(self) -> BadValue:
        """The same as a value of the records."""
        return BadValue(
            flat_index=self.flat_index, row=self.flat_index // self.shape[-1], column=self.column, bits=self.bits,
            dtype=self.dtype, kind=self.kind, shape=self.shape, sequence=self.row, token=self.token,
            position=self.position, is_pad=self.is_pad,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What one bad step says.

    Attributes:
        reading: the panel as records.
        burned: by row: what burned it.
        pads: bad values in rows that nobody owns; by themselves no fire.
        is_unattributed: a bad value that no row word names: every row counts as burned.
    """

    reading: Reading
    burned: dict[int, Burn]
    pads: tuple[Burn, ...] = ()
    is_unattributed: bool = False


class Guard:
    """Reads panels of one model.

    Args:
        signals: of the model, in order of execution.
        device, dtype: what its kernels were chosen for.
    """

    def __init__(self, signals: Sequence[Signal], *, device: torch.device, dtype: torch.dtype) -> None:
        self.signals = tuple(signals)
        self._target = target_of(device.type, dtype)

    def is_clean(self, words: Ints) -> bool:
        """Whether no signal is bad, in real rows or in pads."""
        return bool(words[: 2 * len(self.signals)].min(initial=CLEAN) >= CLEAN)

    def num_covered(self, words: Ints) -> int:
        """How many signals ran."""
        return int((words[: len(self.signals)] <= CLEAN).sum())

    def read(self, flight: Flight, words: Ints) -> StepReading:
        """Take a panel apart; needed for a bad one only."""
        panel = decode_panel(words.tolist(), len(self.signals), flight.num_row_words)
        by_slot = {found.slot: found for found in panel.first}
        burned: dict[int, Burn] = {}
        slots: dict[int, int] = {}
        for entry in panel.burned:
            row = entry.sequence // flight.shape.window if flight.chunk is None else 0
            # of a row's tokens the one whose first bad signal ran first
            if entry.slot in by_slot and entry.slot < slots.get(row, 1 << 31):
                slots[row] = entry.slot
                burned[row] = self._burn(flight, by_slot[entry.slot], row, entry.sequence, entry.offset)
        # row words hold the first bad signal of each row: one of them must be the first of all
        first_row = min((entry.slot for entry in panel.burned), default=1 << 31)
        is_unattributed = bool(panel.first) and panel.first[0].slot < first_row
        if is_unattributed:
            # nobody can be told to be clean
            burned = {row: self._burn(flight, panel.first[0], row, None, None) for row in range(len(flight.sequences))}
        pads = tuple(self._pad(flight, found) for found in panel.first_pads)
        return StepReading(
            reading=self._reading(flight, panel, burned, pads),
            burned=burned,
            pads=pads,
            is_unattributed=is_unattributed,
        )

    def _burn(self, flight: Flight, found: Found, row: int, word: int | None, column: int | None) -> Burn:
        """A burn of one row: its place from the row word, or the signal's own where no row word names it."""
        width, first = self._place(flight, found)
        is_first_row = row == first[0]
        token = first[1] if is_first_row else (word or 0) % flight.shape.window if flight.chunk is None else 0
        if column is None:
            column = found.flat_index % width
        same = is_first_row and column == found.flat_index % width
        sequence = flight.sequences[row]
        flat = found.flat_index if same else (row * flight.shape.window + token) * width + column
        return Burn(
            request=sequence.request.id,
            position=int(flight.position[row]) + token,
            step=flight.number,
            phase=flight.phase if flight.chunk is not None or flight.num_real[row] > 1 else Phase.DECODE,
            signal=self.signals[found.slot],
            row=row,
            token=token,
            column=column,
            flat_index=flat,
            shape=found.shape or (found.flat_index + 1,),
            bits=found.bits,
            kind=found.kind or Kind.NAN,
            dtype=found.dtype,
            is_own_bits=same,
            is_pad=False,
            backend=self.backend(flight, self.signals[found.slot]),
        )

    def _pad(self, flight: Flight, found: Found) -> Burn:
        width, (row, token) = self._place(flight, found)
        return Burn(
            request=None,
            position=None,
            step=flight.number,
            phase=flight.phase,
            signal=self.signals[found.slot],
            row=row,
            token=token,
            column=found.flat_index % width,
            flat_index=found.flat_index,
            shape=found.shape or (found.flat_index + 1,),
            bits=found.bits,
            kind=found.kind or Kind.NAN,
            dtype=found.dtype,
            is_own_bits=True,
            is_pad=True,
            backend=self.backend(flight, self.signals[found.slot]),
        )

    def _place(self, flight: Flight, found: Found) -> tuple[int, tuple[int, int]]:
        """(columns, (row of the step, token of the row)) of a signal's first bad element.

        A signal has one row a token, several a token (heads, experts), or one a sequence (states; the logits of a
        prompt, which are its last token's).
        """
        if found.shape is None:
            return found.flat_index + 1, (0, 0)
        rows, width = found.shape[0], found.shape[-1]
        row = found.flat_index // width
        num_rows, window = flight.shape.num_rows, flight.shape.window
        if rows % (num_rows * window) == 0:
            token = row // (rows // (num_rows * window))
            return width, (token // window, token % window)
        is_last = flight.chunk is not None and self.signals[found.slot].stage == "logits"
        return width, (row // max(1, rows // num_rows), window - 1 if is_last else 0)

    def backend(self, flight: Flight, signal: Signal) -> str:
        """Kernel and backend of a signal, and how the step ran: ``moe.down/triton, graph, 8 x 1``."""
        names = KERNELS.get(signal.stage)
        kernel = names[flight.chunk is not None] if names is not None else signal.stage
        choose = getattr(REGISTRY, "reference", REGISTRY.choice) if flight.is_reference else REGISTRY.choice
        choice = choose(kernel, self._target).backend if kernel in REGISTRY.kernels() else "unknown"
        how = "reference" if flight.is_reference else "graph" if flight.is_graphed else "eager"
        return f"{kernel}/{choice}, {how}, {flight.shape.num_rows} x {flight.shape.window}"

    def _reading(
        self, flight: Flight, panel: PanelReading, burned: dict[int, Burn], pads: tuple[Burn, ...]
    ) -> Reading:
        firsts = {found.slot: self._value(flight, found, is_pad=False) for found in panel.first}
        pad_firsts = {found.slot: self._value(flight, found, is_pad=True) for found in panel.first_pads}
        signals = []
        for slot, signal in enumerate(self.signals):
            first = firsts.get(slot)
            ran = panel.ran[slot]
            status = Status.BAD if first is not None else Status.CLEAN if ran else Status.NOT_COVERED
            signals.append(
                SignalReading(
                    signal=signal,
                    status=status,
                    first=first,
                    first_pad=pad_firsts.get(slot),
                    reason=None if ran else _why_not(signal, flight),
                )
            )
        return Reading(
            step=flight.number,
            phase=flight.phase,
            num_tokens=int(flight.num_real.sum()),
            signals=tuple(signals),
            burned=tuple(
                BurnedRow(
                    sequence=row, signal=burn.signal, token=burn.token, column=burn.column,
                    first=burn.first if burn.is_own_bits else None,
                )
                for row, burn in sorted(burned.items())
            ),
            pad_before_real=panel.pad_before_real,
        )  # fmt: skip

    def _value(self, flight: Flight, found: Found, *, is_pad: bool) -> BadValue:
        width, (row, token) = self._place(flight, found)
        is_known = not is_pad and found.shape is not None and row < len(flight.sequences)
        return BadValue(
            flat_index=found.flat_index,
            row=found.flat_index // width,
            column=found.flat_index % width,
            bits=found.bits,
            dtype=found.dtype,
            kind=found.kind or Kind.NAN,
            shape=found.shape or (),
            sequence=row,
            token=token,
            position=int(flight.position[row]) + token if is_known else None,
            is_pad=is_pad,
        )


def _why_not(signal: Signal, flight: Flight) -> str:
    if flight.chunk is not None:
        return "a prompt does not mark it: the next signal sees what it holds"
    return f"{signal.stage} did not run in this step" if signal.legal is Legal.FINITE else "did not run in this step"
