from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.bits import WIDENED_FROM, read_bits, read_text
from firetower.core.errors import BitsError
from firetower.core.facts import DEVICES
from firetower.core.formats import FORMATS, classify
from firetower.core.records import DTYPE_BITS, Kind


def words_of(reading):
    return " ".join(reading.sentences)


def test_the_taught_example_reads_as_a_widened_float16_with_its_rival():
    reading = read_bits(0x7FD6E000, "float32")
    assert (reading.kind, reading.quiet, reading.sign, reading.payload) == (Kind.NAN, True, 0, 0x16E000)
    assert reading.whose == ("unknown",)
    [widening] = reading.widenings
    assert (widening.dtype, widening.bits_hex, widening.num_zero_bits) == ("float16", "7eb7", 13)
    assert widening.rival == "two adjacent 16-bit fields, high 7fd6 low e000"
    text = words_of(reading)
    assert "7eb7" in text
    assert "high 7fd6 low e000 (as float16 NaN and -512)" in text
    assert "cannot prove unwritten memory" in text


@pytest.mark.parametrize(
    ("bits", "dtype", "writer"),
    [
        (0x7FFFFFFF, "float32", "nvidia arithmetic"),
        (0x7FFF, "float16", "nvidia arithmetic"),
        (0x7FFF, "bfloat16", "nvidia arithmetic"),
        (0xFFC00000, "float32", "x86 arithmetic"),
        (0x7FC00000, "float32", "x86 arithmetic"),
        (0x7FC00000, "float32", "amd arithmetic"),
        (0x7FC00000, "float32", "torch.nan constant"),
        (0x7FC00000, "float32", "PyTorch deterministic fill"),
        (0xFE00, "float16", "x86 arithmetic"),
        (0x7FC0, "bfloat16", "torch.nan constant"),
        (0x7F, "float8_e4m3fn", "PyTorch deterministic fill"),
    ],
)
def test_known_writers_are_named(bits, dtype, writer):
    assert writer in read_bits(bits, dtype).whose


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFC00000])
def test_the_default_nan_of_a_machine_is_never_proof_of_garbage(bits):
    reading = read_bits(bits, "float32")
    assert any(c.startswith("garbage") for c in reading.cannot_prove)
    assert "garbage" in words_of(reading)


def test_nvidias_nan_has_the_integer_fill_as_rival():
    assert "2147483647" in words_of(read_bits(0x7FFFFFFF, "float32"))
    assert "2147483647" not in words_of(read_bits(0x7FFFFFFE, "float32"))


def test_the_device_tells_a_computed_nan_from_a_moved_one():
    moved = words_of(read_bits(0xFFC00000, "float32", "nvidia"))
    assert "Arithmetic on nvidia writes 7fffffff: this one was moved or converted there." in moved
    assert "moved or converted" not in words_of(read_bits(0x7FFFFFFF, "float32", "nvidia"))
    assert "moved or converted" not in words_of(read_bits(0xFFC00000, "float32"))


def test_on_nvidia_a_widened_float16_was_not_widened_by_the_gpu():
    text = words_of(read_bits(0x7FD6E000, "float32", "nvidia"))
    assert "conversion float16->float32: writes the default NaN 7fffffff" in text


def test_x86s_scalar_tail_explains_7fffffff_on_a_cpu():
    reading = read_bits(0x7FFFFFFF, "float32", "x86")
    assert any("fewer than 8 elements" in w for w in reading.whose)
    assert "scalar tail" in words_of(reading)


def test_a_zero_payload_widening_is_said_to_tell_nothing():
    text = words_of(read_bits(0x7FC00000, "float32"))
    assert "that tells nothing" in text
    assert "consistent with" not in text


def test_a_signalling_nan_was_moved_not_computed():
    reading = read_bits(0x7FA00001, "float32")
    assert reading.quiet is False
    assert "signalling one was moved here, not computed" in words_of(reading)


@pytest.mark.parametrize(
    ("bits", "kind", "word"), [(0x7C00, Kind.POS_INF, "+Inf"), (0xFC00, Kind.NEG_INF, "-Inf")]
)
def test_infinity_is_told_from_nan(bits, kind, word):
    reading = read_bits(bits, "float16")
    assert reading.kind is kind
    assert (reading.quiet, reading.payload, reading.whose, reading.widenings) == (None, None, (), ())
    assert f"is {word}, not a NaN" in reading.sentences[0]
    assert "65504" in words_of(reading)
    assert ("legal in masks" in words_of(reading)) == (kind is Kind.NEG_INF)


@pytest.mark.parametrize(
    ("text", "dtype", "word"),
    [
        ("3f800000", "float32", "finite: 1."),
        ("7f7fffff", "float32", "absurd"),
        ("7b00", "float16", "little headroom"),
        ("7000", "float16", "little headroom"),
        ("00000001", "float32", "subnormal"),
    ],
)
def test_finite_patterns_get_their_value_and_a_warning_where_due(text, dtype, word):
    [reading] = read_text(text, dtype)
    assert reading.kind is None
    assert reading.cannot_prove == ()
    assert word in words_of(reading)


