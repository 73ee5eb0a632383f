"""`attention` on CUDA, shapes of Q36 (16 query, 2 key heads of 256): correct first, then windows beside SDPA.

The peer reads contiguous keys and values, ours pages in random order. Short sequences are taken in turn, so that none
stays in L2 from one replay to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from ops.common import bandwidth_line, copy_bandwidth, graph_ms, guarded, ratio_line, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from firetower.ops.attention import (
    PagedKV,
    cases,
    gather_kv,
    kernels,
    new_kv,
    prefill,
    reference,
    torch_path,
    window,
    write_kv,
)
from firetower.ops.attention.cases import Q36, Window, make_window
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
BF16, NAN = torch.bfloat16, float("nan")
HEADS, KV_HEADS, DIM, PAGE = Q36.num_heads, Q36.num_kv_heads, Q36.head_dim, Q36.page_size
LENGTHS = (8300, 1000, 4097)
"""Several splits, less than one, one key past a power of two."""

L2_BYTES = 100 << 20
"""More than L2 holds: a replay reads at least as much."""


def run(report: Report, quick: bool) -> None:
    """Every check and figure of attention; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: leave out 128k tokens.
    """
    for name, check in checks():
        guarded(report, name, lambda check=check, name=name: report(f"{name} ok {check() or ''}".rstrip()))
    guarded(report, "attention figures", lambda: figures(report, quick))


def checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, what asserts and may return a remark)."""
    for kv_dtype in (BF16, torch.int8, torch.float8_e4m3fn):
        yield f"attention_window_error {kv_dtype}", lambda d=kv_dtype: window_error(d)
        yield f"attention_write {kv_dtype}", lambda d=kv_dtype: write_bits(d)
        yield f"attention_row_bits {kv_dtype}", lambda d=kv_dtype: row_bits(d)
    yield "attention_fillings_repeats", fillings
    yield "attention_sensors", sensors
    yield "attention_late_nan_value", late_nan_value
    yield "attention_prefill", prefill_error
    yield "attention_prefill_bad_values", prefill_bad_values


def _window(kv_dtype: torch.dtype = BF16, lengths: tuple[int, ...] = LENGTHS, width: int = 5) -> Window:
    shape = dataclasses.replace(Q36, num_sequences=len(lengths), width=width)
    return make_window(shape, lengths, BF16, "cuda", kv_dtype=kv_dtype)


def _run(w: Window, mark: Mark | None = None) -> Tensor:
    return window(
        w.query, w.kv, w.block_table, w.seq_lens, slot_mapping=w.slot_mapping, gate=w.gate, scale=w.scale, mark=mark
    )


def _truth(w: Window) -> Tensor:
    """In float64, from what stands in the pages."""
    lengths = w.seq_lens.tolist()
    keys, values, bounds = gather_kv(w.kv, w.block_table, lengths, torch.float64)
    out = torch.zeros(w.query.shape, dtype=torch.float64, device="cuda")
    for n, length in enumerate(lengths):
        for token in range(w.query.shape[1]):
            part = slice(bounds[n], bounds[n] + length - (w.query.shape[1] - 1 - token))
            out[n, token] = reference.attend(w.query[n, token].double(), keys[part], values[part], w.scale)
    return out * w.gate.double().sigmoid()


def window_error(kv_dtype: torch.dtype) -> str:
    """Against float64."""
    w = _window(kv_dtype)
    error = relative_error(_truth(w), _run(w))
    assert error <= cases.RTOL[BF16], f"{error:.3g}"
    return f"own={error:.3g}"


def write_bits(kv_dtype: torch.dtype) -> None:
    """The kernel writes what the plain path does, sensor on or off, and names what is not finite."""
    g = torch.Generator(device="cuda").manual_seed(3)
    key, value = (torch.randn(33, KV_HEADS, DIM, dtype=BF16, device="cuda", generator=g) for _ in range(2))
    key[7, 1, 9], value[30, 0, 2] = NAN, float("inf")
    slots = torch.randperm(2 * PAGE, device="cuda", generator=g)[:33]
    slots[5] = -1
    panels, pages = [], []
    for write, with_mark in ((torch_path.write_kv, True), (write_kv_kernel, True), (write_kv_kernel, False)):
        kv = new_kv(2, PAGE, KV_HEADS, DIM, kv_dtype, "cuda")
        cases.fill(kv, 2.0)
        mark = _mark(33) if with_mark else None
        write(key, value, kv, slots, mark)
        panels += [mark.panel] if mark else []
        pages.append([x for x in (kv.key, kv.value, kv.key_scale, kv.value_scale) if x is not None])
    for other in pages[1:]:
        for a, b in zip(pages[0], other, strict=True):
            assert torch.equal(a.float().nan_to_num(77.0), b.float().nan_to_num(77.0)), "pages differ"
    # the bits of a NaN that arithmetic makes differ between paths: positions are compared
    assert torch.equal(panels[0] >> 32, panels[1] >> 32), "words differ"


