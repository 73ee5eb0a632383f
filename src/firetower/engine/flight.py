"""A step that went to the device, and what comes back of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firetower.core.records import Phase
from firetower.engine.buckets import Shape
from firetower.engine.scheduler import Chunk
from firetower.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One step between its launch and its reading.

    Attributes:
        number: of the step. phase: prefill, decode (no row has a draft) or verify.
        shape: rows and window; (1, tokens of the chunk) for a prompt.
        sequences: those it runs, by row. epochs: theirs at launch; a row whose sequence has another by now is stale.
        fed, num_real, position, accepted: what the window ran, by row, as `firetower.engine.pack` has it; of a chained
            row ``fed`` is unknown until the flight before it is read.
        chunk: of the prompt, for a prefill.
        has_token: whether the step chooses tokens.
        is_graphed, is_reference: how it ran.
        out: the host's copy: panel, tokens, events; complete once ``event`` is.
        logprobs, top_ids, top_logprobs: host copies, where asked for.
    """

    number: int
    phase: Phase
    shape: Shape
    sequences: list[Sequence]
    epochs: list[int]
    out: Tensor
    fed: Ints
    num_real: Ints
    position: Ints
    accepted: Ints
    chunk: Chunk | None = None
    has_token: bool = True
    is_graphed: bool = False
    is_reference: bool = False
    event: torch.cuda.Event | None = None
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    @property
    def num_row_words(self) -> int:
        """R of its panel."""
        return 1 if self.chunk is not None else self.shape.num_rows * self.shape.window

    def wait(self) -> None:
        """Until the copy is there: the only wait of a step."""
        if self.event is not None:
            self.event.synchronize()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landed:
    """The parts of a flight's copy as arrays.

    Attributes:
        words: int64 [3 S + R + 1], the panel.
        tokens, events: int64 [B, W], of the bucket's rows, pads included; empty where the step chooses none.
    """

    words: Ints
    tokens: Ints
    events: Ints


def land(flight: Flight, num_signals: int) -> Landed:
    """Wait for a flight and take its copy apart."""
    flight.wait()
    out = flight.out.numpy()
    panel = 3 * num_signals + flight.num_row_words + 1
    rows, window = (1, 1) if flight.chunk is not None else (flight.shape.num_rows, flight.shape.window)
    size = rows * window if flight.has_token else 0
    shape = (rows, window) if size else (0, window)
    return Landed(
        words=out[:panel],
        tokens=out[panel : panel + size].reshape(shape),
        events=out[panel + size : panel + 2 * size].reshape(shape),
    )
