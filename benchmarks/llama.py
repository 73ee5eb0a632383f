"""Decode of SmolLM2 in llama.cpp: the filtered callback on, against no callback at all.

Two contexts of one model decode the same tokens in one process, a few tokens each in turn, so that a noisy
machine hits both alike. The figure is the median over rounds of (with / without) of a round. One line:

    llama_filtered_ratio with_ms without_ms ratio bar

    python benchmarks/llama.py [--rounds N] [--tokens N] [--level full] [MODEL.gguf]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# set before numpy is imported: its threads must not compete with llama.cpp's
os.environ.setdefault("OMP_NUM_THREADS", "1")

from firetower.attach.llama.runtime import LlamaContext, LlamaOptions, LlamaSession
from firetower.attach.llama.sensor import EvalSensor, Step
from firetower.attach.llama.weights import WeightReader
from firetower.core.errors import MissingExtraError
from firetower.core.records import Phase

BAR = 1.6
PROMPT = "The lighthouse keeper wrote in the log that"


class Side:
    """One context, with its sensor or without; feeds tokens and keeps its own position."""

    def __init__(self, context: LlamaContext, sensor: EvalSensor | None) -> None:
        self._context, self._sensor, self._position = context, sensor, 0

    def feed(self, tokens: tuple[int, ...], phase: Phase) -> None:
        if self._sensor is not None:
            step = Step(index=0, phase=phase, first_position=self._position, num_tokens=len(tokens))
            self._sensor.begin_step(step)
        self._position += len(tokens)
        self._context.decode(tokens)

    def decode_ms(self, tokens: tuple[int, ...]) -> float:
        """Milliseconds a token."""
        begin = time.perf_counter()
        for token in tokens:
            self.feed((token,), Phase.DECODE)
        return (time.perf_counter() - begin) / len(tokens) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="default: SmolLM2 in the cache folder")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=4, help="tokens a round and side")
    parser.add_argument("--level", choices=("filtered", "full"), default="filtered")
    parser.add_argument("--threads", type=int, help="default: the usable CPUs, at most 8")
    args = parser.parse_args()
    with LlamaSession(args.model or smollm2(), LlamaOptions(num_threads=args.threads)) as session:
        sensor = EvalSensor(session.ggml, WeightReader(session.ggml, None), level=args.level)
        prompt = session.tokenize(PROMPT)
        total = len(prompt) + (args.rounds + 1) * args.tokens
        with session.context(total, None) as bare, session.context(total, sensor.callback) as watched:
            sides = [Side(watched, sensor), Side(bare, None)]
            with_ms, without_ms = measure(sides, prompt, args.rounds, args.tokens)
        if sensor.num_errors or sensor.num_bad or not sensor.num_checked:
            print(
                f"not a measurement: {sensor.num_errors} errors, {sensor.num_bad} bad, {sensor.first_error}"
            )
            return 1
    ratio = statistics.median(w / b for w, b in zip(with_ms, without_ms, strict=True))
    own, other = statistics.median(with_ms), statistics.median(without_ms)
    print(f"llama_{args.level}_ratio with_ms={own:.2f} without_ms={other:.2f} ratio={ratio:.3f} bar={BAR}")
    return 0 if ratio <= BAR or args.level == "full" else 3


def measure(
    sides: list[Side], prompt: tuple[int, ...], num_rounds: int, num_tokens: int
) -> tuple[list[float], list[float]]:
    """Milliseconds a token of each side, by round; the first round warms up, and the order alternates."""
    for side in sides:
        side.feed(prompt, Phase.PREFILL)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(num_rounds + 1):
        tokens = tuple(prompt[(i + j) % len(prompt)] for j in range(num_tokens))
        for index in (0, 1) if i % 2 else (1, 0):
            ms = sides[index].decode_ms(tokens)
            if i:
                times[index].append(ms)
    return times


def smollm2() -> Path:
    """The real model that `make models` fetches."""
    from firetower.drills.hosts import smollm2_path

    return smollm2_path()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MissingExtraError as e:
        # the peer takes minutes to build: its absence is said, and does not stop the other benchmarks
        print(f"llama_filtered_ratio not measured: {e}")