def write_kv_kernel(key: Tensor, value: Tensor, kv: PagedKV, slots: Tensor, mark: Mark | None) -> None:
    """The public op, arguments in the order of the backends."""
    write_kv(key, value, kv, slots, mark=mark)


def _mark(num_rows: int) -> Mark:
    ids = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    return Mark(panel=new_panel(2, num_rows, "cuda"), slot=1, num_signals=2, num_rows=num_rows, row_ids=ids)


def _only(w: Window, n: int, tokens: list[int]) -> Window:
    part = slice(n, n + 1)
    return dataclasses.replace(
        w,
        query=w.query[part, tokens].contiguous(),
        gate=w.gate[part, tokens].contiguous(),
        slot_mapping=w.slot_mapping[part, tokens].contiguous(),
        seq_lens=w.seq_lens[part] - (w.query.shape[1] - 1 - tokens[-1]),
        block_table=w.block_table[part],
    )


def row_bits(kv_dtype: torch.dtype) -> str:
    """Windows of 8: each token alone, each sequence alone, shorter windows, a bound on the length, large batches."""
    w = _window(kv_dtype, (8195, 129, 520, 16388), width=8)
    whole = _run(w)
    for n in range(4):
        assert torch.equal(_run(_only(w, n, list(range(8))))[0], whole[n]), f"sequence {n} alone"
        for tokens in ([0], [3], [7], [0, 1], [3, 4, 5], [4, 5, 6, 7], [2, 3, 4, 5, 6]):
            assert torch.equal(_run(_only(w, n, tokens))[0], whole[n, tokens]), f"sequence {n}, tokens {tokens}"
    bounded = window(
        w.query, w.kv, w.block_table, w.seq_lens, slot_mapping=w.slot_mapping, gate=w.gate, scale=w.scale,
        max_seq_len=16400,
    )  # fmt: skip
    assert torch.equal(bounded, whole), "max_seq_len"
    for first in (0, 5, 6, 7):
        part = [x[:, first:].repeat(16, 1, 1, 1) for x in (w.query, w.gate)]
        many = dataclasses.replace(
            w, query=part[0], gate=part[1], seq_lens=w.seq_lens.repeat(16), block_table=w.block_table.repeat(16, 1),
            slot_mapping=w.slot_mapping[:, first:].repeat(16, 1),
        )  # fmt: skip
        assert torch.equal(_run(many), whole[:, first:].repeat(16, 1, 1, 1)), f"batch of 64, windows of {8 - first}"
    return "windows of 1, 2, 3, 4, 5, 8; batches of 1, 4, 64"


def fillings() -> None:
    """Outputs and workspaces of two fillings, 50 repeats: the same bits."""
    w = _window()
    limit = w.block_table.shape[1] * PAGE
    parts = kernels.new_workspace(w.query, KV_HEADS, limit, kernels.plan_for(w.query, w.kv))
    first = None
    for i in range(52):
        fill = NAN if i % 2 else 3.0
        for x in (parts.acc, parts.top, parts.total):
            x.fill_(fill)
        out = torch.full_like(w.query, fill)
        arguments = (w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, limit, out, None)
        kernels.window(*arguments, workspace=parts)
        first = out if first is None else first
        assert torch.equal(out, first), f"run {i}"


def sensors() -> None:
    """On or off the same bits; words as the plain check has them."""
    w = _window()
    for bad in (False, True):
        if bad:
            w.query[1, 3, 9], w.query[2, 0] = NAN, NAN
        mark, expected = _mark(15), _mark(15)
        off, on = _run(w), _run(w, mark)
        assert torch.equal(on.view(torch.uint8), off.view(torch.uint8)), "on and off differ"
        mark_rows(on.view(15, -1), expected)
        assert torch.equal(mark.panel, expected.panel), "words differ"


