"""`causal_conv1d`: ragged prefill against float64, states in and out, pads, sensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.causal_conv1d import cases, causal_conv1d, new_conv_state, reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

# Triton's interpreter computes with NumPy, which warns where a GPU gives Inf or NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")

MAX_WINDOW = 3


def state_of(num_slots: int, channels: int, taps: int, dtype: torch.dtype, device: str, seed: int = 50) -> torch.Tensor:
    """Committed columns random, pending ones too."""
    state = new_conv_state(num_slots, channels, kernel_size=taps, max_window=MAX_WINDOW, dtype=dtype, device=device)
    return state.copy_(cases.normal((num_slots, channels, taps - 1 + MAX_WINDOW), seed, dtype, device))


@pytest.mark.parametrize("lengths", cases.LENGTHS.values(), ids=cases.LENGTHS)
@pytest.mark.parametrize(("taps", "has_bias", "activation"), [(4, False, "silu"), (2, True, None), (8, True, "silu")])
def test_against_float64(backend, lengths, taps, has_bias, activation, device, kernel_dtypes, assert_close):
    cu_seqlens = cases.cu_seqlens(lengths, device)
    for dtype in kernel_dtypes:
        x = cases.normal((sum(lengths), 11), 1, dtype, device)
        weight, bias = cases.parameters(11, taps, 2, dtype, device)
        bias = bias if has_bias else None
        y = backend.prefill(x, weight, cu_seqlens, bias=bias, activation=activation)
        assert torch.equal(y, backend.prefill(x, weight.T.contiguous().T, cu_seqlens, bias=bias, activation=activation))
        truth = [
            reference.convolve(part, weight, bias, is_silu=activation == "silu")[0] for part in x.split(list(lengths))
        ]
        assert_close(f"{lengths} {dtype}", torch.cat(truth), y, cases.RTOL[dtype])


@pytest.mark.parametrize("layout", ["channels contiguous", "columns contiguous"])
def test_states_in_and_out(backend, layout, device, same_bits, assert_close):
    """Sequence 0 starts from its slot, 1 from zeros though its slot holds something, 2 after 2 accepted tokens, 3 has
    no slot, 4 is empty, 5 writes nothing."""
    lengths, taps, channels = (6, 5, 2, 4, 0, 3), 4, 7
    x = cases.normal((sum(lengths), channels), 3, device=device)
    weight, bias = cases.parameters(channels, taps, 4, device=device)
    before = state_of(9, channels, taps, torch.float32, device)
    before[3] = math.nan
    state = before.clone() if layout == "channels contiguous" else before.contiguous()
    ids = torch.tensor([5, 3, 0, -1, 8, 2], dtype=torch.int32, device=device)
    ids_out = torch.tensor([5, 3, 1, 4, 8, -1], dtype=torch.int32, device=device)
    y = backend.prefill(
        x, weight, cases.cu_seqlens(lengths, device), bias=bias, conv_state=state, state_ids=ids,
        state_ids_out=ids_out, num_accepted=torch.tensor([0, 1, 2, 77, 3, 0], device=device),
        has_initial_state=torch.tensor([True, False, True, True, True, True], device=device),
    )  # fmt: skip
    pasts = {0: before[5, :, :3], 2: before[0, :, 2:5], 4: before[8, :, 3:6], 5: before[2, :, :3]}
    expected, written = before.clone(), {0: 5, 1: 3, 2: 1, 4: 8}
    for n, part in enumerate(x.split(list(lengths))):
        past = pasts[n].T if n in pasts else None
        truth, after = reference.convolve(part, weight, bias, past)
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
        assert_close(f"sequence {n}", truth, y[rows], cases.RTOL[torch.float32])
        if n in written:
            expected[written[n], :, :3] = after.T
            expected[written[n], :, 3:] = math.nan
    assert torch.equal(state[[5, 3, 1, 8], :, :3], expected[[5, 3, 1, 8], :, :3])
    assert state[[5, 3, 1, 8], :, 3:].isnan().all(), "nothing is pending after a prefill"
    for slot in (0, 2, 4, 6, 7):
        assert same_bits(state[slot], before[slot])


def test_chunks_carry_the_state(backend, device):
    channels, taps = 5, 4
    x = cases.normal((20, channels), 5, device=device)
    weight, bias = cases.parameters(channels, taps, 6, device=device)
    whole = backend.prefill(x, weight, cases.cu_seqlens((20,), device), bias=bias)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    for cuts in ((20,), (1,) * 20, (2, 1, 3, 14), (7, 0, 13)):
        state = state_of(1, channels, taps, torch.float32, device)
        parts = []
        for i, part in enumerate(x.split(list(cuts))):
            has = torch.tensor([i > 0], device=device)
            parts.append(
                backend.prefill(
                    part,
                    weight,
                    cases.cu_seqlens((len(part),), device),
                    bias=bias,
                    conv_state=state,
                    state_ids=ids,
                    has_initial_state=has,
                )
            )
        assert torch.equal(torch.cat(parts), whole), cuts
        assert torch.equal(state[0, :, :3].T, x[-3:])


@pytest.mark.parametrize("num_tokens", cases.NUM_TOKENS)
def test_lengths_against_conv1d(num_tokens, device, assert_close):
    x = cases.normal((num_tokens, 6), 7, device=device)
    weight, bias = cases.parameters(6, 4, 8, device=device)
    y = causal_conv1d(x, weight, bias, cu_seqlens=cases.cu_seqlens((num_tokens,), device))
    truth = F.conv1d(x.double().T[None], weight.double()[:, None], bias.double(), padding=3, groups=6)
    truth = F.silu(truth[0, :, :num_tokens]).T
    assert_close(f"T={num_tokens}", truth, y, cases.RTOL[torch.float32])


def test_equals_transformers(assert_close):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(modeling, "causal_conv1d_fn") or modeling.causal_conv1d_fn is None:
        pytest.skip("this transformers has no causal_conv1d_fn of its own")
    x = cases.normal((2, 9, 6), 9)
    weight, bias = cases.parameters(6, 4, 10)
    theirs = modeling.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
    ours = causal_conv1d(x.flatten(0, 1), weight, bias, cu_seqlens=cases.cu_seqlens((9, 9)))
    assert_close("causal_conv1d_fn", theirs.flatten(0, 1), ours, cases.RTOL[torch.float32])


@pytest.mark.parametrize("filling", [math.nan, math.inf, 7.0])
def test_left_pads_count_for_nothing_drill_f2(backend, filling, device, same_bits):
    """A batch padded on the left is the same as its sequences alone, whatever stands in the pads."""
    channels, taps, longest, lengths = 6, 4, 9, (9, 4, 1, 0)
    weight, bias = cases.parameters(channels, taps, 11, device=device)
    x = cases.normal((4, longest, channels), 12, device=device)
    pads = torch.tensor([longest - n for n in lengths], dtype=torch.int32, device=device)
    is_pad = torch.arange(longest, device=device) < pads[:, None]
    x[is_pad] = filling
    has = torch.tensor([True, True, False, True], device=device)
    state = state_of(4, channels, taps, torch.float32, device)
    alone_state = state.clone()
    ids = torch.arange(4, device=device)
    y = backend.prefill(
        x.flatten(0, 1), weight, cases.cu_seqlens((longest,) * 4, device), bias=bias, conv_state=state, state_ids=ids,
        has_initial_state=has, num_pads=pads,
    ).view(4, longest, channels)  # fmt: skip
    alone = backend.prefill(
        x[~is_pad], weight, cases.cu_seqlens(lengths, device), bias=bias, conv_state=alone_state, state_ids=ids,
        has_initial_state=has,
    )  # fmt: skip
    assert torch.equal(y[~is_pad], alone)
    assert torch.equal(y[is_pad], torch.zeros_like(y[is_pad]))
    assert same_bits(state, alone_state)
    assert state[:, :, :3].isfinite().all()

    masked = x * (~is_pad)[..., None]
    if not math.isfinite(filling):
        assert masked.isnan().any(), "faulty form: multiplying by the mask keeps a NaN"


def test_rows_of_no_sequence_are_pads(backend, device):
    """The rows that a CUDA graph of a larger bucket holds: never read, zeros out."""
    x = cases.normal((12, 4), 13, device=device)
    weight, _ = cases.parameters(4, 4, 14, device=device)
    x[:2], x[9:] = math.nan, math.inf
    y = backend.prefill(x, weight, torch.tensor([2, 5, 9], device=device))
    inside = backend.prefill(x[2:9], weight, cases.cu_seqlens((3, 4), device))
    assert torch.equal(y[2:9], inside)
    assert torch.equal(y[[0, 1, 9, 10, 11]], torch.zeros(5, 4, device=device))


def test_what_is_not_read_cannot_matter_drill_c1(backend, device, same_bits):
    """Two fillings of every byte that must not be read give the same bits; a tap through a mask would not."""
    channels, taps = 4, 4
    weight, bias = cases.parameters(channels, taps, 15, device=device)
    results = []
    for filling in (1e30, -3.0, math.nan):
        x = torch.full((10, channels), filling, device=device)
        x[2:8] = cases.normal((6, channels), 16, device=device)
        state = torch.full((4, channels, taps - 1 + MAX_WINDOW), filling, device=device)
        state[1, :, 1:4] = 0.5
        y = backend.prefill(
            x, weight, torch.tensor([1, 5, 8], device=device), bias=bias, conv_state=state, fill=filling,
            num_pads=torch.tensor([1, 0], device=device), state_ids=torch.tensor([1, 2], device=device),
            has_initial_state=torch.tensor([True, False], device=device),
            num_accepted=torch.tensor([1, 3], device=device),
        )  # fmt: skip
        results.append((y, state[1:3]))
    for y, state in results[1:]:
        assert same_bits(y, results[0][0])
        assert same_bits(state, results[0][1])
    assert results[0][0].isfinite().all()

    page = torch.full((16, 8), math.nan)
    page[:5] = 1.0
    probabilities = torch.cat((torch.full((5,), 0.2), torch.zeros(11)))
    assert (probabilities @ page).isnan().all(), "the faulty form: zero times an unwritten slot"


def test_a_state_left_over_is_not_read_drill_e1(backend, device):
    """Faulty form: a slot cleared by a multiplication keeps its NaN. Here a fresh sequence does not read it at all."""
    x = cases.normal((5, 4), 17, device=device)
    weight, _ = cases.parameters(4, 4, 18, device=device)
    cu_seqlens, ids = cases.cu_seqlens((5,), device), torch.zeros(1, dtype=torch.int32, device=device)
    fresh = backend.prefill(x, weight, cu_seqlens)
    state = torch.full((1, 4, 3), math.nan, device=device)
    assert (state * 0.0).isnan().all()
    assert torch.equal(backend.prefill(x, weight, cu_seqlens, conv_state=state, state_ids=ids), fresh)
    assert torch.equal(state[0].T, x[-3:])


def test_states_swapped_between_rows_show_drill_f4(backend, device):
    """Live slots are 0 and 2: the ids say so, and the states of 0 and 1 give other answers."""
    x = cases.normal((6, 4), 19, device=device)
    weight, _ = cases.parameters(4, 4, 20, device=device)
    before = state_of(3, 4, 4, torch.float32, device)
    answers = [
        backend.prefill(
            x, weight, cases.cu_seqlens((3, 3), device), conv_state=before.clone(),
            state_ids=torch.tensor(ids, device=device), has_initial_state=torch.tensor([True, True], device=device),
        )
        for ids in ([0, 2], [0, 1])
    ]  # fmt: skip
    assert torch.equal(answers[0][:3], answers[1][:3])
    assert not torch.equal(answers[0][3:], answers[1][3:])


def test_a_bad_input_burns_its_channel_for_k_tokens_of_its_sequence(backend, device):
    for bad in (math.nan, math.inf):
        x = cases.normal((10, 5), 21, device=device)
        weight, _ = cases.parameters(5, 4, 22, device=device)
        cu_seqlens = cases.cu_seqlens((6, 4), device)
        clean = backend.prefill(x, weight, cu_seqlens)
        x[3, 2] = bad
        y = backend.prefill(x, weight, cu_seqlens)
        burned = torch.zeros(10, 5, dtype=torch.bool, device=device)
        burned[3:6, 2] = True
        assert torch.equal(y[~burned], clean[~burned])
        assert not (y[burned] == clean[burned]).any()


def test_slots_beyond_the_pool_are_nan_and_write_nothing(backend, device, same_bits):
    x = cases.normal((8, 4), 23, device=device)
    weight, _ = cases.parameters(4, 4, 24, device=device)
    state = state_of(3, 4, 4, torch.float32, device)
    before = state.clone()
    y = backend.prefill(
        x, weight, cases.cu_seqlens((2, 2, 2, 2), device), conv_state=state,
        state_ids=torch.tensor([3, 0, 1, 1 << 30], device=device),
        state_ids_out=torch.tensor([0, 9, -1, 1], device=device),
        num_accepted=torch.tensor([0, 0, MAX_WINDOW + 1, 0], device=device),
    )  # fmt: skip
    assert y.isnan().all()
    assert same_bits(state, before)


def test_lengths_that_lie_never_read_outside(backend, device):
    """A cu_seqlens beyond the rows is cut, in answers and in states."""
    x = cases.normal((5, 4), 25, device=device)
    weight, _ = cases.parameters(4, 4, 26, device=device)
    state = state_of(1, 4, 4, torch.float32, device)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    y = backend.prefill(x, weight, torch.tensor([0, 99], device=device), conv_state=state, state_ids=ids)
    assert torch.equal(y, backend.prefill(x, weight, cases.cu_seqlens((5,), device)))
    assert torch.equal(state[0, :, :3].T, x[-3:])


def test_row_bits_do_not_depend_on_the_batch(backend, device):
    channels = 37
    weight, bias = cases.parameters(channels, 4, 27, device=device)
    lengths = (5, 1, 8, 40, 2)
    x = cases.normal((sum(lengths), channels), 28, device=device)
    together = backend.prefill(x, weight, cases.cu_seqlens(lengths, device), bias=bias).split(list(lengths))
    for part, expected in zip(x.split(list(lengths)), together, strict=True):
        alone = backend.prefill(part, weight, cases.cu_seqlens((len(part),), device), bias=bias)
        assert torch.equal(alone, expected)


def test_sensors_change_no_bit_and_say_what_mark_rows_says(backend, device, kernel_dtypes, same_bits):
    lengths, channels = (4, 3, 6, 2), 5
    token_ids = torch.tensor([0] * 4 + [-1] * 3 + [2] * 6 + [1] * 2, dtype=torch.int32, device=device)
    sequence_ids = torch.tensor([0, -1, 2, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 0, -1, 3], device=device)
    has = torch.ones(4, dtype=torch.bool, device=device)
    for dtype in kernel_dtypes:
        x = cases.normal((15, channels), 29, dtype, device)
        weight, _ = cases.parameters(channels, 4, 30, dtype, device)
        x[3, 1], x[5, 0], x[12, 4] = math.nan, math.inf, math.nan
        start = state_of(4, channels, 4, dtype, device)
        start[3, 2, 2] = math.inf
        for ids, ids_state in ((token_ids, sequence_ids), (None, None)):
            panel, expected = new_panel(2, 3, device), new_panel(2, 3, device)
            mark = Mark(panel=panel, slot=1, num_signals=2, num_rows=3, row_ids=ids)
            mark_state = Mark(panel=panel, slot=0, num_signals=2, num_rows=3, row_ids=ids_state)
            outs = []
            for sensors in ({"mark": mark, "mark_state": mark_state, "fill": 5.0}, {}):
                state = start.clone()
                y = backend.prefill(
                    x, weight, cases.cu_seqlens(lengths, device), conv_state=state, state_ids=slots,
                    has_initial_state=has, **sensors,
                )  # fmt: skip
                outs.append((y, state))
            y, state = outs[0]
            committed = state[[2, 0, 0, 3], :, :3].transpose(1, 2).reshape(4, -1).clone()
            committed[2] = 0
            signal = {"panel": expected, "num_signals": 2, "num_rows": 3}
            mark_rows(committed, Mark(slot=0, row_ids=ids_state, **signal))
            mark_rows(y, Mark(slot=1, row_ids=ids, **signal))
            assert torch.equal(panel, expected)
            assert same_bits(y, outs[1][0])
            assert same_bits(state, outs[1][1])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=6),
    taps=st.integers(min_value=2, max_value=8),
    seed=st.integers(min_value=0, max_value=1000),
)
def test_any_lengths(lengths, taps, seed):
    x = cases.normal((sum(lengths), 3), seed)
    weight, bias = cases.parameters(3, taps, seed)
    state = new_conv_state(len(lengths), 3, kernel_size=taps, max_window=0, dtype=torch.float32)
    y = causal_conv1d(
        x, weight, bias, cu_seqlens=cases.cu_seqlens(tuple(lengths)), conv_state=state,
        state_ids=torch.arange(len(lengths)),
    )  # fmt: skip
    for n, part in enumerate(x.split(lengths)):
        truth, past = reference.convolve(part, weight, bias)
        torch.testing.assert_close(y[sum(lengths[:n]) : sum(lengths[: n + 1])].double(), truth, rtol=1e-5, atol=1e-6)
        assert torch.equal(state[n].T, past)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.ones(4, 3, 2)}, "must be float with 2 dimensions"),
        ({"weight": torch.ones(2, 4)}, r"weight: .* must be float \[3, K\]"),
        ({"weight": torch.ones(3, 1)}, "K=1: must be from 2"),
        ({"bias": torch.ones(4)}, "bias: "),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"cu_seqlens": torch.tensor([0])}, "cu_seqlens: "),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens: "),
        ({"conv_state": torch.zeros(2, 3, 3)}, "together"),
        ({"conv_state": torch.zeros(2, 3, 2), "state_ids": torch.zeros(1).long()}, "conv_state: "),
        ({"conv_state": torch.zeros(2, 3, 3).half(), "state_ids": torch.zeros(1).long()}, "must hold inputs as they"),
        ({"conv_state": torch.zeros(2, 3, 3), "state_ids": torch.zeros(2).long()}, "state_ids: "),
        ({"num_pads": torch.zeros(1)}, "num_pads: "),
        ({"has_initial_state": torch.zeros(1)}, "has_initial_state: "),
        ({"out": torch.ones(4, 2)}, "out: "),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else None,
)
def test_refusals(change, message):
    args = {
        "hidden_states": torch.ones(4, 3),
        "weight": torch.ones(3, 4),
        "cu_seqlens": torch.tensor([0, 4]),
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        causal_conv1d(args.pop("hidden_states"), args.pop("weight"), args.pop("bias", None), **args)
    x = torch.ones(4, 3)
    with pytest.raises(ConfigError, match="not hidden_states"):
        causal_conv1d(x, torch.ones(3, 4), cu_seqlens=torch.tensor([0, 4]), out=x)
    with pytest.raises(ConfigError, match="kernel_size=9"):
        new_conv_state(1, 3, kernel_size=9, max_window=1, dtype=torch.float32)
