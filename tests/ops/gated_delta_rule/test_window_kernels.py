"""The Triton kernel of the window step against the reference, its sensors, and the fires it has to survive."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from firetower.core.words import CLEAN
from firetower.ops.gated_delta_rule import WindowState, commit_window, new_window_state
from firetower.ops.gated_delta_rule.reference import gated_delta_rule_reference, window_reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from firetower.ops.gated_delta_rule import window_kernels  # noqa: E402

NAN = float("nan")
RTOL = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
"""Of outputs: fp32 sums of Dk products over 16 tokens; the others are half an ulp of the stored type."""
STATE_RTOL = 2e-6
"""Of states, fp32 whatever the inputs are."""


@triton.jit
def exp_kernel(p_x, p_y, num):
    for i in range(num):
        tl.store(p_y + i, window_kernels._exp(tl.load(p_x + i)))


class Case:
    """Rows with their slots; tokens come from one seed, so that every window of a request can be cut anew."""

    def __init__(self, device, *, rows=2, tokens=4, heads=(1, 2), dims=(16, 16), dtype=torch.float32, seed=0,
                 slots=None):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        (num_k_heads, num_v_heads), (head_k_dim, head_v_dim) = heads, dims

        def normal(*shape):
            return torch.randn(rows, tokens, *shape, generator=draw)

        self.q = normal(num_k_heads, head_k_dim).to(device, dtype)
        self.k = normal(num_k_heads, head_k_dim).to(device, dtype)
        self.v = normal(num_v_heads, head_v_dim).to(device, dtype)
        self.g = -normal(num_v_heads).abs().to(device)
        self.beta = torch.rand(rows, tokens, num_v_heads, generator=draw).to(device)
        slots = list(range(1, rows + 1)) if slots is None else slots
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        num_slots = rows + 2
        self.state = new_window_state(
            num_slots, num_k_heads, num_v_heads, head_k_dim, head_v_dim, dtype=dtype, device=device
        )
        self.state.side.copy_(torch.arange(num_slots) % 2)
        self.state.state.copy_(torch.randn(self.state.state.shape, generator=draw))
        poison_other_half(self.state)
        for name in ("pending_k", "pending_v", "pending_g", "pending_beta"):
            getattr(self.state, name).fill_(NAN)

    def tensors(self, begin=0, end=None):
        return tuple(x[:, begin:end] for x in (self.q, self.k, self.v, self.g, self.beta))


def poison_other_half(state: WindowState, value: float = NAN) -> None:
    """What a step writes and must not read."""
    slots = torch.arange(state.num_slots, device=state.side.device)
    for name in ("state", "pending_k", "pending_v", "pending_g", "pending_beta"):
        getattr(state, name)[1 - state.side.long(), slots] = value


def run(state, slots, tensors, accepted, *, fill=NAN, mark=None, state_mark=None, use_l2norm=True) -> Tensor:
    """One step by the kernel into outputs filled with ``fill``."""
    q, _, v = tensors[:3]
    out = torch.full(v.shape, fill, dtype=v.dtype, device=v.device)
    if isinstance(accepted, int):
        accepted = [accepted] * len(slots)
    # the interpreter computes in numpy, which warns where a device does not
    with np.errstate(all="ignore"):
        window_kernels.window(
            *tensors, state, state_slots=slots, use_l2norm=use_l2norm, scale=q.shape[-1] ** -0.5, out=out, mark=mark,
            num_accepted=torch.tensor(accepted, dtype=torch.int32, device=v.device), state_mark=state_mark,
        )  # fmt: skip
    return out


def written(state: WindowState, slots: Tensor) -> Tensor:
    """[N, Hv, Dk, Dv]: the states that the last step wrote; zeros for pads."""
    rows = slots.clamp_min(0).long()
    states = state.state[1 - state.side[rows].long(), rows]
    return torch.where((slots < 0)[:, None, None, None], 0.0, states)


def as_float64(state: WindowState) -> WindowState:
    names = ("state", "pending_k", "pending_v", "pending_g", "pending_beta")
    doubled = {name: getattr(state, name).double() for name in names}
    return WindowState(**doubled, num_pending=state.num_pending.clone(), side=state.side.clone())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


SHAPES = {
    "one_head": {"heads": (1, 1)},
    "grouped": {"heads": (2, 4), "tokens": 2},
    "two_blocks": {"dims": (16, 64), "tokens": 2},
    "odd_dims": {"dims": (24, 40), "tokens": 2},
    "single_token": {"tokens": 2, "rows": 1},
    "full_window": {"tokens": 16, "rows": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_two_windows_match_the_reference(device, kernel_dtypes, assert_close, shape):
    for dtype in kernel_dtypes:
        case = Case(device, dtype=dtype, **SHAPES[shape])
        half = case.q.shape[1] // 2
        accepted = [i % (half + 1) for i in range(1, len(case.slots) + 1)]
        truth = as_float64(case.state)
        for begin, accept in ((0, 0), (half, accepted)):
            tensors = case.tensors(begin, begin + half)
            out = run(case.state, case.slots, tensors, accept)
            counts = torch.tensor([accept] * len(case.slots) if isinstance(accept, int) else accept)
            expected = window_reference(
                *(x.double() for x in tensors), truth, state_slots=case.slots, num_accepted=counts
            )
            assert_close(f"out {shape} {dtype}", expected, out, RTOL[dtype])
            assert_close("state", written(truth, case.slots), written(case.state, case.slots), STATE_RTOL)
            for state in (case.state, truth):
                commit_window(state, case.slots)
        rows = case.slots.long()
        for name in ("pending_k", "pending_v", "pending_g", "pending_beta"):
            have, want = (getattr(s, name)[s.side[rows].long(), rows, :half] for s in (case.state, truth))
            assert_close(name, want, have, 1e-6)
        assert torch.equal(case.state.num_pending, truth.num_pending)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_chain_of_windows_is_the_recurrence_over_accepted_tokens(device, assert_close, seed):
    """Drafts at random, acceptance at random, burned steps at random and a pad beside it all."""
    choose = random.Random(seed)
    case = Case(device, rows=1, tokens=14, seed=seed, slots=[1], heads=(1, 1))
    slots = torch.tensor([-1, 1], dtype=torch.int32, device=device)
    initial = case.state.state[case.state.side[1].item(), 1][None].clone()
    done = accepted = 0
    outputs = []
    while done < 14:
        length = choose.randint(1, min(5, 14 - done))
        keep = choose.randint(1, length)
        real = case.tensors(done, done + length)
        drafts = [x.clone() for x in real]
        for x in drafts:
            x[:, keep:] = choose.choice([NAN, 3.0, 1e30])
        tensors = tuple(torch.cat([torch.full_like(x, NAN), x]) for x in drafts)
        for is_burned in (choose.random() < 0.4, False):
            out = run(case.state, slots, tensors, [3, accepted])
            assert bool((out[0] == 0).all())
            commit_window(case.state, slots, torch.tensor([False, is_burned], device=device))
            if not is_burned:
                break
        outputs.append(out[1:, :keep])
        done, accepted = done + keep, keep
    expected, _ = gated_delta_rule_reference(*(x.double() for x in case.tensors()), initial_state=initial.double())
    assert_close("chain", expected, torch.cat(outputs, dim=1), RTOL[torch.float32])


def test_a_burned_step_can_be_repeated_bit_for_bit(device):
    case = Case(device, tokens=6, heads=(1, 1))
    run(case.state, case.slots, case.tensors(0, 3), 0)
    commit_window(case.state, case.slots)
    before = copy.deepcopy(case.state)
    burned = [x.clone() for x in case.tensors(3, 6)]
    burned[1][0, 1, 0, 2] = NAN
    assert run(case.state, case.slots, burned, 2).isnan().any()
    poison_other_half(case.state)
    again = run(case.state, case.slots, case.tensors(3, 6), 2)
    states = written(case.state, case.slots)
    assert same_bits((again, run(before, case.slots, case.tensors(3, 6), 2)), (states, written(before, case.slots)))
    assert again.isfinite().all()
    rows = case.slots.long()
    clean = case.state.side[rows].long()
    for name in ("state", "pending_k", "pending_v", "pending_g", "pending_beta"):
        now, then = (getattr(s, name)[clean, rows] for s in (case.state, before))
        assert same_bits((now, then)), name


@pytest.mark.parametrize("cut", [(1,) * 9, (3, 3, 3), (8, 1), (1, 5, 3)], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_windows(device, cut):
    one, other = (Case(device, rows=1, tokens=9, heads=(1, 1)) for _ in range(2))
    expected = chain(one, (4, 5))
    assert same_bits(*zip(expected, chain(other, cut), strict=True))


def chain(case: Case, cut: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Outputs of windows of these lengths, all accepted, and the state with all but the last token."""
    done = before = 0
    outputs = []
    for length in cut:
        outputs.append(run(case.state, case.slots, case.tensors(done, done + length), before))
        commit_window(case.state, case.slots)
        done, before = done + length, length
    run(case.state, case.slots, case.tensors(0, 1), before)
    return torch.cat(outputs, dim=1), written(case.state, case.slots)


