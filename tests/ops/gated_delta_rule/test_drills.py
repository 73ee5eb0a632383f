"""Faults that inference is known for, in random variants: the op's own sensor tells, or the op cannot have them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.words import CLEAN, unpack_word
from firetower.ops.gated_delta_rule import commit_window, gated_delta_rule, gated_delta_rule_window, load_state
from firetower.ops.gated_delta_rule import new_window_state as new_state
from firetower.ops.gated_delta_rule.cases import make_inputs, with_gates
from firetower.ops.gated_delta_rule.reference import delta_step, gated_delta_rule_reference
from firetower.sensors.marks import Mark, new_panel

SEEDS = range(3)


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def marked(x, slot=0):
    rows = torch.arange(x.q.shape[1], device=x.q.device)
    panel = new_panel(1, len(rows), x.q.device)
    return panel, Mark(panel=panel, slot=slot, num_signals=1, num_rows=len(rows), row_ids=rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_i1_exponential_before_the_mask(prefill, faulty, seed):
    prefill.only_where_quick(seed == 0)
    x = prefill.inputs(seed, length=64)
    g = -6 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(seed)).to(x.g.device)
    x = with_gates(x, g)
    sums = g[0, :, 0].cpu().cumsum(0)
    pairs = (sums[:, None] - sums[None, :]).exp()
    assert pairs.isinf().any()
    assert not pairs.tril().isinf().any()
    assert faulty.exp_before_mask(g[0, :, 0].cpu())[0].isnan().any()
    panel, mark = marked(x)
    out, state = prefill(x, mark=mark)
    expected, expected_state = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state)
    assert int(panel[0]) == CLEAN
    assert error(out, expected) < prefill.rtol()
    assert error(state, expected_state) < prefill.rtol()


@pytest.mark.parametrize("seed", SEEDS)
def test_i2_a_gate_of_infinity_times_zero(prefill, seed):
    prefill.only_where_quick(seed == 2)
    x = prefill.inputs(seed, length=70)
    token = [5, 37, 66][seed]
    a_log, raw = torch.tensor(90.0), torch.tensor(-120.0)
    gate = -(a_log.exp() * torch.nn.functional.softplus(raw))
    assert gate.isnan()
    x.g[0, token, 1] = gate
    panel, mark = marked(x)
    prefill(x, mark=mark)
    word = unpack_word(int(panel[0]))
    assert divmod(word.flat_index, x.v.shape[3])[0] == token * x.v.shape[2] + 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_i3_keys_without_a_norm(prefill, seed):
    prefill.only_where_quick(seed == 0)
    x = prefill.inputs(seed, length=70, head_k_dim=16)
    key = x.k[:, :1]
    key = key * (11.5**0.5 / key.norm(dim=-1, keepdim=True))
    x = with_gates(dataclasses.replace(x, k=key.expand_as(x.k), beta=torch.ones_like(x.beta)), 0.0)
    panel, mark = marked(x)
    prefill(x, mark=mark, use_l2norm=False)
    assert int(panel[0]) < CLEAN
    panel, mark = marked(x)
    out, _ = prefill(x, mark=mark)
    assert int(panel[0]) == CLEAN
    assert out.isfinite().all()


def test_i3_windows_name_the_step():
    state = new_state(1, 1, 1, 16, 16, dtype=torch.float32)
    x = make_inputs(4, length=8, num_k_heads=1, num_v_heads=1, head_k_dim=16, head_v_dim=16)
    key = x.k[:, :1] * (11.5**0.5 / x.k[:, :1].norm())
    x = with_gates(dataclasses.replace(x, k=key.expand_as(x.k).contiguous(), beta=torch.ones_like(x.beta)), 0.0)
    load_state(state, torch.tensor([0]), x.initial_state)
    step = 0
    while True:
        panel, mark = marked(x)
        gated_delta_rule_window(
            *x.tokens, state, state_slots=torch.tensor([0]), num_accepted=torch.tensor([8], dtype=torch.int32),
            use_l2norm=False, mark=mark,
        )  # fmt: skip
        if int(panel[0]) != CLEAN:
            break
        commit_window(state, torch.tensor([0]))
        step += 1
    token = step * 8 + unpack_word(int(panel[0])).flat_index // 16
    # a factor of 10.5 a token: 3.4e38 is passed after 37 or 38
    assert 35 <= token <= 39


@pytest.mark.parametrize("seed", SEEDS)
def test_i5_a_state_in_bfloat16_stops_forgetting(seed):
    x = make_inputs(seed, length=1, num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=8)
    zero = torch.zeros(1, 1)
    decay = torch.full((1, 1), -1e-3)
    low = x.initial_state.bfloat16()
    for _ in range(1000):
        low = delta_step(low, *(t.bfloat16() for t in (x.k[0], x.v[0], decay, zero)))
    window = new_state(1, 1, 1, 8, 8, dtype=torch.float32)
    load_state(window, torch.tensor([0]), x.initial_state)
    tokens = [t.expand(1, 8, *t.shape[2:]).contiguous() for t in (x.q, x.k, x.v)]
    gates = torch.full((1, 8, 1), -1e-3), torch.zeros(1, 8, 1)
    accepted = torch.tensor([8], dtype=torch.int32)
    for _ in range(126):
        gated_delta_rule_window(*tokens, *gates, window, state_slots=torch.tensor([0]), num_accepted=accepted)
        commit_window(window, torch.tensor([0]))
    assert error(window.state[int(window.side[0]), 0], x.initial_state[0] * torch.e**-1) < 1e-4
    # e^-0.001 is 1 in bfloat16
    assert torch.equal(low, x.initial_state.bfloat16())


@pytest.mark.parametrize("seed", SEEDS)
def test_j1_a_decay_above_one_tells_of_a_stale_pair(prefill, faulty, seed):
    prefill.only_where_quick(seed == 0)
    x = prefill.inputs(seed, length=128 if not prefill.is_interpreted else 70)
    g = x.g[0, :, -1].cpu()
    # the chunk before decayed more than this one
    stale = faulty.stale_pair(g[:32] * 0.1, g[32:64])
    assert stale.max() > 1
    chunks = prefill.prepare(x)
    decays = torch.cat([chunks.factors[..., 0].flatten(), chunks.factors[..., 2].flatten(), chunks.total.flatten()])
    assert decays.min() >= 0
    assert decays.max() <= 1
    # of normalised q and k, a score is a decay times a cosine
    assert chunks.scores.abs().max() <= x.k.shape[3] ** -0.5 * (1 + 1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_f2_pads_are_in_no_state(seed):
    x = make_inputs(seed, length=96, num_states=1)
    real = 80
    edges = torch.tensor([0, real])
    _, state = gated_delta_rule(*x.tokens, initial_state=x.initial_state, cu_seqlens=edges)
    _, expected = gated_delta_rule_reference(*(t[:, :real] for t in x.tokens), initial_state=x.initial_state)
    beta, g = x.beta.clone(), x.g.clone()
    beta[:, real:], g[:, real:] = 0.5, 0.0
    _, polluted = gated_delta_rule(x.q, x.k, x.v, g, beta, initial_state=x.initial_state)
    assert error(state, expected) < 2e-6
    assert error(polluted, expected) > 0.1


def windows_of(seed, rows, slots):
    state = new_state(4, 1, 2, 16, 16, dtype=torch.float32)
    load_state(state, torch.arange(4), torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(seed)))
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 16}
    x = make_inputs(seed, batch=rows, length=4, **sizes)
    none = torch.zeros(rows, dtype=torch.int32)
    out = gated_delta_rule_window(*x.tokens, state, state_slots=slots, num_accepted=none)
    return x, state, out


@pytest.mark.parametrize("seed", SEEDS)
def test_f4_rows_keep_their_slots(seed):
    slots = torch.tensor([0, 2], dtype=torch.int32)
    x, state, out = windows_of(seed, 2, slots)
    for wrong, expected in (((0, 1), False), ((0, 2), True)):
        truth, _ = gated_delta_rule_reference(*x.tokens, initial_state=state.state[0, list(wrong)])
        assert (error(out, truth) < 2e-6) is expected


@pytest.mark.parametrize(("seed", "accepted"), [(0, 2), (1, 0), (2, 3)])
def test_q1_and_q2_the_state_is_that_after_the_accepted_tokens(seed, accepted):
    slots = torch.tensor([1], dtype=torch.int32)
    x, state, _ = windows_of(seed, 1, slots)
    start = state.state[0, 1:2].clone()
    commit_window(state, slots)
    gated_delta_rule_window(
        *x.tokens, state, state_slots=slots, num_accepted=torch.tensor([accepted], dtype=torch.int32)
    )
    commit_window(state, slots)
    kept = state.state[int(state.side[1]), 1:2]
    for count in range(5):
        _, truth = gated_delta_rule_reference(*(t[:, :count] for t in x.tokens), initial_state=start)
        # Q1 keeps all four, Q2 the first column's
        assert (error(kept, truth) < 2e-6) is (count == accepted)