@pytest.mark.parametrize("text", ["3c00", "6400"])
def test_ordinary_finite_patterns_get_no_warning(text):
    [reading] = read_text(text, "float16")
    assert len(reading.sentences) == 1


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("7ff8000000000000", ["float64"]),
        ("7fc00000", ["float32"]),
        ("7fff", ["float16", "bfloat16"]),
        ("7f", [n for n, w in DTYPE_BITS.items() if w == 8]),
    ],
)
def test_the_number_of_digits_chooses_the_types(text, dtypes):
    assert sorted(r.dtype for r in read_text(text)) == sorted(dtypes)


def test_other_types_of_the_same_width_are_named():
    assert read_bits(0x7FFF, "float16").also == ("bfloat16",)
    assert read_bits(0x7FC00000, "float32").also == ()


@pytest.mark.parametrize("text", ["7", "7ff", "7fd6e", "2147483647"])
def test_a_number_of_digits_that_no_type_has_is_refused(text):
    with pytest.raises(BitsError, match=rf"has {len(text)} hexadecimal digits, must be 2"):
        read_text(text)


def test_leading_zeros_may_be_left_out_when_the_type_is_named():
    assert read_text("1", "float32")[0].bits_hex == "00000001"


def test_unknown_devices_are_refused():
    with pytest.raises(BitsError, match="device='cuda': must be one of nvidia, x86, amd; leave it out"):
        read_bits(0x7FFFFFFF, "float32", "cuda")


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(0x7F, "float8_e4m3fn"), (0x7FFF, "float16"), (0x7FC00000, "float32"), (0x7FF8 << 48, "float64")],
)
def test_a_bare_number_gets_the_narrowest_usual_type(bits, dtype):
    assert read_bits(bits).dtype == dtype


@pytest.mark.parametrize("dtype", [n for n, w in DTYPE_BITS.items() if w <= 16])
def test_every_narrow_pattern_can_be_read(dtype):
    for bits in range(2 ** DTYPE_BITS[dtype]):
        reading = read_bits(bits, dtype)
        assert reading.kind is classify(bits, dtype)
        assert reading.bits_hex in reading.sentences[0]
        assert (reading.whose == ()) == (reading.kind is not Kind.NAN)
        assert (reading.kind is None) == math.isfinite(reading.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_nan_that_is_widened_is_found_again(dtype):
    shift = dict(WIDENED_FROM["float32"])[dtype]
    form = FORMATS[dtype]
    for bits in range(2**16):
        if classify(bits, dtype) is not Kind.NAN:
            continue
        mantissa = bits & ((1 << form.mantissa_bits) - 1)
        wide = (bits >> 15) << 31 | 0x7F800000 | mantissa << shift
        assert bits in {w.bits for w in read_bits(wide, "float32").widenings if w.dtype == dtype}


def test_numpy_widens_quiet_float16_nans_as_the_reading_says():
    """An outside check of the bit arithmetic: the conversion itself, done by numpy for every quiet NaN."""
    quiet = np.array([b for b in range(2**16) if b & 0x7E00 == 0x7E00], dtype=np.uint16)
    wide = quiet.view(np.float16).astype(np.float32).view(np.uint32)
    for narrow, bits in zip(quiet.tolist(), wide.tolist(), strict=True):
        assert narrow in {w.bits for w in read_bits(bits, "float32").widenings}


@given(st.integers(1, 2**13 - 1), st.integers(0, 2**10 - 1))
def test_non_zero_low_bits_are_never_called_widened(low, high):
    assert read_bits(0x7FC00000 | high << 13 | low, "float32").widenings == ()


@given(st.integers(0x7F800001, 0x7FFFFFFF) | st.integers(0xFF800001, 0xFFFFFFFF))
def test_a_float32_nan_widened_to_float64_is_found_again(bits):
    wide = (bits >> 31) << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29
    assert bits in {w.bits for w in read_bits(wide, "float64").widenings}


@given(st.integers(0, 2**64 - 1), st.sampled_from(sorted(DTYPE_BITS)), st.sampled_from([None, *DEVICES]))
def test_every_reading_is_whole_sentences_and_ends_without_a_verdict(bits, dtype, device):
    reading = read_bits(bits & ((1 << DTYPE_BITS[dtype]) - 1), dtype, device)
    assert all(re.match(r"[A-Z0-9a-f-].*[.]$", s) for s in reading.sentences)
    assert len(set(reading.sentences)) == len(reading.sentences)
    if reading.kind is not None:
        assert reading.cannot_prove
        assert reading.sentences[-1] == "Bits are one piece of evidence, never the verdict."