def late_nan_value() -> None:
    """A NaN value of the window's fourth token: tokens 0 to 2 keep their bits, 3 and 4 show it."""
    w = _window()
    clean = _run(w)
    position = LENGTHS[0] - 2
    w.kv.value[int(w.block_table[0, position // PAGE]), position % PAGE, 1, 40] = NAN
    got = _run(w)
    assert torch.equal(got[0, :3], clean[0, :3]), "earlier tokens changed"
    assert torch.equal(got[1:], clean[1:]), "other sequences changed"
    assert got[0, 3:, 8:, 40].isnan().all(), "it does not show"
    assert got[0, 3:, :8].isfinite().all(), "it reached heads that do not read it"


def prefill_error() -> str:
    """1024 queries behind a prefix of 1000, beside 300 more: some rows against float64."""
    q, k, v, cq, ck, gate = cases.make_prefill(
        [1024, 300], [2024, 300], BF16, "cuda", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    got, worst = prefill(q, k, v, cq, ck, gate=gate), 0.0
    for row, begin, seen in ((0, 0, 1001), (513, 0, 1514), (1023, 0, 2024), (1024, 2024, 1), (1323, 2024, 300)):
        part = slice(begin, begin + seen)
        truth = reference.attend(q[row].double(), k[part].double(), v[part].double(), DIM**-0.5)
        worst = max(worst, relative_error(truth * gate[row].double().sigmoid(), got[row]))
    assert worst <= cases.RTOL[BF16], f"{worst:.3g}"
    mark, expected = _mark(1324), _mark(1324)
    prefill(q, k, v, cq, ck, gate=gate, out=got, mark=mark)
    mark_rows(got.view(1324, -1), expected)
    assert torch.equal(mark.panel, expected.panel), "words differ"
    return f"own={worst:.3g}"


def prefill_bad_values() -> None:
    """A NaN in a query, a key and a value burns the rows that see it and no other."""
    q, k, v, cq, ck, _ = cases.make_prefill(
        [100], [164], BF16, "cuda", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    clean = prefill(q, k, v, cq, ck)
    for x, at, burned in (
        (q, (50, 3, 1), (slice(50, 51), slice(3, 4), slice(None))),
        (k, (114, 1, 1), (slice(50, None), slice(8, None), slice(None))),
        (v, (114, 1, 7), (slice(50, None), slice(8, None), slice(7, 8))),
    ):
        before = x[at].clone()
        x[at] = NAN
        got = prefill(q, k, v, cq, ck)
        is_burned = torch.zeros_like(got, dtype=torch.bool)
        is_burned[burned] = True
        assert got[is_burned].isnan().all(), f"{at}: laundered"
        assert torch.equal(got[~is_burned], clean[~is_burned]), f"{at}: leaked"
        x[at] = before


@dataclasses.dataclass(kw_only=True)
class Pool:
    """Pages for 32 long sequences, and the same data as a contiguous peer has them."""

    kv: PagedKV
    table: Tensor
    key: Tensor
    value: Tensor


def make_pool(num_sequences: int, length: int) -> Pool:
    """Random pages in random order; [N, Hkv, L, D] for the peer."""
    pages = num_sequences * length // PAGE
    kv = new_kv(pages, PAGE, KV_HEADS, DIM, BF16, "cuda")
    for x in (kv.key, kv.value):
        x.normal_()
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(num_sequences, -1)
    both = [x.view(num_sequences, length, KV_HEADS, DIM).transpose(1, 2).contiguous() for x in (kv.key, kv.value)]
    return Pool(kv=kv, table=table, key=both[0], value=both[1])


def figures(report: Report, quick: bool) -> None:
    """Windows over 8k and 128k tokens, batch 1 and 32."""
    copy = copy_bandwidth()
    for length in (8192,) if quick else (8192, 131072):
        pool = make_pool(32, length)
        for num, width in ((1, 1), (1, 5), (32, 1), (32, 5)):
            name = f"attention_window_{length // 1024}k_batch{num}_tokens{width}"
            guarded(report, name, lambda n=num, w=width, a=(name, pool, length): figure(report, *a, n, w, copy))
        del pool
        torch.cuda.empty_cache()


def figure(report: Report, name: str, pool: Pool, length: int, num: int, width: int, copy: float) -> None:
    """Time of one window, sensors on and off, beside SDPA."""
    num_bytes = num * length * KV_HEADS * DIM * 2 * 2
    turns = min(32 // num, -(-L2_BYTES // num_bytes))
    query, gate = (torch.randn(num, width, HEADS, DIM, dtype=BF16, device="cuda") for _ in range(2))
    q_peer = query.transpose(1, 2).contiguous()
    lens = torch.full((num,), length, dtype=torch.int32, device="cuda")
    slots = torch.zeros(num, width, dtype=torch.int64, device="cuda")
    out, mark = torch.empty_like(query), _mark(num * width)
    parts = [slice(i * num, (i + 1) * num) for i in range(turns)]
    tables = [pool.table[p].contiguous() for p in parts]

    def own(mark: Mark | None) -> float:
        def windows() -> None:
            for table in tables:
                window(query, pool.kv, table, lens, slot_mapping=slots, gate=gate, out=out, mark=mark)

        return graph_ms(windows, reps=15) / turns

    def peer() -> None:
        for p in parts:
            F.scaled_dot_product_attention(q_peer, pool.key[p], pool.value[p], enable_gqa=True)

    on, off = own(mark), own(None)
    report(bandwidth_line(name, num_bytes, on, copy, bar=0.0, goal=0.8))
    report(f"{name}_sensors on/off={on / off:.3f}")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        peer_ms = graph_ms(peer, reps=8) / turns
    report(ratio_line(name, on, peer_ms, "sdpa", bar=1.0, goal="80% of copy"))
