# ruff: noqa: N803 - compile-time arguments of kernels are upper case, as in Triton's own code
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""How a kernel starts while the one before it ends (programmatic dependent launch). Import needs Triton.

From compute capability 9.0 on, a kernel launched with `overlap_options` is resident while its predecessor still runs.
It calls `wait` before it reads or writes anything that another kernel writes or reads: then all of the predecessor is
complete and visible. Since every program of every such kernel waits, whatever a kernel two places back wrote is
complete too once its successor runs: a kernel that knows its predecessor may read that before it waits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firetower.ops import registry

OVERLAP_FROM = (9, 0)
"""Compute capability from which kernels may overlap."""

OVERLAPS = True
"""Whether they do where they may; turn it off to look for a fault, or to see what it is worth."""


def overlap_options(x: Tensor, *, is_wanted: bool = True) -> dict[str, Any]:
    """Launch options of a kernel: whether it overlaps, told to the kernel and to the launcher alike."""
    capability = registry.target_of(x.device.type, x.dtype).capability
    if not OVERLAPS or not is_wanted or capability is None or capability < OVERLAP_FROM:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel before this one is complete and what it wrote is visible; then let the next one in."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
