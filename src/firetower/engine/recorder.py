"""The flight recorder: signals of the last windows stay on the device, in a ring of buffers for each of them.

Handed to the model as its recorder, it copies each signal right after it was marked, inside the graph where there is
one. Which turn of the ring a window goes to is read from device memory, so that one graph serves all turns. It writes
nothing that a step reads: tokens have the same bits with it and without.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.engine.buckets import Shape, bucket_of, window_limit
from firetower.engine.buffers import StepBuffers
from firetower.engine.config import EngineConfig
from firetower.engine.flight import Flight
from firetower.engine.inject import Injector
from firetower.models.hybrid import HybridModel
from firetower.models.signals import NOT_KEPT, STAGES
from firetower.models.state import new_state

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalShape:
    """What one signal is handed as: rows for each token of a window, columns, type."""

    rows_per_token: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token."""
        return self.rows_per_token * self.width * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One window that the ring holds; ``slots`` by row, as they were at launch."""

    flight: Flight
    turn: int
    slots: Ints


class _Probe:
    """Notes what a window of one pad hands out."""

    def __init__(self, wanted: Collection[int]) -> None:
        self.wanted = wanted
        self.shapes: dict[int, SignalShape] = {}

    def keep(self, signal_index: int, tensor: Tensor) -> None:
        self.shapes[signal_index] = SignalShape(
            rows_per_token=tensor.shape[0], width=tensor.shape[1], dtype=tensor.dtype
        )


def wanted_signals(model: HybridModel, stages: Sequence[str] | None) -> frozenset[int]:
    """Indices of the signals of some stages; of all that can be kept where None.

    Raises:
        ConfigError: a stage that does not exist, or that no tensor holds as a whole.
    """
    if stages is None:
        return frozenset(model.kept_signals)
    for stage in stages:
        if stage not in STAGES or stage in NOT_KEPT:
            known = ", ".join(s for s in STAGES if s not in NOT_KEPT)
            raise ConfigError(f"record_stages={stage!r}: cannot be recorded; known: {known}")
    return frozenset(i for i in model.kept_signals if model.signals[i].stage in stages)


@torch.inference_mode()
def signal_shapes(model: HybridModel, wanted: Collection[int]) -> dict[int, SignalShape]:
    """What the model hands a recorder, by signal: found with a window of one pad, which writes nothing."""
    state = new_state(model.config, num_pages=1, num_slots=1, dtype=model.dtype, device=model.device)
    buffers = StepBuffers(
        Shape(num_rows=1, window=1), max_pages=1, max_seq_len=state.page_size, num_signals=len(model.signals),
        device=model.device,
    )  # fmt: skip
    probe = _Probe(wanted)
    model.window(buffers.batch, state, panel=buffers.panel, keep=probe)
    return {index: probe.shapes[index] for index in sorted(probe.shapes)}


def build_recorder(
    model: HybridModel, config: EngineConfig, *, depth: int, injector: Injector | None
) -> FlightRecorder:
    """The recorder that options ask for; ``depth`` turns more, for windows that are launched before one is read.

    Raises:
        ConfigError: stages that cannot be recorded, or more memory than there is.
    """
    wanted = wanted_signals(model, config.record_stages)
    return FlightRecorder(
        signal_shapes(model, wanted), num_windows=config.record_windows + depth,
        num_tokens=most_tokens(config.max_batch, config.max_window, config.max_window_rows), device=model.device,
        injector=injector,
    )  # fmt: skip


def most_tokens(max_batch: int, max_window: int, max_window_rows: int) -> int:
    """Tokens of the largest window that an engine may run, pads included."""
    return max(bucket_of(n, max_batch) * window_limit(n, max_window, max_window_rows) for n in range(1, max_batch + 1))


class FlightRecorder:
    """Keeps the signals of the last windows on the device.

    Args:
        shapes: of the signals, by index.
        num_windows: turns of the ring.
        num_tokens: of the largest window.
        device: where.
        injector: the fault node, which goes first, so that what it wrote is what is kept; None for none.

    Attributes:
        num_bytes: memory of the ring. wanted: indices that it is handed.
        windows: what the ring holds, oldest first.

    Raises:
        ConfigError: more than the device has free; nothing has been allocated then.
    """

    def __init__(
        self, shapes: dict[int, SignalShape], *, num_windows: int, num_tokens: int, device: torch.device,
        injector: Injector | None = None,
    ) -> None:  # fmt: skip
        self.shapes = shapes
        self.num_windows = num_windows
        self.num_tokens = num_tokens
        self.num_bytes = cost_bytes(shapes, num_windows=num_windows, num_tokens=num_tokens)
        if device.type == "cuda" and self.num_bytes > (free := torch.cuda.mem_get_info(device)[0]):
            raise ConfigError(
                f"record_windows: {num_windows} windows of {num_tokens} tokens take {self.num_bytes:,} bytes, "
                f"{free:,} are free; record fewer windows, or name record_stages"
            )
        self._injector = injector
        # the fault node is handed every signal
        self.wanted: Collection[int] = frozenset(shapes) if injector is None else range(1 << 30)
        self._rings = {
            index: torch.zeros((num_windows, num_tokens * s.rows_per_token, s.width), dtype=s.dtype, device=device)
            for index, s in shapes.items()
        }
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0
        self.windows: deque[Recorded] = deque(maxlen=num_windows)

    def begin_window(self) -> None:
        """The next window goes to the next turn; before it is launched, in order of the stream, without a sync."""
        if len(self.windows) == self.num_windows:
            # its buffers are about to be written over
            self.windows.popleft()
        self._turn.fill_(self._next)

    def launched(self, flight: Flight, slots: Ints) -> None:
        """That window is on the device."""
        self.windows.append(Recorded(flight=flight, turn=self._next, slots=slots))
        self._next = (self._next + 1) % self.num_windows

    def keep(self, signal_index: int, tensor: Tensor) -> None:
        """Copy a signal, ``[rows, width]``, to its place in the ring.

        Raises:
            ConfigError: a signal that is not as it was declared.
        """
        if self._injector is not None:
            self._injector.keep(signal_index, tensor)
        ring = self._rings.get(signal_index)
        if ring is None:
            return
        rows, width = tensor.shape
        if rows > ring.shape[1] or width != ring.shape[2] or tensor.dtype != ring.dtype:
            raise ConfigError(
                f"signal {signal_index}: {rows} x {width} {tensor.dtype}: must be at most {ring.shape[1]} x "
                f"{ring.shape[2]} {ring.dtype}; the model hands out other shapes than it did at the start"
            )
        ring[:, :rows].index_copy_(0, self._turn, tensor.unsqueeze(0))

    def window_bytes(self, window: Recorded) -> int:
        """Memory of what the ring holds of one window."""
        shape = window.flight.shape
        return shape.num_rows * shape.window * sum(s.bytes_per_token for s in self.shapes.values())

    def read(self, window: Recorded) -> dict[int, Tensor]:
        """Signals of one window on the host, ``[rows, width]``; waits for the device."""
        tokens = window.flight.shape.num_rows * window.flight.shape.window
        return {
            index: ring[window.turn, : tokens * self.shapes[index].rows_per_token].cpu()
            for index, ring in self._rings.items()
        }


def cost_bytes(shapes: dict[int, SignalShape], *, num_windows: int, num_tokens: int) -> int:
    """Memory that a ring takes; nothing is allocated."""
    return num_windows * num_tokens * sum(s.bytes_per_token for s in shapes.values())
