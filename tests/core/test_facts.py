"""The data file is checked against the types, and its x86 part against this very machine."""

from __future__ import annotations

import platform

import pytest
import torch

from firetower.core.facts import DEVICES, arithmetic_patterns, integer_twin, nan_facts, writers
from firetower.core.formats import FORMATS, classify
from firetower.core.records import Kind

INF = float("inf")
INVALID = {
    "0/0": lambda z: z / z,
    "inf-inf": lambda z: (z + INF) - (z + INF),
    "0*inf": lambda z: z * INF,
    "sqrt(-1)": lambda z: (z - 1).sqrt(),
    "log(-1)": lambda z: (z - 1).log(),
    "softmax": lambda z: torch.softmax(z - INF, dim=0),
}


def tables():
    facts = nan_facts()
    for device in DEVICES:
        yield device, facts["arithmetic"][device]["patterns"]
    yield from facts["others"].items()


@pytest.mark.parametrize(("name", "table"), list(tables()))
def test_every_pattern_of_the_facts_is_a_nan_of_its_type(name, table):
    for dtype, patterns in table.items():
        for pattern in patterns:
            assert len(pattern) * 4 == FORMATS[dtype].num_bits, (name, dtype, pattern)
            assert classify(int(pattern, 16), dtype) is Kind.NAN, (name, dtype, pattern)


def test_every_device_has_its_provenance():
    assert set(nan_facts()["measured"]) == set(nan_facts()["arithmetic"]) == set(DEVICES)


def raw_bits(x: torch.Tensor) -> set[int]:
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return {v & ((1 << 8 * x.element_size()) - 1) for v in x.view(view).flatten().tolist()}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the facts are of x86")
@pytest.mark.parametrize("num_elements", [1, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", INVALID)
def test_arithmetic_of_this_machine_is_read_as_x86(op, dtype, num_elements):
    result = INVALID[op](torch.zeros(num_elements, dtype=getattr(torch, dtype)))
    assert raw_bits(result) <= set(arithmetic_patterns("x86", dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", INVALID)
def test_arithmetic_of_the_gpu_is_read_as_nvidia(op, dtype):
    result = INVALID[op](torch.zeros(64, dtype=getattr(torch, dtype), device="cuda"))
    assert raw_bits(result.cpu()) <= set(arithmetic_patterns("nvidia", dtype))


@pytest.mark.gpu
def test_a_payload_survives_a_gather_on_the_gpu_and_no_conversion():
    half = torch.full((64,), 0x7EB7, dtype=torch.int16, device="cuda").view(torch.float16)
    assert raw_bits(half[torch.arange(9, device="cuda")].cpu()) == {0x7EB7}
    assert raw_bits(half.float().cpu()) == {0x7FFFFFFF}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torchs_constant_is_known(dtype):
    [bits] = raw_bits(torch.full((3,), torch.nan, dtype=getattr(torch, dtype)))
    assert "torch.nan constant" in writers(bits, dtype)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_torchs_deterministic_fill_is_known(dtype, deterministic_fill):
    [bits] = raw_bits(torch.empty(9, dtype=getattr(torch, dtype)))
    assert "PyTorch deterministic fill" in writers(bits, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_torchs_deterministic_integer_fill_is_a_known_rival(dtype, deterministic_fill):
    [bits] = raw_bits(torch.empty(9, dtype=dtype))
    assert integer_twin(f"{bits:0{dtype.itemsize * 2}x}") is not None
