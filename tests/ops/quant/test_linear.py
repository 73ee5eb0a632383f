"""Products with quantised weights: against float64, token by token the same bits, bad values where they belong."""

from __future__ import annotations

import math

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.ops.quant import cases, dequantize, quant_linear, quant_linear_q8_1, quantize_q8_1, reference, torch_path
from firetower.sensors.marks import Mark, mark_rows, new_panel

every_kind = pytest.mark.parametrize("kind", cases.ALL, ids=lambda k: k.name)
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def mark_of(ids: list[int], device: str) -> Mark:
    return Mark(
        panel=new_panel(2, 4, device), slot=1, num_signals=2, num_rows=4, row_ids=torch.tensor(ids, device=device)
    )


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(torch_path, "TILE_ROWS", 5)


@every_kind
@every_type
@pytest.mark.parametrize("is_prompt", [False, True], ids=["window", "prompt"])
def test_products_are_those_of_float64(device, small_tiles, assert_close, kind, dtype, is_prompt):
    raw = cases.random_raw(19, 512, kind, 1, device)
    x = cases.inputs(3, 512, 2, dtype, device)
    found = quant_linear(x, raw, kind.name, is_prompt=is_prompt)
    assert found.dtype is dtype
    rtol = (cases.PROMPT_RTOL if is_prompt else cases.RTOL)[dtype]
    assert_close(kind.name, reference.linear(x, raw, kind), found, rtol)


@every_kind
def test_products_of_quantised_activations(device, small_tiles, assert_close, kind):
    raw = cases.random_raw(19, 512, kind, 1, device)
    x = quantize_q8_1(cases.inputs(3, 512, 2, device=device))
    found = quant_linear_q8_1(x, raw, kind.name)
    assert_close(kind.name, reference.linear(x.dequantize(torch.float64), raw, kind), found, cases.Q8_1_EXACT_RTOL)
    assert_close("to fp", reference.linear(cases.inputs(3, 512, 2), raw, kind), found, cases.Q8_1_RTOL)


@every_kind
@pytest.mark.parametrize("tokens", [1, 2, 63])
def test_a_token_has_the_same_bits_alone_and_in_company(device, small_tiles, kind, tokens):
    raw = cases.random_raw(12, 256, kind, 3, device)
    x = cases.inputs(max(tokens, 8), 256, 4, torch.bfloat16, device)
    together = quant_linear(x, raw, kind.name)
    quantised = quant_linear_q8_1(quantize_q8_1(x), raw, kind.name)
    for first in (0, 5):
        part = x[first : first + tokens]
        assert torch.equal(quant_linear(part, raw, kind.name), together[first : first + tokens])
        found = quant_linear_q8_1(quantize_q8_1(part), raw, kind.name)
        assert torch.equal(found, quantised[first : first + tokens])


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_zero", [False, True], ids=["normal x", "x of zeros"])
def test_m1_a_bad_weight_scale_is_bad_in_its_row_for_every_token_and_nowhere_else(device, kind, value, is_zero):
    clean = cases.random_raw(9, 2 * kind.block_elements, kind, 5, device)
    x = cases.inputs(4, 2 * kind.block_elements, 6, device=device) * (0 if is_zero else 1)
    for field in range(cases.fields(kind)):
        raw = clean.clone()
        cases.set_scale(raw, kind, 7, 1, value, field)
        for found in (
            quant_linear(x, raw, kind.name),
            quant_linear(x, raw, kind.name, is_prompt=True),
            quant_linear_q8_1(quantize_q8_1(x), raw, kind.name),
        ):
            bad = ~found.isfinite()
            assert bad[:, 7].all()
            bad[:, 7] = False
            assert not bad.any()


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_activation_stays_in_its_token(device, kind, value):
    raw = cases.random_raw(9, 256, kind, 5, device)
    x = cases.inputs(4, 256, 6, device=device)
    clean = quant_linear(x, raw, kind.name)
    quantised = quant_linear_q8_1(quantize_q8_1(x), raw, kind.name)
    x[2, 100] = value
    for found, before in (
        (quant_linear(x, raw, kind.name), clean),
        (quant_linear_q8_1(quantize_q8_1(x), raw, kind.name), quantised),
    ):
        # a weight of 0 times Inf is NaN as well
        assert not found[2].isfinite().any()
        others = torch.tensor([0, 1, 3], device=device)
        assert torch.equal(found[others], before[others])


