"""The engine beside Transformers, in one process: Q36-shaped random weights on CUDA, a small model on the CPU.

One line a figure, with its bar. Every section is guarded and looks at the time that is left, so that what is printed
stands whatever comes after it. On CUDA the peer runs first and is thrown away: both models do not fit one device.

    python benchmarks/engine.py [--only checks,peer,decode,prefill,window,sensors,cpu] [--budget 540] [--layers 40]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

SECTIONS = ("checks", "peer", "decode", "prefill", "window", "sensors", "cpu")
PROMPT = 512
LONG = 8192
BATCHES = (1, 32, 256)
SMALL = {
    "vocab_size": 4096, "hidden_size": 192, "num_layers": 6, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "max_position_embeddings": 2048,
}  # fmt: skip


class Clock:
    """The time that is left, and figures as they come."""

    def __init__(self, budget_s: float) -> None:
        self.end = time.perf_counter() + budget_s
        self.peer: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the budget is spent."""
        return self.end - time.perf_counter()

    def figure(
        self, name: str, value: float, unit: str, *, bar: str = "", is_met: bool | None = None, **more: Any
    ) -> None:
        """Print one figure."""
        verdict = "" if is_met is None else " met" if is_met else " MISSED"
        rest = "".join(f" {k}={v:.4g}" if isinstance(v, float) else f" {k}={v}" for k, v in more.items())
        print(f"[engine] {name} = {value:.4g} {unit}{f' bar={bar}' if bar else ''}{verdict}{rest}", flush=True)


