"""CUDA graphs of the model's window, one a shape, within a memory budget; plain calls where there is none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from firetower.engine.buckets import Shape

Forward = Callable[[], Tensor]
"""Runs a window of one shape over its buffers and returns the logits, at a fixed address once it is captured."""

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What was captured.

    Attributes:
        captured: shapes that have a graph. left_out: those that run without one, each with its reason.
        num_bytes: memory that graphs hold. seconds: time that it took.
    """

    captured: tuple[Shape, ...] = ()
    left_out: tuple[tuple[Shape, str], ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0


class Graphs:
    """Runs windows, by graph where the shape has one. A graph and a plain call give the same bits.

    Args:
        device: of the model; nothing is captured anywhere but on CUDA.
        budget_bytes: memory that graphs may hold together.
    """

    def __init__(self, device: torch.device, *, budget_bytes: int) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.report = CaptureReport()
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def has(self, shape: Shape) -> bool:
        """Whether a shape runs by graph."""
        return shape in self._graphs

    def run(self, shape: Shape, forward: Forward) -> Tensor:
        """The logits of a window; they stand until the next window runs."""
        entry = self._graphs.get(shape)
        if entry is None:
            return forward()
        graph, logits = entry
        graph.replay()
        return logits

    def capture(
        self, shapes: Sequence[Shape], forward_of: Callable[[Shape], Forward], progress: Progress | None = None
    ) -> CaptureReport:
        """Capture shapes in order until the budget is spent; what is left out runs without a graph.

        Args:
            shapes: the most important first.
            forward_of: the call of a shape; it must leave nothing behind when it runs on pads alone.
            progress: told of each shape.
        """
        if self.device.type != "cuda":
            reason = f"graphs are of CUDA, this is {self.device.type}"
            self.report = CaptureReport(left_out=tuple((shape, reason) for shape in shapes))
            return self.report
        begin = time.perf_counter()
        captured, left_out, spent = [], [], 0
        self._pool = torch.cuda.graph_pool_handle()
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress("capture", done, len(shapes))
            if spent >= self.budget_bytes:
                left_out.append((shape, f"the budget of {self.budget_bytes:,} bytes is spent"))
                continue
            before = torch.cuda.mem_get_info(self.device)[0]
            try:
                self._capture(shape, forward_of(shape))
            except torch.cuda.OutOfMemoryError as e:
                torch.cuda.empty_cache()
                left_out.append((shape, f"no memory: {str(e).splitlines()[0]}"))
                continue
            spent += max(0, before - torch.cuda.mem_get_info(self.device)[0])
            captured.append(shape)
        self.report = CaptureReport(
            captured=tuple(captured), left_out=tuple(left_out), num_bytes=spent, seconds=time.perf_counter() - begin
        )
        return self.report

    def drop(self) -> int:
        """Give all graphs up; how many there were. Windows then run without."""
        count = len(self._graphs)
        self._graphs.clear()
        self._pool = None
        return count

    def _capture(self, shape: Shape, forward: Forward) -> None:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # kernels are compiled, and libraries make their workspaces, outside the graph
            forward()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._graphs[shape] = (graph, logits)
