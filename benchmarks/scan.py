"""Scan of the Q4_1 model, warm, against dequantising every tensor with `gguf` and testing each element.

    python benchmarks/scan.py [MODEL.gguf]

Both sides read the file from the page cache in one process. Ours is the whole of `firetower.scan.scan`: the
header, its checks, and every tensor. The peer's time leaves out parsing the header (seconds, in the package),
so the ratio is the least favourable one. Each side is the best of several runs, alternating.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from firetower.scan import scan

BAR = 10.0
ROUNDS = 5


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print ``scan_ratio ours_ms peer_ms ratio bar``; returns 0 when the bar is met, else 3."""
    path = Path(argv[0]) if argv else _model()
    started = time.perf_counter()
    reader = GGUFReader(path)
    parse_ms = 1e3 * (time.perf_counter() - started)
    print(f"machine: {_machine()}; numpy {np.__version__}, Python {platform.python_version()}")
    size_mb = path.stat().st_size / 1e6
    print(f"file: {path.name}, {size_mb:.1f} MB; the peer's header, not counted: {parse_ms:.0f} ms")
    ours, peer = [], []
    for _ in range(ROUNDS):
        ours.append(_milliseconds(lambda: _ours(path)))
        peer.append(_milliseconds(lambda: _peer(reader)))
    ratio = min(peer) / min(ours)
    print(f"scan_ratio {min(ours):.1f} {min(peer):.1f} {ratio:.1f} {BAR:.0f}")
    return 0 if ratio >= BAR else 3


def _ours(path: Path) -> None:
    report = scan(path)
    assert report.is_clean, report.findings


def _peer(reader: GGUFReader) -> None:
    for tensor in reader.tensors:
        assert np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all(), tensor.name


def _milliseconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def _model() -> Path:
    from firetower.drills.hosts import smollm2_path

    return smollm2_path()


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.system()} {platform.machine()}, {model or platform.processor() or 'unknown CPU'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
