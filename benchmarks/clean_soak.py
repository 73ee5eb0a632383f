"""Do clean steps stay silent? Thousands of decode steps with what looks bad and is legal.

Left pads, ragged batches, sampling with top-k and min-p (which write -Inf), banned tokens, a model that masks its own
logits with -Inf, fp32, fp16 and bf16, greedy, sampled and beams, all levels. One false fire fails the run.

    python benchmarks/clean_soak.py [--steps N] [--seed S]

Prints ``clean_steps steps=20000 false_fires=0``; exits with 3 on a false fire.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import firetower
from firetower.drills import hosts

HOSTS = ("small_llama", "small_qwen3_next", "small_qwen35_moe", "small_qwen4_exp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BannedLogits(nn.Module):
    """A head that bans part of the vocabulary itself, as some engines do for padded vocabularies."""

    def __init__(self, head: nn.Module, first: int) -> None:
        super().__init__()
        self.lm_head, self.first = head, first

    def forward(self, x: Tensor) -> Tensor:
        logits = self.lm_head(x).clone()
        logits[..., self.first :] = float("-inf")
        return logits


def request(model: Any, generator: torch.Generator, turn: int) -> dict[str, Any]:
    """A ragged, left-padded batch with one of the sampling settings."""
    batch, length = 1 + turn % 4, 4 + turn % 23
    ids = torch.randint(5, model.config.vocab_size - 8, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : int(torch.randint(0, length - 1, (1,), generator=generator))] = 0
    settings: tuple[dict[str, Any], ...] = (
        {"do_sample": False},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"do_sample": True, "min_p": 0.2},
        {"do_sample": False, "bad_words_ids": [[7], [9]], "repetition_penalty": 1.3},
        {"do_sample": True, "top_p": 0.4, "suppress_tokens": [6, 8]},
    )
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None, **settings[turn % 5]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    models = []
    for name, dtype in itertools.product(HOSTS, DTYPES):
        model = getattr(hosts, name)(dtype=dtype)
        if dtype is torch.float32:
            model.lm_head = BannedLogits(model.lm_head, model.config.vocab_size - 3)
        models.append(model)
    steps = fires = turn = 0
    begin = time.perf_counter()
    while steps < args.steps:
        model = models[turn % len(models)]
        level = "ops" if turn % 25 == 7 else "logits" if turn % 25 == 3 else "layers"
        num_tokens = 64 if level != "ops" else 8
        on_fire = ("raise", "record", "isolate")[turn % 3]
        kwargs = request(model, generator, turn)
        if turn % 11 == 5 and "llama" in type(model).__name__.lower():
            kwargs.update(num_beams=3, do_sample=False)
        with firetower.attach(model, level=level, on_fire=on_fire, store=False) as watch:
            try:
                model.generate(max_new_tokens=num_tokens, **kwargs)
            except firetower.NonFiniteError as e:
                print(f"false fire: {e}", file=sys.stderr)
            if watch.fires and on_fire != "raise":
                print(f"false fire: {watch.fires[0]}", file=sys.stderr)
            fires += len(watch.fires)
            if watch.failures:
                raise RuntimeError(watch.last_failure)
            ran, declared = watch.coverage()
            if ran != declared:
                raise RuntimeError(f"{declared - ran} signals not covered: {watch.last.not_covered[:3]}")
        steps += num_tokens
        turn += 1
        if turn % 25 == 0:
            rate = steps / (time.perf_counter() - begin)
            left = (args.steps - steps) / rate
            print(f"\r{steps}/{args.steps} steps, {rate:.0f}/s, {left:.0f} s left ", end="", file=sys.stderr)
    print(f"\nclean_steps steps={steps} false_fires={fires} bar=0 seed={args.seed}")
    return 0 if fires == 0 else 3


if __name__ == "__main__":
    sys.exit(main())