def test_bits_of_a_row_do_not_depend_on_the_others(device):
    case = Case(device, rows=3, tokens=6, heads=(1, 1))
    alone = copy.deepcopy(case.state)
    outputs = []
    for begin, accept in ((0, [0, 0, 0]), (3, [3, 0, 2])):
        out = run(case.state, case.slots, case.tensors(begin, begin + 3), accept)
        commit_window(case.state, case.slots)
        outputs.append(out)
    for n in range(3):
        slot = case.slots[n : n + 1]
        for i, (begin, accept) in enumerate(((0, [0, 0, 0]), (3, [3, 0, 2]))):
            tensors = tuple(x[n : n + 1] for x in case.tensors(begin, begin + 3))
            assert same_bits((run(alone, slot, tensors, accept[n : n + 1])[0], outputs[i][n]))
            commit_window(alone, slot)
    rows = case.slots.long()
    assert same_bits((alone.state[:, rows], case.state.state[:, rows]))


@pytest.mark.parametrize("fill", [NAN, 1e30])
def test_nothing_unwritten_is_read_and_everything_is_written(device, fill):
    """Outputs, the half that is not clean and what lies beyond the pending tokens, filled with anything (C1, J1)."""
    case, plain = (Case(device, rows=1, tokens=5, dims=(16, 40), heads=(1, 1)) for _ in range(2))
    first = run(plain.state, plain.slots, plain.tensors(0, 3), 0)
    poison_other_half(case.state, fill)
    assert same_bits((first, run(case.state, case.slots, case.tensors(0, 3), 0, fill=fill)))
    for x in (case, plain):
        commit_window(x.state, x.slots)
    rows = case.slots.long()
    for name in ("pending_k", "pending_v", "pending_g", "pending_beta"):
        getattr(case.state, name)[case.state.side[rows].long(), rows, 3:] = fill
    poison_other_half(case.state, fill)
    # more than are pending counts as all
    second = run(plain.state, plain.slots, plain.tensors(3, 5), 3)
    assert same_bits((second, run(case.state, case.slots, case.tensors(3, 5), 7, fill=fill)))
    assert same_bits((written(plain.state, plain.slots), written(case.state, case.slots)))


