"""Window decode: both backends against the reference, equal bits of a row in every company, NaN where it belongs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.attention import cases, new_kv, reference, window
from firetower.ops.attention.cases import Shape, make_window
from firetower.ops.registry import REGISTRY
from firetower.sensors.marks import Mark, mark_rows, new_panel

kernels = pytest.importorskip("firetower.ops.attention.kernels")

NAN, INF = float("nan"), float("inf")
LENGTHS = (70, 3)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaNs in the interpreter


@pytest.fixture(params=["torch", "triton", "flat"])
def backend(request):
    """Of `run`."""
    return request.param


def truth(w):
    return reference.window(
        w.query, w.kv, w.block_table, w.seq_lens, scale=w.scale, slot_mapping=w.slot_mapping, gate=w.gate
    )


def only(w, n, tokens):
    """The window of one sequence, of some of its tokens, as if they were all it has."""
    part = slice(n, n + 1)
    last = w.query.shape[1] - 1 - tokens[-1]
    return dataclasses.replace(
        w,
        query=w.query[part, tokens],
        gate=None if w.gate is None else w.gate[part, tokens],
        slot_mapping=None if w.slot_mapping is None else w.slot_mapping[part, tokens].contiguous(),
        seq_lens=w.seq_lens[part] - last,
        block_table=w.block_table[part],
    )


def assert_same(a, b, backend, device):
    """Equal bits. Nearly, in the interpreter, where the bits of NumPy's product depend on a row's place in the tile,
    and of the plain path on CUDA, whose library picks a product by the shape."""
    if (backend == "torch") == (device == "cpu"):
        assert torch.equal(a, b)
    else:
        assert torch.allclose(a, b, rtol=1e-3 if a.itemsize == 2 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=lambda s: f"w{s.width}-h{s.num_heads}-d{s.head_dim}")
@pytest.mark.parametrize("length", [1, 2, 33, 64, 130])
def test_matches_the_reference(run, backend, shape, length, device, kernel_dtypes, assert_close):
    lengths = [length, max(1, length // 2)][: shape.num_sequences]
    dtypes = (*kernel_dtypes, torch.bfloat16)
    if backend != "torch":
        # the interpreter takes 5 ms a program
        dtypes = kernel_dtypes if device == "cuda" else kernel_dtypes[length % 2 :][:1]
    for dtype in dtypes:
        w = make_window(shape, lengths, dtype, device)
        assert_close(f"{dtype}", truth(w), run(w), cases.RTOL[dtype])


def test_every_page_size(run, device, assert_close):
    """A tile within one page, and one that spans several."""
    for page_size in (1, 32, 48):
        w = make_window(Shape(page_size=page_size), LENGTHS, torch.float32, device)
        assert_close(f"pages of {page_size}", truth(w), run(w), cases.RTOL[torch.float32])


@pytest.mark.parametrize("length", [1000, 4097])
def test_long_sequences(length, assert_close):
    w = make_window(Shape(num_sequences=1, width=2), [length], torch.float32, "cpu")
    got = window(
        w.query, w.kv, w.block_table, w.seq_lens, slot_mapping=w.slot_mapping, gate=w.gate, scale=w.scale
    )
    assert_close("long", truth(w), got, cases.RTOL[torch.float32])


def test_float64_stays_float64(assert_close):
    w = make_window(Shape(), LENGTHS, torch.float64, "cpu")
    got = window(w.query, w.kv, w.block_table, w.seq_lens, slot_mapping=w.slot_mapping, gate=w.gate)
    assert_close("float64", truth(w), got, cases.RTOL[torch.float64])


@pytest.mark.parametrize(
    ("kv_dtype", "scale_dtype"),
    [(torch.int8, torch.float16), (torch.float8_e4m3fn, torch.float32)],
    ids=["int8-scale16", "e4m3-scale32"],
)
def test_quantised_pages(run, kv_dtype, scale_dtype, device, kernel_dtypes, assert_close):
    for dtype in kernel_dtypes:
        w = make_window(Shape(), LENGTHS, dtype, device, kv_dtype=kv_dtype, scale_dtype=scale_dtype)
        assert_close(f"{dtype} {kv_dtype}", truth(w), run(w), cases.RTOL[dtype])


def test_pages_interleaved_in_one_pool(run, device):
    """Views of [pages, page_size, 2, Hkv, D] give the bits of separate pools."""
    w = make_window(Shape(), LENGTHS, torch.float32, device)
    pool = torch.stack([w.kv.key, w.kv.value], 2)
    views = dataclasses.replace(w.kv, key=pool[:, :, 0], value=pool[:, :, 1])
    assert torch.equal(run(dataclasses.replace(w, kv=views)), run(w))


def test_strided_query_and_gate(run, device):
    """Query and gate as views of one projection, as the gated attention of hybrid models has them."""
    w = make_window(Shape(), LENGTHS, torch.float32, device)
    both = torch.cat([w.query, w.gate], -1)
    query, gate = both.chunk(2, -1)
    assert torch.equal(run(dataclasses.replace(w, query=query, gate=gate)), run(w))


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_rows_bits_depend_on_nothing_else(run, backend, width, device, kernel_dtypes):
    """Alone, in any batch, in windows of every length, behind a wider block table: equal bits."""
    for dtype in kernel_dtypes if device == "cuda" else kernel_dtypes[-1:]:
        w = make_window(Shape(num_sequences=2, width=width, num_heads=2, num_kv_heads=1), [97, 66], dtype, device)
        whole = run(w)
        for n in range(2):
            assert torch.equal(run(only(w, n, list(range(width)))), whole[n : n + 1])
            for token in {0, width - 1}:
                assert_same(run(only(w, n, [token])), whole[n : n + 1, token : token + 1], backend, device)
        order = [1, 0]
        shuffled = dataclasses.replace(
            w, query=w.query[order], gate=w.gate[order], slot_mapping=w.slot_mapping[order],
            seq_lens=w.seq_lens[order], block_table=w.block_table[order],
        )  # fmt: skip
        assert torch.equal(run(shuffled), whole[order])
        wide = torch.full((2, 20), 2**30, dtype=torch.int32, device=device)
        wide[:, : w.block_table.shape[1]] = w.block_table
        assert torch.equal(run(dataclasses.replace(w, block_table=wide)), whole)
        assert torch.equal(run(w, limit=97), whole)


@pytest.mark.parametrize("backend", ["torch", *(pytest.param(x, marks=pytest.mark.slow) for x in ("triton", "flat"))])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=2),
    width=st.integers(1, 8),
    page_size=st.sampled_from([3, 16, 32]),
    seed=st.integers(0, 999),
)
def test_any_lengths(run, backend, lengths, width, page_size, seed):
    shape = Shape(num_sequences=len(lengths), width=width, num_heads=2, page_size=page_size, head_dim=8)
    w = make_window(shape, lengths, torch.float32, "cpu", seed=seed)
    got, expected = run(w), truth(w)
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5)
    n, token = seed % len(lengths), seed % width
    assert_same(run(only(w, n, [token])), got[n : n + 1, token : token + 1], backend, "cpu")


def test_pads_and_empty_sequences_are_zero(run, device):
    """Pads at the end, at the start and between real tokens; NaN queries and gates of pads stay out (case F2)."""
    w = make_window(Shape(width=4, num_heads=2, num_kv_heads=1), (70, 33), torch.float32, device)
    whole = run(w)
    w.slot_mapping[0, 3] = w.slot_mapping[1, 1] = -1
    w.seq_lens[0] -= 1
    w.query[0, 3], w.gate[1, 1] = NAN, NAN
    got = run(w)
    assert (got[0, 3] == 0).all()
    assert (got[1, 1] == 0).all()
    assert torch.equal(got[0, :3], whole[0, :3])
    assert torch.equal(got[1, 2:], whole[1, 2:])
    w.seq_lens[1] = 0
    assert (run(w)[1] == 0).all()
    assert torch.equal(run(dataclasses.replace(w, slot_mapping=None))[1], torch.zeros_like(got[1]))


@pytest.mark.parametrize("what", ["query", "gate"])
def test_a_bad_query_or_gate_burns_its_own_place(run, what, device):
    w = make_window(Shape(), LENGTHS, torch.float32, device)
    clean = run(w)
    getattr(w, what)[0, 1, 2, 5] = NAN
    got = run(w)
    burned = got.isnan()
    assert burned[0, 1, 2].all() if what == "query" else burned[0, 1, 2, 5]
    assert burned.sum() == (16 if what == "query" else 1)
    assert torch.equal(got[~burned], clean[~burned])


@pytest.mark.parametrize(("what", "bad"), [("key", NAN), ("value", NAN), ("value", INF)], ids=str)
@pytest.mark.parametrize("position", [67, 63], ids=lambda p: f"at{p}")
def test_a_bad_key_or_value_burns_who_sees_it(run, backend, what, position, bad, device):
    """Of tokens at 66, 67 and 68; heads 2 and 3 read head 1 of the pages. Earlier tokens keep their bits: a weight of 0
    times NaN would reach them."""
    w = make_window(Shape(num_sequences=1, width=3), [69], torch.float32, device)
    clean = run(w)
    page, offset = int(w.block_table[0, position // 16]), position % 16
    getattr(w.kv, what)[page, offset, 1, 4] = bad
    got = run(w)
    sees = torch.zeros_like(got, dtype=torch.bool)
    first = max(0, position - 66)
    if what == "value":
        sees[0, first:, 2:, 4] = True
    else:
        sees[0, first:, 2:] = True
    assert torch.equal(got[~sees], clean[~sees])
    expected = truth(w)
    assert torch.equal(got[sees].isnan(), expected[sees].isnan())
    if bad != bad or what == "value":
        assert not got[sees].isfinite().any()
    if what == "value":
        alone = run(only(w, 0, [1]))
        assert torch.equal(alone.isnan(), got[0:1, 1:2].isnan())
        assert_same(alone.nan_to_num(0.5), got[0:1, 1:2].nan_to_num(0.5), backend, device)


def test_scores_that_are_all_minus_infinity_are_no_empty_row(run, device):
    """0/0 has no answer: NaN, where an empty row is zero."""
    w = make_window(Shape(num_sequences=1, width=1), [5], torch.float32, device)
    w.kv.key.fill_(-INF)
    w.query.abs_()
    assert run(w).isnan().all()


def test_nothing_beyond_the_length_is_read(run, device, kernel_dtypes):
    """Two fillings of all that is not the sequence's own give the same bits (case C1)."""
    for kv_dtype in (None, torch.int8):
        results = []
        for fill in (NAN, 7.0):
            w = make_window(Shape(), LENGTHS, kernel_dtypes[-1], device, kv_dtype=kv_dtype)
            own = reference.read(w.kv, w.block_table[0], 70)
            is_own = torch.zeros(w.kv.num_slots, dtype=torch.bool, device=device)
            for n, length in enumerate(LENGTHS):
                at = torch.arange(length, device=device)
                is_own[w.block_table[n].long()[at // 16] * 16 + at % 16] = True
            if kv_dtype is None:
                for x in (w.kv.key, w.kv.value):
                    x.view(-1, 2, 16)[~is_own] = fill
            else:
                for x in (w.kv.key_scale, w.kv.value_scale):
                    x.view(-1, 2)[~is_own] = fill
            assert all(torch.equal(a, b) for a, b in zip(own, reference.read(w.kv, w.block_table[0], 70), strict=True))
            results.append(run(w))
        assert torch.equal(*results)
        assert results[0].isfinite().all()


def test_a_page_that_is_not_in_the_pool_shows(run, device):
    """NaN, not another request's memory; rows that do not see it keep their bits."""
    for page_size, wrong in ((16, -1), (32, 10**6)):
        w = make_window(Shape(page_size=page_size), LENGTHS, torch.float32, device)
        clean = run(w)
        w.block_table[0, 1] = wrong
        got = run(w)
        assert got[0].isnan().all()
        assert torch.equal(got[1:], clean[1:])


def test_more_keys_than_the_limit_show(run, device):
    w = make_window(Shape(), LENGTHS, torch.float32, device)
    clean = run(w)
    got = run(w, limit=69)
    assert got[0, 1:].isnan().all()
    assert torch.equal(got[0, 0], clean[0, 0])
    assert torch.equal(got[1], clean[1])


def test_marks_what_is_stored_and_changes_no_bit(run, device, kernel_dtypes):
    # a pad of the sensor may hold values: it marks the pad word
    ids = torch.tensor([5, 2, -1, 3], dtype=torch.int32, device=device)
    for dtype, row_ids in [(kernel_dtypes[0], None), *((dtype, ids) for dtype in kernel_dtypes[1:])]:
        w = make_window(Shape(), LENGTHS, dtype, device)
        w.query[0, 1, 2], w.gate[1, 1, 3, 1] = NAN, NAN
        w.query[1, 0] = NAN
        off = run(w)
        words = [new_panel(3, 8, device) for _ in range(2)]
        kwargs = {"slot": 1, "num_signals": 3, "num_rows": 8, "row_ids": row_ids}
        on = run(w, Mark(panel=words[0], **kwargs))
        assert torch.equal(on.view(torch.uint8), off.view(torch.uint8))
        mark_rows(on.view(4, -1), Mark(panel=words[1], **kwargs))
        assert torch.equal(words[0], words[1])


def test_every_partial_sum_is_written_before_it_is_read(small_plan, device, kernel_dtypes):
    """Workspaces of two fillings, repeats: the same bits."""
    w = make_window(Shape(), LENGTHS, kernel_dtypes[-1], device)
    results = []
    plan = small_plan(w.query)
    for fill in (NAN, 3.0, NAN):
        parts = kernels.new_workspace(w.query, 2, 80, plan)
        for x in (parts.acc, parts.top, parts.total):
            x.fill_(fill)
        out = torch.full_like(w.query, fill)
        kernels.window(
            w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, 80, out, None, workspace=parts,
            plan=plan,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("lengths", [(70, 3), (200, 65)], ids=str)
def test_the_number_of_programs_changes_no_bit(small_plan, lengths, device, kernel_dtypes):
    """One program that writes splits, some that write units, as many as there are units."""
    w = make_window(Shape(num_heads=2), lengths, kernel_dtypes[-1], device)
    results = []
    for programs in (1, 12, 16, 100):
        out = torch.full_like(w.query, NAN)
        kernels.window(
            w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, 208, out, None,
            plan=small_plan(w.query, programs=programs),
        )  # fmt: skip
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_number_of_programs_follows_the_work():
    """Never more than units; whole waves; as many shares as cost little where there is work for many."""
    plan = kernels.PLANS[2]
    unit, at_once = plan.splits.unit_tokens, plan.programs
    assert plan.num_programs(2, 8, 256, 1) == 1
    assert plan.num_programs(2, 8, 256, 10 * unit) == 10
    assert plan.num_programs(10 * at_once, 8, 256, 10**6) <= plan.max_waves
    for heads, tokens in ((2, 10**6), (64, 10**5), (64, 8192), (7, 33333)):
        count = plan.num_programs(heads, 8, 256, tokens)
        assert heads * count <= plan.max_waves * at_once
        share, _ = plan.splits.shares(tokens, count)
        # two thirds of the places of a wave, or more
        assert heads * -(-tokens // share) >= at_once * 2 // 3


@pytest.mark.parametrize("width", [2, 3])
def test_windows_of_both_forms_agree(width, device, assert_close):
    """The default plan of 16 bits, eight heads of one key head: 16 rows upright, 24 flat, in two chunks of columns."""
    form = kernels.PLANS[2].form(8 * width)
    assert form.flat == (width == 3)
    w = make_window(Shape(num_sequences=1, width=3, num_heads=8, num_kv_heads=1, head_dim=160), [300], torch.float16,
                    device)  # fmt: skip
    w = only(w, 0, list(range(width)))
    out = torch.full_like(w.query, NAN)
    kernels.window(w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, 300, out, None)
    assert_close("both forms", truth(w), out, cases.RTOL[torch.float16])


def test_more_rows_than_a_program_takes(device, assert_close):
    """Sixteen query heads of one key head: 80 rows for a window of 5, in two row tiles."""
    shape = Shape(num_sequences=1, width=5, num_heads=16, num_kv_heads=1)
    plan = kernels.PLANS[2]
    assert plan.form(80).rows < 80
    w = make_window(shape, [150], torch.float16, device)
    out = torch.full_like(w.query, NAN)
    kernels.window(w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, 160, out, None)
    assert_close("two row tiles", truth(w), out, cases.RTOL[torch.float16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 9, 4, 16)}, r"query=\(1, 9, 4, 16\): must be \[N, 1 to 8"),
        ({"query": torch.zeros(1, 1, 3, 16)}, "heads that divide 3"),
        ({"query": torch.zeros(1, 1, 4, 8)}, "must have width 8"),
        ({"query": torch.zeros(1, 1, 4, 16).half()}, "kv of torch.float32: a query of torch.float16 would round it"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table=\(2, 1\)"),
        ({"block_table": torch.zeros(1, 1)}, r"must be int32 \[1, max_pages\]"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, r"seq_lens=\(2,\)"),
        ({"slot_mapping": torch.zeros(1, 2, dtype=torch.int32)}, r"slot_mapping=\(1, 2\)"),
        ({"gate": torch.zeros(1, 1, 4, 8)}, r"gate=\(1, 1, 4, 8\)"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"out": torch.zeros(1, 1, 4, 16).half()}, "out="),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    arguments = {
        "query": torch.zeros(1, 1, 4, 16),
        "kv": new_kv(2, 4, 2, 16, torch.float32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        window(**arguments)


def test_backends_are_registered_in_order():
    assert REGISTRY.backends("attention.window") == ("triton", "torch")
    assert REGISTRY.backends("attention.write_kv") == ("triton", "torch")
    assert REGISTRY.backends("attention.finish") == ("triton", "torch")
    assert REGISTRY.backends("attention.prefill") == ("sdpa",)
