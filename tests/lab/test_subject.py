"""The records of the protocol, and subjects put together from parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from firetower.core.errors import SubjectError
from firetower.lab import subject as protocol
from firetower.lab.discriminate.look import Look
from firetower.lab.subject import PARTS, array, hash_of
from firetower.lab.subjects.given import LISTS, GivenSubject

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=4), elements=st.floats(width=32))


@given(FLOATS)
def test_equal_bits_hash_the_same_and_one_flipped_bit_does_not(x):
    assert hash_of(x) == hash_of(x.copy())
    y = x.copy()
    y.view(np.uint32).reshape(-1)[0] ^= np.uint32(1)
    assert hash_of(x) != hash_of(y)


def test_the_hash_tells_type_and_shape():
    zeros = np.zeros(4, np.float32)
    assert len({hash_of(zeros), hash_of(zeros.reshape(2, 2)), hash_of(zeros.view(np.int32))}) == 3


def test_a_view_hashes_as_its_content():
    x = np.arange(6.0).reshape(2, 3)
    assert hash_of(x.T) == hash_of(np.ascontiguousarray(x.T))


def test_an_array_names_its_stored_type():
    assert array("x", np.zeros(2, np.float32), "bfloat16").type_name == "bfloat16"
    assert array("ids", np.zeros(2, np.int64)).is_integer
    assert array("mask", np.zeros(2, bool)).is_integer
    assert not array("x", np.zeros(2, np.float16)).is_integer


def test_every_part_is_documented_by_a_protocol_and_the_other_way_round():
    classes = [c for n, c in vars(protocol).items() if isinstance(c, type) and n.startswith(("Has", "Runs"))]
    named = {n for c in classes for n in vars(c) if not n.startswith("_")}
    assert named == set(PARTS)
    assert all(c.__doc__ for c in classes)


def test_a_given_subject_refuses_what_is_no_part():
    with pytest.raises(SubjectError, match="wights: is no part"):
        GivenSubject(wights=())
    with pytest.raises(SubjectError, match="none='first_bad_op': is no list"):
        GivenSubject(none=("first_bad_op",))


def test_none_and_missing_are_two_things():
    look = Look(GivenSubject(none=("states",)))
    assert look.has("states")
    assert look.part("states") == ()
    assert not look.has("slots")
    assert look.missing == {"slots": "the subject has no such part"}
    assert set(LISTS) <= set(PARTS)


def test_a_part_is_asked_once():
    asked = []

    def weights() -> tuple[()]:
        asked.append(1)
        return ()

    look = Look(GivenSubject(weights=weights))
    assert [look.part("weights") for _ in range(3)] == [(), (), ()]
    assert len(asked) == 1
