"""Family B: what the faulty forms make of large blocks, and that these ops stay finite or say so."""

from __future__ import annotations

import math
import random

import pytest
import torch

from firetower.core.words import CLEAN
from firetower.ops.quant import KINDS, cases, dequantize, quant_linear_q8_1, quantize_q8_1
from firetower.sensors.marks import Mark, new_panel

BLOCK = 32


def mark_of(rows: int, device: str) -> Mark:
    ids = torch.arange(rows, device=device)
    return Mark(panel=new_panel(1, rows, device), slot=0, num_signals=1, num_rows=rows, row_ids=ids)


def faulty_fields(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and sum of blocks as fp16 without a bound."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1) / 127
    return scale.to(torch.float16), (torch.round(blocks / scale[..., None]).sum(-1) * scale).to(torch.float16)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q5_K"])
@pytest.mark.parametrize("variant", range(3))
def test_b1_a_sum_beyond_fp16_is_nan_in_the_faulty_form_and_finite_here(device, name, variant):
    draw = random.Random(variant)
    kind, tokens = KINDS[name], draw.randint(2, 4)
    bad, block, height = draw.randrange(tokens), draw.randrange(8), draw.choice([2100.0, 4000.0, -2100.0])
    raw = cases.random_raw(9, 256, kind, variant, device)
    cases.set_scale(raw, kind, 3, 0, 0.0, field=1)  # no minimum in the first block of one row
    x = cases.inputs(tokens, 256, variant, device=device)
    x[bad, block * BLOCK : (block + 1) * BLOCK] = height
    scale, total = faulty_fields(x)
    assert scale.isfinite().all()
    assert (~total.isfinite()).nonzero().tolist() == [[bad, block]]
    assert math.isnan(0.0 * total[bad, block].item())

    mark = mark_of(tokens, device)
    found = quantize_q8_1(x)
    assert found.saturated()[1].tolist() == [int(t == bad) for t in range(tokens)]
    y = quant_linear_q8_1(found, raw, name, mark=mark)
    assert y.isfinite().all()
    assert mark.panel[0] == CLEAN
    # what saturation costs: the part of the sum that is missing, times the minima of that run
    truth = found.dequantize(torch.float64).cpu() @ dequantize(raw, name, torch.float64).cpu().T
    lost = abs(abs(height) * BLOCK - 65504)
    minima = (dequantize(raw, name, torch.float64).abs().amax().item()) * 2
    assert (y.double().cpu() - truth)[bad].abs().max() <= lost * minima + 1
    assert (y.double().cpu() - truth)[[t for t in range(tokens) if t != bad]].abs().max() < 1


@pytest.mark.parametrize("variant", range(3))
def test_b3_a_scale_beyond_fp16_is_inf_in_the_faulty_form_and_saturates_here(device, variant):
    draw = random.Random(variant)
    tokens, width = 12, 64
    position, channel = draw.randrange(3, tokens), draw.randrange(width)
    x = cases.inputs(tokens, width, variant, device=device)
    x[position, channel] = draw.choice([9e6, 1e8, -3e38])
    scale, _ = faulty_fields(x)
    assert (~scale.isfinite()).nonzero().tolist() == [[position, channel // BLOCK]]

    found = quantize_q8_1(x)
    assert found.scale.isfinite().all()
    assert found.saturated()[0].tolist() == [int(t == position) for t in range(tokens)]
    back = found.dequantize().cpu()
    assert back[position, channel].abs() == 65504 * 127
    others = [t for t in range(tokens) if t != position]
    assert (back[others] - x.cpu()[others]).abs().max() < 0.03


@pytest.mark.parametrize("variant", range(3))
def test_b4_a_scale_from_a_warm_up_cuts_and_one_a_block_does_not(device, variant):
    draw = random.Random(variant)
    warm, real = 0.05, draw.uniform(2, 5)
    x = real * cases.inputs(1, 64, variant, device=device)
    static = 3 * warm / 448
    cut = (x / static).clamp(-448, 448)
    assert (cut.abs() == 448).float().mean() > 0.9
    assert ((cut * static - x).norm() / x.norm()) > 0.9
    found = quantize_q8_1(x)
    assert int(found.saturated()[0]) == 0
    assert ((found.dequantize() - x).norm() / x.norm()) < 0.01


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b_a_bad_activation_is_laundered_by_a_clamp_and_marked_here(device, value):
    x = cases.inputs(3, 96, 0, device=device)
    x[1, 40] = value
    laundered = x.nan_to_num(0.0, posinf=0.0).unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    assert laundered.isfinite().all()
    mark = mark_of(3, device)
    quantize_q8_1(x, mark=mark)
    assert mark.panel[0] >> 32 == 1 * 3 + 1
    assert mark.panel[2 + 1] < CLEAN
