"""Buckets, windows, acceptance: small functions with a definition to compare with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.engine.accept import count_accepted
from firetower.engine.buckets import BUCKETS, Shape, bucket_of, buckets_up_to, capture_order, window_limit


@given(st.integers(1, 256), st.data())
def test_the_smallest_bucket_that_holds_them(max_batch, data):
    count = data.draw(st.integers(1, max_batch))
    bucket = bucket_of(count, max_batch)
    assert bucket >= count
    assert bucket == min(b for b in buckets_up_to(max_batch) if b >= count)
    assert buckets_up_to(max_batch)[-1] == max_batch


@pytest.mark.parametrize("count", [0, 5])
def test_more_than_the_last_bucket_is_refused(count):
    with pytest.raises(ConfigError, match=f"num_sequences={count}: must be from 1 to max_batch=4"):
        bucket_of(count, 4)


@pytest.mark.parametrize("max_batch", [0, 257])
def test_engines_of_other_sizes_are_refused(max_batch):
    with pytest.raises(ConfigError, match="max_batch"):
        buckets_up_to(max_batch)


@given(st.integers(1, 256), st.integers(1, 8), st.integers(1, 300))
def test_windows_are_bounded_by_rows(rows, longest, bound):
    window = window_limit(rows, longest, bound)
    assert 1 <= window <= longest
    assert window == 1 or rows * window <= bound


def test_capture_order_has_every_shape_once_windows_of_one_first():
    shapes = capture_order(8, 4, 16)
    assert shapes[:4] == [Shape(num_rows=b, window=1) for b in (8, 4, 2, 1)]
    assert len(set(shapes)) == len(shapes)
    want = {(b, w) for b in (1, 2, 4, 8) for w in range(1, min(4, 16 // b) + 1)}
    assert {(s.num_rows, s.window) for s in shapes} == want
    assert BUCKETS[-1] == 256


@given(st.data())
def test_accepted_tokens_are_those_up_to_the_first_wrong_draft(data):
    rows, window = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    token = st.integers(-1, 3)
    fed = [[data.draw(st.integers(0, 3)) for _ in range(window)] for _ in range(rows)]
    sampled = [[data.draw(token) for _ in range(window)] for _ in range(rows)]
    real = [data.draw(st.integers(1, window)) for _ in range(rows)]
    want = []
    for f, s, n in zip(fed, sampled, real, strict=True):
        count = 1
        while count < n and f[count] == s[count - 1]:
            count += 1
        want.append(count)
    got = count_accepted(np.array(fed), np.array(sampled), np.array(real))
    assert got.tolist() == want