def test_repeats_have_the_same_bits(device):
    case = Case(device, rows=1, tokens=8, dims=(16, 64), heads=(1, 1))
    run(case.state, case.slots, case.tensors(0, 4), 0)
    commit_window(case.state, case.slots)
    first, state = run(case.state, case.slots, case.tensors(4, 8), 3), written(case.state, case.slots)
    for _ in range(50 if device == "cuda" else 2):
        poison_other_half(case.state)
        again = run(case.state, case.slots, case.tensors(4, 8), 3)
        assert same_bits((first, again), (state, written(case.state, case.slots)))


def test_views_of_one_projection_are_read_in_place(device):
    case = Case(device, tokens=3, heads=(1, 2))
    joined = torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], dim=-1)
    q, k, v = joined.split([16, 16, 32], dim=-1)
    views = (q.unflatten(-1, (1, 16)), k.unflatten(-1, (1, 16)), v.unflatten(-1, (2, 16)), case.g, case.beta)
    assert window_kernels._with_whole_tokens(views[2]) is views[2]
    expected = run(copy.deepcopy(case.state), case.slots, case.tensors(), 0)
    assert same_bits((expected, run(case.state, case.slots, views, 0)))
    headwise = case.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bits((expected, run(case.state, case.slots, (*views[:2], headwise, case.g, case.beta), 0)))


