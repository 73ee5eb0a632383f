"""What must not bend the model: no clamps, an exact solve, a norm for every finite input, a state that still decays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule import gated_delta_rule, new_window_state
from firetower.ops.gated_delta_rule.cases import make_inputs, with_gates
from firetower.ops.gated_delta_rule.reference import gated_delta_rule_reference, l2norm_reference
from firetower.ops.gated_delta_rule.torch_path import l2norm, segment_sums, solve_unit_lower

CLAMP_RTOL = 5e-6
INF = float("inf")


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def long_inputs(gate):
    return with_gates(make_inputs(1, length=1024, num_k_heads=1, num_v_heads=1, head_k_dim=128, head_v_dim=128), gate)


@pytest.mark.parametrize(
    ("gate", "spoiled"),
    [
        (-0.19, {"sums 12"}),
        (-0.32, {"sums 12", "sums 20"}),
        (-0.6, {"gates .5", "sums 12", "sums 20"}),
        (-5.0, {"gates .5", "sums 12", "sums 20"}),
    ],
)
def test_clamps_change_the_model_and_we_have_none(faulty, gate, spoiled):
    x = long_inputs(gate)
    expected = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state)
    ours = gated_delta_rule(*x.tokens, initial_state=x.initial_state)
    assert max(map(error, ours, expected)) < CLAMP_RTOL
    clamps = {
        "gates .5": faulty.clamped_gates(0.5),
        "sums 12": faulty.clamped_sums(12.0),
        "sums 20": faulty.clamped_sums(20.0),
    }
    clamped = {name: faulty.chunked(*x.tokens, x.initial_state, decays) for name, decays in clamps.items()}
    errors = {name: max(map(error, pair, expected)) for name, pair in clamped.items()}
    assert {name for name, e in errors.items() if e > CLAMP_RTOL} == spoiled, errors


@pytest.mark.parametrize("gate", [-1.387, -1.41])
def test_factors_and_late_masks_overflow_where_we_are_exact(faulty, gate):
    x = with_gates(make_inputs(2, length=64), gate)
    forms = [faulty.factored] if gate > -1.4 else [faulty.factored, faulty.exp_before_mask]
    for form in forms:
        out, _ = faulty.chunked(*x.tokens, x.initial_state, form)
        assert not out.isfinite().all()
    expected, _ = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state)
    assert error(gated_delta_rule(*x.tokens, initial_state=x.initial_state)[0], expected) < 2e-6


def systems(correlation, count=32, size=64):
    shared = torch.randn(count, 1, 128)
    keys = l2norm_reference(correlation**0.5 * shared + (1 - correlation) ** 0.5 * torch.randn(count, size, 128))
    return (keys @ keys.mT).tril(-1)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 64, 100])
def test_the_solve_is_exact(size):
    lower = systems(0.5, size=size)
    inverse = solve_unit_lower(lower)
    expected = torch.linalg.inv(lower.double() + torch.eye(size, dtype=torch.float64))
    assert error(inverse, expected) < 1e-6
    assert torch.equal(inverse.triu(1), torch.zeros_like(inverse))


def test_the_solve_is_exact_for_identical_keys_where_doubling_explodes(faulty):
    lower = torch.ones(64, 64).tril(-1)
    expected = torch.eye(64, dtype=torch.float64) - torch.diag(torch.ones(63, dtype=torch.float64), -1)
    assert error(solve_unit_lower(lower), expected) < 1e-7
    assert not error(faulty.neumann(lower), expected) < 1e6


def test_the_kernels_solve_and_decays_equal_the_torch_paths(prefill, assert_close):
    if prefill.backend == "torch":
        pytest.skip("is the other side")
    x = prefill.inputs(3, num_v_heads=2)
    ours, theirs = prefill.prepare(x), dataclasses.replace(prefill, backend="torch").prepare(x)
    for name in ("q", "k", "solve", "scores", "factors", "total"):
        assert_close(name, getattr(theirs, name), getattr(ours, name), prefill.rtol())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100.0, 0.0, width=32) | st.sampled_from([-INF, -3e38, -1e6, -1e-30]), min_size=1))
def test_each_segment_is_a_sum_of_its_own(gates):
    g = torch.tensor(gates)
    sums = segment_sums(g)
    for i in range(len(gates)):
        for j in {0, i // 2, i}:
            expected = float(g[j + 1 : i + 1].double().sum())
            assert float(sums[i, j]) == pytest.approx(expected, rel=1e-5) or expected < -3e38
    assert (sums.triu(1)[~torch.ones_like(sums, dtype=torch.bool).tril()] == -INF).all() or len(gates) == 1
    assert not sums.isnan().any()


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e15, 3e19, 3e38])
def test_the_norm_of_every_finite_size(size):
    x = torch.rand(5, 128) * 2 - 1
    x = torch.where(x.abs() < 0.01, 0.01, x) * size
    x[0] = 0.0
    expected = l2norm_reference(x.double())
    assert torch.allclose(l2norm(x).double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-30, 3e19, 3e38])
def test_keys_and_queries_of_any_size(prefill, assert_close, size):
    prefill.only_where_quick(size != 3e19)
    x = prefill.inputs(4, length=70)
    q, k = (t / t.abs().amax() * size for t in (x.q, x.k))
    x = dataclasses.replace(x, q=q, k=k)
    expected = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state)
    for name, e, actual in zip(("out", "state"), expected, prefill(x), strict=True):
        assert_close(name, e, actual, prefill.rtol())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 140),
    scale=st.sampled_from([1e-4, 0.1, 3.0, 100.0, 1e6]),
    beta=st.sampled_from([0.0, 0.5, 1.0]),
    chunk_size=st.sampled_from([1, 7, 16, 64, 100]),
)
def test_any_gates_keys_and_lengths(seed, length, scale, beta, chunk_size):
    x = make_inputs(seed, length=length, num_k_heads=1, head_k_dim=8, head_v_dim=4)
    generator = torch.Generator().manual_seed(seed)
    g = -scale * torch.rand(x.g.shape, generator=generator) ** 8
    x = dataclasses.replace(x, g=g, beta=torch.where(x.beta > 0.7, beta, x.beta))
    expected = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state)
    ours = gated_delta_rule(*x.tokens, initial_state=x.initial_state, chunk_size=chunk_size)
    assert max(map(error, ours, expected)) < 3e-6


def test_the_state_forgets_by_a_factor_of_e_in_a_thousand_steps(prefill):
    x = prefill.inputs(5, length=1000 if not prefill.is_interpreted else 100)
    x = with_gates(dataclasses.replace(x, beta=torch.zeros_like(x.beta)), -1.0 / x.g.shape[1])
    _, state = prefill(x)
    assert float(state.norm() / x.initial_state.norm()) == pytest.approx(torch.e**-1, abs=1e-4)


def test_a_state_of_fewer_bits_is_refused():
    with pytest.raises(ConfigError, match=r"state_dtype=torch.bfloat16: must be float32"):
        new_window_state(1, 1, 1, 16, 16, state_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 9, 2, 64)}, "q: .* k: .* must be the same"),
        ({"v": torch.zeros(1, 8, 3, 64)}, "v: .* a multiple of 2 heads"),
        ({"g": torch.zeros(1, 8, 3)}, "g: .* must be"),
        ({"v": torch.zeros(1, 8, 2, 64, dtype=torch.float16)}, "must be one float type"),
        ({"initial_state": torch.zeros(2, 2, 64, 64)}, "initial_state: .* must be"),
        ({"chunk_size": 0}, "chunk_size=0: must be positive"),
        ({"out": torch.zeros(1, 8, 2, 32)}, "out: .* must be contiguous"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(change, message):
    x = make_inputs(6, length=8)
    arguments = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")} | change
    with pytest.raises(ConfigError, match=message):
        gated_delta_rule(**arguments)


def test_sequences_in_a_batch_are_refused():
    x = make_inputs(7, length=8, batch=2)
    with pytest.raises(ConfigError, match="batch of 2 with cu_seqlens: must be 1"):
        gated_delta_rule(*x.tokens, cu_seqlens=torch.tensor([0, 8]))
