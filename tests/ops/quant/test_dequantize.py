"""Block formats: bits against the `gguf` package, values against a decoder that goes byte by byte."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.quant import KINDS, cases, columns_of, dequantize, kind_of, reference

every_kind = pytest.mark.parametrize("kind", cases.ALL, ids=lambda k: k.name)


def theirs(raw: torch.Tensor, name: str) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])


@every_kind
def test_sizes_are_those_of_the_package(kind):
    assert (kind.block_elements, kind.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]


@every_kind
@pytest.mark.parametrize("blocks", [1, 3])
def test_bits_are_those_of_the_package(device, kind, blocks):
    raw = cases.random_raw(5, blocks * kind.block_elements, kind, blocks)
    found = dequantize(raw.to(device), kind.name)
    assert np.array_equal(found.cpu().numpy().view(np.uint32), theirs(raw, kind.name).view(np.uint32))


@every_kind
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_any_bytes_at_all_give_the_bits_of_the_package(kind, seed):
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (4, kind.block_bytes), dtype=np.uint8))
    expected = torch.from_numpy(theirs(raw, kind.name))
    found = dequantize(raw, kind.name)
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found[finite].view(torch.int32), expected[finite].view(torch.int32))


@every_kind
def test_float64_is_the_byte_by_byte_reference(device, kind):
    raw = cases.random_raw(3, 2 * kind.block_elements, kind, 7)
    assert torch.equal(dequantize(raw.to(device), kind.name, torch.float64).cpu(), reference.dequantize(raw, kind))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_weights_that_the_package_quantised_come_back(name):
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name]))
    found = dequantize(raw, name).numpy()
    # half a step: a 127th of the largest of a block, or a 15th of its range
    assert np.abs(found - weights).max() < {"Q8_0": 0.02, "Q4_1": 0.25}[name]


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_scale_is_bad_in_its_block_and_nowhere_else(kind, value):
    blocks, row, block = 4, 2, 1
    clean = cases.random_raw(5, blocks * kind.block_elements, kind, 3)
    for field in range(cases.fields(kind)):
        raw = clean.clone()
        cases.set_scale(raw, kind, row, block, value, field)
        found = dequantize(raw, kind.name).view(5, blocks, -1)
        bad = ~found.isfinite()
        assert bad[row, block].all()
        bad[row, block] = False
        assert not bad.any()


def test_what_is_no_format_or_no_whole_blocks_is_refused():
    raw = torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="kind=Q2_K: must be one of Q8_0"):
        kind_of("Q2_K")
    for bad in (raw[:, :143], raw.int(), raw[0], raw.T, raw[:, :0]):
        with pytest.raises(ConfigError, match=r"must be contiguous uint8 \[rows, n \* 144\] for Q4_K"):
            columns_of(bad, KINDS["Q4_K"])
    flat = torch.zeros(146, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="starts at byte 2"):
        columns_of(flat[2:].view(1, 144), KINDS["Q4_K"])
    with pytest.raises(ConfigError, match="dtype"):
        dequantize(raw, "Q4_K", torch.float16)