def test_without_norm_and_with_keys_of_any_size(device, assert_close):
    case = Case(device, tokens=2, heads=(1, 1))
    truth = as_float64(case.state)
    expected = window_reference(
        *(x.double() for x in case.tensors()), truth, state_slots=case.slots, num_accepted=[0, 0], use_l2norm=False
    )
    assert_close("no norm", expected, run(case.state, case.slots, case.tensors(), 0, use_l2norm=False), 2e-6)
    for size in (3e37, 1e19, 1e-4, 1e-30, 0.0):
        tensors = (case.q * size, case.k * size, *case.tensors()[2:])
        expected = window_reference(*(x.double() for x in tensors), truth, state_slots=case.slots, num_accepted=[0, 0])
        assert_close(f"norm of {size}", expected, run(case.state, case.slots, tensors, 0), 2e-6)


def test_exponentials_are_right_to_an_ulp(device):
    usual = torch.cat([-torch.logspace(-9, math.log10(103), 40), torch.linspace(-1, 0, 9), torch.tensor([5.0, 88.0])])
    x = torch.cat([usual, torch.tensor([-math.inf, -3e38, 200.0, NAN])]).to(device)
    y = torch.empty_like(x)
    with np.errstate(all="ignore"):
        exp_kernel[(1,)](x, y, len(x))
    truth = x.double().exp()[:-4]
    ulp = torch.nextafter(truth.float(), torch.full_like(x[:-4], math.inf)).double() - truth.float().double()
    assert bool(((y[:-4].double() - truth).abs() <= ulp).all())
    assert y[-4:].tolist()[:3] == [0.0, 0.0, math.inf]
    assert math.isnan(y[-1].item())


GATES = {
    "reset": [-0.1, -math.inf, -0.1],
    "all_reset": [-math.inf] * 3,
    "lowest": [-3e38] * 3,
    "reset_then_small": [-1e4, -0.01, -0.01],
    "past_clamps": [-0.32, -5.0, -21.0],
    "none": [0.0] * 3,
}


@pytest.mark.parametrize("gates", GATES)
def test_every_gate_is_exact_as_pending_and_as_new(device, assert_close, gates):
    case = Case(device, rows=1, tokens=6, heads=(1, 1))
    case.g[:] = torch.tensor(GATES[gates] * 2, device=device)[None, :, None]
    case.beta[0, :5] = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.0], device=device)[:, None]
    truth = as_float64(case.state)
    for begin, accept in ((0, 0), (3, 3)):
        tensors = case.tensors(begin, begin + 3)
        out = run(case.state, case.slots, tensors, accept)
        expected = window_reference(
            *(x.double() for x in tensors), truth, state_slots=case.slots, num_accepted=[accept]
        )
        assert_close("out", expected, out, 2e-6)
        assert_close("state", written(truth, case.slots), written(case.state, case.slots), STATE_RTOL)
        for state in (case.state, truth):
            commit_window(state, case.slots)


def test_a_reset_in_the_window_starts_anew(device, assert_close):
    case = Case(device, rows=1, tokens=6, heads=(1, 1))
    case.g[:, 3] = -math.inf
    out = run(case.state, case.slots, case.tensors(), 0)
    expected, _ = gated_delta_rule_reference(*(x.double() for x in case.tensors(3)))
    assert_close("after the reset", expected, out[:, 3:], 2e-7)


