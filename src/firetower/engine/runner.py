"""Steps on the device: pack, run, choose, settle, and one copy back. Knows nothing of requests' fates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firetower.core.records import Phase
from firetower.core.words import NOT_RUN
from firetower.engine.buckets import Shape, bucket_of
from firetower.engine.buffers import Packed, StepBuffers
from firetower.engine.choose import OwnPast, choose
from firetower.engine.flight import Flight
from firetower.engine.graphs import Graphs
from firetower.engine.pack import fed_tokens, pack_sampling, pack_window
from firetower.engine.rows import RowTable
from firetower.engine.scheduler import Chunk
from firetower.engine.sequence import Sequence
from firetower.engine.settle import Chain, follow, settle
from firetower.models.batch import PrefillBatch
from firetower.models.state import ModelState
from firetower.ops import registry
from firetower.ops.sample import Sampled, SampleParams

if TYPE_CHECKING:
    from firetower.engine.inject import Injector
    from firetower.engine.recorder import FlightRecorder
    from firetower.models.hybrid import HybridModel

Ints = npt.NDArray[np.int64]


class Runner:
    """Launches steps of one model on one device, all on the current stream.

    Args:
        model, state: what runs.
        max_batch: rows of the largest bucket.
        max_pages: pages that a sequence may have. max_seq_len: its tokens.
        graphs: of windows.
        injector: the fault node, part of every step; None for none.
        recorder: keeps signals of windows; None for none. It hands them on to the fault node first.
    """

    def __init__(
        self,
        model: HybridModel,
        state: ModelState,
        *,
        max_batch: int,
        max_pages: int,
        max_seq_len: int,
        graphs: Graphs,
        injector: Injector | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.max_batch = max_batch
        self.max_pages = max_pages
        self.max_seq_len = max_seq_len
        self.graphs = graphs
        self.injector = injector
        self.recorder = recorder
        self.device = state.side.device
        self.num_signals = len(model.signals)
        self.num_steps = 0
        self._table = np.zeros((state.num_slots, max_pages), dtype=np.int32)
        self._device_table = (
            torch.from_numpy(self._table)
            if self.device.type == "cpu"
            else torch.zeros(self._table.shape, dtype=torch.int32, device=self.device)
        )
        self._chain = Chain(max_batch, self.device)
        self._buffers: dict[Shape, StepBuffers] = {}
        self._redo_buffers: dict[int, StepBuffers] = {}

    def set_pages(self, slot: int, pages: list[int]) -> None:
        """The pages of the sequence that has a slot; they stay for as long as it has it."""
        self._table[slot] = 0
        self._table[slot, : len(pages)] = pages
        if self.device.type != "cpu":
            row = torch.from_numpy(self._table[slot].copy()).pin_memory()
            self._device_table[slot].copy_(row, non_blocking=True)

    def buffers(self, shape: Shape) -> StepBuffers:
        """The buffers of a shape; made at its first use."""
        if shape not in self._buffers:
            self._buffers[shape] = self._new_buffers(shape)
        return self._buffers[shape]

    def forward(self, buffers: StepBuffers, *, is_recorded: bool = True) -> Tensor:
        """The model over one shape's buffers: what a graph captures. Logits [B * W, V]."""
        buffers.panel.fill_(NOT_RUN)
        torch.index_select(self._device_table, 0, buffers.device.tensors["table_rows"], out=buffers.block_table)
        if self.injector is not None:
            self.injector.begin(buffers.panel, buffers.batch.row_ids)
        keep = self.recorder if self.recorder is not None and is_recorded else self.injector
        return self.model.window(buffers.batch, self.state, panel=buffers.panel, keep=keep)

    @torch.inference_mode()
    def launch_window(
        self, rows: RowTable, seats: Ints, drafts: Mapping[int, list[int]], *, is_chained: bool = False
    ) -> Flight:
        """Run one window of the sequences in ``seats``.

        Args:
            rows: the running sequences.
            seats: int64 [n], at least one.
            drafts: by place in ``seats``; none where chained.
            is_chained: rows with a source take their token from the window launched before.
        """
        window = 1 + max((len(d) for d in drafts.values()), default=0)
        shape = Shape(num_rows=bucket_of(len(seats), self.max_batch), window=window)
        fed, num_real = fed_tokens(rows, seats, drafts, window)
        return self._window(self.buffers(shape), rows, seats, fed, num_real, is_chained=is_chained)

    @torch.inference_mode()
    def redo(self, flight: Flight, row: int, *, is_reference: bool) -> Flight:
        """Run one row of a window that has landed again, by itself, from the same state; without a graph.

        Args:
            flight: the window. row: of it; its state must not have been committed.
            is_reference: on the reference path of every op, where the registry offers one.
        """
        rows = RowTable.of_one(flight.sequences[row])
        rows.position[0] = flight.position[row]
        rows.accepted[0] = flight.accepted[row]
        window = flight.shape.window
        if window not in self._redo_buffers:
            self._redo_buffers[window] = self._new_buffers(Shape(num_rows=1, window=window))
        with _reference_path(wanted=is_reference) as was_reference:
            again = self._window(
                self._redo_buffers[window], rows, np.zeros(1, dtype=np.int64), flight.fed[row : row + 1],
                flight.num_real[row : row + 1], is_redo=True,
            )  # fmt: skip
        again.is_reference = was_reference
        return again

    def _window(
        self, buffers: StepBuffers, rows: RowTable, seats: Ints, fed: Ints, num_real: Ints, *, is_chained: bool = False,
        is_redo: bool = False,
    ) -> Flight:  # fmt: skip
        shape = buffers.shape
        host = buffers.next_host()
        pack_window(host.arrays, shape, rows, seats, fed, num_real, self._table, self.state.page_size)
        use = pack_sampling(host.arrays, shape, rows, seats)
        buffers.send(host)
        if is_chained:
            follow(buffers, self._chain)
        is_graphed = not is_redo and self.graphs.has(shape)
        if self.recorder is not None and not is_redo:
            self.recorder.begin_window()
        if is_graphed:
            logits = self.graphs.run(shape, lambda: self.forward(buffers))
        else:
            logits = self.forward(buffers, is_recorded=not is_redo)
        sequences = [rows.sequences[seat] for seat in seats]
        position = rows.position[seats]
        special = np.flatnonzero(rows.is_special[seats]).tolist()
        sampled = self._choose(buffers, logits, buffers.params(**use), sequences, position, special)
        settle(buffers, sampled, self.state, None if is_redo else self._chain)
        self.num_steps += 1
        flight = Flight(
            number=self.num_steps,
            phase=Phase.VERIFY if shape.window > 1 else Phase.DECODE,
            shape=shape,
            sequences=sequences,
            epochs=[s.epoch for s in sequences],
            out=buffers.fetch(),
            fed=fed,
            num_real=num_real,
            position=position,
            accepted=rows.accepted[seats],
            is_graphed=is_graphed,
        )
        if self.recorder is not None and not is_redo:
            self.recorder.launched(flight, rows.slot[seats])
        return self._ending(flight, sampled)

    def _choose(
        self, buffers: StepBuffers, logits: Tensor, params: SampleParams, sequences: list[Sequence], position: Ints,
        special: list[int],
    ) -> Sampled:  # fmt: skip
        x = buffers.device.tensors
        window = buffers.shape.window
        own_pasts: dict[int, tuple[OwnPast, int]] = {}
        num_logprobs: int | None = None
        for row in special:
            sequence = sequences[row]
            if sequence.own_past is not None:
                own_pasts[row * window] = (sequence.own_past, int(position[row]) + 1)
            asked = sequence.request.sampling.num_logprobs
            if asked is not None:
                num_logprobs = max(num_logprobs or 0, asked)
        return choose(
            logits, params, seeds=x["seeds"], positions=x["token_positions"], row_ids=x["row_ids"], own_pasts=own_pasts,
            num_logprobs=num_logprobs,
        )  # fmt: skip

    @torch.inference_mode()
    def launch_chunk(self, chunk: Chunk) -> Flight:
        """Run a chunk of a prompt, and choose the first token of the answer behind the last one."""
        sequence = chunk.sequence
        size = chunk.end - chunk.begin
        panel_words = 3 * self.num_signals + 2
        out = torch.full((panel_words + 2 * chunk.is_last,), NOT_RUN, dtype=torch.int64, device=self.device)
        panel = out[:panel_words]
        batch = self._prefill_batch(chunk)
        if self.injector is not None:
            self.injector.begin(panel, batch.row_ids)
        with _reference_path(wanted=sequence.uses_reference) as was_reference:
            logits = self.model.prefill(batch, self.state, panel=panel, keep=self.injector)
        sampled = None
        if chunk.is_last:
            sampled = self._choose_first(sequence, logits)
            out[panel_words:] = torch.stack((sampled.tokens[0], sampled.events[0].long()))
        self.num_steps += 1
        host = out if out.is_cpu else torch.empty_like(out, device="cpu", pin_memory=True).copy_(out, non_blocking=True)
        flight = Flight(
            number=self.num_steps,
            phase=Phase.PREFILL,
            shape=Shape(num_rows=1, window=size),
            sequences=[sequence],
            epochs=[sequence.epoch],
            out=host,
            fed=np.asarray([sequence.prompt[chunk.begin : chunk.end]], dtype=np.int64),
            num_real=np.asarray([size], dtype=np.int64),
            position=np.asarray([chunk.begin], dtype=np.int64),
            accepted=np.zeros(1, dtype=np.int64),
            chunk=chunk,
            has_token=chunk.is_last,
            is_reference=was_reference,
        )
        return self._ending(flight, sampled)

    def _choose_first(self, sequence: Sequence, logits: Tensor) -> Sampled:
        sampling = sequence.request.sampling
        position = len(sequence.prompt)
        if sequence.own_past is not None:
            return sequence.own_past.choose(logits, position, sampling.num_logprobs)
        host = Packed(_ONE, torch.zeros(Packed.num_bytes(_ONE), dtype=torch.uint8))
        use = pack_sampling(host.arrays, _ONE, RowTable.of_one(sequence), np.zeros(1, dtype=np.int64))
        host.tensors["token_positions"][0] = position
        x = Packed(_ONE, host.storage.to(self.device)).tensors
        params = SampleParams()
        if use["is_sampled"]:
            filters = {name: x[name] if use[name] else None for name in ("top_k", "top_p", "min_p")}
            params = SampleParams(temperature=x["temperature"], **filters)
        return choose(
            logits, params, seeds=x["seeds"], positions=x["token_positions"], row_ids=None, own_pasts={},
            num_logprobs=sampling.num_logprobs,
        )  # fmt: skip

    def _prefill_batch(self, chunk: Chunk) -> PrefillBatch:
        sequence, size, page_size = chunk.sequence, chunk.end - chunk.begin, self.state.page_size
        positions = np.arange(chunk.begin, chunk.end)
        pages = np.asarray(sequence.pages, dtype=np.int64)
        longs = np.stack(
            (
                np.asarray(sequence.prompt[chunk.begin : chunk.end], dtype=np.int64),
                positions,
                pages[positions // page_size] * page_size + positions % page_size,
            )
        )
        token_ids, positions_, slot_mapping = self._send(torch.from_numpy(longs)).unbind(0)
        ints = self._send(torch.tensor([0, size, sequence.slot], dtype=torch.int32))
        return PrefillBatch(
            token_ids=token_ids,
            positions=positions_,
            # one sequence, one row word
            row_ids=torch.zeros(size, dtype=torch.int32, device=self.device),
            cu_seqlens=(0, size),
            cu_seqlens_device=ints[:2],
            prefix_lens=(chunk.begin,),
            block_table=self._device_table[sequence.slot : sequence.slot + 1],
            slot_mapping=slot_mapping,
            state_slots=ints[2:],
        )

    def _send(self, x: Tensor) -> Tensor:
        return x if self.device.type == "cpu" else x.pin_memory().to(self.device, non_blocking=True)

    def _ending(self, flight: Flight, sampled: Sampled | None) -> Flight:
        """Copy log-probabilities where there are any, and note where the copies end."""
        if sampled is not None and sampled.logprobs is not None:
            flight.logprobs = _to_host(sampled.logprobs)
            if sampled.top_ids is not None and sampled.top_logprobs is not None:
                flight.top_ids, flight.top_logprobs = _to_host(sampled.top_ids), _to_host(sampled.top_logprobs)
        if self.device.type == "cuda":
            flight.event = torch.cuda.current_stream(self.device).record_event()
        return flight

    def _new_buffers(self, shape: Shape) -> StepBuffers:
        return StepBuffers(
            shape, max_pages=self.max_pages, max_seq_len=self.max_seq_len, num_signals=self.num_signals,
            device=self.device,
        )  # fmt: skip


_ONE = Shape(num_rows=1, window=1)


def _to_host(x: Tensor) -> Tensor:
    return x if x.is_cpu else torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@contextlib.contextmanager
def _reference_path(*, wanted: bool) -> Iterator[bool]:
    """The plain form of every kernel, where it is wanted and the registry can switch; says whether it is."""
    switch = getattr(registry, "reference_path", None)
    if not wanted or switch is None:
        yield False
        return
    with switch():
        yield True
