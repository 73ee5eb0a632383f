"""Every Triton kernel of the op library, launched on tiny shapes, for tools that watch a device's memory:

    python tests/ops/sanitize.py                # first: fills Triton's cache
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/ops/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/ops/sanitize.py [OP ...]

Sizes that no tile divides, sound inputs and inputs with a NaN, so that the marking paths run too. Every tensor is an
allocation of its own. Fails if a kernel of the library was not launched; ``--interpret`` runs it all on the CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OPS = HERE.parents[1] / "src" / "firetower" / "ops"
KERNEL = re.compile(r"^def (\w+_fwd_kernel)\(", re.MULTILINE)
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(OPS.parents[1]))

import torch  # noqa: E402 - after the environment that it reads
from torch import Tensor  # noqa: E402

from firetower.ops import registry  # noqa: E402
from firetower.sensors.marks import Mark, new_panel  # noqa: E402

LAUNCHED: set[str] = set()
NAN = float("nan")


class Tiny:
    """Makes small tensors on one device, from one seed; a NaN in each sound one's copy where asked for."""

    def __init__(self, device: str, dtype: torch.dtype, *, is_bad: bool) -> None:
        self.device, self.dtype, self.is_bad = device, dtype, is_bad
        self.draw = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, is_input: bool = False) -> Tensor:
        x = torch.randn(shape, generator=self.draw)
        if is_input and self.is_bad:
            x.view(-1)[x.numel() // 2] = NAN
        return x.to(self.device, dtype or self.dtype)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def raw(self, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=self.draw, dtype=torch.uint8).to(self.device)

    def mark(self, num_rows: int, slot: int = 0) -> Mark:
        ids = self.ints(list(range(num_rows)))
        panel = new_panel(3, num_rows, self.device)
        return Mark(panel=panel, slot=slot, num_signals=3, num_rows=num_rows, row_ids=ids)


def rms_norm(t: Tiny) -> None:
    from firetower.ops.rms_norm import add_rms_norm, rms_norm

    x, w = t.normal(3, 63, is_input=True), t.normal(63)
    rms_norm(x, w, gate=t.normal(3, 63), mark=t.mark(3), mark_input=t.mark(3, 1))
    add_rms_norm(x, t.normal(3, 63), w, mark=t.mark(3), mark_residual=t.mark(3, 1))


def rope(t: Tiny) -> None:
    from firetower.ops.rope import rope, rope_table

    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    table = rope_table(parameters, head_dim=24, num_positions=9)
    table = table.to(t.device) if hasattr(table, "to") else table
    q, k = t.normal(3, 4, 24, is_input=True), t.normal(3, 2, 24)
    rope(q, k, t.ints([0, 3, 8], torch.int64), table, mark_q=t.mark(3), mark_k=t.mark(3, 1))


def causal_conv1d(t: Tiny) -> None:
    from firetower.ops.causal_conv1d import causal_conv1d, causal_conv1d_window, new_conv_state

    weight = t.normal(40, 4)
    state = new_conv_state(3, 40, kernel_size=4, max_window=8, dtype=t.dtype, device=t.device)
    ids, bounds = t.ints([2, 0]), t.ints([0, 5, 12])
    causal_conv1d(
        t.normal(12, 40, is_input=True), weight, cu_seqlens=bounds, conv_state=state, state_ids=ids, mark=t.mark(12),
        mark_state=t.mark(2, 1),
    )  # fmt: skip
    causal_conv1d_window(
        t.normal(2, 5, 40, is_input=True), weight, conv_state=state, state_ids=ids, num_accepted=t.ints([0, 2]),
        mark=t.mark(10), mark_state=t.mark(2, 1),
    )  # fmt: skip


def gated_delta_rule(t: Tiny) -> None:
    from firetower.ops.gated_delta_rule import (
        commit_window,
        gated_delta_rule,
        gated_delta_rule_window,
        new_window_state,
    )

    def tokens(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        k, g = t.normal(rows, length, 1, 24, is_input=True), -t.normal(rows, length, 2, dtype=torch.float32).abs()
        return t.normal(rows, length, 1, 24), k, t.normal(rows, length, 2, 40), g, -g

    state = t.normal(2, 2, 24, 40, dtype=torch.float32)
    for bounds, rows in ((None, 2), (t.ints([0, 19, 31]), 1)):
        gated_delta_rule(
            *tokens(rows, 35), initial_state=state, cu_seqlens=bounds, chunk_size=16, mark=t.mark(70),
            state_mark=t.mark(2, 1),
        )  # fmt: skip
    window = new_window_state(3, 1, 2, 24, 40, dtype=t.dtype, device=t.device)
    slots = t.ints([2, -1, 0])
    for accepted in ([0, 0, 0], [2, 3, 1]):
        gated_delta_rule_window(
            *tokens(3, 3), window, state_slots=slots, num_accepted=t.ints(accepted), mark=t.mark(9),
            state_mark=t.mark(3, 1),
        )  # fmt: skip
        commit_window(window, slots)


def moe(t: Tiny) -> None:
    from firetower.ops import moe

    shared = moe.SharedExpert(gate_up_proj=t.normal(64, 64), down_proj=t.normal(64, 32), gate=t.normal(1, 64))
    weights = moe.MoeWeights(
        router=t.normal(6, 64), gate_up_proj=t.normal(6, 64, 64), down_proj=t.normal(6, 64, 32), shared=shared
    )
    for tokens, phase in ((3, "window"), (21, "prefill"), (600, "prefill")):
        marks = moe.MoeMarks(swiglu=t.mark(tokens), routed=t.mark(tokens, 1))
        moe.moe(t.normal(tokens, 64, is_input=True), weights, moe.RoutingRule(top_k=2), phase=phase, marks=marks)


def linear(t: Tiny) -> None:
    from firetower.ops.linear import linear

    for num_outputs, num_inputs in ((40, 96), (24, 2048)):
        linear(t.normal(3, num_inputs, is_input=True), t.normal(num_outputs, num_inputs), mark=t.mark(3))


def quant(t: Tiny) -> None:
    from firetower.ops.quant import KINDS, quant_linear, quant_linear_q8_1, quantize_q8_1

    for name, kind in KINDS.items():
        raw = t.raw(20, 512 // kind.block_elements * kind.block_bytes)
        quant_linear(t.normal(1, 512, is_input=True), raw, name, mark=t.mark(1))
        activations = quantize_q8_1(t.normal(1, 512, is_input=True), mark=t.mark(1))
        quant_linear_q8_1(activations, raw, name, dtype=t.dtype, mark=t.mark(1))


def sample(t: Tiny) -> None:
    from firetower.ops.sample import SampleParams, sample

    def row(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((2,), value, dtype=dtype).to(t.device)

    logits = t.normal(2, 131, is_input=True)
    sample(logits, mark=t.mark(2))
    warm = SampleParams(temperature=row(1), top_k=row(5, torch.int32), top_p=row(0.9))
    seeds, positions = t.ints([1, 2], torch.int64), t.ints([0, 7], torch.int64)
    sample(logits, warm, seeds=seeds, positions=positions, num_logprobs=2, mark=t.mark(2))
    sample(logits, SampleParams(temperature=row(1)), seeds=seeds, positions=positions, mark=t.mark(2))


def attention(t: Tiny) -> None:
    from firetower.ops.attention import new_kv, prefill, window, write_kv

    table, lengths = t.ints([[1, 3], [2, 0]]), t.ints([19, 5])
    slots = t.ints([[33, 34], [35, 36]])
    for dtype in (t.dtype, torch.int8, torch.float8_e4m3fn):
        kv = new_kv(4, 16, 1, 32, dtype=dtype, device=t.device)
        write_kv(t.normal(2, 2, 1, 32, is_input=True), t.normal(2, 2, 1, 32), kv, slots, mark=t.mark(4))
        q = t.normal(2, 2, 4, 32)
        window(q, kv, table, lengths, slot_mapping=slots, gate=q, mark=t.mark(4))
    q, k = t.normal(9, 4, 32, is_input=True), t.normal(9, 1, 32)
    prefill(q, k, k, [0, 4, 9], gate=q, mark=t.mark(9))


RUNS: dict[str, Callable[[Tiny], None]] = {
    f.__name__: f for f in (rms_norm, rope, causal_conv1d, gated_delta_rule, moe, linear, quant, sample, attention)
}


def note_launches() -> None:
    """Keep the name of every kernel that is launched."""
    from triton.runtime import interpreter, jit

    for owner, name in ((jit.JITFunction, "run"), (interpreter.GridExecutor, "__call__")):
        inner = getattr(owner, name)

        def noted(self: Any, *args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            LAUNCHED.add(self.fn.__name__)
            return inner(self, *args, **kwargs)

        setattr(owner, name, noted)


def as_if_cuda() -> None:
    """The interpreter runs what a CUDA device would, but for kernels that wait for each other."""
    import contextlib

    torch.cuda.device_of = torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    registry.target_of = lambda _, dtype: registry.Target(  # type: ignore[assignment]
        device="cuda", dtype=dtype, capability=(8, 0), has_triton=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", choices=[[], *RUNS], default=[], help="some ops only")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, in float16")
    args = parser.parse_args()
    note_launches()
    if args.interpret:
        as_if_cuda()
    registry.load_all()
    device, dtype = ("cpu", torch.float16) if args.interpret else ("cuda", torch.bfloat16)
    for name in args.ops or RUNS:
        begin = time.perf_counter()
        for is_bad in (False, True):
            RUNS[name](Tiny(device, dtype, is_bad=is_bad))
        if not args.interpret:
            torch.cuda.synchronize()
        print(f"{name}: launched in {time.perf_counter() - begin:.1f} s", flush=True)
    written = {
        kernel
        for name in args.ops or RUNS
        for path in (OPS / name).rglob("*.py")
        for kernel in KERNEL.findall(path.read_text(encoding="utf-8"))
    }
    assert written, "no kernels found"
    print(f"launched {len(written & LAUNCHED)} of {len(written)} kernels", *sorted(written - LAUNCHED))
    return 1 if written - LAUNCHED else 0


if __name__ == "__main__":
    sys.exit(main())
