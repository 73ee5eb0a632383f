from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from firetower.core.errors import BitsError
from firetower.core.formats import ALIASES, FORMATS, classify, decode, find_format, parse_bits
from firetower.core.records import DTYPE_BITS, Kind

NARROW = [name for name, width in DTYPE_BITS.items() if width <= 16]


def kind_of(value: float) -> Kind | None:
    if math.isnan(value):
        return Kind.NAN
    return None if math.isfinite(value) else Kind.POS_INF if value > 0 else Kind.NEG_INF


def same_value(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def all_values(dtype: str) -> list[float]:
    """The value of every pattern of a 16- or 8-bit type, in order of the pattern, as PyTorch reads it."""
    width = DTYPE_BITS[dtype]
    integers = torch.arange(2**width, dtype=torch.int32).to(torch.int16 if width == 16 else torch.uint8)
    return integers.view(getattr(torch, dtype)).to(torch.float32).tolist()


@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_pattern_agrees_with_torch(dtype):
    wrong = [
        hex(bits)
        for bits, value in enumerate(all_values(dtype))
        if classify(bits, dtype) is not kind_of(value) or not same_value(decode(bits, dtype), value)
    ]
    assert wrong == []


def test_every_float16_pattern_agrees_with_numpy():
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).tolist()
    wrong = [hex(b) for b, v in enumerate(values) if not same_value(decode(b, "float16"), v)]
    assert wrong == []


@pytest.mark.parametrize(
    ("dtype", "nan", "inf"),
    [
        ("float16", 2 * 1023, 2),
        ("bfloat16", 2 * 127, 2),
        ("float8_e5m2", 6, 2),
        ("float8_e4m3fn", 2, 0),
        ("float8_e4m3fnuz", 1, 0),
        ("float8_e5m2fnuz", 1, 0),
        ("float8_e8m0fnu", 1, 0),
    ],
)
def test_each_type_has_as_many_nonfinite_patterns_as_its_definition_says(dtype, nan, inf):
    kinds = [classify(b, dtype) for b in range(2 ** DTYPE_BITS[dtype])]
    assert (kinds.count(Kind.NAN), len(kinds) - kinds.count(None) - kinds.count(Kind.NAN)) == (nan, inf)


@given(st.integers(0, 2**32 - 1))
@example(0x7F800000)
@example(0xFF800000)
@example(0x7F800001)
@example(0x7F7FFFFF)
@example(0x00000001)
@example(0x80000000)
def test_float32_agrees_with_numpy(bits):
    value = np.array(bits, dtype=np.uint32).view(np.float32).item()
    assert classify(bits, "float32") is kind_of(value)
    assert same_value(decode(bits, "float32"), value)


@given(st.integers(0, 2**64 - 1) | st.integers(0x7FF0 << 48, 0x7FFF << 48))
@example(0x7FF0000000000000)
@example(0xFFF0000000000000)
@example(0x7FF0000000000001)
@example(1)
def test_float64_agrees_with_struct(bits):
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert classify(bits, "float64") is kind_of(value)
    assert struct.pack(">d", decode(bits, "float64")) == struct.pack(">d", value), "payload kept"


@pytest.mark.parametrize("dtype", [n for n in DTYPE_BITS if n != "float8_e8m0fnu"])
def test_maximum_is_that_of_torch(dtype):
    assert FORMATS[dtype].maximum == torch.finfo(getattr(torch, dtype)).max


def test_maximum_of_a_scale_type_is_two_to_the_127():
    assert FORMATS["float8_e8m0fnu"].maximum == 2.0**127


@pytest.mark.parametrize("text", ["7fd6e000", "0x7FD6E000", " 0x7fd6_e000 ", "7FD6E000"])
def test_parse_reads_what_people_paste(text):
    assert parse_bits(text) == (0x7FD6E000, 32)


@given(st.integers(0, 2**64 - 1), st.sampled_from([8, 16, 32, 64]))
def test_parse_round_trips(bits, num_bits):
    bits &= (1 << num_bits) - 1
    assert parse_bits(f"{bits:0{num_bits // 4}x}") == (bits, num_bits)


@pytest.mark.parametrize("text", ["", "0x", "zz", "-1", "7fd6 e000", "1.5", "0x7g", "nan", "０x7f"])
def test_parse_refuses_what_is_no_hexadecimal(text):
    with pytest.raises(BitsError, match="must be hexadecimal digits such as"):
        parse_bits(text)


def test_parse_refuses_more_than_64_bits():
    with pytest.raises(BitsError, match="at most 16"):
        parse_bits("7" * 17)


@pytest.mark.parametrize("bits", [-1, 1 << 16, 0x7FD6E000])
@pytest.mark.parametrize("reader", [classify, decode])
def test_bits_wider_than_the_type_are_refused(bits, reader):
    with pytest.raises(BitsError, match="must fit the 16 bits of float16; name a wider dtype"):
        reader(bits, "float16")


def test_types_are_found_by_short_and_torch_names():
    assert find_format("bf16") is find_format("torch.bfloat16") is FORMATS["bfloat16"]
    assert set(ALIASES.values()) == set(FORMATS)


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(BitsError, match=r"dtype='int8': must be one of float64, float32"):
        classify(0, "int8")