def test_pads_write_zero_rows_and_nothing_else(device):
    case = Case(device, rows=3, tokens=2, slots=[-1, 2, -7], heads=(1, 1))
    before = copy.deepcopy(case.state)
    case.q[0], case.v[2], case.g[0] = NAN, math.inf, NAN
    out = run(case.state, case.slots, case.tensors(), [8, 0, -3])
    assert bool((out[[0, 2]] == 0).all())
    assert out[1].isfinite().all()
    for name in ("state", "pending_k", "pending_v", "pending_g", "pending_beta", "num_pending", "side"):
        now, then = getattr(case.state, name), getattr(before, name)
        at = [0, 1, 3, 4] if name == "side" else (slice(None), [0, 1, 3, 4])
        assert same_bits((now[at], then[at])), name
    assert case.state.num_pending[1 - case.state.side[2], 2] == 2


def panel_mark(device, row_ids, slot) -> Mark:
    ids = None if row_ids is None else torch.tensor(row_ids, dtype=torch.int32, device=device)
    return Mark(panel=new_panel(3, 3, device), slot=slot, num_signals=3, num_rows=3, row_ids=ids)


ROW_IDS = (([0, 0, 2, 2], [0, 2]), ([-1, 0, 1, -1], [-1, 1]), (None, None))
"""Row words of the outputs and of the states: a request each, some of them pads, none."""

PLANTED = {
    "clean": [],
    "value": [("v", (0, 1, 0, 3))],
    "keys_of_two_rows": [("k", (1, 1, 0, 5)), ("k", (0, 0, 0, 1))],
    "query": [("q", (1, 1, 0, 0))],
    "gate_and_value": [("g", (0, 0, 1)), ("v", (1, 0, 1, 15))],
    "state": [("state", (0, 1, 7, 9)), ("state", (1, 0, 15, 0))],
    "state_alone": [("state", (1, 1, 13, 2)), ("state", (1, 1, 15, 3))],
    "accepted_value": [("pending_v", (1, 0, 0, 2))],
    "rejected_value": [("pending_v", (1, 1, 0, 2))],
}


@pytest.mark.parametrize(
    ("planted", "value"),
    [*((name, NAN) for name in PLANTED), ("value", math.inf), ("state", -math.inf), ("keys_of_two_rows", math.inf)],
)
def test_words_are_those_of_mark_rows_and_marking_changes_no_bit(device, planted, value):
    case = Case(device, tokens=4)
    run(case.state, case.slots, case.tensors(0, 2), 0)
    commit_window(case.state, case.slots)
    for name, where in PLANTED[planted]:
        plant(case, name, where, value)
    # a token that is applied spreads a NaN over its column
    accepted = 0 if planted == "state_alone" else 1
    off_state = copy.deepcopy(case.state)
    off = run(off_state, case.slots, case.tensors(2), accepted)
    for out_ids, state_ids in ROW_IDS if value != value else ROW_IDS[:1]:
        mark, state_mark = panel_mark(device, out_ids, slot=1), panel_mark(device, state_ids, slot=2)
        on = run(case.state, case.slots, case.tensors(2), accepted, mark=mark, state_mark=state_mark)
        states = written(case.state, case.slots)
        assert same_bits((on, off), (states, written(off_state, case.slots)))
        expected, expected_state = panel_mark(device, out_ids, slot=1), panel_mark(device, state_ids, slot=2)
        mark_rows(on.flatten(0, 1).flatten(1), expected)
        mark_rows(states.flatten(1), expected_state)
        assert torch.equal(mark.panel, expected.panel)
        assert torch.equal(state_mark.panel, expected_state.panel)
    assert (off.isfinite().all()) == (planted in ("clean", "rejected_value"))


def plant(case: Case, name: str, where: tuple[int, ...], value: float) -> None:
    """A value in a row's window (token counted from its begin), its clean state, or its pending tokens."""
    row, *rest = where
    if hasattr(case, name) and name != "state":
        rest[0] += 2
        getattr(case, name)[(row, *rest)] = value
        return
    slot = case.slots[row].item()
    getattr(case.state, name)[(case.state.side[slot].item(), slot, *rest)] = value


