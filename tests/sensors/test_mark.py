"""The marking operator on the CPU: bit tests, words, geometry, operator contract."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.formats import classify
from firetower.core.records import Kind, Legal
from firetower.core.words import CLEAN, MAX_ELEMENTS, NOT_RUN, unpack_row_word, unpack_word
from firetower.sensors.check import Frame, Layout, first_bad, locate
from firetower.sensors.mark import BIT_TESTS, FLOAT_TYPES, shape_of_word, shape_word, unmarkable, view_of

NUM_SIGNALS, NUM_ROWS = 3, 4
NUM_WORDS = 3 * NUM_SIGNALS + NUM_ROWS + 1
_INT_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def new_panel() -> torch.Tensor:
    return torch.full((NUM_WORDS,), NOT_RUN, dtype=torch.int64)


def mark(x, panel, *, slot=1, pad=None, geometry=None, neg_inf_legal=False, num_rows=NUM_ROWS):
    heads, tokens, width = geometry or (1, x.shape[1], x.numel() // (x.shape[0] * x.shape[1]))
    torch.ops.firetower.mark(x, panel, pad, slot, NUM_SIGNALS, num_rows, heads, tokens, width, neg_inf_legal)
    return panel.tolist()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [d for d in FLOAT_TYPES if d.itemsize <= 2], ids=name_of)
def test_bit_test_of_every_8_and_16_bit_pattern_agrees_with_the_format(dtype):
    mask, value, neg_inf = BIT_TESTS[dtype]
    for code in range(1 << (8 * dtype.itemsize)):
        kind = classify(code, name_of(dtype))
        assert (code & mask == value) == (kind is not None), hex(code)
        assert (code == neg_inf and code != 0) == (kind is Kind.NEG_INF), hex(code)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(code=st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFF800000, 0x7FF00000, 0xFFF00000]))
def test_bit_test_of_wide_types_agrees_with_the_format(dtype, code):
    mask, value, neg_inf = BIT_TESTS[getattr(torch, dtype)]
    kind = classify(code << 32 if dtype == "float64" else code, dtype)
    assert (code & mask == value) == (kind is not None)
    assert (code == neg_inf & 0xFFFFFFFF) == (kind is Kind.NEG_INF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("neg_inf_legal", [False, True], ids=["finite", "neg_inf"])
def test_every_16_bit_pattern_is_marked_with_its_own_bits(dtype, neg_inf_legal):
    special = [b for b in range(1 << 16) if classify(b, name_of(dtype)) is not None]
    for bits in special[:: max(1, len(special) // 150)]:
        raw = torch.zeros(2, 3, 5, dtype=torch.int16)
        raw[1, 2, 3] = bits - (1 << 16) if bits >> 15 else bits
        words = mark(raw.view(dtype), new_panel(), neg_inf_legal=neg_inf_legal)
        if neg_inf_legal and classify(bits, name_of(dtype)) is Kind.NEG_INF:
            assert words[1] == CLEAN
        else:
            assert (words[1] >> 32, words[1] & 0xFFFFFFFF) == (15 + 13, bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=name_of)
def test_first_bad_element_row_words_and_shape_of_every_type(dtype):
    raw = (
        torch.zeros(3, 7, 4, dtype=torch.uint8)
        .repeat_interleave(dtype.itemsize, dim=2)
        .view(_INT_OF[dtype.itemsize])
    )
    nan = next(
        b
        for b in range(1 << min(16, 8 * dtype.itemsize))
        if classify(b << max(0, 8 * dtype.itemsize - 16), name_of(dtype)) is Kind.NAN
    ) << max(0, 8 * dtype.itemsize - 16)
    signed = (
        nan if dtype.itemsize == 1 or not nan >> (8 * dtype.itemsize - 1) else nan - (1 << 8 * dtype.itemsize)
    )
    raw[1, 6, 2] = raw[1, 6, 3] = raw[2, 0, 1] = signed
    words = mark(raw.view(dtype), new_panel())
    found = unpack_word(words[1], name_of(dtype))
    assert (found.flat_index, found.bits) == (28 + 26, nan)
    assert found.kind is Kind.NAN
    rows = [unpack_row_word(w) for w in words[2 * NUM_SIGNALS : 2 * NUM_SIGNALS + NUM_ROWS]]
    assert [(r.execution_index, r.column) for r in rows] == [(None, None), (1, 26), (1, 1), (None, None)]
    assert shape_of_word(words[2 * NUM_SIGNALS + NUM_ROWS + 1]) == (name_of(dtype), (3, 7, 4))
    untouched = [0, 2, *range(NUM_SIGNALS, 2 * NUM_SIGNALS)]
    assert all(words[i] == NOT_RUN for i in untouched)


def test_clean_and_empty_tensors_ran_and_are_clean():
    assert mark(torch.ones(2, 3, 4), new_panel())[1] == CLEAN
    assert mark(torch.ones(0, 3, 4), new_panel(), geometry=(1, 1, 1))[1] == CLEAN


def test_float64_nan_with_payload_in_the_low_half_is_not_taken_for_neg_inf():
    raw = torch.zeros(1, 1, 2, dtype=torch.int64)
    raw[0, 0, 1] = (0xFFF0000000000001) - (1 << 64)
    words = mark(raw.view(torch.float64), new_panel(), neg_inf_legal=True)
    assert unpack_word(words[1], "float64").kind is Kind.NAN
    words = mark(torch.tensor([[[0.0, -math.inf]]], dtype=torch.float64), new_panel(), neg_inf_legal=True)
    assert words[1] == CLEAN


def test_pad_rows_set_only_the_pad_word():
    x = torch.zeros(2, 3, 2)
    pad = torch.tensor([[True, False, False], [False, False, False]])
    x[0, 0, 1] = math.nan
    words = mark(x, new_panel(), pad=pad)
    assert words[1] == CLEAN
    assert words[NUM_SIGNALS + 1] >> 32 == 1
    assert all(w == NOT_RUN for w in words[2 * NUM_SIGNALS : 2 * NUM_SIGNALS + NUM_ROWS])
    x[0, 1, 0] = math.inf
    words = mark(x, new_panel(), pad=pad)
    assert (words[1] >> 32, words[NUM_SIGNALS + 1] >> 32) == (2, 1)


def test_the_earliest_signal_keeps_a_row_and_the_first_element_keeps_a_signal():
    panel, x = new_panel(), torch.zeros(2, 3, 2)
    x[1, 2, 1] = math.nan
    mark(x, panel, slot=2)
    mark(x, panel, slot=1)
    x[1, 0, 0] = math.nan
    words = mark(x, panel, slot=2)
    assert unpack_row_word(words[2 * NUM_SIGNALS + 1]).execution_index == 1
    assert words[2] >> 32 == 6


def test_two_shapes_under_one_slot_are_said_to_be_ambiguous():
    panel = new_panel()
    mark(torch.zeros(2, 3, 2), panel)
    words = mark(torch.zeros(2, 3, 4), panel)
    assert shape_of_word(words[2 * NUM_SIGNALS + NUM_ROWS + 1]) == ("float32", None)
    words = mark(torch.zeros(2, 3, 2), panel)
    assert shape_of_word(words[2 * NUM_SIGNALS + NUM_ROWS + 1]) == ("float32", None)


def test_sequences_beyond_the_row_words_are_left_out():
    x = torch.full((NUM_ROWS + 2, 1, 2), math.nan)
    words = mark(x, new_panel())
    assert words[2 * NUM_SIGNALS + NUM_ROWS] == NOT_RUN
    assert all(w != NOT_RUN for w in words[2 * NUM_SIGNALS : 2 * NUM_SIGNALS + NUM_ROWS])


def test_non_contiguous_tensors_are_read_in_logical_order():
    x = torch.zeros(2, 4, 3)
    x[1, 3, 0] = math.nan
    words = mark(x.transpose(1, 2), new_panel())
    assert words[1] >> 32 == 12 + 3


def test_marks_of_tensors_that_need_gradients_do_not_warn_or_join_the_graph():
    x = torch.ones(1, 2, 2, requires_grad=True)
    y = x * 2
    mark(y.detach(), new_panel())
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    layout=st.sampled_from(Layout),
    num_sequences=st.integers(1, 5),
    num_tokens=st.integers(1, 6),
    data=st.data(),
)
def test_view_agrees_with_locate(shape, layout, num_sequences, num_tokens, data):
    b, heads, tokens, width = view_of(shape, layout, num_sequences, num_tokens)
    flat = data.draw(st.integers(0, math.prod(shape) - 1))
    frame = Frame(num_sequences=num_sequences, num_tokens=num_tokens, layout=layout)
    sequence, token = locate(torch.tensor(flat), tuple(shape), frame)
    per_row = heads * max(tokens, 1) * width
    if sequence is None:
        assert b == 0
    elif b:
        assert int(sequence) == flat // per_row
    if token is None or tokens == 0:
        assert tokens == 0
        assert token is None
    else:
        # fewer tokens than the step has are its last ones
        assert int(token) == (flat // width) % tokens + num_tokens - tokens


@given(
    dtype=st.sampled_from(FLOAT_TYPES),
    dims=st.lists(st.integers(1, 2**31), max_size=6).filter(lambda d: math.prod(d) <= MAX_ELEMENTS),
)
def test_shape_words_round_trip(dtype, dims):
    word = shape_word(dtype, dims)
    assert 0 < word < NOT_RUN
    found_dtype, found = shape_of_word(word)
    assert found_dtype == name_of(dtype)
    if len(dims) <= 4:
        assert found == tuple(dims)
    else:
        assert found is not None
        assert found[-3:] == tuple(dims[-3:])
        assert math.prod(found) == math.prod(dims)
    assert shape_of_word(word & -2) == (name_of(dtype), None)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), neg_inf_legal=st.booleans())
def test_words_agree_with_the_host_check(data, neg_inf_legal):
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7)))
    x = torch.zeros(shape)
    values = st.sampled_from([math.nan, math.inf, -math.inf, 1.0])
    for flat, value in data.draw(st.dictionaries(st.integers(0, x.numel() - 1), values, max_size=6)).items():
        x.view(-1)[flat] = value
    pad = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    )
    pad = pad.reshape(shape[:2])
    legal = Legal.NEG_INF if neg_inf_legal else Legal.FINITE
    frame = Frame(num_sequences=shape[0], num_tokens=shape[1], pad=pad)
    first, first_pad = first_bad(x, legal, frame)
    words = mark(x, new_panel(), pad=pad, neg_inf_legal=neg_inf_legal)
    for word, expected in ((words[1], first), (words[NUM_SIGNALS + 1], first_pad)):
        taken = unpack_word(word)
        assert (taken.flat_index, taken.bits) == (
            (None, None) if expected is None else (expected.flat_index, expected.bits)
        )


def test_tensors_that_cannot_be_marked_say_why():
    assert unmarkable(torch.zeros(2)) is None
    assert "31 bits" in str(unmarkable(torch.empty(MAX_ELEMENTS + 1, dtype=torch.float8_e5m2, device="meta")))
    assert unmarkable(torch.empty(MAX_ELEMENTS, dtype=torch.float8_e5m2, device="meta")) is None
    assert "int64" in str(unmarkable(torch.zeros(2, dtype=torch.int64)))
    assert "complex64" in str(unmarkable(torch.zeros(2, dtype=torch.complex64)))
    assert "sparse" in str(unmarkable(torch.zeros(2, 2).to_sparse()))


def test_operators_keep_pytorchs_contract():
    x = torch.zeros(2, 3, 4)
    panel = new_panel()
    torch.library.opcheck(
        torch.ops.firetower.mark.default, (x, panel, None, 1, NUM_SIGNALS, NUM_ROWS, 1, 3, 4, False)
    )
    many = (
        [x, x],
        panel,
        None,
        [0, 1],
        NUM_SIGNALS,
        [4, 4],
        [1, 1],
        [3, 3],
        [4, 4],
        [False] * 2,
        [False] * 2,
    )
    torch.library.opcheck(torch.ops.firetower.mark_many.default, many)
    torch.library.opcheck(torch.ops.firetower.reset.default, (panel, 2, 3))
