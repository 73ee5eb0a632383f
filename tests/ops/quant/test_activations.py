"""q8_1 activations: exact where they can be, saturating where fp16 ends, NaN where the input was bad."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.quant import activations, cases, quantize_q8_1
from firetower.sensors.marks import Mark, mark_rows, new_panel

FIELDS = ("codes", "scale", "total")


def mark_of(rows: int, device: str, ids: torch.Tensor | None = None) -> Mark:
    ids = torch.arange(rows, device=device) if ids is None else ids
    return Mark(panel=new_panel(3, rows, device), slot=1, num_signals=3, num_rows=rows, row_ids=ids)


def hard_blocks(device: str = "cpu") -> torch.Tensor:
    """Blocks of 32 at the ends of what the format can say; finite ones only."""
    x = torch.zeros(9, 32)
    x[0] = torch.linspace(-1, 1, 32)
    x[1] = 2100.0
    x[2, 0], x[2, 1:] = 3e38, 1e5
    x[3] = -3e38
    x[4, 3] = 1e-40
    x[5] = 4e-6
    x[6] = torch.arange(32) * 1e-5
    x[7] = torch.where(torch.arange(32) % 2 == 0, 8e6, -8e6)
    x[8] = -0.0
    return x.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [32, 96, 2048])
def test_codes_come_back_within_half_a_step(device, dtype, columns):
    x = cases.inputs(5, columns, 1, dtype, device)
    found = quantize_q8_1(x)
    blocks = x.float().view(5, -1, 32)
    step = found.scale.float()[..., None]
    assert ((found.dequantize().view_as(blocks) - blocks).abs() <= step * 0.5 + blocks.abs() * 1e-3).all()
    exact = found.codes.view(5, -1, 32).long().sum(-1) * found.scale.double()
    assert torch.equal(found.total, exact.to(torch.float16))
    assert all(int(n.sum()) == 0 for n in found.saturated())


def test_hard_blocks_stay_finite(device):
    found = quantize_q8_1(hard_blocks(device))
    assert found.scale.isfinite().all()
    assert found.total.isfinite().all()
    scales, totals = found.saturated()
    assert scales.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert totals.tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0]
    back = found.dequantize().cpu()
    # a block of 2100 is whole but for its sum; beyond 65504 * 127 a value is cut
    assert (back[1] / 2100 - 1).abs().max() < 1e-3
    assert back[2, 0] == 65504 * 127
    assert (back[2, 1:] == 2 * 65504).all()
    assert not back[4].any()
    assert not back[8].any()


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_finite_block_gives_finite_fields(values):
    found = activations.quantize(torch.tensor([values], dtype=torch.float32))
    assert found.scale.isfinite().all()
    assert found.total.isfinite().all()
    assert found.codes.abs().max() <= 127


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_bad_value_is_seen_in_its_block_and_marked(device, dtype, value):
    x = cases.inputs(4, 128, 2, dtype, device)
    clean = quantize_q8_1(x)
    x[2, 70] = value
    mark, expected = mark_of(4, device), mark_of(4, device)
    found = quantize_q8_1(x, mark=mark)
    assert found.scale.isnan().nonzero().tolist() == [[2, 2]]
    assert found.total.isnan().nonzero().tolist() == [[2, 2]]
    assert not found.codes[2, 64:96].any()
    keep = torch.ones(4, 4, dtype=torch.bool, device=device)
    keep[2, 2] = False
    assert torch.equal(found.scale[keep], clean.scale[keep])
    mark_rows(found.scale, expected)
    assert torch.equal(mark.panel, expected.panel)
    assert mark.panel[1] >> 32 == 2 * 4 + 2


@pytest.mark.parametrize("shape", [(2, 33), (2, 0), (64,)])
def test_what_is_no_whole_blocks_is_refused(shape):
    with pytest.raises(ConfigError, match="K a multiple of 32"):
        quantize_q8_1(torch.zeros(shape))


def test_no_tokens(device):
    assert quantize_q8_1(torch.zeros(0, 64, device=device)).scale.shape == (0, 2)