def test_overflow_of_the_stored_type_is_marked_as_stored(device):
    case = Case(device, rows=1, tokens=1, dtype=torch.float16, heads=(1, 1))
    case.state.state.mul_(1e7)
    mark, state_mark = panel_mark(device, [1], slot=0), panel_mark(device, [1], slot=1)
    out = run(case.state, case.slots, case.tensors(), 0, mark=mark, state_mark=state_mark)
    assert out.isinf().any()
    expected = panel_mark(device, [1], slot=0)
    mark_rows(out.flatten(0, 1).flatten(1), expected)
    assert torch.equal(mark.panel, expected.panel)
    assert state_mark.panel[1].item() == CLEAN


def test_a_nan_stays_in_its_row_its_heads_and_its_column(device):
    case = Case(device, rows=2, tokens=3, heads=(2, 4))
    clean = run(copy.deepcopy(case.state), case.slots, case.tensors(), 0)
    case.k[0, 1, 1, 4] = NAN
    case.v[1, 1, 2, 7] = NAN
    case.q[1, 0, 0, 3] = NAN
    out = run(case.state, case.slots, case.tensors(), 0)
    expected = torch.zeros(out.shape, dtype=torch.bool, device=device)
    expected[0, 1:, 2:] = True
    expected[1, 1:, 2, 7] = True
    expected[1, 0, :2] = True
    assert torch.equal(out.isnan(), expected)
    assert same_bits((out[~expected], clean[~expected]))


