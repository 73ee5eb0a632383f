"""Faults of the case list that concern attention and its pages, in random variants: the faulty form shows the fault,
the op cannot have it or its own sensor names it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.ops.attention import cases, new_kv, reference, torch_path
from firetower.ops.attention.cases import Shape, make_window
from firetower.sensors.marks import Mark, new_panel

kernels = pytest.importorskip("firetower.ops.attention.kernels")
write_kernels = pytest.importorskip("firetower.ops.attention.write_kernels")

NAN, INF = float("nan"), float("inf")
WRITE = {"torch": torch_path.write_kv, "triton": write_kernels.write_kv}
SEEDS = [0, 1, 2]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaNs in the interpreter


def variant(seed, low, high):
    """A random integer of a seed."""
    return int(torch.randint(low, high, (1,), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("seed", SEEDS)
def test_c1_stale_values_behind_a_mask(run, seed, device):
    """A page of which some slots are written and one other holds NaN. Masking scores with -1e30 gives it a weight of
    exactly 0, and 0 * NaN burns the row. Refuter: two fillings of the unread slots."""
    written = variant(seed, 1, 15)
    results = []
    for garbage in (NAN, INF, -3.0):
        w = make_window(Shape(num_sequences=1, width=1, head_dim=8), [written], torch.float32, device, seed=seed)
        page = int(w.block_table[0, 0])
        w.kv.value[page, written:] = 0.0
        w.kv.value[page, variant(seed + 9, written, 16)] = garbage
        results.append(run(w))
        scores = (w.kv.key[page, :, 0].nan_to_num() @ w.query[0, 0, 0]).masked_fill(
            torch.arange(16, device=device) >= written, -1e30
        )
        weights = scores.softmax(0)
        assert (weights[written:] == 0).all()
        assert (weights @ w.kv.value[page, :, 0]).isnan().all() == (abs(garbage) != 3.0)
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def faulty_merge(tops, totals, accs):
    """A merge that trusts every split to hold something."""
    best = max(tops)
    factors = [torch.tensor(t - best).exp() for t in tops]
    total = sum(f * s for f, s in zip(factors, totals, strict=True))
    return sum(f * a for f, a in zip(factors, accs, strict=True)) / total


@pytest.mark.parametrize("seed", SEEDS)
def test_g2_merging_an_empty_split(seed, small_plan, device):
    """A window whose first token stops where a split ends: the next split holds nothing for it, and for a sequence of
    length 0 every split is empty. An accumulator left unwritten, or -Inf minus -Inf, would make both NaN."""
    acc = torch.randn(8, generator=torch.Generator().manual_seed(seed))
    assert faulty_merge([1.5, -INF], [2.0, 0.0], [acc, torch.full((8,), NAN)]).isnan().all()
    assert faulty_merge([-INF, -INF], [0.0, 0.0], [acc * 0, acc * 0]).isnan().all()

    edge, size, programs = [(32, 32, 16), (64, 64, 4), (128, 64, 4)][seed]
    w = make_window(Shape(width=2), [edge + 1, 0], torch.float32, device, seed=seed)
    plan = small_plan(w.query, programs=programs)
    limit = edge + 64
    parts = kernels.new_workspace(w.query, 2, limit, plan)
    for x in (parts.acc, parts.top, parts.total):
        x.fill_(NAN)
    out = torch.full_like(w.query, NAN)
    kernels.window(
        w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, limit, out, None, workspace=parts,
        plan=plan,
    )  # fmt: skip
    part = edge // size
    assert plan.splits.shares(edge + 1, plan.num_programs(4, 4, 16, limit))[1] == size
    # rows 0 and 1 of each head group are the first token's
    assert (parts.top[0, :, :2, part] == -INF).all()
    assert (parts.total[0, :, :2, part] == 0).all()
    assert (parts.acc[0, :, part, :2] == 0).all()
    assert parts.top[0, :, 2:, part].isfinite().all()
    expected = reference.window(
        w.query, w.kv, w.block_table, w.seq_lens, scale=w.scale, slot_mapping=w.slot_mapping, gate=w.gate
    )
    assert torch.allclose(out.double(), expected, atol=1e-6)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_g4_scores_past_the_end_set_the_maximum(run, seed, device):
    """Real scores near -300, zeros past the end: with the zeros in the row's maximum every real weight underflows."""
    length = variant(seed, 2, 14)
    w = make_window(Shape(num_sequences=1, width=1, num_heads=2), [length], torch.float32, device, seed=seed)
    w.query.fill_(1.0)
    page = int(w.block_table[0, 0])
    w.kv.key[page, :length] = -300.0 / w.scale / 16
    w.kv.key[page, length:] = 0.0
    scores = w.kv.key[page, :, 0].sum(-1) * w.scale
    assert (scores - scores.max())[:length].exp().sum() == 0
    expected = reference.window(w.query, w.kv, w.block_table, w.seq_lens, scale=w.scale, gate=w.gate)
    assert torch.allclose(run(w).double(), expected, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_h1_a_row_of_nothing_is_zero_and_one_of_zero_weights_is_not(run, seed, device):
    """0/0 where all weights vanish: finite for a row that sees no key, visible for one whose keys gave no weight."""
    w = make_window(Shape(num_sequences=2, width=1, num_heads=2), [5, 0], torch.float32, device, seed=seed)
    w.query.abs_()
    w.kv.key[w.block_table[0, 0].long()] = -INF
    got = run(w)
    assert got[0].isnan().all()
    assert (got[1] == 0).all()


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("loud", [3e7, INF], ids=str)
def test_b3_a_scale_that_overflows_in_the_cache(backend, seed, loud, device):
    """int8 pages with float16 scales, one loud token: a scale cast without care is Inf, and burns every query from that
    position on. Ours saturates; where the token itself is not finite the sensor names its position and head."""
    position = variant(seed, 3, 10)
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(12, 2, 64, generator=g).to(device) for _ in range(2))
    key[position, 1] = torch.randn(64, generator=g).to(device) * (loud if loud == 3e7 else 1.0)
    if loud != 3e7:
        key[position, 1, 5] = loud
    kv = new_kv(1, 12, 2, 64, torch.int8, device, torch.float16)
    panel = new_panel(1, 12, device)
    ids = torch.arange(12, dtype=torch.int32, device=device)
    mark = Mark(panel=panel, slot=0, num_signals=1, num_rows=12, row_ids=ids)
    WRITE[backend](key, value, kv, torch.arange(12, device=device), mark)

    faulty = (key[position, 1].abs().amax() / 127).half()
    assert not faulty.isfinite()
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    seen = []
    for length in range(1, 13):
        keys, values = reference.read(kv, table[0], length)
        seen.append(reference.attend(key[0, 1:2].double(), keys[:, 1:], values[:, 1:], 1e-9).isfinite().all().item())
    if loud == 3e7:
        assert all(seen)
        assert (panel[2:14] > 2**62).all()  # no row is burned
    else:
        assert seen == [length <= position for length in range(1, 13)]
        # the row word of the token; row, head 1 of [keys | values]
        assert int(panel[0]) >> 32 == position * 4 + 1
        assert [i for i in range(12) if int(panel[2 + i]) < 2**62] == [position]


