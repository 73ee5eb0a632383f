"""Run by test_compiles.py without the interpreter: build the engine's kernels for an H200 without one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from firetower.engine import inject_kernel, settle_kernels
from firetower.engine.buckets import Shape
from firetower.engine.buffers import StepBuffers
from firetower.engine.settle import Chain
from firetower.ops.sample import Sampled


class State:
    """As much of a state as ending a window needs."""

    side = torch.zeros(256, dtype=torch.int32)


def main() -> None:
    path = Path(__file__).parents[1] / "ops" / "compile_all.py"
    spec = importlib.util.spec_from_file_location("tests_ops_compile_all", path)
    assert spec is not None
    assert spec.loader is not None
    ops: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = ops
    spec.loader.exec_module(ops)
    ops.pretend()
    for rows, window in ((1, 1), (256, 1), (3, 5), (32, 8)):
        shape = Shape(num_rows=rows, window=window)
        buffers = StepBuffers(shape, max_pages=2, max_seq_len=128, num_signals=521, device=torch.device("cpu"))
        chain = Chain(256, torch.device("cpu"))
        sampled = Sampled(
            tokens=torch.zeros(rows * window, dtype=torch.int64), events=torch.zeros(rows * window, dtype=torch.int32)
        )
        settle_kernels.settle(buffers, sampled, State(), chain if window == 1 else None)  # type: ignore[arg-type]
        settle_kernels.follow(buffers, chain)
    for dtype in (torch.float32, torch.bfloat16):
        inject_kernel.write(torch.zeros(16, 4, dtype=torch.int64), 3, torch.zeros(4, 8, dtype=dtype))
    print(*sorted(ops.BUILT))


if __name__ == "__main__":
    main()