@contextlib.contextmanager
def guarded(clock: Clock, name: str, least_s: float = 0.0) -> Iterator[None]:
    """A part that fails or has no time left becomes one line."""
    begin = time.perf_counter()
    try:
        if clock.left_s < least_s:
            raise TimeoutError(f"{clock.left_s:.0f} s left, {least_s:.0f} needed")
        yield
    except Exception as e:  # noqa: BLE001 - a figure that fails must not hide the others
        first = (str(e).splitlines() or [""])[0][:300]
        where = e.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where is not None else ""
        print(f"[engine] FAILED {name}: {type(e).__name__} at {at}: {first}", flush=True)
    print(f"[engine] ({name}: {time.perf_counter() - begin:.1f} s, {clock.left_s:.0f} s left)", flush=True)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run_checks(clock: Clock) -> None:
    """The checks of tests/engine/checks.py on the device: no figure is worth anything without them."""
    path = Path(__file__).resolve().parents[1] / "tests" / "engine" / "checks.py"
    spec = importlib.util.spec_from_file_location("tests_engine_checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, check in module.CHECKS.items():
        with guarded(clock, f"check {name}", 10):
            check("cuda")
            print(f"[engine] PASS {name}", flush=True)


# the peer


def q36(layers: int) -> Any:
    """Transformers' configuration of the size of Qwen3.6-35B-A3B."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(num_hidden_layers=layers)


def timed(run: Callable[[], Any], reps: int, *, warm_up: int = 2, inner: int = 1) -> float:
    """Median milliseconds of a call, the device waited for after ``inner`` of them."""
    times = []
    for i in range(reps + warm_up):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(inner):
            run()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - begin) / inner)
    return statistics.median(times)


def run_peer(clock: Clock, layers: int) -> None:
    """Transformers: decode at each batch, prefill; eager, as its class comes."""
    from transformers import DynamicCache, Qwen3_5MoeForCausalLM

    config = q36(layers)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Qwen3_5MoeForCausalLM._from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)

    def decode(model: Any, batch: int) -> float:
        cache = DynamicCache(config=config)
        ids = torch.randint(0, config.vocab_size, (batch, PROMPT), device="cuda")
        # prompts in parts of rows would need a cache each: one call, logits of the last token alone
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        one = ids[:, :1].contiguous()
        return timed(lambda: model(one, past_key_values=cache, use_cache=True, logits_to_keep=1), 5)

    with torch.inference_mode():
        for batch in BATCHES:
            with guarded(clock, f"peer decode {batch}", 30):
                ms = decode(model, batch)
                clock.peer[f"decode {batch}"] = ms
                clock.figure(f"transformers eager decode batch {batch}", ms, "ms", tokens_per_s=1e3 * batch / ms)
            free()
        with guarded(clock, "peer prefill", 20):
            ids = torch.randint(0, config.vocab_size, (1, LONG), device="cuda")
            ms = timed(functools.partial(model, ids, use_cache=True, logits_to_keep=1), 3, warm_up=1)
            clock.peer["prefill"] = ms
            clock.figure(f"transformers prefill {LONG}", ms, "ms")
    del model
    free()


# ours


def our_model(layers: int, num_positions: int) -> Any:
    """The same sizes with random weights of our own."""
    from firetower.models.config import read_config
    from firetower.models.hybrid import HybridModel
    from firetower.models.weights import random_weights

    config = read_config(q36(layers).to_dict())
    return HybridModel(config, random_weights(config, torch.bfloat16, "cuda", 0), num_positions=num_positions)


def roofline_ms(model: Any, batch: int, window: int, bandwidth: float = 4.2e12) -> float:
    """Bytes of the weights that a step must read, over the bandwidth: dense ones, and the experts that are expected."""
    config, weights = model.config, model.weights
    experts = [n for n, _ in weights.named_tensors() if "gate_up_proj" in n or "down_proj" in n]
    total = sum(x.nbytes for _, x in weights.named_tensors())
    routed = sum(x.nbytes for n, x in weights.named_tensors() if n in experts and "shared" not in n)
    embedding = weights.embedding.nbytes if not config.tie_word_embeddings else 0
    share = 1 - (1 - config.top_k / config.num_experts) ** (batch * window)
    state = 2 * 4 * config.value_dim * config.head_k_dim * len(config.linear_layers) * batch
    return 1e3 * (total - routed - embedding + share * routed + state) / bandwidth


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab, (count, length), generator=generator).tolist()


def run_decode(clock: Clock, model: Any, batches: tuple[int, ...] = BATCHES) -> None:
    """Wall-clock steps of the engine: packing, graph, sampler, panel, copy, reading; overlap on, drafts off."""
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    bars = {1: 4.0}
    with Engine(
        model, max_batch=max(batches), max_model_len=1024, max_window=1, store=False, num_pages=max(batches) * 10 + 8,
    ) as engine:  # fmt: skip
        status = engine.status()
        report = engine._parts.loop.runner.graphs.report
        clock.figure("capture", report.seconds, "s", graphs=status.num_graphs, graph_gb=status.graph_bytes / 1e9,
                     state_gb=status.memory_bytes / 1e9, left_out=len(report.left_out))  # fmt: skip
        for line in status.graphs_left_out[:3]:
            print(f"[engine] left out {line}", flush=True)
        for batch in batches:
            with guarded(clock, f"decode {batch}", 10):
                ms = decode_ms(engine, batch, Sampling(max_tokens=96, ignore_eos=True, max_repeats=0))
                peer = clock.peer.get(f"decode {batch}")
                floor = roofline_ms(model, batch, 1)
                ratio = float("nan") if peer is None else peer / ms
                bar = f"{bars[batch]} ms" if batch in bars else "10x transformers"
                is_met = ms <= bars[batch] if batch in bars else None if peer is None else ratio >= 10
                clock.figure(f"decode batch {batch}", ms, "ms a step", bar=bar, is_met=is_met,
                             tokens_per_s=1e3 * batch / ms, times_transformers=ratio, roofline_ms=floor,
                             share_of_roofline=floor / ms)  # fmt: skip
            with guarded(clock, f"graph {batch}", 5):
                clock.figure(f"decode batch {batch}, graph alone", graph_ms(engine, batch, 1), "ms")
        for batch in batches:
            with guarded(clock, f"sampled decode {batch}", 10):
                sampling = Sampling(max_tokens=64, ignore_eos=True, temperature=0.8, top_p=0.95, top_k=50, seed=1)
                clock.figure(f"decode batch {batch}, top-k and top-p", decode_ms(engine, batch, sampling), "ms a step")


def decode_ms(engine: Any, batch: int, sampling: Any) -> float:
    """Milliseconds of a step while ``batch`` requests decode, all of it."""
    prompts = random_prompts(batch, PROMPT, engine.model.config.vocab_size)
    sequences = [engine.submit(p, sampling) for p in prompts]
    while any(s.stage in ("queued", "prefill") for s in sequences):
        engine.step()
    for _ in range(4):
        engine.step()
    loop = engine._parts.loop
    begin_windows = loop.num_windows
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while not any(s.is_done for s in sequences) and loop.num_windows < begin_windows + 48:
        engine.step()
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - begin) / (loop.num_windows - begin_windows)
    for s in sequences:
        engine.cancel(s)
    while engine.step():
        pass
    assert not engine.fires, engine.fires[0]
    return ms


def graph_ms(engine: Any, batch: int, window: int) -> float:
    """Milliseconds of the model's graph alone, replayed over the buffers as the last step left them."""
    from firetower.engine.buckets import Shape

    graphs = engine._parts.loop.runner.graphs
    graph, _ = graphs._graphs[Shape(num_rows=batch, window=window)]
    return timed(graph.replay, 7, inner=10)


def run_prefill(clock: Clock, model: Any) -> None:
    """Time from the prompt to its first token."""
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    with Engine(model, max_batch=1, max_model_len=LONG + 64, max_window=1, store=False, graphs=False) as engine:
        [prompt] = random_prompts(1, LONG, model.config.vocab_size)
        ms = timed(lambda: engine.generate(prompt, Sampling(max_tokens=1)), 4)
        peer = clock.peer.get("prefill")
        clock.figure(f"prefill {LONG}", ms, "ms", bar="200 ms", is_met=ms <= 200,
                     times_transformers=float("nan") if peer is None else peer / ms)  # fmt: skip
        assert not engine.fires


def run_window(clock: Clock, model: Any) -> None:
    """A window of one token and four drafts, by its graph, and how many experts it meets."""
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    with Engine(model, max_batch=1, max_model_len=1024, max_window=5, store=False) as engine:
        loop = engine._parts.loop
        runner = loop.runner
        sequence = engine.submit(random_prompts(1, PROMPT, model.config.vocab_size)[0], Sampling(max_tokens=64))
        while not loop.rows.sequences:
            engine.step()
        drafts = {0: random_prompts(7, 4, model.config.vocab_size)[0]}
        distinct: list[int] = []

        class Count:
            def keep(self, signal: int, x: Tensor) -> None:
                if model.signals[signal].stage == "router":
                    chosen = x[:, : model.config.num_experts].topk(model.config.top_k).indices
                    distinct.append(int(chosen.unique().numel()))

        seats = loop.rows.to_launch()
        flight = runner.launch_window(loop.rows, seats, drafts)
        flight.wait()
        with torch.inference_mode():
            buffers = runner.buffers(flight.shape)
            model.window(buffers.batch, runner.state, panel=buffers.panel, keep=Count())

        def step() -> None:
            runner.launch_window(loop.rows, seats, drafts).wait()

        ms, alone = timed(step, 20), graph_ms(engine, 1, 5)
        clock.figure("window of 5", ms, "ms", bar="6.5 ms", is_met=ms <= 6.5, graph_alone_ms=alone,
                     least_distinct_experts=min(distinct), mean_distinct_experts=statistics.mean(distinct),
                     roofline_ms=roofline_ms(model, 1, 5))  # fmt: skip
        engine.cancel(sequence)


def run_sensors(clock: Clock, model: Any) -> None:
    """Graphs with and without a panel, over the same buffers, replayed in turn."""
    from firetower.engine.buckets import Shape
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    with Engine(model, max_batch=32, max_model_len=1024, max_window=1, store=False, graphs=False) as engine:
        loop = engine._parts.loop
        runner = loop.runner
        sequences = [
            engine.submit(p, Sampling(max_tokens=64)) for p in random_prompts(32, 64, model.config.vocab_size)
        ]
        while len(loop.rows) < 32:
            engine.step()
        loop.drain()
        for batch in (1, 32):
            seats = loop.rows.to_launch()[:batch]
            runner.launch_window(loop.rows, seats, {}).wait()
            buffers = runner.buffers(Shape(num_rows=batch, window=1))
            graphs = []
            with torch.inference_mode():
                for panel in (None, buffers.panel):
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        model.window(buffers.batch, runner.state, panel=panel)
                    graphs.append(graph)
            pairs = [[timed(g.replay, 1, warm_up=1, inner=20) for g in graphs] for _ in range(9)]
            ratio = statistics.median(on / off for off, on in pairs)
            off = statistics.median(p[0] for p in pairs)
            clock.figure(f"sensors on / off, batch {batch}", ratio, "", bar="1.01", is_met=ratio <= 1.01, off_ms=off)
        for s in sequences:
            engine.cancel(s)


# the small model


def run_cpu(clock: Clock) -> None:
    """Tokens a second of a small model on the CPU, the same weights in Transformers."""
    from firetower.drills import hosts
    from firetower.engine.engine import Engine
    from firetower.engine.request import Sampling

    answer = 96
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = hosts.small_qwen35_moe(seed=0, **SMALL)
        count = sum(p.numel() for p in host.parameters())
        host.save_pretrained(folder)
        for batch in (1, 8):
            prompts = random_prompts(batch, 32, SMALL["vocab_size"])
            ids = torch.tensor(prompts)

            def peer(ids: Tensor = ids) -> Tensor:
                with torch.inference_mode():
                    return host.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer,
                                         do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip

            for window in (1, 5):
                with Engine(folder, device="cpu", max_batch=batch, max_model_len=256, max_window=window,
                            store=False) as engine:  # fmt: skip
                    sampling = Sampling(max_tokens=answer, ignore_eos=True, max_repeats=0)
                    ours, theirs = [], []
                    for _ in range(3):
                        begin = time.perf_counter()
                        found = engine.generate(prompts, sampling)
                        middle = time.perf_counter()
                        expected = peer()
                        ours.append(batch * answer / (middle - begin))
                        theirs.append(batch * answer / (time.perf_counter() - middle))
                    same = [list(c.token_ids) for c in found] == expected[:, 32:].tolist()
                    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                    clock.figure(f"cpu, batch {batch}, window up to {window}", max(ours), "tokens/s",
                                 bar="1.5x transformers", is_met=ratio >= 1.5, times_transformers=ratio,
                                 transformers=max(theirs), parameters=count, threads=torch.get_num_threads(),
                                 same_tokens=same)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("--layers", type=int, default=40, help="decoder layers of the large model")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batches of decode")
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU section")
    args = parser.parse_args()
    only, clock = args.only.split(","), Clock(args.budget)
    batches = tuple(int(b) for b in args.batches.split(","))
    if torch.cuda.is_available():
        print(f"[engine] {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        if "checks" in only:
            run_checks(clock)
            free()
        if "peer" in only:
            with guarded(clock, "peer", 60):
                run_peer(clock, args.layers)
            free()
        ours = [s for s in ("decode", "prefill", "window", "sensors") if s in only]
        if ours:
            model = None
            with guarded(clock, "weights", 60):
                model = our_model(args.layers, LONG + 64)
            sections: dict[str, Callable[[], None]] = {
                "decode": lambda: run_decode(clock, model, batches),
                "prefill": lambda: run_prefill(clock, model),
                "window": lambda: run_window(clock, model),
                "sensors": lambda: run_sensors(clock, model),
            }
            for name in ours:
                with guarded(clock, name, 15):
                    sections[name]()
                free()
            del model
            free()
    if "cpu" in only:
        torch.set_num_threads(args.threads)
        with guarded(clock, "cpu", 30):
            run_cpu(clock)


if __name__ == "__main__":
    main()
