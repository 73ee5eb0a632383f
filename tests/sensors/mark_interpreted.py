"""Run by test_mark_triton.py with TRITON_INTERPRET=1: the kernel against the CPU operator, word for word."""

from __future__ import annotations

import itertools
import math

import torch

from firetower.core.words import NOT_RUN
from firetower.sensors import mark, mark_triton

NUM_SIGNALS, NUM_ROWS = 6, 3
SHAPES = {
    "tokens, odd": ((3, 7, 5), (1, 7, 5)),
    "heads": ((3, 2, 7, 5), (2, 7, 5)),
    "two blocks a row": ((2, 1, 1500), (1, 1, 1500)),
    "states": ((3, 4), (1, 1, 4)),
    "one block, full": ((1, 1, 1024), (1, 1, 1024)),
    "more sequences than row words": ((5, 1, 3), (1, 1, 3)),
    "empty": ((0,), (1, 1, 1)),
}
VALUES = torch.tensor([math.inf, -math.inf, math.nan])


def panels() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.full((3 * NUM_SIGNALS + NUM_ROWS + 1,), NOT_RUN, dtype=torch.int64)
    return words, words.clone()


def with_faults(shape: tuple[int, ...], dtype: torch.dtype, num_bad: int) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    if x.numel() and num_bad:
        places = torch.randint(0, x.numel(), (num_bad,))
        x.view(-1)[places] = VALUES[torch.randint(0, 3, (num_bad,))].to(dtype)
    return x


def pad_of(shape: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    return torch.rand(shape[0], num_tokens) < 0.5


def check_single() -> int:
    num_cases = 0
    dtypes = (torch.float32, torch.float16, torch.float64)
    for dtype, (shape, geometry), num_bad, legal, padded in itertools.product(
        dtypes, SHAPES.values(), (0, 5), (False, True), (False, True)
    ):
        x = with_faults(shape, dtype, num_bad)
        pad = pad_of(shape, geometry[1]) if padded else None
        expected, found = panels()
        for operator, words in ((mark._mark_cpu, expected), (mark._mark_cuda, found)):
            operator(x, words, pad, 2, NUM_SIGNALS, NUM_ROWS, *geometry, legal)
        assert torch.equal(expected, found), (dtype, shape, num_bad, legal, padded, expected, found)
        num_cases += 1
    return num_cases


def check_many() -> int:
    shapes = [(2, 3, 700), (2, 3, 5), (0, 3, 5), (2, 4, 3, 2)]
    geometries = [(1, 3, 700), (1, 3, 5), (1, 3, 5), (4, 3, 2)]
    for num_bad in (0, 1, 40):
        xs = [
            with_faults(s, d, num_bad)
            for s, d in zip(shapes, [torch.float32, torch.float16] * 2, strict=True)
        ]
        pad = pad_of((2,), 3)
        expected, found = panels()
        for operator, words in ((mark._mark_many_cpu, expected), (mark._mark_many_cuda, found)):
            operator(
                xs, words, pad, [4, 0, 5, 1], NUM_SIGNALS, [NUM_ROWS, 0, NUM_ROWS, NUM_ROWS],
                *([g[i] for g in geometries] for i in range(3)), [False] * 4, [True, False, True, True],
            )  # fmt: skip
        assert torch.equal(expected, found), (num_bad, expected, found)
    return 3


def check_reset() -> int:
    words, _ = panels()
    words.zero_()
    mark_triton.launch_reset(words, mark.step_word(2, 3))
    assert words[-1] == mark.step_word(2, 3)
    assert bool((words[:-1] == NOT_RUN).all())
    return 1


if __name__ == "__main__":
    torch.manual_seed(0)
    total = check_single() + check_many() + check_reset()
    print(f"{total} cases agree")
