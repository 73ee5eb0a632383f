"""The watch on a CUDA device: correctness, then decode of an 8-layer Q36 with the watch at ``layers`` / bare.

Runs where pytest is missing; every section is guarded, so that one failure does not hide the rest. The figure
is the median of CUDA-graph replays of one decode step (static cache, compiled), bare and watched interleaved
in one process on shared weights. Prints PASS, FAIL or SKIP lines and a JSON summary, which also goes to
``$OUT/h200_watch.json`` where OUT is set.

    python benchmarks/h200_watch.py [--only TEXT] [--layers 8] [--experts grouped_mm]
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BAR, GOAL = 1.05, 1.02
# the cache must be longer than all replays together: each moves the position on
MAX_CACHE_LEN, NUM_PROMPT = 1024, 32


def load_checks() -> ModuleType:
    """tests/gpu/checks.py, which is no package."""
    path = ROOT / "tests" / "gpu" / "checks.py"
    spec = importlib.util.spec_from_file_location("tests_gpu_checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_q36(num_layers: int, experts: str) -> Any:
    """Qwen3.5-MoE text model of 35B-A3B shape, ``num_layers`` deep, random bf16 weights on the device."""
    import torch
    import transformers

    config = transformers.Qwen3_5MoeTextConfig(num_hidden_layers=num_layers, max_position_embeddings=4096)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.Qwen3_5MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.set_experts_implementation(experts)
    return model.eval().requires_grad_(False)


def twin_of(model: Any) -> Any:
    """A second module tree on the same weights, so that one can be watched and the other not."""
    import copy

    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


class Decoder:
    """One decode step of a model with its own static cache, static input and static position."""

    def __init__(self, model: Any, run: Callable[..., Any]) -> None:
        import torch
        from transformers import StaticCache

        self.run = run
        names = inspect.signature(model.forward).parameters
        self.cache_name = "past_key_values" if "past_key_values" in names else "cache"
        self.cache = StaticCache(config=model.config, max_cache_len=MAX_CACHE_LEN)
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (1, NUM_PROMPT)
        prompt = torch.randint(5, model.config.vocab_size, shape, device="cuda", generator=generator)
        model(input_ids=prompt, use_cache=True, **{self.cache_name: self.cache})
        self.token = prompt[:, -1:].clone()
        self.position = torch.full((1, 1), NUM_PROMPT, device="cuda")
        self.logits: Any = None

    def step(self) -> None:
        out = self.run(
            input_ids=self.token,
            position_ids=self.position,
            use_cache=True,
            **{self.cache_name: self.cache},
        )
        self.logits = out.logits


def replay_ms(graph: Any, num_replays: int) -> float:
    """Milliseconds a replay, over ``num_replays`` back to back."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / num_replays


