"""What must hold on a CUDA device, as plain functions that raise AssertionError or return what they measured.

Run by test_gpu.py, and by benchmarks/h200_watch.py where pytest is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import firetower
from firetower.core.records import Reading
from firetower.core.words import NOT_RUN
from firetower.drills import hosts
from firetower.sensors import mark
from firetower.sensors.check import Layout
from firetower.sensors.panel import Panel

NUM_SIGNALS, NUM_ROWS = 5, 3
GEOMETRIES = {
    "tokens": ((3, 7, 5), (1, 7, 5)),
    "heads": ((3, 2, 7, 5), (2, 7, 5)),
    "states": ((3, 4), (1, 1, 4)),
    "decode": ((1, 1, 2048), (1, 1, 2048)),
    "batch over the row words": ((5, 63, 17), (1, 63, 17)),
    "many blocks": ((2, 1000, 600), (1, 1000, 600)),
    "empty": ((0, 3, 4), (1, 1, 1)),
}
_BAD_BITS: dict[torch.dtype, tuple[int, ...]] = {
    torch.float64: (0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF0000000000001),
    torch.float32: (0x7F800000, 0xFF800000, 0x7FC00000, 0x7FD6E000, 0x7FA00000, 0xFFFFFFFF),
    torch.float16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF),
    torch.bfloat16: (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF),
    torch.float8_e5m2: (0x7C, 0xFC, 0x7D, 0xFF),
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e4m3fnuz: (0x80,),
    torch.float8_e5m2fnuz: (0x80,),
    torch.float8_e8m0fnu: (0xFF,),
}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def new_words(device: str) -> Tensor:
    """An empty panel of `NUM_SIGNALS` and `NUM_ROWS`."""
    num_words = 3 * NUM_SIGNALS + NUM_ROWS + 1
    return torch.full((num_words,), NOT_RUN, dtype=torch.int64, device=device)


def with_faults(
    shape: tuple[int, ...], dtype: torch.dtype, num_bad: int, generator: torch.Generator
) -> Tensor:
    """A tensor of ones whose ``num_bad`` random elements hold NaN or Inf of all kinds, made on raw bits."""
    x = torch.ones(shape).to(dtype)
    raw = x.view(_INTEGER[dtype.itemsize]).view(-1)
    if raw.numel() == 0:
        return x
    width = 8 * dtype.itemsize
    signed = [b - (1 << width) if width > 8 and b >> (width - 1) else b for b in _BAD_BITS[dtype]]
    for _ in range(num_bad):
        place = int(torch.randint(raw.numel(), (1,), generator=generator))
        raw[place] = signed[int(torch.randint(len(signed), (1,), generator=generator))]
    return x


def kernel_agrees_with_the_cpu_operator() -> dict[str, Any]:
    """Every type, geometry, pad mask, legality and density: all words equal."""
    generator = torch.Generator().manual_seed(0)
    num_cases = 0
    for dtype, (shape, geometry), num_bad, legal, padded in itertools.product(
        _BAD_BITS, GEOMETRIES.values(), (0, 1, 3, 100), (False, True), (False, True)
    ):
        x = with_faults(shape, dtype, num_bad, generator)
        pad = torch.rand(shape[0], geometry[1], generator=generator) < 0.5 if padded else None
        expected, found = new_words("cpu"), new_words("cuda")
        arguments = (2, NUM_SIGNALS, NUM_ROWS, *geometry, legal)
        torch.ops.firetower.mark(x, expected, pad, *arguments)
        torch.ops.firetower.mark(x.cuda(), found, None if pad is None else pad.cuda(), *arguments)
        assert torch.equal(expected, found.cpu()), (
            dtype,
            shape,
            num_bad,
            legal,
            padded,
            expected,
            found.cpu(),
        )
        num_cases += 1
    return {"cases": num_cases}


def unaligned_and_strided_tensors_agree() -> dict[str, Any]:
    """Storage that does not start on 16 bytes, and views that are not contiguous."""
    generator = torch.Generator().manual_seed(1)
    num_cases = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        base = with_faults((4, 9, 1003), dtype, 5, generator)
        views = (base.view(-1)[1:9001].view(3, 3, 1000), base.transpose(1, 2), base[:, 2:5], base[..., ::2])
        for x in views:
            geometry = (1, x.shape[1], x.shape[2])
            expected, found = new_words("cpu"), new_words("cuda")
            on_device = base.cuda()
            y = torch.as_strided(on_device, x.shape, x.stride(), x.storage_offset())
            torch.ops.firetower.mark(x, expected, None, 1, NUM_SIGNALS, NUM_ROWS, *geometry, False)
            torch.ops.firetower.mark(y, found, None, 1, NUM_SIGNALS, NUM_ROWS, *geometry, False)
            assert torch.equal(expected, found.cpu()), (dtype, x.shape, x.stride())
            num_cases += 1
    return {"cases": num_cases}


def many_tensors_in_one_launch_agree() -> dict[str, Any]:
    """Mixed types and shapes, more tensors than one launch takes, some with pads."""
    generator = torch.Generator().manual_seed(2)
    dtypes = [torch.bfloat16, torch.float32, torch.float16] * 4
    num = len(dtypes)
    num_words = 3 * num + NUM_ROWS + 1
    for num_bad in (0, 1, 50):
        shapes = [(2, 3, 700 + 13 * i) if i % 3 else (2, 3, 4, 6) for i in range(num)]
        xs = [
            with_faults(s, d, num_bad if i % 4 else 0, generator)
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        pad = torch.tensor([[True, False, False], [False, False, True]])
        arguments = (
            list(range(num)), num, [NUM_ROWS] * num, [1 if i % 3 else 3 for i in range(num)],
            [3 if i % 3 else 4 for i in range(num)], [s[-1] for s in shapes],
            [i % 2 == 0 for i in range(num)], [bool(i % 3) for i in range(num)],
        )  # fmt: skip
        expected = torch.full((num_words,), NOT_RUN, dtype=torch.int64)
        found = expected.cuda()
        torch.ops.firetower.mark_many(xs, expected, pad, *arguments)
        torch.ops.firetower.mark_many([x.cuda() for x in xs], found, pad.cuda(), *arguments)
        assert torch.equal(expected, found.cpu()), (num_bad, expected, found.cpu())
    return {"tensors": num}


def the_same_word_every_time(num_repeats: int = 50) -> dict[str, Any]:
    """A large tensor with 1,000 bad elements: whatever the thread order, the words are the same."""
    generator = torch.Generator().manual_seed(3)
    x = with_faults((16, 4096, 2048), torch.bfloat16, 1000, generator).cuda()
    seen = set()
    for _ in range(num_repeats):
        words = new_words("cuda")
        torch.ops.firetower.mark(x, words, None, 0, NUM_SIGNALS, NUM_ROWS, 1, 4096, 2048, False)
        seen.add(tuple(words.tolist()))
    assert len(seen) == 1, f"{len(seen)} different panels in {num_repeats} runs"
    expected = new_words("cpu")
    torch.ops.firetower.mark(x.cpu(), expected, None, 0, NUM_SIGNALS, NUM_ROWS, 1, 4096, 2048, False)
    assert tuple(expected.tolist()) in seen
    return {"repeats": num_repeats}


def a_tensor_of_nearly_two_to_the_31_elements() -> dict[str, Any]:
    """The largest tensor that a word can index: its last element is found, no index wraps."""
    x = torch.zeros(mark.MAX_ELEMENTS, dtype=torch.uint8, device="cuda")
    x[-1] = 0x7F
    words = new_words("cuda")
    torch.ops.firetower.mark(
        x.view(torch.float8_e4m3fn), words, None, 0, NUM_SIGNALS, NUM_ROWS, 1, 1, x.numel(), False
    )
    word = int(words[0])
    assert (word >> 32, word & 0xFFFFFFFF) == (mark.MAX_ELEMENTS - 1, 0x7F)
    return {"elements": x.numel()}


def a_panel_resets_and_reads_inside_a_graph() -> dict[str, Any]:
    """Reset and marks captured once; each replay reads what its own input holds."""
    panel = Panel(num_rows=4)
    slots = [panel.declare(layout=layout) for layout in (Layout.TOKENS, Layout.HEADS)]
    panel.freeze(["cuda"])
    x, kv = (
        torch.zeros(2, 3, 64, device="cuda"),
        torch.zeros(2, 2, 3, 32, device="cuda", dtype=torch.bfloat16),
    )

    def step() -> None:
        panel.reset(2, 3)
        panel.mark(slots[0], x, num_sequences=2, num_tokens=3)
        panel.mark(slots[1], kv, num_sequences=2, num_tokens=3)
        panel.flush()

    graph = captured(step)
    for fault in (None, (0, 1, 5), None, (1, 2, 63)):
        x.zero_()
        if fault:
            x[fault] = float("nan")
        graph.replay()
        reading = panel.read()
        assert reading.ran == (True, True)
        assert reading.step == (2, 3)
        where = reading.origin and reading.origin.flat_index
        assert where == (None if fault is None else (fault[0] * 3 + fault[1]) * 64 + fault[2])
    return {"replays": 4}


def captured(step: Any, num_warm_ups: int = 3) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``step``, after warm-ups on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(num_warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


FAULTS = {
    "llama": ("model.layers.2.mlp.down_proj.weight", (3, 7)),
    "qwen3.5-moe": ("model.layers.1.mlp.shared_expert.up_proj.weight", (5, 2)),
}
"""Where `small_model` gets its NaN: the origin is the first signal that this weight feeds."""


def small_model(kind: str) -> Any:
    """A tiny model on the device, random weights."""
    build = {"llama": hosts.small_llama, "qwen3.5-moe": hosts.small_qwen35_moe}[kind]
    return build(torch.bfloat16).cuda().eval().requires_grad_(False)


@contextlib.contextmanager
def faulty_weight(model: nn.Module, kind: str) -> Iterator[None]:
    """Put a NaN into one weight, in place, and take it out again."""
    name, place = FAULTS[kind]
    weight = model.get_parameter(name)
    kept = weight[place].clone()
    weight[place] = float("nan")
    try:
        yield
    finally:
        weight[place] = kept


def origin_key(reading: Reading) -> tuple[object, ...]:
    """What must be the same for the same fault: signal, place, bits."""
    assert reading.origin is not None
    first = reading.origin.first
    assert first is not None
    return reading.origin.signal.module, reading.origin.signal.stage, first.row, first.column, first.bits


def eager_origin(model: Any, kind: str, ids: Tensor) -> tuple[object, ...]:
    """The origin that plain eager hooks give."""
    with firetower.attach(model, store=False, on_fire="record") as watch, faulty_weight(model, kind):
        model(input_ids=ids, use_cache=False)
        return origin_key(watch.read())


@torch.no_grad()
def a_users_own_graph_reads_as_eager(kind: str) -> dict[str, Any]:
    """The model captured by the user: no Python runs at replay, yet `Watch.read` tells of the replay."""
    model = small_model(kind)
    ids = torch.randint(5, 90, (2, 6), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = eager_origin(model, kind, ids)
    with firetower.attach(model, store=False, on_fire="record") as watch:
        model(input_ids=ids, use_cache=False)
        assert watch.read().is_clean
        graph = captured(lambda: model(input_ids=ids, use_cache=False))
        assert watch.failures == 0, watch.last_failure
        graph.replay()
        clean = watch.read()
        assert clean.is_clean
        with faulty_weight(model, kind):
            graph.replay()
            burned = watch.read()
        graph.replay()
        assert watch.read().is_clean, "the reset is not in the graph"
        assert origin_key(burned) == expected, (origin_key(burned), expected)
        assert watch.failures == 0, watch.last_failure
        return {"coverage": clean.coverage, "origin": str(expected), "num_fires": len(watch.fires)}


@torch.no_grad()
def compiled_with_cuda_graphs_reads_as_eager(kind: str) -> dict[str, Any]:
    """``torch.compile(mode="reduce-overhead")``: the origin of eager, and no cudagraph skipped."""
    model = small_model(kind)
    ids = torch.randint(5, 90, (2, 6), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = eager_origin(model, kind, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    bare = run_compiled(compiled, ids, 3)
    torch._dynamo.utils.counters.clear()
    with firetower.attach(compiled, store=False, on_fire="record") as watch:
        watched = run_compiled(compiled, ids, 4)
        clean = watch.read()
        assert clean.is_clean
        with faulty_weight(model, kind):
            run_compiled(compiled, ids, 1)
            burned = watch.read()
        run_compiled(compiled, ids, 1)
        assert watch.read().is_clean
        num_launches = graph_launches(lambda: run_compiled(compiled, ids, 1))
        inductor = dict(torch._dynamo.utils.counters["inductor"])
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
        assert watch.failures == 0, watch.last_failure
        assert inductor.get("cudagraph_skips", 0) == 0, inductor
        assert num_launches > 0, "no CUDA graph was launched"
        assert origin_key(burned) == expected, (origin_key(burned), expected)
        return {
            "coverage": clean.coverage,
            "not_covered": sorted({s.signal.stage for s in clean.not_covered}),
            "logits_bit_identical": torch.equal(bare, watched),
            "logits_max_abs_diff": float((bare.float() - watched.float()).abs().max()),
            "graph_launches_a_step": num_launches,
            "graph_breaks": breaks,
        }


def run_compiled(compiled: Any, ids: Tensor, num_times: int) -> Tensor:
    """Logits of the last of ``num_times`` calls, copied out of the graph's memory."""
    for _ in range(num_times):
        torch.compiler.cudagraph_mark_step_begin()
        logits = compiled(input_ids=ids, use_cache=False).logits
    return logits.clone()


