"""The host check: exact on every pattern, no false alarm on extremes, rows mapped to sequences and tokens."""

from __future__ import annotations

import pytest
import torch

from firetower.core.records import Kind, Legal
from firetower.sensors.check import Frame, Layout, burned_sequences, first_bad, is_clean, raw_bits

ALL_16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
ALL_8 = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("legal", list(Legal))
def test_every_16_bit_pattern(dtype: torch.dtype, legal: Legal) -> None:
    values = ALL_16.view(dtype)
    bad = ~torch.isfinite(values)
    if legal is Legal.NEG_INF:
        bad &= ~torch.isneginf(values)
    wrong = [i for i in range(0, 65536, 1) if (i % 257 == 0 or bad[i]) and is_clean(values[i : i + 1], legal) == bad[i]]
    assert not wrong
    good = values[~bad & torch.isfinite(values)]
    assert is_clean(good, legal)
    first, _ = first_bad(values, legal)
    assert first is not None
    assert first.flat_index == int(torch.nonzero(bad)[0])
    assert first.bits == int(ALL_16[first.flat_index]) & 0xFFFF


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_8_bit_pattern(dtype: torch.dtype) -> None:
    values = ALL_8.view(dtype)
    bad = ~torch.isfinite(values.float())
    assert [is_clean(values[i : i + 1]) for i in range(256)] == (~bad).tolist()
    first, _ = first_bad(values)
    assert (first.bits if first else None) == (int(torch.nonzero(bad)[0]) if bad.any() else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_legitimate_extremes_are_silent(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    for x in (
        torch.full((3, 1000), top, dtype=dtype),
        torch.full((3, 1000), -top, dtype=dtype),
        torch.zeros(2, 0, 5, dtype=dtype),
        torch.full((7,), torch.finfo(dtype).tiny, dtype=dtype),
        torch.full((7,), torch.finfo(dtype).smallest_normal, dtype=dtype) / 2,
    ):
        assert is_clean(x)
        assert first_bad(x) == (None, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 33)], ids=str)
def test_one_bad_element_anywhere(value: float, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for index in torch.randperm(torch.Size(shape).numel())[:12].tolist():
        x = torch.randn(shape).to(dtype)
        x.view(-1)[index] = value
        assert not is_clean(x)
        first, pad = first_bad(x)
        assert first is not None
        assert pad is None
        assert (first.flat_index, first.row, first.column) == (index, index // shape[-1], index % shape[-1])
        assert first.kind == {"nan": Kind.NAN, "inf": Kind.POS_INF, "-inf": Kind.NEG_INF}[str(value)]
        assert is_clean(x.transpose(0, -1)) is False


def test_infinities_that_cancel_are_seen() -> None:
    x = torch.tensor([float("inf"), float("-inf"), 1.0])
    assert not is_clean(x)


def test_legal_neg_inf_row_with_nan_beside() -> None:
    x = torch.full((4, 9), float("-inf"))
    assert is_clean(x, Legal.NEG_INF)
    assert not is_clean(x)
    x[2, 5] = float("nan")
    assert not is_clean(x, Legal.NEG_INF)


def test_nan_payload_survives() -> None:
    x = torch.tensor([1, 0x7FD6E000, 3], dtype=torch.int32).view(torch.float32)
    first, _ = first_bad(x)
    assert first is not None
    assert (first.bits, first.bits_hex) == (0x7FD6E000, "7fd6e000")
    assert raw_bits(x, 1) == 0x7FD6E000


def test_complex_counts_both_parts() -> None:
    x = torch.complex(torch.ones(3), torch.tensor([0.0, float("inf"), 0.0]))
    assert not is_clean(x)
    assert first_bad(x)[0].flat_index == 3


def test_pads_do_not_fire_but_are_told() -> None:
    pad = torch.tensor([[True, True, False], [False, False, False]])
    frame = Frame(num_sequences=2, num_tokens=3, pad=pad, positions=torch.tensor([[0, 0, 0], [0, 1, 2]]))
    x = torch.zeros(2, 3, 4)
    x[0, 1, 2] = float("nan")
    first, first_pad = first_bad(x, frame=frame)
    assert first is None
    assert (first_pad.sequence, first_pad.token, first_pad.is_pad) == (0, 1, True)
    x[1, 2, 3] = float("inf")
    first, first_pad = first_bad(x, frame=frame)
    assert (first.sequence, first.token, first.position, first.is_pad) == (1, 2, 2, False)
    assert first_pad is not None


@pytest.mark.parametrize(
    ("shape", "layout", "place", "expected"),
    [
        ((2, 5, 8), Layout.TOKENS, (1, 3, 2), (1, 3)),
        ((10, 8), Layout.TOKENS, (7, 2), (1, 2)),
        ((2, 1, 8), Layout.TOKENS, (1, 0, 2), (1, 4)),
        ((2, 3, 5, 8), Layout.HEADS, (1, 2, 4, 0), (1, 4)),
        ((2, 5, 5, 8), Layout.HEADS, (1, 2, 4, 0), (1, 4)),
        ((2, 4, 8, 8), Layout.STATE, (1, 2, 4, 0), (1, None)),
        ((3, 8), Layout.TOKENS, (1, 2), (None, None)),
    ],
    ids=["tokens", "flat-tokens", "last-token", "heads", "heads-equal-tokens", "state", "unknown"],
)
def test_rows_map_to_sequence_and_token(
    shape: tuple[int, ...], layout: Layout, place: tuple[int, ...], expected: tuple[int | None, int | None]
) -> None:
    x = torch.zeros(shape)
    x[place] = float("nan")
    first, _ = first_bad(x, frame=Frame(num_sequences=2, num_tokens=5, layout=layout))
    assert (first.sequence, first.token) == expected


def test_burned_sequences_are_told_apart() -> None:
    x = torch.zeros(4, 3, 6)
    x[1, 2, 5] = float("nan")
    x[3, 0, 1] = float("inf")
    burned = burned_sequences(x, Legal.FINITE, Frame(num_sequences=4, num_tokens=3))
    assert {s: (b.token, b.column, b.kind) for s, b in burned.items()} == {
        1: (2, 5, Kind.NAN),
        3: (0, 1, Kind.POS_INF),
    }
