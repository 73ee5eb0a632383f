"""Family N: what naive samplers make of bad rows, and that this one neither takes a token nor stays silent."""

from __future__ import annotations

import math
import random

import pytest
import torch

from firetower.core.words import CLEAN
from firetower.ops.sample import Event, SampleParams, cases, pack_mask, sample
from firetower.sensors.marks import Mark, new_panel

NAN = math.nan


def blockwise_argmax(row: list[float], block: int) -> int:
    """Each block starts at -Inf with its last lane, as a kernel does that compares with ``>``."""
    best, place = -math.inf, block - 1
    for start in range(0, len(row), block):
        for at, value in enumerate(row[start : start + block], start):
            if value > best:
                best, place = value, at
    return place


def greater_than_argmax(row: list[float]) -> int:
    place = 0
    for at, value in enumerate(row):
        if value > row[place]:
            place = at
    return place


def each_row(argmax):
    return lambda x: torch.tensor([argmax(row) for row in x.tolist()])


FAULTY = {
    "argmax": lambda x: x.argmax(-1),
    "greater-than loop": each_row(greater_than_argmax),
    "blocks of four": each_row(lambda row: blockwise_argmax(row, 4)),
    "nan_to_num, then argmax": lambda x: x.nan_to_num().argmax(-1),
    "where n > 0": lambda x: torch.where(x > 0, x, 0.0).argmax(-1),
    "fmax with 0": lambda x: torch.fmax(x, torch.zeros(())).argmax(-1),
}


def panel(rows: int, device: str) -> Mark:
    ids = torch.arange(rows, device=device)
    return Mark(panel=new_panel(1, rows, device), slot=0, num_signals=1, num_rows=rows, row_ids=ids)


@pytest.mark.parametrize("faulty", FAULTY, ids=str)
@pytest.mark.parametrize("variant", range(3))
def test_n1_an_all_nan_row_is_an_ordinary_id_elsewhere_and_an_event_here(device, faulty, variant):
    draw = random.Random(variant)
    rows, vocab = draw.randint(2, 5), draw.choice([12, 64, 100])
    bad = draw.randrange(rows)
    logits = cases.make_logits(rows, vocab, variant, device=device)
    logits[bad] = NAN
    laundered = FAULTY[faulty](logits.cpu())[bad].item()
    assert 0 <= laundered < vocab
    assert laundered == (3 if faulty == "blocks of four" else 0)
    mark = panel(rows, device)
    found = sample(logits, mark=mark)
    assert found.tokens[bad] == -1
    assert found.events.tolist() == [Event.ALL_NAN if r == bad else Event.OK for r in range(rows)]
    assert mark.panel[0] >> 32 == bad * vocab
    assert (mark.panel[2 : 2 + rows] < CLEAN).nonzero()[:, 0].tolist() == [bad]


@pytest.mark.parametrize("variant", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_n3_an_empty_mask_is_token_0_elsewhere_and_no_numerics_fire_here(device, variant, temperature):
    draw = random.Random(variant)
    rows, vocab = draw.randint(2, 5), draw.choice([31, 64, 3000])
    bad = draw.randrange(rows)
    logits = cases.make_logits(rows, vocab, variant, device=device)
    allowed = torch.rand(rows, vocab) < 0.5
    allowed[:, 0] = True
    allowed[bad] = False
    assert logits.cpu().masked_fill(~allowed, -math.inf)[bad].argmax() == 0
    mark = panel(rows, device)
    seeds, positions = cases.make_keys(rows, variant, device)
    params = SampleParams(
        temperature=torch.full((rows,), temperature, device=device), allowed_mask=pack_mask(allowed).to(device)
    )
    found = sample(logits, params, seeds=seeds, positions=positions, mark=mark)
    assert found.events.tolist() == [Event.EMPTY_MASK if r == bad else Event.OK for r in range(rows)]
    assert found.tokens[bad] == -1
    assert mark.panel[0] == CLEAN
    real = [r for r in range(rows) if r != bad]
    assert allowed[real, found.tokens.cpu()[real]].all()


@pytest.mark.parametrize("variant", range(4))
def test_n4_one_nan_beside_finite_values_is_laundered_elsewhere_and_an_event_here(device, variant):
    draw = random.Random(variant)
    rows, vocab = draw.randint(2, 5), draw.choice([33, 100, 2500])
    bad, column = draw.randrange(rows), draw.randrange(vocab)
    logits = cases.make_logits(rows, vocab, variant, device=device)
    logits[bad, column] = NAN
    row = logits[bad].cpu()
    assert row.argmax() == column
    assert math.isfinite(row.nan_to_num().softmax(-1).sum())
    assert torch.fmax(row, torch.zeros(()))[column] == 0
    assert torch.where(row > 0, row, 0.0)[column] == 0
    assert row.sort().indices[-1] == column
    assert row.topk(1).indices == column
    mark = panel(rows, device)
    found = sample(logits, mark=mark)
    assert found.events.tolist() == [Event.NAN_BESIDE_FINITE if r == bad else Event.OK for r in range(rows)]
    assert found.tokens[bad] == -1
    assert mark.panel[0] >> 32 == bad * vocab + column


def test_n4_uniform_softmax_of_a_laundered_row_has_the_perplexity_of_the_vocabulary(device):
    vocab = 50
    laundered = torch.full((1, vocab), NAN).nan_to_num().log_softmax(-1)
    assert math.exp(-laundered[0, 0]) == pytest.approx(vocab)
    found = sample(torch.full((1, vocab), NAN, device=device), num_logprobs=1)
    assert found.logprobs[0] == -math.inf
    assert found.top_ids[0, 0] == -1
