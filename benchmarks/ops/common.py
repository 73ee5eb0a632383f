"""What every op's benchmark shares: times as medians of CUDA graph replays, the device's copy bandwidth, checks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_ms(run: Callable[[], Any], reps: int = 20, inner: int = 1) -> float:
    """Median milliseconds of one ``run()`` over ``reps`` replays of a graph that holds ``inner`` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    graph.replay()
    torch.cuda.synchronize()
    return replays_ms(graph, reps) / inner


def replays_ms(graph: torch.cuda.CUDAGraph, reps: int) -> float:
    """Median milliseconds of a replay."""
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written together, of 1 GiB: the better of a copy and of a kernel that passes it on.

    ``copy_`` inside a graph is a copy node, which reached 2.75 TB/s on an H200 whose memory does 4.27: alone it
    flatters.
    """
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target))
    return 2 * 4 * source.numel() / (min(graph_ms(way, reps=10) for way in ways) * 1e-3)


def relative_error(truth: torch.Tensor, x: torch.Tensor) -> float:
    """Frobenius error against a float64 truth."""
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def ratio_line(name: str, own_ms: float, peer_ms: float, peer: str, bar: float, goal: str) -> str:
    """One figure: ours against a named peer."""
    verdict = "met" if own_ms <= bar * peer_ms else "MISSED"
    return (
        f"{name} own={own_ms * 1e3:.1f}us {peer}={peer_ms * 1e3:.1f}us ratio={own_ms / peer_ms:.3f} "
        f"bar={bar} {verdict} goal={goal}"
    )


def bandwidth_line(name: str, num_bytes: int, own_ms: float, copy: float, bar: float, goal: float) -> str:
    """One figure: bytes that must move, as a share of the copy bandwidth."""
    share = num_bytes / (own_ms * 1e-3) / copy
    verdict = "met" if share >= bar else "MISSED"
    return f"{name} own={own_ms * 1e3:.1f}us share_of_copy={share:.3f} bar={bar} {verdict} goal={goal}"


def guarded(report: Callable[[str], None], name: str, work: Callable[[], object]) -> None:
    """Do a part of the work; one that fails becomes a line that says FAILED."""
    try:
        work()
        # a kernel's error shows where it is waited for
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others; it is reported
        report(f"FAILED {name}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}")
