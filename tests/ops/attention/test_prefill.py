"""Prefill: against the reference, and the rules that the library's kernel alone does not keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.ops.attention import cases, gather_kv, new_kv, prefill, reference, torch_path, write_kv
from firetower.ops.attention.cases import make_prefill
from firetower.ops.attention.prefill import segment_rows
from firetower.sensors.marks import Mark, mark_rows, new_panel

kernels = pytest.importorskip("firetower.ops.attention.kernels")

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaNs in the interpreter


def truth(q, k, v, cq, ck, gate=None, causal=True):
    return reference.prefill(q, k, v, cq, ck, scale=q.shape[-1] ** -0.5, gate=gate, causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([1], [1]), ([2], [2]), ([63], [63]), ([64], [100]), ([65, 1, 7], [65, 40, 7]), ([5, 0, 3], [5, 0, 9])],
    ids=str,
)
def test_matches_the_reference(lengths_q, lengths_k, causal, device, assert_close):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v, cq, ck, gate = make_prefill(lengths_q, lengths_k, dtype, device)
        got = prefill(q, k, v, cq, ck, causal=causal, gate=gate)
        assert_close(f"{dtype}", truth(q, k, v, cq, ck, gate, causal), got, cases.RTOL[dtype])
        got = prefill(q, k, v, cq, ck, causal=causal)
        assert_close(f"{dtype} no gate", truth(q, k, v, cq, ck, None, causal), got, cases.RTOL[dtype])


@pytest.mark.parametrize("length", [1000, 4097])
def test_long_prompts(length, device, assert_close):
    q, k, v, cq, ck, _ = make_prefill([length], [length], torch.float32, device, num_heads=2, head_dim=8)
    rows = [0, 1, length // 2, length - 1]
    got = prefill(q, k, v, cq, ck)
    for row in rows:
        expected = reference.attend(q[row].double(), k[: row + 1].double(), v[: row + 1].double(), 8**-0.5)
        assert_close(f"row {row}", expected, got[row], cases.RTOL[torch.float32])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 99))
def test_any_lengths(lengths, seed):
    lengths_q = [a for a, _ in lengths]
    lengths_k = [a + b for a, b in lengths]
    q, k, v, cq, ck, gate = make_prefill(lengths_q, lengths_k, torch.float32, "cpu", seed=seed)
    assert torch.allclose(prefill(q, k, v, cq, ck, gate=gate).double(), truth(q, k, v, cq, ck, gate), atol=1e-5)


def test_a_prefix_in_the_cache(device, assert_close):
    """A prompt in two chunks, the first one's keys read back from pages, gives what the whole prompt does."""
    q, k, v, cq, _, gate = make_prefill([50], [50], torch.float32, device)
    kv = new_kv(8, 16, 2, 16, torch.float32, device)
    table = torch.tensor([[3, 0, 7, 5]], dtype=torch.int32, device=device)
    at = torch.arange(50, device=device)
    write_kv(k, v, kv, table[0].long()[at // 16] * 16 + at % 16)
    key, value, bounds = gather_kv(kv, table, [50], torch.float32)
    second = prefill(q[32:], key, value, [0, 18], bounds, gate=gate[32:])
    assert_close("chunk", truth(q, k, v, cq, cq, gate)[32:], second, cases.RTOL[torch.float32])


def test_pads_are_zero_and_see_nothing(device):
    q, k, v, cq, ck, gate = make_prefill([5, 3], [5, 9], torch.float32, device)
    clean = prefill(q, k, v, cq, ck, gate=gate)
    pad = torch.full((4, 4, 16), NAN, device=device)
    got = prefill(torch.cat([q, pad]), k, v, cq, ck, gate=torch.cat([gate, pad]))
    assert torch.equal(got[:8], clean)
    assert (got[8:] == 0).all()
    assert prefill(q[:0], k[:0], v[:0], [0, 0]).shape == (0, 4, 16)


def test_queries_of_no_key_are_zero(device):
    q, k, v, *_ = make_prefill([3], [3], torch.float32, device)
    got = prefill(q, k, v, [0, 1, 3], [0, 0, 3], causal=False)
    assert (got[0] == 0).all()
    assert got[1:].abs().min() > 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e20])
@pytest.mark.parametrize("what", ["query", "key"])
def test_a_bad_query_or_key_burns_who_sees_it(what, bad, device):
    """Sequences of 6 and 4 after a prefix of 3; the bad token is the third of the second. No other row changes.

    1e20 squared leaves float32: the library would answer zeros where a score overflows.
    """
    q, k, v, cq, ck, gate = make_prefill([6, 4], [6, 7], torch.float32, device)
    clean = prefill(q, k, v, cq, ck, gate=gate)
    burned = torch.zeros_like(clean, dtype=torch.bool)
    if what == "query":
        q[8, 1, 4] = bad
        burned[8, 1] = True
    else:
        k[6 + 3 + 2, 1, 4] = bad
        burned[8:, 2:] = True
    got = prefill(q, k, v, cq, ck, gate=gate)
    assert got[burned].isnan().all()
    assert torch.equal(got[~burned], clean[~burned])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_bad_value_burns_its_column_from_its_token_on(bad, causal, device):
    q, k, v, cq, ck, _ = make_prefill([6, 4], [6, 7], torch.float32, device)
    clean = prefill(q, k, v, cq, ck, causal=causal)
    v[6 + 3 + 2, 1, 4] = bad
    got = prefill(q, k, v, cq, ck, causal=causal)
    burned = torch.zeros_like(clean, dtype=torch.bool)
    burned[8 if causal else 6 :, 2:, 4] = True
    assert got[burned].isnan().all()
    assert torch.equal(got[~burned], clean[~burned])