class TestDrills:
    """Fires of this op's family: caught by its own sensor, or impossible where the faulty form burns."""

    def test_i1_exp_before_mask(self, device, assert_close):
        """No pairwise decay is ever formed, so that none can overflow above a diagonal."""
        case = Case(device, rows=1, tokens=8, heads=(1, 1))
        case.g[:] = -torch.rand(case.g.shape, generator=torch.Generator().manual_seed(1)).to(device) * 60
        sums = case.g[0, :, 0].cumsum(0)
        faulty = (sums[:, None] - sums[None, :]).exp() * torch.ones(8, 8, device=device).tril()
        assert faulty.isnan().any()
        truth = as_float64(case.state)
        expected = window_reference(
            *(x.double() for x in case.tensors()), truth, state_slots=case.slots, num_accepted=[0]
        )
        assert_close("I1", expected, run(case.state, case.slots, case.tensors(), 0), RTOL[torch.float32])

    @pytest.mark.parametrize("seed", [0, 1])
    def test_i2_gate_of_inf_times_zero(self, device, seed):
        choose = random.Random(seed)
        case = Case(device, rows=3, tokens=2, seed=seed)
        row, token, head = choose.randrange(3), choose.randrange(2), choose.randrange(2)
        a_log, x = torch.tensor(choose.uniform(89, 120)), torch.tensor(choose.uniform(-200, -120))
        case.g[row, token, head] = -a_log.exp() * torch.nn.functional.softplus(x)
        mark = panel_mark(device, [0, 0, 1, 1, 2, 2], slot=0)
        run(case.state, case.slots, case.tensors(), 0, mark=mark)
        width = case.v[0, 0].numel()
        assert mark.panel[0].item() >> 32 == (row * 2 + token) * width + head * 16
        assert [r for r in range(3) if mark.panel[6 + r].item() != mark.panel[6 + (row + 1) % 3].item()] == [row]

    def test_i3_keys_without_norm_blow_up_and_are_marked(self, device):
        case = Case(device, rows=1, tokens=48, heads=(1, 1))
        case.k[:], case.g[:], case.beta[:] = 3.4, 0.0, 1.0
        state_mark, burned_at = None, None
        for i in range(6):
            state_mark = panel_mark(device, [0], slot=0)
            tensors = case.tensors(8 * i, 8 * i + 8)
            run(case.state, case.slots, tensors, 8 * (i > 0), state_mark=state_mark, use_l2norm=False)
            if state_mark.panel[0].item() != CLEAN:
                burned_at = i
                break
            commit_window(case.state, case.slots)
        assert burned_at is not None
        assert not written(case.state, case.slots).isfinite().all()

    def test_i5_slow_decay_is_kept(self, device):
        case = Case(device, rows=1, tokens=8, heads=(1, 1))
        case.g[:], case.beta[:] = -1e-3, 0.0
        before = case.state.state[case.state.side[1].item(), 1].clone()
        faulty = before.bfloat16()
        for i in range(9):
            run(case.state, case.slots, case.tensors(), 8 * (i > 0))
            commit_window(case.state, case.slots)
        ratio = case.state.state[case.state.side[1].item(), 1].norm() / before.norm()
        assert abs(ratio.item() - math.exp(-0.064)) < 1e-6
        for _ in range(64):
            faulty = faulty * torch.tensor(-1e-3, device=device).exp().bfloat16()
        assert torch.equal(faulty, before.bfloat16())

    @pytest.mark.parametrize("name", ["pending_g", "pending_k", "state"])
    def test_j1_stale_half(self, device, name):
        """What the other half holds is never read; a step that does read it is far off."""
        case = Case(device, rows=1, tokens=4, heads=(1, 1))
        run(case.state, case.slots, case.tensors(0, 2), 0)
        commit_window(case.state, case.slots)
        expected = run(copy.deepcopy(case.state), case.slots, case.tensors(2), 2)
        side = case.state.side[1].item()
        stale = copy.deepcopy(case.state)
        getattr(case.state, name)[1 - side, 1] = 5.0
        assert same_bits((expected, run(case.state, case.slots, case.tensors(2), 2)))
        getattr(stale, name)[side, 1] = 5.0
        faulty = run(stale, case.slots, case.tensors(2), 2)
        assert (faulty - expected).norm() > 0.05 * expected.norm()

    def test_f2_and_q1_rejected_and_pad_tokens_stay_out_of_the_state(self, device):
        case = Case(device, rows=1, tokens=5, heads=(1, 1))
        case.g[:, 2:4], case.beta[:, 2:4] = 0.0, 0.5
        run(case.state, case.slots, case.tensors(0, 4), 0)
        commit_window(case.state, case.slots)
        states = {}
        for accepted in (2, 4):
            run(case.state, case.slots, case.tensors(4), accepted)
            states[accepted] = written(case.state, case.slots)
        short = Case(device, rows=1, tokens=5, heads=(1, 1))
        run(short.state, short.slots, short.tensors(0, 2), 0)
        commit_window(short.state, short.slots)
        run(short.state, short.slots, short.tensors(4), 2)
        assert same_bits((states[2], written(short.state, short.slots)))
        assert (states[4] - states[2]).norm() > 0.1 * states[2].norm()

    def test_f4_rows_take_the_state_of_their_own_slot(self, device):
        case = Case(device, rows=3, tokens=2, slots=[3, 1, 4], heads=(1, 1))
        expected = run(copy.deepcopy(case.state), case.slots, case.tensors(), 0)
        order = [2, 0, 1]
        moved = run(copy.deepcopy(case.state), case.slots[order], tuple(x[order] for x in case.tensors()), 0)
        assert same_bits((moved, expected[order]))
        swapped = run(case.state, case.slots[order], case.tensors(), 0)
        assert ((swapped - expected).flatten(1).norm(dim=1) > 0.1 * expected.flatten(1).norm(dim=1)).all()


@pytest.mark.gpu
def test_a_step_is_captured_in_a_graph():
    case = Case("cuda", rows=2, tokens=3, dims=(128, 128), dtype=torch.bfloat16)
    accepted = torch.zeros(2, dtype=torch.int32, device="cuda")
    out = torch.empty_like(case.v)

    def step():
        window_kernels.window(
            *case.tensors(), case.state, state_slots=case.slots, num_accepted=accepted, use_l2norm=True, scale=0.1,
            out=out, mark=None, state_mark=None,
        )  # fmt: skip

    step()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.fill_(NAN)
    graph.replay()
    assert same_bits((out, expected))
