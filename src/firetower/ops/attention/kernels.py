# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Launches of the attention kernels, and the end of prefill in Triton."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from firetower.ops.attention.cache import PagedKV
from firetower.ops.attention.checks import MAX_HEAD_DIM, MAX_WINDOW
from firetower.ops.attention.splits import Splits
from firetower.ops.attention.window_kernels import attention_combine_fwd_kernel, attention_window_fwd_kernel
from firetower.sensors.mark_tile import mark_ran, mark_tile
from firetower.sensors.marks import Mark, mark_arguments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the programs of a window are built; decides no bit.

    Attributes:
        rows: query rows of a program.
        flat: rows by keys, for 64 rows; else keys by rows.
        columns: columns of the values that a program takes, at most; a power of two.
        num_stages: key tiles in flight.
        num_warps: of a program.
        max_regs: registers of a thread, where given.
    """

    rows: int
    flat: bool = False
    columns: int = MAX_HEAD_DIM
    num_stages: int
    num_warps: int
    max_regs: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How windows are shared out. `splits` and `block_n` decide bits, the rest does not.

    Attributes:
        splits: where sequences are cut.
        block_n: keys of a tile.
        programs: as many run at once.
        forms: from few rows to many; a window takes the first that holds its rows, else the last, several times.
        max_waves: more would write more sums than they save.
    """

    splits: Splits
    block_n: int
    programs: int
    forms: tuple[Form, ...]
    max_waves: int = 8

    def form(self, rows: int) -> Form:
        """For ``rows`` query rows of one key head."""
        return next((form for form in self.forms if form.rows >= rows), self.forms[-1])

    def groups(self, rows: int, dim: int) -> int:
        """Programs that read the same keys: row tiles times chunks of columns."""
        form = self.form(rows)
        return -(-rows // form.rows) * -(-dim // form.columns)

    def num_programs(self, num_heads: int, rows: int, dim: int, max_seq_len: int) -> int:
        """Shares of the keys of each of ``num_heads`` key heads of all sequences.

        Every key head of every sequence has the same, of whole units or splits. So one share more can begin another
        wave of programs that is nearly empty. Of the numbers that just fill some waves those count whose longest run is
        within a sixteenth of the shortest; of these the largest, which spreads a batch of unlike lengths best.
        """
        readers = num_heads * self.groups(rows, dim)

        def run(count: int) -> int:
            share, _ = self.splits.shares(max_seq_len, count)
            waves = -(-readers * -(-max_seq_len // share) // self.programs)
            # a program takes as long for its queries, first keys and sums as for a unit
            return waves * (share + self.splits.unit_tokens)

        units = -(-max_seq_len // self.splits.unit_tokens)
        counts = (min(units, max(1, w * self.programs // readers)) for w in range(1, self.max_waves + 1))
        runs = {count: run(count) for count in counts}
        least = min(runs.values())
        return max(count for count, length in runs.items() if length <= least + least // 16)


# For an H200. Tiles of 32 keys, three in flight, and queries leave room for two programs on a multiprocessor, so that
# one waits while the other computes; 264 programs are one such wave. A unit of 128 keys cuts 8192 tokens of 2 key heads
# into 128 parts; a split of 1024 writes 8 KB of sums a MB read where a window has one token, 40 KB where it has five.
# A flat program of 64 rows has registers for the sums of 128 columns twice, of the unit and of the split.
_SPLITS = Splits(unit_tokens=128, units_per_split=8, max_units=4)
PLANS = {
    2: Plan(
        splits=_SPLITS, block_n=32, programs=264,
        forms=(
            Form(rows=16, num_stages=3, num_warps=4), Form(rows=64, flat=True, columns=128, num_stages=3, num_warps=4)
        ),
    ),
    4: Plan(splits=_SPLITS, block_n=32, programs=132, forms=(Form(rows=16, num_stages=1, num_warps=8),)),
}  # fmt: skip
"""By bytes of the widest element. float32 runs on the scalar units: exact, and slow where heads are wide."""

_FEW_ROWS = 256
"""Up to as many answers the combine cuts each of them, to have more programs."""

_LEVELS = 4
"""The combine takes 2^4 splits at a time."""

_LOG2E = 1.4426950408889634
_UNSPECIALIZED = ["slot", "num_signals", "num_words", "shape", "neg_inf"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_finish_fwd_kernel(p_attended, p_q, p_gate, p_first_key, p_first_value, p_sequence, p_last, p_out, a_row,
                                a_head, q_row, q_head, gate_row, gate_head, p_panel, p_row_ids, slot, num_signals,
                                num_words, shape, neg_inf, NUM_KV: tl.constexpr, GROUP: tl.constexpr,
                                DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """`firetower.ops.attention.torch_path.finish`, one program a row."""
    i_row = tl.program_id(0)
    row = i_row.to(tl.int64)
    b_h = tl.arange(0, BLOCK_H)[:, None]
    b_d = tl.arange(0, BLOCK_D)[None, :]
    in_h = b_h < NUM_KV * GROUP
    b_mask = in_h & (b_d < DIM)
    last = tl.load(p_last + i_row)
    sequence = tl.load(p_sequence + i_row)
    b_q = tl.load(p_q + row * q_row + b_h * q_head + b_d, mask=b_mask, other=0.0).to(tl.float32)
    # NaN, Inf or squares beyond float32: the difference is NaN
    b_norm = tl.sum(b_q * b_q, 1)[:, None]
    b_kv = sequence * NUM_KV + b_h // GROUP
    b_bad = (b_norm - b_norm != 0.0) | (tl.load(p_first_key + b_kv, mask=in_h, other=2147483647) <= last)
    b_bad = b_bad | (tl.load(p_first_value + b_kv * DIM + b_d, mask=b_mask, other=2147483647) <= last)
    b_y = tl.load(p_attended + row * a_row + b_h * a_head + b_d, mask=b_mask, other=0.0).to(tl.float32)
    b_y = tl.where(b_bad, float("nan"), b_y)
    if p_gate is not None:
        p_gates = p_gate + row * gate_row + b_h * gate_head + b_d
        b_y *= tl.sigmoid(tl.load(p_gates, mask=b_mask, other=0.0).to(tl.float32))
    b_y = tl.where(last < 0, 0.0, b_y).to(p_out.dtype.element_ty)
    full_width = NUM_KV * GROUP * DIM
    b_column = b_h * DIM + b_d
    tl.store(p_out + row * full_width + b_column, b_y, mask=b_mask)
    if p_panel is not None:
        if i_row == 0:
            mark_ran(p_panel, slot, num_signals, num_words, shape)
        mark_tile(b_y, i_row + b_column * 0, b_column, b_mask, full_width, p_panel, p_row_ids, slot, num_signals,
                  num_words, neg_inf)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Partial sums of one `window` call; every element that is read was written by the same call.

    Attributes:
        acc: float32 [N, Hkv, S, W * G, D].
        top: float32 [N, Hkv, W * G, S], maxima of the scores, as powers of two.
        total: float32 [N, Hkv, W * G, S], sums of the weights.
    """

    acc: Tensor
    top: Tensor
    total: Tensor


def new_workspace(query: Tensor, num_kv_heads: int, max_seq_len: int, plan: Plan) -> Workspace:
    """Uninitialised partial sums for a query [N, W, H, D]."""
    n, w, h, d = query.shape
    rows = w * (h // num_kv_heads)
    count = plan.splits.max_parts(max_seq_len, plan.num_programs(n * num_kv_heads, rows, d, max_seq_len))
    acc = torch.empty(n, num_kv_heads, count, rows, d, dtype=torch.float32, device=query.device)
    top, total = (
        torch.empty(n, num_kv_heads, rows, count, dtype=torch.float32, device=query.device) for _ in range(2)
    )
    return Workspace(acc=acc, top=top, total=total)


def plan_for(query: Tensor, kv: PagedKV) -> Plan:
    """The plan of these types."""
    return PLANS[max(query.itemsize, kv.key.itemsize)]


def window(
    query: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor | None,
    gate: Tensor | None,
    scale: float,
    max_seq_len: int,
    out: Tensor,
    mark: Mark | None,
    *,
    workspace: Workspace | None = None,
    plan: Plan | None = None,
) -> None:
    """Launch both kernels; arguments as `firetower.ops.attention.torch_path.window`."""
    n, w, h, d = query.shape
    num_kv = kv.key.shape[2]
    plan = plan_for(query, kv) if plan is None else plan
    panel = mark_arguments(mark, out.dtype, n * w, h * d)
    gates = None if gate is None else gate.reshape(n * w, h, d)
    parts = new_workspace(query, num_kv, max_seq_len, plan) if workspace is None else workspace
    rows = w * (h // num_kv)
    sizes = (max_seq_len, parts.top.shape[3], plan.num_programs(n * num_kv, rows, d, max_seq_len))
    constants = {
        "NUM_KV": num_kv, "GROUP": h // num_kv, "DIM": d, "UNIT": plan.splits.unit_tokens, "WINDOW": MAX_WINDOW,
        "PER_SPLIT": plan.splits.units_per_split, "MAX_UNITS": plan.splits.max_units, "PDL": _overlaps(query.device),
        # a product joined to a sum rounds once, where two kernels must round alike
        "enable_fp_fusion": False,
    }  # fmt: skip
    _launch_window(query.reshape(n * w, h, d), kv, block_table, seq_lens, slot_mapping, scale, w, sizes, parts, plan,
                   constants)  # fmt: skip
    gate_strides = (0, 0) if gates is None else gates.stride()[:2]
    # few rows: many programs that wait together; many rows: wide ones. The sum is the same tree
    block_d = min(triton.next_power_of_2(d), 64 if n * w * h <= _FEW_ROWS else 256)
    with torch.cuda.device_of(query):
        attention_combine_fwd_kernel[(n * w, h, triton.cdiv(d, block_d))](
            parts.acc, parts.top, parts.total, gates, seq_lens, slot_mapping, out, w, *sizes, *gate_strides, *panel,
            **constants, LEVELS=_LEVELS, BLOCK_D=block_d, num_warps=4, **_launch_option(_overlaps(query.device)),
        )  # fmt: skip


@functools.cache
def _overlaps(_: torch.device) -> bool:
    """Whether the second kernel may be launched while the first runs (programmatic dependent launch)."""
    if not isinstance(attention_combine_fwd_kernel, JITFunction):
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def _launch_option(overlaps: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlaps else {}


def _launch_window(
    rows: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor | None,
    scale: float,
    width: int,
    sizes: tuple[int, int, int],
    parts: Workspace,
    plan: Plan,
    constants: dict[str, int],
) -> None:
    dim, num_rows = constants["DIM"], width * constants["GROUP"]
    form = plan.form(num_rows)
    block_d = max(16, triton.next_power_of_2(dim))
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    scales = (0, 0, 0) if kv.key_scale is None else kv.key_scale.stride()
    limits = {} if form.max_regs is None else {"maxnreg": form.max_regs}
    grid = (sizes[2] * constants["NUM_KV"] * plan.groups(num_rows, dim), len(rows) // width)
    with torch.cuda.device_of(rows):
        attention_window_fwd_kernel[grid](
            rows, kv.key, kv.value, kv.key_scale, kv.value_scale, table, seq_lens, slot_mapping, parts.acc, parts.top,
            parts.total, scale * _LOG2E, width, kv.key.shape[0], table.stride(0), *sizes, *rows.stride()[:2],
            kv.key.stride(0), kv.key.stride(2), *scales, **constants, KV_TOKEN=kv.key.stride(1),
            PAGE=kv.key.shape[1], ROWS=form.rows, FLAT=form.flat, BLOCK_N=plan.block_n, BLOCK_D=block_d,
            LEVELS=plan.block_n.bit_length() - 1, COLUMNS=min(form.columns, block_d),
            CHUNKS=triton.cdiv(dim, form.columns), num_warps=form.num_warps, num_stages=form.num_stages, **limits,
        )  # fmt: skip


def finish(
    attended: Tensor,
    query: Tensor,
    gate: Tensor | None,
    first_key: Tensor,
    first_value: Tensor,
    sequence: Tensor,
    last_key: Tensor,
    out: Tensor,
    mark: Mark | None,
) -> None:
    """Launch; arguments as `firetower.ops.attention.torch_path.finish`."""
    rows, heads, dim = out.shape
    panel = mark_arguments(mark, out.dtype, rows, heads * dim)
    if rows == 0:
        return
    num_kv = first_key.shape[1]
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]
    with torch.cuda.device_of(out):
        attention_finish_fwd_kernel[(rows,)](
            attended, query, gate, first_key, first_value, sequence, last_key, out, *attended.stride()[:2],
            *query.stride()[:2], *gate_strides, *panel, NUM_KV=num_kv, GROUP=heads // num_kv, DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_H=triton.next_power_of_2(heads), num_warps=4,
        )  # fmt: skip
