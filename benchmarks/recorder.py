"""What the flight recorder and the state audit cost on a CUDA device, at the sizes of Q36 with random weights.

One line a figure. Graphs with and without the recorder run over the same buffers, in turn.

    python benchmarks/recorder.py [--layers 40] [--batches 1,32]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine as bench
import torch

STAGES: dict[str, tuple[str, ...] | None] = {
    "input, hidden, logits": ("input", "hidden", "logits"),
    "mixers and residuals": ("input", "recurrence", "context", "attention", "residual", "output", "hidden", "logits"),
    "all": None,
}


def ring(model: Any, stages: tuple[str, ...] | None, num_tokens: int) -> Any:
    """A recorder of four windows."""
    from firetower.engine.recorder import FlightRecorder, signal_shapes, wanted_signals

    shapes = signal_shapes(model, wanted_signals(model, stages))
    return FlightRecorder(shapes, num_windows=4, num_tokens=num_tokens, device=model.device)


def cost_of_recording(clock: bench.Clock, model: Any, batches: tuple[int, ...]) -> None:
    """Ratio of graphs with the recorder and without."""
    from firetower.engine.buckets import Shape
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    most = max(batches)
    with Engine(model, max_batch=most, max_model_len=1024, max_window=1, store=False, graphs=False, audit=False,
                num_pages=most * 4) as engine:  # fmt: skip
        loop, runner = engine._parts.loop, engine._parts.loop.runner
        prompts = bench.random_prompts(most, 64, model.config.vocab_size)
        sequences = [engine.submit(p, Sampling(max_tokens=64, ignore_eos=True)) for p in prompts]
        while len(loop.rows) < most:
            engine.step()
        loop.drain()
        for batch in batches:
            runner.launch_window(loop.rows, loop.rows.to_launch()[:batch], {}).wait()
            buffers = runner.buffers(Shape(num_rows=batch, window=1))
            for name, stages in STAGES.items():
                recorder = ring(model, stages, batch)
                graphs = []
                with torch.inference_mode():
                    for keep in (None, recorder):
                        model.window(buffers.batch, runner.state, panel=buffers.panel, keep=keep)
                        torch.cuda.synchronize()
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            model.window(buffers.batch, runner.state, panel=buffers.panel, keep=keep)
                        graphs.append(graph)
                pairs = [[bench.timed(g.replay, 1, warm_up=1, inner=20) for g in graphs] for _ in range(9)]
                ratio = statistics.median(on / off for off, on in pairs)
                clock.figure(f"recorder on / off, batch {batch}, {name}", ratio, "", bar="1.02", is_met=ratio <= 1.02,
                             off_ms=statistics.median(p[0] for p in pairs), signals=len(recorder.shapes),
                             mb_a_token=recorder.num_bytes / 4e6 / batch)  # fmt: skip
                del graphs, graph, recorder
                bench.free()
        for sequence in sequences:
            engine.cancel(sequence)


def cost_of_the_audit(clock: bench.Clock, model: Any) -> None:
    """Sums at the start and after a fire, and a flipped bit that must be found."""
    from firetower.core.records import Status
    from firetower.engine.audit import Audit
    from firetower.models.state import new_state

    state = new_state(model.config, num_pages=1, num_slots=1, device="cuda", dtype=model.dtype)
    begin = time.perf_counter()
    audit = Audit(model, state, weights_every_s=0.0)
    clock.figure("audit, sums at the start", time.perf_counter() - begin, "s", weights_gb=model.weights.num_bytes / 1e9)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    clean = audit.weights()
    clock.figure("audit, weights after a fire", time.perf_counter() - begin, "s",
                 extra_gb=(torch.cuda.max_memory_allocated() - before) / 1e9)  # fmt: skip
    assert [item.status for item in clean] == [Status.CLEAN]
    x = model.weights.layers[-1].moe.down_proj
    place = [n // 2 for n in x.shape]
    x.view(torch.int16)[tuple(place)] ^= 1 << 3
    [item] = audit.weights()
    x.view(torch.int16)[tuple(place)] ^= 1 << 3
    assert item.place["element"] == place, item
    print(f"[engine] found: {item.first}", flush=True)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--batches", default="1,32")
    args = parser.parse_args()
    clock = bench.Clock(540.0)
    model = bench.our_model(args.layers, 1024)
    with bench.guarded(clock, "audit"):
        cost_of_the_audit(clock, model)
    with bench.guarded(clock, "recorder"):
        cost_of_recording(clock, model, tuple(int(b) for b in args.batches.split(",")))


if __name__ == "__main__":
    main()
