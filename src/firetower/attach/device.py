"""The device side of a watch: hooks mark a panel where the tensors are; one small copy a step brings it to the host.

Runs in three ways: by eager hooks, inside a graph traced by ``torch.compile``, or inside a CUDA graph that the user
captured, where no Python runs and only `Watch.read` looks at the panel.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor, nn

from firetower.attach.discover import Side, Tap
from firetower.attach.frame import Call
from firetower.attach.step import Finding, Step
from firetower.core.records import BadValue, BurnedRow, Kind
from firetower.sensors.check import Frame, locate, place
from firetower.sensors.panel import BurnedSequence, Found, Panel, PanelReading, Snapshot

MAX_BURNED_ROWS = 1024
"""Sequences of a batch that a device panel tells apart."""

MAX_PARTS = 3
"""Tensors of one tap that have words of their own: a router's logits, weights and scores; keys and values."""


class DevicePanels:
    """One `Panel` over all devices of a model.

    Attributes:
        in_use: whether anything was ever marked; a model that runs eagerly on the host never needs the panel.
        traced: whether a graph that marks the panel was traced, so that steps run without our Python.
    """

    def __init__(self, root: nn.Module, taps: list[Tap], *, is_compiled: bool) -> None:
        self._taps = taps
        self.in_use = False
        self.traced = False
        self.reasons: dict[int, str] = {}
        self._tracing_root = False
        self._num_sequences = 1
        self._num_tokens = 1
        self._pad: Tensor | None = None
        self.panel = Panel(num_rows=MAX_BURNED_ROWS)
        # a tap that yields several tensors has a word for each: they differ in shape
        self._tap_of: list[int] = []
        self._word_of: list[int] = []
        for slot, tap in enumerate(taps):
            self._word_of.append(len(self._tap_of))
            for _ in range(1 if tap.side in (Side.INPUT, Side.OUTPUT) else MAX_PARTS):
                self.panel.declare(legal=tap.signal.legal, layout=tap.layout)
                self._tap_of.append(slot)
        tensors = itertools.chain(root.parameters(), root.buffers())
        devices = {t.device for t in tensors if t.device.type in ("cpu", "cuda")}
        self._never_marks = all(d.type == "cpu" for d in devices) and not is_compiled
        self.panel.freeze(sorted(devices or {torch.device("cpu")}, key=str))

    def begin(self, call: Call) -> None:
        """Open an eager step: remember its rows and pads, empty the panel (recorded, if a graph is being captured)."""
        if self._never_marks and not self.traced:
            return
        self._num_sequences, self._num_tokens = call.shape()
        self._pad = call.pad()
        self.panel.reset(self._num_sequences, self._num_tokens)

    def begin_traced(self, call: Call) -> None:
        """Open a step inside a graph that is being traced at the root: the reset becomes a part of the graph."""
        self._num_sequences, self._num_tokens = call.shape()
        mask = call.kwargs.get("attention_mask")
        fits = isinstance(mask, Tensor) and mask.shape == (self._num_sequences, self._num_tokens)
        self._pad = mask == 0 if fits and mask is not None else None
        self._tracing_root = True
        self.traced = True
        self.panel.reset(self._num_sequences, self._num_tokens)

    def end_traced(self) -> None:
        """Close the traced step: send the marks that were collected while tracing."""
        self.panel.flush()
        self._tracing_root = False

    def mark(self, slot: int, x: Tensor, part: int = 0) -> None:
        """Mark one tensor of one signal on its device; notes why where it cannot.

        Args:
            slot: the tap.
            x: the tensor.
            part: which of the tap's tensors this is, from 0; those past the last word share it.
        """
        word = self._word_of[slot] + min(part, MAX_PARTS - 1)
        reason = self.panel.mark(
            word, x, num_sequences=self._num_sequences, num_tokens=self._num_tokens, pad=self._pad
        )
        if torch.compiler.is_compiling():
            if not self._tracing_root:
                # only a part of the model is compiled: its graph must carry the mark itself
                self.panel.flush()
                self.traced = True
        elif reason is not None:
            self.reasons[slot] = reason
        self.in_use = True

    def flush(self) -> None:
        """Send the marks of an eager step; recorded, if a graph is being captured."""
        self.panel.flush()
        for word in self.panel.overwritten:
            self.reasons[self._tap_of[word]] = "written in place before the device could check it"

    @property
    def should_read(self) -> bool:
        """Whether this step may have left something in the panel that can be copied now."""
        if not (self.in_use or self.traced):
            return False
        return not is_capturing()

    def snapshot(self) -> Snapshot:
        """Start the step's one small copy; does not wait."""
        return self.panel.snapshot_async()

    def put_into(self, step: Step, reading: PanelReading) -> None:
        """Enter a panel reading into a step, in place of what an earlier reading of the panel said there."""
        frame = self._frame(step, reading)
        marked = {self._tap_of[word] for word, ran in enumerate(reading.ran) if ran}
        for slot in step.from_device:
            step.findings.pop(slot, None)
            step.ran[slot] = -1
        step.from_device = marked
        for slot in marked:
            step.ran[slot] = step.number
        step.reasons.update(self.reasons)
        pads, bad = self._by_tap(reading.first_pads), self._by_tap(reading.first)
        for slot in sorted(bad.keys() | pads.keys()):
            step.findings[slot] = Finding(
                slot,
                self._bad_value(bad.get(slot), frame),
                self._bad_value(pads.get(slot), frame),
                order=len(step.findings),
            )
        if bad:
            # some signals were seen on the host, in time, and some on a device: order both as declared
            for slot, finding in step.findings.items():
                finding.order = slot
            step.findings = dict(sorted(step.findings.items()))
        step.pad_before_real |= reading.pad_before_real
        words = {f.slot: f for f in reading.first}
        for burned in reading.burned:
            if burned.sequence not in step.burned and burned.slot in words:
                step.burned[burned.sequence] = self._burned_row(burned, words[burned.slot], frame)

    def _by_tap(self, found: tuple[Found, ...]) -> dict[int, Found]:
        """The first bad tensor of each tap; parts stand in the order in which the tap yields them."""
        result: dict[int, Found] = {}
        for f in found:
            result.setdefault(self._tap_of[f.slot], f)
        return result

    def _frame(self, step: Step, reading: PanelReading) -> Frame:
        frame = step.frame
        if reading.step is None:
            return frame or Frame(num_sequences=1, num_tokens=1)
        num_sequences, num_tokens = reading.step
        if frame is not None and (frame.num_sequences, frame.num_tokens) == reading.step:
            return frame
        return Frame(num_sequences=num_sequences, num_tokens=num_tokens)

    def _bad_value(self, found: Found | None, frame: Frame) -> BadValue | None:
        if found is None:
            return None
        frame = dataclasses.replace(frame, layout=self._taps[self._tap_of[found.slot]].layout)
        kind = found.kind or Kind.NAN
        return place(found.flat_index, found.bits, found.dtype, kind, found.shape or (), frame)

    def _burned_row(self, burned: BurnedSequence, found: Found, frame: Frame) -> BurnedRow:
        tap = self._taps[self._tap_of[burned.slot]]
        token = column = first = None
        if found.shape is not None and frame.num_sequences > 0:
            num_elements = torch.Size(found.shape).numel()
            flat = burned.sequence * (num_elements // frame.num_sequences) + burned.offset
            _, t = locate(torch.tensor(flat), found.shape, dataclasses.replace(frame, layout=tap.layout))
            token, column = None if t is None else int(t), flat % found.shape[-1]
            # the panel keeps bits for the first bad row of a signal only
            first = self._bad_value(found, frame) if flat == found.flat_index else None
        return BurnedRow(
            sequence=burned.sequence, signal=tap.signal, token=token, column=column, first=first
        )


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def reset_compiled(model: nn.Module) -> bool:
    """Whether a part of ``model`` is compiled; if so, compiled code is dropped, so that the next call recompiles.

    Dynamo does not look for new hooks in code that it compiled before: without this the watch would see nothing.
    """
    modules = [model, *model.modules()]
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    if compiled:
        torch._dynamo.reset()
    return compiled