def graph_launches(step: Any) -> int:
    """How many CUDA graphs one call launches, as the profiler sees it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if "GraphLaunch" in event.key)


class Filling(TorchDispatchMode):
    """Every allocation that PyTorch leaves unwritten is filled with ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.num_filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ):
            self.num_filled += 1
            if out.is_floating_point():
                out.fill_(self.value)
        return out


class HalfWritten(nn.Module):
    """Keeps its product in a buffer of 16 rows and reads one row more than it wrote, or not."""

    def __init__(self, num_extra: int) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.num_extra = num_extra

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.empty(16, 32, device=x.device, dtype=x.dtype)
        rows[: x.shape[0]] = self.proj(x)
        return self.norm(rows[: x.shape[0] + self.num_extra])


@torch.no_grad()
def two_poison_fillings_show_an_unwritten_read() -> dict[str, Any]:
    """NaN filling: the watch names the reader. A finite one: other bits come out. Clean model: same bits."""
    results = {}
    for num_extra in (0, 1):
        model = HalfWritten(num_extra).cuda()
        x = torch.randn(5, 32, device="cuda")
        outputs, origins = [], []
        for value in (float("nan"), 3.0e4):
            with firetower.attach(model, store=False, on_fire="record") as watch, Filling(value) as filling:
                outputs.append(model(x).clone())
                assert filling.num_filled > 0
                origin = watch.read().origin
                origins.append(
                    None if origin is None else (origin.signal.module, origin.first and origin.first.row)
                )
        differs = not torch.equal(outputs[0].view(torch.int32), outputs[1].view(torch.int32))
        assert differs == bool(num_extra)
        assert origins == ([("norm", 5), None] if num_extra else [None, None]), origins
        results["unwritten read" if num_extra else "clean"] = {
            "bits_differ": differs,
            "origin": str(origins[0]),
        }
    return results


