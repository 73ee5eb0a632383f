"""Summaries: counts, range, headroom and zero fraction, for every type that a tensor can have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firetower.sensors.summary import summarize

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_counts_each_class(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.5, -4.0, math.nan], [math.inf, -math.inf, -math.inf, 0.0]], dtype=dtype)
    s = summarize("x", x)
    assert (s.num_nan, s.num_pos_inf, s.num_neg_inf, s.num_nonfinite) == (1, 1, 2, 4)
    assert s.absmax == 4.0
    assert s.zero_frac == 0.25
    assert s.headroom == torch.finfo(dtype).max / 4.0
    assert (s.name, s.shape, s.dtype) == ("x", (2, 4), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_reads_fp8(dtype: torch.dtype) -> None:
    s = summarize("x", torch.tensor([0.0, 2.0, math.nan]).to(dtype))
    assert (s.num_nan, s.absmax) == (1, 2.0)
    assert s.headroom == torch.finfo(dtype).max / 2.0


def test_absmax_is_none_without_a_finite_element() -> None:
    s = summarize("x", torch.full((3,), math.nan))
    assert (s.absmax, s.headroom, s.zero_frac) == (None, None, 0.0)


def test_integers_have_no_headroom() -> None:
    s = summarize("ids", torch.tensor([0, -7, 3]))
    assert (s.absmax, s.headroom, s.num_nonfinite) == (7.0, None, 0)
    assert s.zero_frac == pytest.approx(1 / 3)


def test_complex_counts_both_parts() -> None:
    x = torch.tensor([complex(math.nan, 1.0), complex(0.0, -math.inf)]).conj()
    s = summarize("x", x)
    assert (s.num_nan, s.num_pos_inf, s.zero_frac) == (1, 1, 0.25)
    assert s.shape == (2,)


@pytest.mark.parametrize(
    "x",
    [torch.empty(0, 3), torch.empty(2, 3, device="meta"), torch.eye(3).to_sparse()],
    ids=["empty", "meta", "sparse"],
)
def test_unreadable_tensors_have_no_numbers(x: torch.Tensor) -> None:
    s = summarize("x", x)
    assert (s.absmax, s.num_nonfinite, s.shape) == (None, 0, tuple(x.shape))


def test_keeps_no_graph_and_no_content() -> None:
    x = torch.ones(3, requires_grad=True)
    s = summarize("x", x * 2)
    assert not any(isinstance(getattr(s, n), torch.Tensor) for n in s.__slots__)


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_agrees_with_python(values: list[float]) -> None:
    s = summarize("x", torch.tensor(values))
    finite = [abs(v) for v in values if math.isfinite(v)]
    assert s.num_nan == sum(math.isnan(v) for v in values)
    assert s.num_pos_inf == sum(v == math.inf for v in values)
    assert s.num_neg_inf == sum(v == -math.inf for v in values)
    assert s.absmax == (max(finite) if finite else None)
    assert s.zero_frac == sum(v == 0 for v in values) / len(values)