def test_the_library_alone_breaks_both_rules():
    """The faulty form, so that the tests above can fail: PyTorch's fused kernel on the CPU."""
    q, k, v, *_ = make_prefill([6], [6], torch.float32, "cpu")
    q_bad, v_bad = q.clone(), v.clone()
    q_bad[3, 0, 0], v_bad[3, 0, 0] = NAN, NAN
    laundered = torch_path.sdpa(q_bad, k, v, 0.25, causal=True)[3, 0]
    leaked = torch_path.sdpa(q, k, v_bad, 0.25, causal=True)[:3, 0, 0]
    if laundered.isnan().any() and leaked.isfinite().all():
        pytest.skip("this PyTorch keeps both rules")


@pytest.mark.parametrize("with_gate", [True, False])
def test_both_backends_finish_alike(with_gate, device, kernel_dtypes):
    for dtype in kernel_dtypes:
        q, _, _, cq, _, gate = make_prefill([5, 6], [5, 9], dtype, device)
        attended = torch.randn(11, 4, 16, generator=torch.Generator().manual_seed(3)).to(device=device, dtype=dtype)
        q[2, 1, 3], gate[4, 0, 2] = NAN, INF
        first_key = torch.tensor([[4, torch_path.NEVER], [torch_path.NEVER, 7]], dtype=torch.int32, device=device)
        first_value = torch.full((2, 2, 16), torch_path.NEVER, dtype=torch.int32, device=device)
        first_value[0, 1, 5] = 1
        sequence, last = segment_rows(cq, [5, 9], q, causal=True)
        last[6] = -1
        results, words = [], []
        for finish in (torch_path.finish, kernels.finish):
            out = torch.full_like(q, NAN)
            words.append(new_panel(2, 11, device))
            mark = Mark(panel=words[-1], slot=1, num_signals=2, num_rows=11)
            finish(attended, q, gate if with_gate else None, first_key, first_value, sequence, last, out, mark)
            results.append(out)
            expected = new_panel(2, 11, device)
            mark_rows(out.view(11, -1), Mark(panel=expected, slot=1, num_signals=2, num_rows=11))
            assert torch.equal(words[-1], expected)
            off = torch.full_like(q, NAN)
            finish(attended, q, gate if with_gate else None, first_key, first_value, sequence, last, off, None)
            assert torch.equal(off.nan_to_num(9.0), out.nan_to_num(9.0))
        assert torch.equal(results[0].isnan(), results[1].isnan())
        assert torch.allclose(results[0].nan_to_num(9.0), results[1].nan_to_num(9.0), rtol=2e-3, atol=1e-6)
        assert (results[0][6] == 0).all()


def test_marks_the_answer(device):
    q, k, v, cq, ck, gate = make_prefill([5, 3], [5, 3], torch.float32, device)
    q[6, 2, 3] = NAN
    words = [new_panel(1, 3, device) for _ in range(2)]
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.int32, device=device)
    kwargs = {"slot": 0, "num_signals": 1, "num_rows": 3, "row_ids": ids}
    off = prefill(q, k, v, cq, ck, gate=gate)
    on = prefill(q, k, v, cq, ck, gate=gate, mark=Mark(panel=words[0], **kwargs))
    assert torch.equal(on.view(torch.int32), off.view(torch.int32))
    mark_rows(on.view(8, -1), Mark(panel=words[1], **kwargs))
    assert torch.equal(*words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(5, 3, 8), "value": torch.zeros(5, 3, 8)}, "heads that divide 4"),
        ({"value": torch.zeros(5, 2, 4)}, "value="),
        ({"gate": torch.zeros(5, 4, 4)}, "gate="),
        ({"cu_seqlens_q": [0, 6]}, r"cu_seqlens_q=\[0, 6\]"),
        ({"cu_seqlens_q": [0, 3, 2]}, "must ascend from 0"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, "must be host integers"),
        ({"cu_seqlens_k": [0, 2, 5]}, "cu_seqlens_k has 3 entries"),
        ({"cu_seqlens_k": [0, 4]}, "5 queries and 4 keys"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    arguments = {
        "query": torch.zeros(5, 4, 8),
        "key": torch.zeros(5, 2, 8),
        "value": torch.zeros(5, 2, 8),
        "cu_seqlens_q": [0, 5],
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        prefill(**arguments)
