"""Decode of SmolLM2 on the CPU: bare, under the watch at ``layers``, and under Transformers' DebugUnderflowOverflow.

They take turns in one process, a few tokens at a time, in changing order, so that a noisy machine hits all alike. A
turn counts by its median token; the figure is the median over rounds of (watched / bare) of the same round, in wall
time and, since other work may share the cores, in CPU time of this process. As in ``generate()``, gradients are off
and a prompt and a few tokens come before what is timed. The peer, ten times slower, takes part in some rounds only, at
their end. Prints one line a figure.

    python benchmarks/watch_cpu.py [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch

import firetower
from firetower.drills.hosts import load_smollm2

_NUM_WARM = 3
"""Tokens before what is timed: whoever ran before leaves cold caches."""

_PEER_EVERY = 10
"""Rounds between two turns of the peer."""


def decode_ms(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int) -> tuple[float, float]:
    """Milliseconds of the median token of greedy decoding, cache included, after a prefill: wall time, CPU time."""
    times = []
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
        for _ in range(_NUM_WARM + num_tokens):
            begin, cpu_begin = time.perf_counter(), time.process_time()
            out = model(input_ids=token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            times.append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    wall, cpu = (statistics.median(t[i] for t in times[_NUM_WARM:]) for i in (0, 1))
    return wall * 1e3, cpu * 1e3


def watched(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """The watch as a user attaches it, store aside."""
    return firetower.attach(model, level="layers", store=False)


def peer(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """Transformers' own detector; it prints when it fires and keeps its hooks, which are removed here."""
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextlib.contextmanager
    def attached() -> object:
        before = {m: list(m._forward_hooks) for m in model.modules()}
        with contextlib.redirect_stdout(io.StringIO()):
            DebugUnderflowOverflow(model)
            yield None
        for module, kept in before.items():
            for key in [k for k in module._forward_hooks if k not in kept]:
                del module._forward_hooks[key]

    return attached()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_smollm2()
    ids = tokenizer("The lighthouse keeper wrote in the log that", return_tensors="pt").input_ids
    kinds: dict[str, Callable[[torch.nn.Module], contextlib.AbstractContextManager[object]]] = {
        "bare": contextlib.nullcontext,
        "watch": watched,
        "peer": peer,
    }
    times: dict[str, list[tuple[int, tuple[float, float]]]] = {k: [] for k in kinds}
    for i in range(args.rounds + 1):
        order = ["bare", "watch"] if i % 2 else ["watch", "bare"]
        for kind in order + ["peer"] * (i % _PEER_EVERY == 1):
            with kinds[kind](model):
                ms = decode_ms(model, ids, args.tokens)
            if i:
                times[kind].append((i, ms))
    bare_at = dict(times["bare"])
    for kind in ("watch", "peer"):
        ratios = [tuple(own[c] / bare_at[i][c] for c in (0, 1)) for i, own in times[kind]]
        wall, cpu = (statistics.median(r[c] for r in ratios) for c in (0, 1))
        bare, own = (statistics.median(t[0] for _, t in times[k]) for k in ("bare", kind))
        bar = "bar 1.05" if kind == "watch" else "Transformers DebugUnderflowOverflow"
        print(f"decode_cpu_{kind}_ratio bare={bare:.1f}ms own={own:.1f}ms ratio={wall:.3f} cpu_ratio={cpu:.3f} {bar}")


if __name__ == "__main__":
    main()