def interleaved(graphs: dict[str, Any], num_rounds: int = 60, num_replays: int = 4) -> dict[str, list[float]]:
    """Replay times of each graph in turn, the order turned around every other round."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(num_rounds):
        for name in list(graphs) if number % 2 else list(graphs)[::-1]:
            times[name].append(replay_ms(graphs[name], num_replays))
    return times


def decode_figure(checks: ModuleType, num_layers: int, experts: str) -> dict[str, Any]:
    """The figure of the issue: `layers` / bare, by replays of the compiled decode step."""
    import torch

    import firetower

    with torch.no_grad():
        bare = build_q36(num_layers, experts)
        watched = twin_of(bare)
        compiled = torch.compile(watched)
        # attaching drops compiled code, so it comes before anything is compiled
        watch = firetower.attach(compiled, store=False, on_fire="record")
        # modules of one class share compiled code: without hook guards the watched one runs the bare code
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        decoders = {"watched": Decoder(watched, compiled), "bare": Decoder(bare, torch.compile(bare))}
        compile_s, graphs, logits = {}, {}, {}
        for name, decoder in decoders.items():
            begin = time.perf_counter()
            decoder.step()
            torch.cuda.synchronize()
            compile_s[name] = round(time.perf_counter() - begin, 1)
            if name == "watched":
                watch.read()
            graphs[name] = checks.captured(decoder.step)
            graphs[name].replay()
            logits[name] = decoder.logits.clone()
        reading = watch.read()
        assert watch.failures == 0, watch.last_failure
        assert reading.is_clean, reading.origin
        assert 2 * reading.coverage[0] > reading.coverage[1], f"coverage={reading.coverage}"
        times = interleaved(graphs)
        assert watch.read().is_clean
    medians = {name: statistics.median(t) for name, t in times.items()}
    pairs = [w / b for b, w in zip(times["bare"], times["watched"], strict=True)]
    return {
        "bare_ms": medians["bare"],
        "watched_ms": medians["watched"],
        "ratio": medians["watched"] / medians["bare"],
        "ratio_of_pairs_median": statistics.median(pairs),
        "ratio_of_pairs_10_90": [sorted(pairs)[len(pairs) // 10], sorted(pairs)[-len(pairs) // 10]],
        "coverage": reading.coverage,
        "not_covered": sorted({s.signal.stage for s in reading.not_covered}),
        "logits_bit_identical": torch.equal(logits["bare"], logits["watched"]),
        "logits_max_abs_diff": float((logits["bare"].float() - logits["watched"].float()).abs().max()),
        "compile_s": compile_s,
        "experts": experts,
        "num_layers": num_layers,
    }


def check_figure(figure: dict[str, Any]) -> dict[str, Any]:
    """Hold the figure against its bar."""
    assert figure["ratio"] <= BAR, figure
    return figure | {"bar": BAR, "goal": GOAL, "goal_met": figure["ratio"] <= GOAL}


def eager_figure(num_layers: int, experts: str, num_steps: int = 20) -> dict[str, Any]:
    """Eager decode with dynamic Python in both: wall time a step, bare and watched in turn."""
    import torch

    import firetower

    with torch.no_grad():
        model = build_q36(num_layers, experts)
        decoder = Decoder(model, model)
        times: dict[str, list[float]] = {"bare": [], "watched": []}
        for number in range(2 * num_steps + 4):
            name = "watched" if number % 2 else "bare"
            watch = firetower.attach(model, store=False, on_fire="record") if name == "watched" else None
            decoder.step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            decoder.step()
            torch.cuda.synchronize()
            if number >= 4:
                times[name].append(1e3 * (time.perf_counter() - begin))
            if watch is not None:
                watch.detach()
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "bare_ms": medians["bare"],
        "watched_ms": medians["watched"],
        "ratio": medians["watched"] / medians["bare"],
    }


def kernel_times(checks: ModuleType) -> dict[str, Any]:
    """Microseconds of one launch inside a graph, and of a large tensor beside PyTorch's own checks."""
    import torch

    from firetower.sensors.panel import Panel

    panel = Panel(num_rows=4)
    for _ in range(8):
        panel.declare()
    panel.freeze(["cuda"])
    words = panel.words(torch.device("cuda", torch.cuda.current_device()))
    small = [torch.ones(1, 1, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    large = torch.ones(1, 65536, 2048, device="cuda", dtype=torch.bfloat16)
    many = ([0] * 8, [1] * 8, [1] * 8, [2048] * 8, [False] * 8, [False] * 8)

    def mark_many() -> None:
        for _ in range(20):
            torch.ops.firetower.mark_many(small, words, None, list(range(8)), 8, *many)

    def mark_small() -> None:
        for _ in range(20):
            panel.mark(0, small[0], num_sequences=1, num_tokens=1)

    def reset() -> None:
        for _ in range(20):
            panel.reset(1, 1)

    steps: dict[str, tuple[Callable[[], Any], int]] = {
        "mark of [1, 1, 2048]": (mark_small, 20),
        "mark_many of 8 x [1, 1, 2048]": (mark_many, 20),
        "reset": (reset, 20),
        "mark of [65536, 2048]": (lambda: panel.mark(0, large, num_sequences=1, num_tokens=65536), 1),
        "sum().isfinite() of [65536, 2048]": (lambda: large.sum().isfinite(), 1),
        "isfinite().all() of [65536, 2048]": (lambda: large.isfinite().all(), 1),
    }
    result = {}
    for name, (step, count) in steps.items():
        graph = checks.captured(step)
        result[name] = round(1e3 * statistics.median(replay_ms(graph, 10) for _ in range(15)) / count, 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run the sections whose name contains this text")
    parser.add_argument("--layers", type=int, default=8, help="depth of the Q36 of the figure")
    parser.add_argument("--experts", default="grouped_mm", help="Transformers' experts implementation")
    options = parser.parse_args()
    if importlib.util.find_spec("firetower") is None:
        sys.path.insert(0, str(ROOT / "src"))
    import torch

    if not torch.cuda.is_available():
        print("SKIP h200_watch: torch sees no CUDA device")
        return 0
    checks = load_checks()
    sections: dict[str, Callable[[], dict[str, Any]]] = dict(checks.CHECKS)
    memcheck = sections.pop("memcheck")
    sections["kernel times, us"] = lambda: kernel_times(checks)
    sections["figure: decode, layers / bare"] = lambda: check_figure(
        decode_figure(checks, options.layers, options.experts)
    )
    sections["eager decode, layers / bare"] = lambda: eager_figure(options.layers, options.experts)
    sections["memcheck"] = memcheck
    summary: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sections": {n: run_section(n, s) for n, s in sections.items() if options.only in n},
    }
    write(summary)
    return 3 if any(s["result"] == "FAIL" for s in summary["sections"].values()) else 0


def run_section(name: str, section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one section; whatever it raises is its result, and the next one starts afresh."""
    import torch

    begin = time.perf_counter()
    try:
        found = {"result": "PASS"} | section()
        if "skipped" in found:
            found["result"] = "SKIP"
    except Exception as e:  # noqa: BLE001 - one section must not hide the others
        traceback.print_exc()
        found = {"result": "FAIL", "error": f"{type(e).__name__}: {e}"[:2000]}
    found["seconds"] = round(time.perf_counter() - begin, 1)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    print(f"{found['result']} {name} ({found['seconds']} s): {json.dumps(found, default=str)}", flush=True)
    return found


def write(summary: dict[str, Any]) -> None:
    """Print the summary, and keep it where OUT says."""
    text = json.dumps(summary, indent=1, default=str)
    print(text)
    if folder := os.environ.get("OUT"):
        path = Path(folder) / "h200_watch.json"
        path.write_text(text + "\n")
        print(f"Wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
