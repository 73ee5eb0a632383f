"""Chunked prefill against the token-by-token recurrence in float64: gates, lengths, layouts, splits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.ops.gated_delta_rule import gated_delta_rule
from firetower.ops.gated_delta_rule.cases import (
    NORM_RTOL,
    ODD_LENGTHS,
    REFLECTION_RTOL,
    SPLIT_RTOL,
    make_inputs,
    with_gates,
)
from firetower.ops.gated_delta_rule.reference import gated_delta_rule_reference

INF = float("inf")


def truth(x, **kwargs):
    return gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state, **kwargs)


def check(prefill, assert_close, x, rtol=None, **kwargs):
    reference = truth(x, cu_seqlens=kwargs.get("cu_seqlens"), use_l2norm=kwargs.get("use_l2norm", True))
    for name, expected, actual in zip(("out", "state"), reference, prefill(x, **kwargs), strict=True):
        assert_close(name, expected, actual, prefill.rtol() if rtol is None else max(rtol, prefill.rtol()))


def reset_at(x, token, gate, rest=-0.01):
    g = torch.full_like(x.g, rest)
    g[:, token] = gate
    return with_gates(x, g)


@pytest.mark.parametrize("gate", [0.0, -1e-3, -0.19, -1.5, -20.0, -1e4, -1e30, -3e38, -INF])
def test_one_gate_everywhere(prefill, assert_close, gate):
    prefill.only_where_quick(gate in (-0.19, -3e38, -INF))
    check(prefill, assert_close, with_gates(prefill.inputs(1), gate))


@pytest.mark.parametrize("gate", [-1e4, -1e5, -1e6, -INF])
def test_a_large_reset_keeps_the_small_gates_after_it(prefill, assert_close, gate):
    prefill.only_where_quick(gate == -1e6)
    check(prefill, assert_close, reset_at(prefill.inputs(2), 10, gate))


def test_differences_of_a_cumulative_sum_lose_the_small_gates(faulty):
    x = reset_at(make_inputs(2), 10, -1e5)
    out, _ = faulty.chunked(*x.tokens, x.initial_state, faulty.differences)
    expected, _ = truth(x)
    assert (out - expected).norm() / expected.norm() > 1e-3


@pytest.mark.parametrize("token", [0, 63, 64, -1])
def test_infinite_gates_at_the_edges_of_chunks(prefill, assert_close, token):
    prefill.only_where_quick(token in (63, 64))
    check(prefill, assert_close, reset_at(prefill.inputs(3), token, -INF))


@pytest.mark.parametrize(("length", "gate"), [(1, -INF), (2, -3e38), (2, -INF)])
def test_heads_of_one(prefill, assert_close, length, gate):
    x = with_gates(prefill.inputs(4, length=length, head_k_dim=1, head_v_dim=1), gate)
    check(prefill, assert_close, x)


@pytest.mark.parametrize("beta", [0.0, 1.0, "zero or one", 2.0])
def test_betas(prefill, assert_close, beta):
    prefill.only_where_quick(beta == "zero or one")
    x = prefill.inputs(5)
    values = torch.rand_like(x.beta).round() if beta == "zero or one" else torch.full_like(x.beta, beta)
    check(prefill, assert_close, dataclasses.replace(x, beta=values))


@pytest.mark.parametrize(("spread", "beta", "rtol"), [(0.0, 1.0, None), (1e-3, 1.0, None), (0.0, 2.0, NORM_RTOL)])
def test_keys_that_are_the_same_or_nearly(prefill, assert_close, spread, beta, rtol):
    x = with_gates(prefill.inputs(6), 0.0)
    k = x.k[:, :1] + spread * x.k
    check(prefill, assert_close, dataclasses.replace(x, k=k, beta=torch.full_like(x.beta, beta)), rtol)


@pytest.mark.parametrize("seed", range(4))
def test_reflections_by_the_same_unit_key(prefill, assert_close, seed):
    prefill.only_where_quick(seed == 0)
    x = with_gates(prefill.inputs(seed, head_k_dim=64), 0.0)
    k = (x.k[:, :1].sign() / 8).expand_as(x.k)
    x = dataclasses.replace(x, k=k, beta=torch.full_like(x.beta, 2.0))
    check(prefill, assert_close, x, REFLECTION_RTOL, use_l2norm=False)


@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_lengths(prefill, assert_close, length):
    prefill.only_where_quick(length in (1, 63, 65))
    check(prefill, assert_close, prefill.inputs(7, length=length, head_k_dim=16, head_v_dim=32))


@pytest.mark.parametrize(("head_k_dim", "head_v_dim"), [(16, 48), (24, 16), (40, 8)])
def test_heads_that_fill_no_tile(prefill, assert_close, head_k_dim, head_v_dim):
    prefill.only_where_quick(head_k_dim == 24)
    sizes = {"head_k_dim": head_k_dim, "head_v_dim": head_v_dim, "num_k_heads": 1, "num_v_heads": 3}
    check(prefill, assert_close, prefill.inputs(8, length=70, batch=2, **sizes))


def test_kept_types(prefill, assert_close, kernel_dtypes):
    for dtype in kernel_dtypes:
        x = prefill.inputs(9, dtype=dtype)
        out, state = prefill(x)
        expected, expected_state = truth(x)
        assert out.dtype is dtype
        assert state.dtype is torch.float32
        assert_close(str(dtype), expected, out, prefill.rtol(dtype))
        assert_close("state", expected_state, state, prefill.rtol(dtype))


def test_gates_and_betas_of_other_types(prefill, assert_close):
    x = prefill.inputs(10)
    check(prefill, assert_close, dataclasses.replace(x, g=x.g.half(), beta=x.beta.half()))


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_sequences_behind_each_other(prefill, assert_close, index_type):
    edges = [0, 37, 37, 69, 133] if prefill.is_interpreted else [0, 77, 77, 141, 300]
    x = prefill.inputs(11, length=edges[-1], num_states=4)
    check(prefill, assert_close, x, cu_seqlens=torch.tensor(edges, dtype=index_type, device=x.q.device))


def test_tokens_behind_the_last_sequence_are_in_no_state(prefill, assert_close):
    x = prefill.inputs(12, length=90, num_states=2)
    edges = torch.tensor([0, 40, 70], device=x.q.device)
    real = dataclasses.replace(x, **{n: getattr(x, n)[:, :70] for n in ("q", "k", "v", "g", "beta")})
    expected, expected_state = truth(real, cu_seqlens=edges)
    out, state = prefill(x, cu_seqlens=edges)
    assert_close("out", expected, out[:, :70], prefill.rtol())
    assert_close("state", expected_state, state, prefill.rtol())
    assert (out[:, 70:] == 0).all()


def test_each_sequence_has_the_bits_that_it_has_alone(prefill):
    prefill.needs_a_fixed_order()
    x = prefill.inputs(13, length=90, num_states=2)
    out, state = prefill(x, cu_seqlens=torch.tensor([0, 50, 90], device=x.q.device), chunk_size=32)
    for i, span in enumerate((slice(0, 50), slice(50, 90))):
        alone = dataclasses.replace(
            x, initial_state=x.initial_state[i : i + 1],
            **{n: getattr(x, n)[:, span] for n in ("q", "k", "v", "g", "beta")},
        )  # fmt: skip
        one, one_state = prefill(alone, chunk_size=32)
        assert torch.equal(one, out[:, span])
        assert torch.equal(one_state, state[i : i + 1])


def test_views_of_a_wider_tensor(prefill):
    x = prefill.inputs(14, length=70, batch=2)
    wide = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], dim=-1)
    sizes = [t.flatten(2).shape[-1] for t in (x.q, x.k, x.v)]
    views = [part.unflatten(-1, t.shape[2:]) for part, t in zip(wide.split(sizes, -1), (x.q, x.k, x.v), strict=True)]
    assert not views[1].is_contiguous()
    strided = dataclasses.replace(x, q=views[0], k=views[1], v=views[2])
    assert all(torch.equal(a, b) for a, b in zip(prefill(x), prefill(strided), strict=True))


def test_an_infinite_gate_is_a_new_sequence(prefill, assert_close):
    x = with_gates(prefill.inputs(15), -0.05)
    x.g[:, 50] = -INF
    parts = {n: getattr(x, n)[:, 50:] for n in ("q", "k", "v", "g", "beta")}
    out, state = prefill(x)
    later, later_state = prefill(dataclasses.replace(x, initial_state=torch.zeros_like(x.initial_state), **parts))
    assert_close("out", later, out[:, 50:], 4e-7 if prefill.device == "cpu" else prefill.rtol())
    assert_close("state", later_state, state, 4e-7 if prefill.device == "cpu" else prefill.rtol())


def test_a_split_with_the_state_carried(prefill, assert_close):
    x = prefill.inputs(16, **({} if prefill.is_interpreted else {"length": 300}))
    whole, whole_state = prefill(x)
    first, middle = prefill(part(x, slice(0, 77)))
    second, last = prefill(dataclasses.replace(part(x, slice(77, None)), initial_state=middle))
    rtol = max(SPLIT_RTOL, 0.0 if prefill.device == "cpu" else prefill.rtol())
    assert_close("out", whole, torch.cat([first, second], 1), rtol)
    assert_close("state", whole_state, last, rtol)


def part(x, span):
    return dataclasses.replace(x, **{n: getattr(x, n)[:, span] for n in ("q", "k", "v", "g", "beta")})


def test_a_split_at_a_multiple_of_the_chunk_has_the_same_bits(prefill):
    prefill.needs_a_fixed_order()
    x = prefill.inputs(17)
    whole, whole_state = prefill(x, chunk_size=32)
    first, middle = prefill(part(x, slice(0, 64)), chunk_size=32)
    second, last = prefill(dataclasses.replace(part(x, slice(64, None)), initial_state=middle), chunk_size=32)
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(last, whole_state)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 32, 128])
def test_chunk_sizes_agree(prefill, assert_close, chunk_size):
    if prefill.backend == "triton" and chunk_size not in (16, 32):
        pytest.skip("the kernel has no tile of this size, and says so")
    x = prefill.inputs(18)
    rtol = max(SPLIT_RTOL, 0.0 if prefill.device == "cpu" else prefill.rtol())
    for name, expected, actual in zip(("out", "state"), prefill(x), prefill(x, chunk_size=chunk_size), strict=True):
        assert_close(name, expected, actual, rtol)


def test_two_fillings_and_two_runs_give_the_same_bits(prefill):
    x = prefill.inputs(19, length=70, batch=2)
    first = prefill(x)
    for again in (prefill(x), dataclasses.replace(prefill, fill=3e38)(x)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("length", [0, 5])
def test_no_tokens_leave_the_state_its_bits(device, length):
    x = make_inputs(20, batch=2, length=length, device=device)
    if length:
        edges = torch.zeros(3, dtype=torch.int32, device=device)
        x = dataclasses.replace(x, **{n: getattr(x, n)[:1, :0] for n in ("q", "k", "v", "g", "beta")})
        out, state = gated_delta_rule(*x.tokens, initial_state=x.initial_state, cu_seqlens=edges)
    else:
        out, state = gated_delta_rule(*x.tokens, initial_state=x.initial_state)
    assert out.numel() == 0
    assert torch.equal(state, x.initial_state)
    assert state.data_ptr() != x.initial_state.data_ptr()


def test_a_start_from_nothing_and_no_state_asked_for(prefill, device):
    x = prefill.inputs(21, length=70)
    zeros = dataclasses.replace(x, initial_state=torch.zeros_like(x.initial_state))
    assert all(torch.equal(a, b) for a, b in zip(prefill(zeros), prefill(x, from_zero=True), strict=True))
    if prefill.backend == "torch":
        out, state = gated_delta_rule(*x.tokens, output_state=False)
        assert state is None
        if device == "cpu":
            assert torch.equal(out, prefill(zeros)[0])
