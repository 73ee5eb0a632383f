from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firetower.core.errors import BitsError
from firetower.core.formats import classify
from firetower.core.records import DTYPE_BITS, Kind, Status
from firetower.core.words import (
    CLEAN,
    MAX_ELEMENTS,
    MAX_INDEX,
    NOT_RUN,
    high_half,
    pack,
    pack_row_word,
    pack_word,
    unpack_row_word,
    unpack_word,
)

INDICES = st.integers(0, MAX_INDEX)


@st.composite
def patterns(draw):
    dtype = draw(st.sampled_from([n for n, w in DTYPE_BITS.items() if w <= 32]))
    return draw(st.integers(0, 2 ** DTYPE_BITS[dtype] - 1)), dtype


@given(INDICES, patterns())
@example(MAX_INDEX, (2**32 - 1, "float32"))
@example(0, (0, "float16"))
def test_a_signal_word_round_trips(flat_index, pattern):
    bits, dtype = pattern
    word = pack_word(flat_index, bits, dtype)
    assert 0 <= word < CLEAN < NOT_RUN < 2**63, "fits a signed int64 below both sentinels"
    read = unpack_word(word, dtype)
    assert (read.status, read.flat_index, read.bits) == (Status.BAD, flat_index, bits)
    assert read.kind is classify(bits, dtype)


@given(INDICES, st.integers(0, 2**64 - 1) | st.integers(0x7FF0 << 48, 0x7FFF << 48))
@example(0, 0x7FF0000000000001)
@example(0, 0xFFF00000FFFFFFFF)
@example(0, 0x7FF0000000000000)
@example(0, 0xFFF0000000000000)
@example(7, 0x7FF8000000000000)
def test_a_float64_keeps_its_class_sign_and_high_payload(flat_index, bits):
    read = unpack_word(pack_word(flat_index, bits, "float64"), "float64")
    assert read.flat_index == flat_index
    assert read.kind is classify(bits, "float64")
    assert read.bits >> 63 == bits >> 63
    assert read.bits & 0xFFFFFFFF == 0
    if high_half(bits) != bits >> 32:
        assert classify(bits, "float64") is Kind.NAN
        assert bits >> 32 in (0x7FF00000, 0xFFF00000), (
            "marked only where the high half alone would read as Inf"
        )


@given(INDICES, st.integers(0, 2**32 - 1))
@example(MAX_INDEX, 2**32 - 1)
def test_a_row_word_round_trips(execution_index, column):
    read = unpack_row_word(pack_row_word(execution_index, column))
    assert (read.status, read.execution_index, read.column) == (Status.BAD, execution_index, column)


@pytest.mark.parametrize("unpack", [unpack_word, unpack_row_word])
def test_sentinels_are_told_apart(unpack):
    not_run, clean = unpack(NOT_RUN), unpack(CLEAN)
    assert (not_run.status, clean.status) == (Status.NOT_COVERED, Status.CLEAN)
    assert not_run.status != clean.status


@given(st.lists(st.tuples(INDICES, st.integers(0, 2**32 - 1)), min_size=1, max_size=20), st.randoms())
def test_the_minimum_is_the_first_position_whatever_the_order(elements, rng: random.Random):
    by_index = dict(elements)
    words = [pack_word(i, b) for i, b in by_index.items()] + [CLEAN, NOT_RUN]
    rng.shuffle(words)
    first = unpack_word(min(words))
    assert (first.flat_index, first.bits) == (min(by_index), by_index[min(by_index)])


@pytest.mark.parametrize("index", [-1, MAX_INDEX + 1, 2**40])
@pytest.mark.parametrize("packer", [pack, pack_word, pack_row_word])
def test_an_index_that_would_hit_a_sentinel_is_refused(packer, index):
    with pytest.raises(BitsError, match=r"must be from 0 to 2147483646; split the tensor by rows"):
        packer(index, 0)


def test_the_largest_tensor_fits_and_one_more_element_would_not():
    last = MAX_ELEMENTS - 1
    assert unpack_word(pack_word(last, 0xFFFFFFFF)).flat_index == last
    assert (last + 1) << 32 | 0xFFFFFFFE == CLEAN


@pytest.mark.parametrize(
    ("bits", "dtype"), [(1 << 16, "float16"), (1 << 32, "float32"), (-1, "float64"), (1 << 64, "float64")]
)
def test_bits_wider_than_the_type_are_refused(bits, dtype):
    with pytest.raises(BitsError, match="must fit"):
        pack_word(0, bits, dtype)


@pytest.mark.parametrize("word", [-1, 2**63, (MAX_INDEX + 1) << 32])
@pytest.mark.parametrize("unpack", [unpack_word, unpack_row_word])
def test_a_number_that_is_no_word_is_refused(unpack, word):
    with pytest.raises(BitsError, match="is no panel word"):
        unpack(word)


def test_a_word_read_as_the_wrong_type_is_refused():
    with pytest.raises(BitsError, match="must fit the 16 bits of float16"):
        unpack_word(pack_word(3, 0x7FFFFFFF, "float32"), "float16")


@pytest.mark.parametrize("column", [-1, 2**32])
def test_a_column_over_32_bits_is_refused(column):
    with pytest.raises(BitsError, match="must fit 32 bits"):
        pack_row_word(0, column)
