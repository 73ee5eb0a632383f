"""Both backends of the attention ops under one name, with outputs full of NaN."""

from __future__ import annotations

import pytest
import torch

from firetower.ops.attention import cases, torch_path


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Name of the backend under test."""
    return request.param


@pytest.fixture
def run(backend, monkeypatch):
    """``run(window, mark=None, ...)``: a window through the backend, cut as finely as a test's short sequences need."""
    kernels = pytest.importorskip("firetower.ops.attention.kernels")
    monkeypatch.setattr(torch_path, "_CHUNK", 32)

    def run_window(w: cases.Window, mark=None, *, out=None, limit=None, **launch):
        out = torch.full_like(w.query, float("nan")) if out is None else out
        limit = w.block_table.shape[1] * w.kv.key.shape[1] if limit is None else limit
        arguments = (w.query, w.kv, w.block_table, w.seq_lens, w.slot_mapping, w.gate, w.scale, limit, out, mark)
        if backend == "torch":
            torch_path.window(*arguments)
        else:
            kernels.window(*arguments, **{"splits": cases.SMALL_SPLITS, **launch})
        return out

    return run_window
