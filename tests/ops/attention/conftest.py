"""Both backends of the attention ops under one name, with outputs full of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.ops.attention import cases, torch_path


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Name of the backend under test."""
    return request.param


@pytest.fixture
def small_plan():
    """``small_plan(query, ...)``: the plan of a type with units of 32 keys and 12 programs in one wave, so that short
    sequences are cut into units and long ones into splits."""
    kernels = pytest.importorskip("firetower.ops.attention.kernels")

    def make(query, **changes):
        plan = kernels.PLANS[query.itemsize]
        small = {"splits": cases.SMALL_SPLITS, "block_n": 32, "programs": 12, "max_waves": 1}
        return dataclasses.replace(plan, **{**small, **changes})

    return make


@pytest.fixture
def run(backend, small_plan, monkeypatch):
    """``run(window, mark=None, ...)``: a window through the backend, cut as finely as a test's short sequences need.

    The backend "flat" is Triton with every window in the form of many rows, in several chunks of a test's narrow heads.
    """
    kernels = pytest.importorskip("firetower.ops.attention.kernels")
    flat = kernels.Form(rows=16, flat=True, columns=8, num_stages=1, num_warps=4)
    monkeypatch.setattr(torch_path, "_CHUNK", 32)

    def run_window(w: cases.Window, mark=None, *, out=None, limit=None, **launch):
        out = torch.full_like(w.query, float("nan")) if out is None else out
        limit = w.block_table.shape[1] * w.kv.key.shape[1] if limit is None else limit
        arguments = (w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, limit, out, mark)
        if backend == "torch":
            torch_path.window(*arguments)
        else:
            plan = small_plan(w.query, **({"forms": (flat,)} if backend == "flat" else {}))
            kernels.window(*arguments, **{"plan": plan, **launch})
        return out

    return run_window