@pytest.mark.parametrize("seed", SEEDS)
def test_b4_a_scale_from_warm_up(backend, seed, device):
    """FP8 with one scale taken from quiet data: 64 of 64 elements saturate, no NaN tells of it. A scale for each token
    and head comes from the data it stands for."""
    g = torch.Generator().manual_seed(seed)
    warm = torch.randn(64, generator=g) * 0.05
    real = (torch.randn(1, 1, 64, generator=g) * 3).to(device)
    scale = warm.abs().amax().item() / 448
    static = (real / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert (static.abs() >= warm.abs().amax().item() * 0.999).float().mean() > 0.9
    assert (static - real).norm() / real.norm() > 0.9
    kv = new_kv(1, 1, 1, 64, torch.float8_e4m3fn, device)
    WRITE[backend](real, real, kv, torch.zeros(1, dtype=torch.int64, device=device), None)
    ours, _ = reference.read(kv, torch.zeros(1, dtype=torch.int64, device=device), 1)
    assert (ours - real.double()).norm() / real.norm() < cases.QUANTISED_RTOL[torch.float8_e4m3fn]


@pytest.mark.parametrize("seed", SEEDS)
def test_b1_there_is_no_sum_to_overflow(backend, seed, device):
    """32 values of 2100: their sum, 67,200, leaves float16. Pages hold a scale and no sum."""
    x = torch.full((1, 1, 32), 2100.0 + seed, device=device)
    assert x.sum().half().isinf()
    kv = new_kv(1, 1, 1, 32, torch.int8, device, torch.float16)
    WRITE[backend](x, x, kv, torch.zeros(1, dtype=torch.int64, device=device), None)
    got, _ = reference.read(kv, torch.zeros(1, dtype=torch.int64, device=device), 1)
    assert torch.allclose(got, x.double(), rtol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_f2_pads_stay_out_of_the_cache(backend, seed, device):
    """A slot clamped to 0 in place of -1, the faulty form, would overwrite another request's first token."""
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(6, 2, 8, generator=g).to(device) for _ in range(2))
    slots = torch.tensor([5, 3, 6, 1, 7, 2], device=device)
    slots[torch.randperm(6, generator=g)[:3].to(device)] = -1
    kv = new_kv(2, 4, 2, 8, torch.float32, device)
    cases.fill(kv, 4.0)
    WRITE[backend](key, value, kv, slots, None)
    stored = kv.key.view(8, 2, 8)
    for slot in range(8):
        row = (slots == slot).nonzero()
        expected = key[row[0, 0]] if len(row) else torch.full_like(key[0], 4.0)
        assert torch.equal(stored[slot], expected)
    clamped = dataclasses.replace(kv, key=kv.key.clone(), value=kv.value.clone())
    WRITE[backend](key, value, clamped, slots.clamp_min(0), None)
    assert not torch.equal(clamped.key.view(8, 2, 8)[0], stored[0])
