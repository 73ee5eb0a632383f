"""Run by test_mark_triton.py: compile the kernel for an H200 (sm_90) without one, and look at its code."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firetower.core.words import CLEAN, NOT_RUN
from firetower.sensors import mark_triton
from firetower.sensors.mark import BIT_TESTS, MANY

_INTEGER = {8: "u8", 16: "i16", 32: "i32", 64: "i64"}


def ptx_of(dtypes: list[torch.dtype], has_pad: bool, block: int, has_huge: bool = False) -> str:
    num = len(dtypes)
    bits = tuple(8 * d.itemsize for d in dtypes)
    constants = {
        "MASKS": tuple(BIT_TESTS[d][0] for d in dtypes),
        "VALUES": tuple(BIT_TESTS[d][1] for d in dtypes),
        "NEG_INFS": tuple(BIT_TESTS[d][2] for d in dtypes),
        "BITS": bits,
        "HAS_PAD": has_pad,
        "RAN": CLEAN,
        "NOT_RUN": NOT_RUN,
        "NUM": num,
        "BLOCK": block,
    }
    if not has_pad:
        constants["p_pad"] = None
    types: dict[str, object] = {
        "p_xs": tuple(f"*{_INTEGER[b]}" for b in bits),
        "p_panel": "*i64",
        "p_pad": "*u8",
        "num_signals": "i32",
        "shapes_at": "i32",
        "starts": ("i32",) * (num + 1),
        "shapes": ("i64",) * num,
    }
    if has_huge:
        # encoded counts of a tensor of 2**30 elements and more are wider than those of its neighbours
        for name in ("numels", "per_rows", "widths"):
            types[name] = ("i32",) * (num - 1) + ("i64",)
    names = mark_triton.mark_fwd_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, ("i32",) * num) for n in names}
    aligned = {(0, i): [["tt.divisibility", 16]] for i in range(num)} | {(1,): [["tt.divisibility", 16]]}
    source = ASTSource(
        mark_triton.mark_fwd_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned
    )
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


if __name__ == "__main__":
    cases = [
        ([dtype], has_pad, block) for dtype in BIT_TESTS for has_pad, block in ((False, 1024), (True, 1024))
    ]
    cases.append(([torch.bfloat16], True, 8192))
    cases.append(([torch.bfloat16] * (MANY - 1) + [torch.float32], True, 1024))
    for dtypes, has_pad, block in cases:
        ptx = ptx_of(dtypes, has_pad, block)
        assert ".min.s64" in ptx, dtypes
        wide = "ld.global.v2.b64" if dtypes[0].itemsize == 8 else "ld.global.v"
        assert wide in ptx, (dtypes, "the main load is not vectorised")
    ptx_of([torch.bfloat16, torch.float32], True, 8192, has_huge=True)
    print(f"{len(cases) + 1} kernels compiled")