_TINY = """
import torch
from tests_gpu_checks import new_words, with_faults, NUM_SIGNALS, NUM_ROWS, torch as t
generator = t.Generator().manual_seed(0)
for shape in ((1, 1, 3), (2, 3, 5), (1, 1, 1025), (3, 2, 700)):
    for dtype in (t.bfloat16, t.float32, t.float64, t.float8_e4m3fn):
        x = with_faults(shape, dtype, 2, generator).cuda()
        pad = t.zeros(shape[:2], dtype=t.bool, device="cuda")
        words = new_words("cuda")
        t.ops.firetower.reset(words, shape[0], shape[1])
        t.ops.firetower.mark(x, words, pad, 1, NUM_SIGNALS, NUM_ROWS, 1, shape[1], shape[2], False)
        xs = [x, x[:1].contiguous(), x[:, :1].contiguous()]
        t.ops.firetower.mark_many(xs, words, None, [0, 2, 4], NUM_SIGNALS, [0] * 3, [1] * 3, [1] * 3, [1] * 3,
                                  [False] * 3, [False] * 3)
        t.cuda.synchronize()
        assert int(words[1]) >> 32 < x.numel()
print("all launched")
"""


def memcheck_is_clean(timeout_s: int = 240) -> dict[str, Any]:
    """compute-sanitizer over the kernels on tiny shapes, each tensor an allocation of its own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        return {"skipped": "compute-sanitizer is not installed"}
    loader = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tests_gpu_checks', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['tests_gpu_checks'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", loader + _TINY]
    environ = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    if "Device not supported" in done.stdout:
        return {"skipped": "compute-sanitizer does not support this device"}
    assert done.returncode == 0, (done.returncode, done.stdout[-1500:], done.stderr[-1500:])
    assert "all launched" in done.stdout
    assert summary, done.stdout[-1500:]
    assert "0 errors" in summary[0], summary
    return {"summary": summary[0].strip("= ")}


CHECKS: dict[str, Any] = {
    "kernel agrees with the CPU operator": kernel_agrees_with_the_cpu_operator,
    "unaligned and strided tensors": unaligned_and_strided_tensors_agree,
    "many tensors in one launch": many_tensors_in_one_launch_agree,
    "the same word every time": the_same_word_every_time,
    "2^31 - 1 elements": a_tensor_of_nearly_two_to_the_31_elements,
    "panel in a CUDA graph": a_panel_resets_and_reads_inside_a_graph,
    "user's own graph, Llama": lambda: a_users_own_graph_reads_as_eager("llama"),
    "user's own graph, Qwen3.5-MoE": lambda: a_users_own_graph_reads_as_eager("qwen3.5-moe"),
    "reduce-overhead, Llama": lambda: compiled_with_cuda_graphs_reads_as_eager("llama"),
    "reduce-overhead, Qwen3.5-MoE": lambda: compiled_with_cuda_graphs_reads_as_eager("qwen3.5-moe"),
    "two poison fillings": two_poison_fillings_show_an_unwritten_read,
    "memcheck": memcheck_is_clean,
}
"""Name to check, in the order of the benchmark script."""
