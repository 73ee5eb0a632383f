"""What one shape of step reads and leaves: a single buffer to the device, a single one back, at fixed addresses.

Shape legend: B rows of the bucket, W tokens of the window, S signals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firetower.core.words import NOT_RUN
from firetower.engine.buckets import Shape
from firetower.models.batch import WindowBatch
from firetower.ops.sample import SampleParams

_PER_TOKEN_64 = ("token_ids", "positions", "slot_mapping", "seeds", "token_positions")
_PER_TOKEN_32 = ("row_ids", "top_k")
_PER_ROW_32 = ("seq_lens", "state_slots", "num_accepted", "source", "table_rows")
_PER_TOKEN_FLOAT = ("temperature", "top_p", "min_p")

NUM_HOST_BUFFERS = 2
"""The host fills one while the device may still read the other."""


class Packed:
    """Named columns in one run of bytes: numpy views of the host's, tensors of the device's.

    Fields: ``token_ids``, ``positions``, ``slot_mapping``, ``seeds``, ``token_positions`` (of the token to come) int64
    [B * W]; ``row_ids``, ``top_k`` int32 [B * W]; ``seq_lens``, ``state_slots``, ``num_accepted``, ``source``,
    ``table_rows`` (rows of the table of pages) int32 [B]; ``temperature``, ``top_p``, ``min_p`` float32 [B * W].
    """

    def __init__(self, shape: Shape, storage: Tensor) -> None:
        tokens, rows = shape.num_rows * shape.window, shape.num_rows
        fields = [(name, torch.int64, tokens) for name in _PER_TOKEN_64]
        fields += [(name, torch.int32, tokens) for name in _PER_TOKEN_32]
        fields += [(name, torch.int32, rows) for name in _PER_ROW_32]
        fields += [(name, torch.float32, tokens) for name in _PER_TOKEN_FLOAT]
        self.storage = storage
        self.tensors: dict[str, Tensor] = {}
        at = 0
        for name, dtype, count in fields:
            size = count * dtype.itemsize
            self.tensors[name] = storage[at : at + size].view(dtype)
            at += size
        self.arrays: dict[str, npt.NDArray[np.generic]] = (
            {name: x.numpy() for name, x in self.tensors.items()} if storage.is_cpu else {}
        )

    @staticmethod
    def num_bytes(shape: Shape) -> int:
        """Size of the run for a shape."""
        tokens, rows = shape.num_rows * shape.window, shape.num_rows
        per_token = 8 * len(_PER_TOKEN_64) + 4 * (len(_PER_TOKEN_32) + len(_PER_TOKEN_FLOAT))
        return tokens * per_token + rows * 4 * len(_PER_ROW_32)


class StepBuffers:
    """Everything at a fixed address that one shape of step needs.

    Attributes:
        shape: B and W.
        device: the packed inputs on the device. hosts: where the host fills them in turn; on the CPU the same memory.
        batch: the model's view of ``device``. params: the sampler's, all parameters in it.
        out: int64 [3 S + B W + 1 + 2 B W]: the panel, then tokens, then events: one copy brings it to the host.
        panel, tokens, events: its parts.
    """

    def __init__(
        self, shape: Shape, *, max_pages: int, max_seq_len: int, num_signals: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_signals = num_signals
        size = Packed.num_bytes(shape)
        on_cpu = device.type == "cpu"
        self.device = Packed(shape, torch.zeros(size, dtype=torch.uint8, device=device))
        for name in ("row_ids", "slot_mapping", "state_slots", "source"):
            # pads alone, so that a step over it, to warm up or to be captured, writes nothing
            self.device.tensors[name].fill_(-1)
        self.hosts = [
            self.device if on_cpu else Packed(shape, torch.zeros(size, dtype=torch.uint8, pin_memory=True))
            for _ in range(NUM_HOST_BUFFERS)
        ]
        self._turn = 0
        rows, window = shape.num_rows, shape.window
        x = self.device.tensors
        self.block_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.batch = WindowBatch(
            token_ids=x["token_ids"].view(rows, window),
            positions=x["positions"].view(rows, window),
            row_ids=x["row_ids"],
            block_table=self.block_table,
            seq_lens=x["seq_lens"],
            slot_mapping=x["slot_mapping"].view(rows, window),
            state_slots=x["state_slots"],
            num_accepted=x["num_accepted"],
            max_seq_len=max_seq_len,
        )
        panel_words = 3 * num_signals + rows * window + 1
        self.out = torch.full((panel_words + 2 * rows * window,), NOT_RUN, dtype=torch.int64, device=device)
        self.panel = self.out[:panel_words]
        self.tokens = self.out[panel_words : panel_words + rows * window]
        self.events = self.out[panel_words + rows * window :]
        self._out_hosts = [] if on_cpu else [torch.empty_like(self.out, device="cpu").pin_memory() for _ in self.hosts]

    def next_host(self) -> Packed:
        """The host's buffer that the device has read already."""
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        return self.hosts[self._turn]

    def send(self, host: Packed) -> None:
        """Copy what the host has filled to the device; returns at once."""
        if host is not self.device:
            self.device.storage.copy_(host.storage, non_blocking=True)

    def fetch(self) -> Tensor:
        """Start the copy of ``out`` to the host, in order behind the step; the caller waits for its event."""
        if not self._out_hosts:
            return self.out.clone()
        return self._out_hosts[self._turn].copy_(self.out, non_blocking=True)

    def params(self, *, is_sampled: bool, top_k: bool, top_p: bool, min_p: bool) -> SampleParams:
        """The sampler's parameters of the step: those that some row uses."""
        if not is_sampled:
            return SampleParams()
        x = self.device.tensors
        return SampleParams(
            temperature=x["temperature"],
            top_k=x["top_k"] if top_k else None,
            top_p=x["top_p"] if top_p else None,
            min_p=x["min_p"] if min_p else None,
        )
