"""Panel words that an op leaves: the PyTorch form against a slow count, and a kernel's epilogue against that."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.core.words import CLEAN, NOT_RUN
from firetower.sensors.mark import shape_word
from firetower.sensors.marks import Mark, mark_arguments, mark_rows, new_panel
from firetower.sensors.panel import decode_panel

ROWS, WIDTH, SIGNALS = 7, 13, 3
IDS = torch.tensor([0, 1, -1, 3, 2, -1, 5], dtype=torch.int32)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = pytest.mark.parametrize("dtype", list(BITS), ids=lambda d: str(d).removeprefix("torch."))


def burned(dtype, seed=0):
    """[ROWS, WIDTH] with a NaN, a +Inf and a -Inf or two in half of its rows, pads among them."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    draw = torch.randint(0, WIDTH, (ROWS, 2), generator=torch.Generator().manual_seed(seed + 1))
    for row in torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed + 2))[: ROWS // 2 + 1].tolist():
        x[row, draw[row, 0]] = (math.nan, math.inf, -math.inf)[row % 3]
        x[row, draw[row, 1]] = (-math.inf, math.nan, math.inf)[row % 3]
    return x.to(dtype)


def slow_words(x, ids, slot, num_rows, neg_inf_legal):
    """The panel, element by element."""
    panel = new_panel(SIGNALS, num_rows).tolist()
    panel[slot] = CLEAN
    panel[len(panel) - 1 - SIGNALS + slot] = shape_word(x.dtype, x.shape)
    code = x.view(BITS[x.dtype]).long() & ((1 << 8 * x.itemsize) - 1)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            value = float(x[row, column])
            if math.isfinite(value) or (neg_inf_legal and value == -math.inf):
                continue
            word = (row * x.shape[1] + column) << 32 | int(code[row, column])
            pad = ids is not None and int(ids[row]) < 0
            at = SIGNALS + slot if pad else slot
            panel[at] = min(panel[at], word)
            if ids is not None and not pad:
                at = 2 * SIGNALS + int(ids[row])
                panel[at] = min(panel[at], slot << 32 | column)
    return torch.tensor(panel)


@DTYPES
@pytest.mark.parametrize("neg_inf_legal", [False, True], ids=["finite", "neg-inf-legal"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["no-rows", "rows"])
@pytest.mark.parametrize("seed", range(4))
def test_words_are_those_of_a_slow_count(dtype, ids, neg_inf_legal, seed, device):
    x = burned(dtype, seed)
    panel = new_panel(SIGNALS, 6, device)
    row_ids = None if ids is None else ids.to(device)
    mark = Mark(
        panel=panel, slot=1, num_signals=SIGNALS, num_rows=6, row_ids=row_ids, neg_inf_legal=neg_inf_legal
    )
    mark_rows(x.to(device), mark)
    assert torch.equal(panel.cpu(), slow_words(x, ids, 1, 6, neg_inf_legal))


@pytest.mark.parametrize("neg_inf_legal", [False, True], ids=["finite", "neg-inf-legal"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["no-rows", "rows"])
@DTYPES
def test_a_kernels_epilogue_leaves_the_same_words(dtype, ids, neg_inf_legal, device, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    from tile_kernel import copy_fwd_kernel

    for seed in range(3):
        x = burned(dtype, seed).to(device)
        expected, found = new_panel(SIGNALS, 6, device), new_panel(SIGNALS, 6, device)
        marks = [
            Mark(
                panel=p,
                slot=2,
                num_signals=SIGNALS,
                num_rows=6,
                row_ids=None if ids is None else ids.to(device),
                neg_inf_legal=neg_inf_legal,
            )
            for p in (expected, found)
        ]
        mark_rows(x, marks[0])
        y = torch.full_like(x, math.nan)
        copy_fwd_kernel[(2,)](x, y, ROWS, WIDTH, *mark_arguments(marks[1], dtype, ROWS, WIDTH), ROWS=4, WIDTH=16)
        assert torch.equal(expected, found)
        off = torch.full_like(x, math.nan)
        copy_fwd_kernel[(2,)](x, off, ROWS, WIDTH, *mark_arguments(None, dtype, ROWS, WIDTH), ROWS=4, WIDTH=16)
        assert torch.equal(off.view(BITS[dtype]), y.view(BITS[dtype]))


def test_clean_rows_leave_a_clean_word(device):
    panel = new_panel(SIGNALS, 6, device)
    mark_rows(torch.randn(ROWS, WIDTH, device=device), Mark(panel=panel, slot=0, num_signals=SIGNALS, num_rows=6))
    reading = decode_panel(panel.tolist(), SIGNALS, 6)
    assert reading.is_clean
    assert reading.ran == (True, False, False)


def test_large_finite_values_are_no_fire():
    panel = new_panel(1, 1)
    mark_rows(torch.full((4, 4), 3e38), Mark(panel=panel, slot=0, num_signals=1, num_rows=1))
    assert panel[0] == CLEAN


def test_no_mark_and_no_rows_leave_nothing():
    panel = new_panel(1, 1)
    mark_rows(torch.full((2, 2), math.nan), None)
    mark_rows(torch.empty(0, 4), Mark(panel=panel, slot=0, num_signals=1, num_rows=1))
    assert (panel == NOT_RUN).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 3}, "slot=3: must be from 0 to 2"),
        ({"num_rows": 7}, "panel: 16 words of torch.int64: must be int64"),
        ({"panel": torch.zeros(16)}, "panel: 16 words of torch.float32"),
    ],
    ids=["slot", "rows", "type"],
)
def test_a_mark_that_does_not_fit_its_panel_is_an_error(changes, message):
    fitting = {"panel": new_panel(SIGNALS, 6), "slot": 0, "num_signals": SIGNALS, "num_rows": 6}
    with pytest.raises(ConfigError, match=message):
        Mark(**fitting | changes)


def test_more_elements_than_a_word_can_index_are_refused():
    mark = Mark(panel=new_panel(1, 1), slot=0, num_signals=1, num_rows=1)
    with pytest.raises(ConfigError, match="a word's index has 31 bits"):
        mark_arguments(mark, torch.float32, 1 << 20, 1 << 11)
