"""Backends: parts fall back one by one, parts of different backends fit each other, libraries serve as oracles."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule import prefill as whole
from firetower.ops.gated_delta_rule.cases import make_inputs
from firetower.ops.registry import REGISTRY, Target

PARTS = ("gated_delta_rule.prepare", "gated_delta_rule.scan", "gated_delta_rule.window")


def cuda(**changes):
    """A CUDA device as far as the table is concerned."""
    settings = {"dtype": torch.bfloat16, "capability": (9, 0), "has_triton": True, **changes}
    return Target(device="cuda", **settings)


@pytest.mark.parametrize("missing", PARTS)
def test_only_the_part_that_a_device_lacks_falls_back(missing):
    table = REGISTRY.table(cuda(missing=frozenset({f"{missing}/triton"})), {})
    assert {part: table[part].backend for part in PARTS} == {p: "torch" if p == missing else "triton" for p in PARTS}
    assert table[missing].passed_over == (("triton", "the device lacks it"),)


def test_without_triton_all_runs_in_pytorch():
    table = REGISTRY.table(cuda(has_triton=False), {})
    assert {table[part].backend for part in PARTS} == {"torch"}
    assert "triton is not installed" in table[PARTS[0]].passed_over[0][1]


def test_libraries_run_when_pinned_alone():
    assert REGISTRY.table(cuda(), {})["gated_delta_rule.prefill"].backend == "own"
    pinned = REGISTRY.table(cuda(capability=(8, 0)), {"gated_delta_rule.prefill": "transformers"})
    assert pinned["gated_delta_rule.prefill"].run is whole.transformers


def test_fla_says_why_it_cannot_run():
    on_cpu = Target(device="cpu", dtype=torch.bfloat16, capability=(0, 0))
    with pytest.raises(ConfigError, match="fla"):
        REGISTRY.table(on_cpu, {"gated_delta_rule.prefill": "fla"})


@pytest.mark.parametrize("backends", [("torch", "triton"), ("triton", "torch")], ids="-".join)
def test_parts_of_different_backends_fit_each_other(prefill, assert_close, backends):
    if prefill.backend == "torch":
        pytest.skip("both are tested under the kernel's name")
    x = prefill.inputs(1, num_states=2, length=80, num_k_heads=2, num_v_heads=4)
    edges = torch.tensor([0, 50, 75], device=x.q.device)
    first, second = (dataclasses.replace(prefill, backend=b) for b in backends)
    mixed = second.scan(first.prepare(x, cu_seqlens=edges), x)
    for name, expected, actual in zip(("out", "state"), prefill(x, cu_seqlens=edges), mixed, strict=True):
        assert_close(name, expected, actual, prefill.rtol())


def arguments(x):
    out, state = torch.full_like(x.v, float("nan")), torch.full_like(x.initial_state, float("nan"))
    settings = {"initial_state": x.initial_state, "cu_seqlens": None, "scale": x.k.shape[3] ** -0.5}
    return {**settings, "use_l2norm": True, "chunk_size": 64, "out": out, "final_state": state}


@pytest.mark.parametrize("length", [63, 130])
def test_transformers_agrees_where_it_is_exact(assert_close, length):
    pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = make_inputs(2, length=length, batch=2, num_v_heads=4, head_k_dim=32)
    theirs, ours = arguments(x), arguments(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.transformers(*x.tokens, **theirs, mark=None, state_mark=None)
    whole.own(*x.tokens, **ours, mark=None, state_mark=None)
    for name in ("out", "final_state"):
        assert_close(name, theirs[name], ours[name], 2e-6)


def test_transformers_refuses_what_it_cannot_do():
    x = make_inputs(3, length=8)
    with pytest.raises(ConfigError, match="takes neither"):
        whole.transformers(*x.tokens, **{**arguments(x), "scale": 1.0}, mark=None, state_mark=None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_fla_agrees_within_bfloat16(assert_close):
    if importlib.util.find_spec("fla") is None:
        pytest.skip("fla is not installed")
    x = make_inputs(4, length=130, num_v_heads=4, head_k_dim=128, head_v_dim=128, dtype=torch.bfloat16, device="cuda")
    theirs, ours = arguments(x), arguments(x)
    whole.fla(*x.tokens, **theirs, mark=None, state_mark=None)
    whole.own(*x.tokens, **ours, mark=None, state_mark=None)
    assert_close("out", theirs["out"], ours["out"], 1e-2)


@pytest.mark.parametrize("chunk_size", [8, 48, 128])
def test_the_kernel_refuses_a_chunk_that_it_has_no_tile_for(prefill, chunk_size):
    if prefill.backend == "torch":
        pytest.skip("takes any")
    with pytest.raises(ConfigError, match=f"chunk_size={chunk_size}"):
        prefill(prefill.inputs(5, length=20), chunk_size=chunk_size)
