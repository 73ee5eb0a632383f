"""A node that writes a bad value when it is armed: for tests and drills of isolation, absent unless asked for.

It hangs behind every signal that the model stores, armed or not, so that a run with a fault and its clean twin execute
the same graph. What it does is steered from device memory: the host writes a list of places before a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.core.records import Legal, Signal
from firetower.sensors.marks import Mark, mark_rows

MAX_PLACES = 16
"""Bad values of one step."""

_FIELDS = 4
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value goes, and its raw bits in the width of the signal's type.

    ``signal`` is the index among the model's signals, ``row`` and ``column`` are of the tensor as it is marked,
    ``[rows, columns]``. A place outside a tensor is not written.
    """

    signal: int
    row: int
    column: int
    bits: int


class Injector:
    """Passed to the model as its recorder: ``keep`` is called with every stored signal, before anything reads it.

    What was written is marked, as if the kernel had stored the value itself.

    Args:
        signals: of the model.
        device: where its list of places lives.
    """

    def __init__(self, signals: Sequence[Signal], device: torch.device | str) -> None:
        self.num_signals = len(signals)
        self.neg_inf_legal = frozenset(i for i, s in enumerate(signals) if s.legal is Legal.NEG_INF)
        self.places = torch.full((MAX_PLACES, _FIELDS), -1, dtype=torch.int64, device=device)
        self._panel: Tensor | None = None
        self._row_ids: Tensor | None = None

    def arm(self, places: Sequence[Place]) -> None:
        """Write these values in the next steps, until `disarm`; in order with what the device does.

        Raises:
            ConfigError: too many places, or a signal that does not exist.
        """
        if len(places) > MAX_PLACES:
            raise ConfigError(f"places={len(places)}: must be at most {MAX_PLACES}")
        for place in places:
            if not 0 <= place.signal < self.num_signals or place.row < 0 or place.column < 0:
                last = self.num_signals - 1
                raise ConfigError(f"place={place}: signal must be from 0 to {last}, row and column from 0 on")
        rows = [[p.signal, p.row, p.column, p.bits] for p in places]
        rows += [[-1] * _FIELDS] * (MAX_PLACES - len(rows))
        self.places.copy_(torch.tensor(rows, dtype=torch.int64))

    def disarm(self) -> None:
        """Write nothing in the next steps."""
        self.places.fill_(-1)

    def begin(self, panel: Tensor, row_ids: Tensor) -> None:
        """The step's panel, and the row word of each of its tokens; before the model runs."""
        self._panel, self._row_ids = panel, row_ids

    def keep(self, signal_index: int, tensor: Tensor) -> None:
        """Write into ``tensor``, ``[rows, columns]`` contiguous, whatever is armed for the signal."""
        if tensor.is_cpu:
            hits = [p for p in self.places.tolist() if p[0] == signal_index]
            if not hits:
                return
            ghost = torch.zeros_like(tensor)
            for into in (tensor, ghost):
                _write_on_cpu(hits, into)
        else:
            from firetower.engine.inject_kernel import write

            ghost = torch.zeros_like(tensor)
            for into in (tensor, ghost):
                write(self.places, signal_index, into)
        self._mark(signal_index, ghost)

    def _mark(self, signal_index: int, ghost: Tensor) -> None:
        """Check what was written, and only that: rows that the op left unwritten are none of ours."""
        panel, row_ids = self._panel, self._row_ids
        if panel is None or row_ids is None:
            return
        rows, tokens = ghost.shape[0], row_ids.numel()
        # several rows a token, or the last token of each prompt alone
        ids = row_ids.repeat_interleave(rows // tokens) if rows >= tokens else row_ids[:rows]
        mark = Mark(
            panel=panel, slot=signal_index, num_signals=self.num_signals, row_ids=ids,
            num_rows=panel.numel() - 3 * self.num_signals - 1, neg_inf_legal=signal_index in self.neg_inf_legal,
        )  # fmt: skip
        mark_rows(ghost, mark)


def _write_on_cpu(hits: list[list[int]], rows: Tensor) -> None:
    width = 8 * rows.element_size()
    for _, row, column, bits in hits:
        if row < rows.shape[0] and column < rows.shape[1]:
            # patterns with the sign bit are negative in an integer view
            value = bits - (1 << width) if bits >> (width - 1) and width > 8 else bits
            rows.view(_WIDTHS[rows.element_size()])[row, column] = value