@every_type
@pytest.mark.parametrize("kind", cases.ALL[:3], ids=lambda k: k.name)
def test_marks_are_those_of_the_answer_and_change_nothing(device, kind, dtype):
    raw = cases.random_raw(9, 256, kind, 5, device)
    x = cases.inputs(5, 256, 6, dtype, device)
    x[1, 3], x[2, 200], x[4, 5] = math.nan, math.inf, math.nan
    ids = [3, 0, -1, 1, 2]
    for run in (
        lambda mark: quant_linear(x, raw, kind.name, mark=mark),
        lambda mark: quant_linear(x, raw, kind.name, is_prompt=True, mark=mark),
        lambda mark: quant_linear_q8_1(quantize_q8_1(x), raw, kind.name, dtype=dtype, mark=mark),
    ):
        mark, expected = mark_of(ids, device), mark_of(ids, device)
        on, off = run(mark), run(None)
        mark_rows(on, expected)
        assert torch.equal(mark.panel, expected.panel)
        assert torch.equal(on.contiguous().view(torch.uint8), off.contiguous().view(torch.uint8))


def test_answers_are_written_whole_into_a_given_tensor(device, small_tiles):
    kind = cases.ALL[2]
    raw, x = cases.random_raw(13, 256, kind, 1, device), cases.inputs(3, 256, 1, device=device)
    expected = quant_linear(x, raw, kind.name)
    for fill in (math.nan, 7.0):
        out = torch.full((3, 13), fill, device=device)
        assert quant_linear(x, raw, kind.name, out=out) is out
        assert torch.equal(out, expected)


def test_inputs_of_other_strides(device):
    kind = cases.ALL[0]
    raw, x = cases.random_raw(6, 64, kind, 1, device), cases.inputs(6, 128, 1, device=device)
    expected = quant_linear(x[::2, :64].contiguous(), raw, kind.name)
    assert torch.equal(quant_linear(x[::2, :64], raw, kind.name), expected)
    turned = x[::2, :64].T.contiguous().T
    assert torch.equal(quant_linear(turned, raw, kind.name), expected)


@pytest.mark.parametrize("tokens", [64, 65, 1000])
def test_many_tokens_as_a_prompt(device, assert_close, tokens):
    kind = cases.ALL[2]
    raw, x = cases.random_raw(20, 256, kind, 1, device), cases.inputs(tokens, 256, 2, device=device)
    truth = reference.linear(x, raw, kind)
    assert_close("prompt", truth, quant_linear(x, raw, kind.name, is_prompt=True), cases.RTOL[torch.float32])


def test_a_sum_beyond_the_type_is_inf_and_marked(device):
    kind = cases.ALL[0]
    raw = cases.random_raw(2, 32, kind, 1, device)
    cases.set_scale(raw, kind, 1, 0, 1000.0)
    x = (dequantize(raw, kind.name)[1:].sign() * 100).to(torch.float16)
    mark = mark_of([0], device)
    found = quant_linear(x, raw, kind.name, mark=mark)
    assert found[0, 1] == math.inf
    assert mark.panel[1] >> 32 == 1


def test_no_tokens(device):
    raw = cases.random_raw(4, 64, cases.ALL[0], 1, device)
    assert quant_linear(torch.zeros(0, 64, device=device), raw, "Q8_0").shape == (0, 4)
    assert quant_linear_q8_1(quantize_q8_1(torch.zeros(0, 64, device=device)), raw, "Q8_0").shape == (0, 4)


def test_what_does_not_fit_is_refused():
    raw = cases.random_raw(4, 64, cases.ALL[0], 1)
    for x in (torch.zeros(2, 65), torch.zeros(64), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ConfigError, match="must be fp32, fp16 or bf16"):
            quant_linear(x, raw, "Q8_0")
    with pytest.raises(ConfigError, match="out"):
        quant_linear(torch.zeros(2, 64), raw, "Q8_0", out=torch.zeros(2, 5))
    with pytest.raises(ConfigError, match=r"must be \[T, 64\]"):
        quant_linear_q8_1(quantize_q8_1(torch.zeros(2, 96)), raw, "Q8_0")
