"""Run by test_compiles.py without the interpreter: build every kernel of the op library for an H200 without one.

Each op is called through its public functions with tensors of the CPU, on a target that says it is a CUDA device; a
launch compiles and then does nothing. Prints the kernels that were built, and fails with the first that was not.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from firetower.ops import registry
from firetower.sensors.marks import Mark, new_panel

BF16, FP32 = torch.bfloat16, torch.float32
SHARED_BYTES = 232448
"""Most shared memory of one block on an H200."""

BUILT: dict[str, set[str]] = {}


class Device:
    """As much of a driver as compiling asks for."""

    class utils:  # noqa: N801 - Triton's own name
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """In place of a launch."""
    kernel = RUN(self, *args, grid=grid, warmup=True, **kwargs)
    assert kernel.metadata.shared <= SHARED_BYTES, f"{self.__name__}: {kernel.metadata.shared} bytes of shared memory"
    BUILT.setdefault(self.__name__, set()).add(kernel.hash)
    return kernel


RUN = jit.JITFunction.run


def pretend() -> None:
    """Make every op choose its kernels, and every launch end once it is compiled."""
    driver.set_active(Device())
    jit.JITFunction.run = compile_only
    torch.cuda.device_of = torch.cuda.device = lambda *_: contextlib.nullcontext()
    registry.target_of = lambda _, dtype: registry.Target(
        device="cuda", dtype=dtype, capability=(9, 0), has_triton=True
    )


def mark(slot: int = 0, num_rows: int = 64) -> Mark:
    return Mark(panel=new_panel(2, num_rows), slot=slot, num_signals=2, num_rows=num_rows)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def norms(m: Any) -> None:
    from firetower.ops.rms_norm import add_rms_norm, rms_norm

    for width in (2048, 63):
        x, w = zeros(5, width), zeros(width)
        rms_norm(x, w, mark=m(), mark_input=m(1))
        add_rms_norm(x, x.clone(), w, mark=m(), mark_residual=m(1))
        rms_norm(x, w, gate=x, mark=m())


def ropes(m: Any) -> None:
    from firetower.ops.rope import rope, rope_table

    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    table = rope_table(parameters, head_dim=256, num_positions=64)
    rope(zeros(5, 16, 256), zeros(5, 2, 256), torch.arange(5), table, mark_q=m(), mark_k=m(1))


def convolutions(m: Any) -> None:
    from firetower.ops.causal_conv1d import causal_conv1d, causal_conv1d_window, new_conv_state

    weight = zeros(8192, 4)
    state = new_conv_state(3, 8192, kernel_size=4, max_window=8, dtype=BF16)
    ids, accepted = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    causal_conv1d_window(
        zeros(2, 5, 8192), weight, conv_state=state, state_ids=ids, num_accepted=accepted, mark=m(), mark_state=m(1)
    )
    bounds = torch.tensor([0, 65, 130], dtype=torch.int32)
    causal_conv1d(zeros(130, 8192), weight, cu_seqlens=bounds, mark=m())
    causal_conv1d(zeros(130, 8192), weight, cu_seqlens=bounds, conv_state=state, state_ids=ids, mark_state=m(1))


def delta_rules(m: Any) -> None:
    from firetower.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_window, new_window_state

    for tokens, bounds in ((130, None), (130, torch.tensor([0, 65, 130], dtype=torch.int32))):
        q, k, v = zeros(1, tokens, 16, 128), zeros(1, tokens, 16, 128), zeros(1, tokens, 32, 128)
        g, beta = zeros(1, tokens, 32, dtype=FP32), zeros(1, tokens, 32, dtype=FP32)
        gated_delta_rule(q, k, v, g, beta, cu_seqlens=bounds, mark=m(), state_mark=m(1))
    slots, accepted = torch.arange(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for dtype, dim, width in ((BF16, 128, 5), (BF16, 128, 8), (torch.float16, 96, 8), (FP32, 64, 1)):
        window = new_window_state(3, 16, 32, dim, 128, dtype=dtype)
        q, k, v = (zeros(2, width, *shape, dtype=dtype) for shape in ((16, dim), (16, dim), (32, 128)))
        g, beta = zeros(2, width, 32, dtype=FP32), zeros(2, width, 32, dtype=FP32)
        gated_delta_rule_window(
            q, k, v, g, beta, window, state_slots=slots, num_accepted=accepted, mark=m(), state_mark=m(1)
        )


def mixtures(m: Any) -> None:
    from firetower.ops import moe

    shared = moe.SharedExpert(gate_up_proj=zeros(1024, 2048), down_proj=zeros(2048, 512), gate=zeros(1, 2048))
    weights = moe.MoeWeights(
        router=zeros(8, 2048), gate_up_proj=zeros(8, 1024, 2048), down_proj=zeros(8, 2048, 512), shared=shared
    )
    for tokens, phase in ((5, "window"), (64, "prefill"), (600, "prefill")):
        marks = moe.MoeMarks(swiglu=m(), routed=m(1)) if m() is not None else None
        moe.moe(zeros(tokens, 2048), weights, moe.RoutingRule(top_k=4), phase=phase, marks=marks)


def projections(m: Any) -> None:
    from firetower.ops.linear import linear

    for num_outputs, num_inputs in ((12288, 2048), (512, 8192)):
        linear(zeros(5, num_inputs), zeros(num_outputs, num_inputs), mark=m())


def quantised(m: Any) -> None:
    from firetower.ops.quant import KINDS, quant_linear, quant_linear_q8_1, quantize_q8_1

    for name, kind in KINDS.items():
        raw = torch.zeros(64, 2048 // kind.block_elements * kind.block_bytes, dtype=torch.uint8)
        quant_linear(zeros(1, 2048), raw, name, mark=m())
        quant_linear_q8_1(quantize_q8_1(zeros(1, 2048), mark=m()), raw, name, dtype=BF16, mark=m())


def samplers(m: Any) -> None:
    from firetower.ops.sample import SampleParams, sample

    seeds, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    sample(zeros(2, 4096), mark=m())
    filters = {
        "top_k": torch.full((2,), 5, dtype=torch.int32), "top_p": torch.full((2,), 0.9), "min_p": torch.full((2,), 0.1),
    }  # fmt: skip
    counts = torch.zeros(2, 4096, dtype=torch.int32)
    penalties = {
        "repetition_penalty": torch.ones(2), "frequency_penalty": torch.ones(2), "presence_penalty": torch.ones(2),
        "token_counts": counts, "prompt_mask": None, "logit_bias": zeros(2, 4096, dtype=FP32),
    }  # fmt: skip
    chosen: list[dict[str, Any]] = [{}, filters, filters | penalties]
    chosen += [{name: filters[name]} for name in filters]
    chosen += [{n: x for n, x in filters.items() if n != name} for name in filters]
    for given in chosen:
        for dtype in (BF16, FP32):
            params = SampleParams(temperature=torch.ones(2), **given)
            sample(zeros(2, 4096, dtype=dtype), params, seeds=seeds, positions=positions, num_logprobs=2, mark=m())


def attentions(m: Any) -> None:
    from firetower.ops.attention import new_kv, prefill, window, write_kv

    table, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.full((2,), 100, dtype=torch.int32)
    slots = torch.arange(10).view(2, 5)
    for dtype in (BF16, torch.int8, torch.float8_e4m3fn):
        kv = new_kv(8, 64, 2, 256, dtype=dtype)
        write_kv(zeros(2, 5, 2, 256), zeros(2, 5, 2, 256), kv, slots, mark=m())
        for width in (2, 5):
            q = zeros(2, width, 16, 256)
            window(q, kv, table, lengths, slot_mapping=slots[:, :width].contiguous(), gate=q, mark=m())
    prefill(zeros(9, 16, 256), zeros(9, 2, 256), zeros(9, 2, 256), [0, 4, 9], gate=zeros(9, 16, 256), mark=m())


OPS = (norms, ropes, convolutions, delta_rules, mixtures, projections, quantised, samplers, attentions)

if __name__ == "__main__":
    pretend()
    registry.load_all()
    chosen = sys.argv[1:]
    for op in OPS:
        if not chosen or op.__name__ in chosen:
            for make in (mark, lambda *_: None):
                op(make)
    print(f"built {sum(map(len, BUILT.values()))} forms of {len(BUILT)} kernels with Triton {triton.__version__}:")
    print(*sorted(BUILT))
