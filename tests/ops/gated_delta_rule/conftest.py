"""One way to run prefill by either backend, and chunked forms as they are found in the wild, each with its fault."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from firetower.ops.gated_delta_rule.cases import RTOL, Inputs, make_inputs
from firetower.ops.gated_delta_rule.chunks import Chunks, make_table
from firetower.ops.gated_delta_rule.reference import l2norm_reference


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Both parts of one backend, called past the registry; every output starts as ``fill``."""

    backend: str
    device: str
    fill: float = float("nan")

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs it: tiny shapes only."""
        return self.backend == "triton" and self.device == "cpu"

    def part(self, name: str) -> Callable[..., Any]:
        """``prepare`` or ``scan``."""
        file = "torch_path" if self.backend == "torch" else {"prepare": "kernels", "scan": "scan_kernels"}[name]
        run: Callable[..., Any] = getattr(importlib.import_module(f"firetower.ops.gated_delta_rule.{file}"), name)
        return run

    def inputs(self, seed: int, **changes: Any) -> Inputs:
        """Inputs of the tables' shape, or of a smaller one with grouped heads for the interpreter."""
        small = {"length": 100, "num_k_heads": 1, "head_k_dim": 32, "head_v_dim": 32} if self.is_interpreted else {}
        return make_inputs(seed, device=self.device, **{**small, **changes})

    def only_where_quick(self, is_enough: bool) -> None:
        """Leaves a variant to the PyTorch path and to CUDA, where others of its kind are enough for the interpreter."""
        if self.is_interpreted and not is_enough:
            pytest.skip("the interpreter runs others of this kind")

    def needs_a_fixed_order(self) -> None:
        """Skips PyTorch on CUDA, where the library picks another order of summation for another number of chunks."""
        if self.backend == "torch" and self.device == "cuda":
            pytest.skip("the library's order of summation goes with the shape")

    def rtol(self, dtype: torch.dtype = torch.float32) -> float:
        """What the backend's arithmetic allows: on CUDA float32 products are sums of three in TF32."""
        return 1e-5 if dtype is torch.float32 and self.device == "cuda" else RTOL[dtype]

    def prepare(self, x: Inputs, *, cu_seqlens: Tensor | None = None, chunk_size: int = 64, use_l2norm: bool = True):
        table = make_table(x.q.shape[0], x.q.shape[1], chunk_size, cu_seqlens)
        scale = x.k.shape[3] ** -0.5
        return self.part("prepare")(x.q, x.k, x.g, x.beta, table, scale=scale, use_l2norm=use_l2norm)

    def scan(self, chunks: Chunks, x: Inputs, *, from_zero: bool = False, mark=None, state_mark=None):
        out = torch.full_like(x.v, self.fill)
        state = torch.full_like(x.initial_state, self.fill)
        self.part("scan")(
            chunks, x.v, initial_state=None if from_zero else x.initial_state, out=out, final_state=state, mark=mark,
            state_mark=state_mark,
        )  # fmt: skip
        return out, state

    def __call__(self, x: Inputs, *, from_zero: bool = False, mark=None, state_mark=None, **of_prepare: Any):
        """(out, final state)."""
        chunks = self.prepare(x, **of_prepare)
        return self.scan(chunks, x, from_zero=from_zero, mark=mark, state_mark=state_mark)


@pytest.fixture(params=["torch", "triton"])
def prefill(request: pytest.FixtureRequest, device: str) -> Prefill:
    """Chunked prefill by each backend."""
    if request.param == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for CUDA here: the interpreter is off")
    return Prefill(request.param, device)


@pytest.fixture
def faulty() -> ModuleType:
    """The faulty forms below."""
    return sys.modules[__name__]


Decays = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Of gates [C]: pairwise [C, C], from the chunk's start [C], to its end [C], in all."""


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, decays: Decays, size: int = 64):
    """One sequence in float32, heads one by one: (out, final state). Decays come from ``decays`` of each chunk."""
    q, k = l2norm_reference(q), l2norm_reference(k)
    out, states = torch.zeros_like(v), state.clone()
    scale = q.shape[-1] ** -0.5
    for h in range(v.shape[2]):
        s = states[0, h]
        for at in range(0, q.shape[1], size):
            span = slice(at, at + size)
            q_c, k_c, v_c, b_c = q[0, span, h], k[0, span, h], v[0, span, h], beta[0, span, h, None]
            pair, start, end, total = decays(g[0, span, h])
            lower = b_c * (k_c @ k_c.mT) * pair * (1 - torch.eye(len(pair)))
            residual = b_c * (v_c - start[:, None] * (k_c @ s))
            new = torch.linalg.solve_triangular(
                lower + torch.eye(len(lower)), residual, upper=False, unitriangular=True
            )
            scores = (q_c @ k_c.mT) * pair
            out[0, span, h] = scale * (start[:, None] * (q_c @ s) + scores @ new)
            s = total * s + (end[:, None] * k_c).mT @ new
        states[0, h] = s
    return out, states


def differences(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masked before the exponential, but of differences of a float32 cumulative sum."""
    total = torch.zeros(())
    sums = torch.stack([total := total + x for x in g])
    pair = (sums[:, None] - sums[None, :]).masked_fill(~torch.ones(len(g), len(g), dtype=torch.bool).tril(), -torch.inf)
    return pair.exp(), sums.exp(), (sums[-1] - sums).exp(), sums[-1].exp()


def clamped_gates(limit: float) -> Decays:
    """Each gate held to +-limit."""
    return lambda g: differences(g.clamp(-limit, limit))


def clamped_sums(limit: float) -> Decays:
    """Each gate held to +-0.5, and the cumulative sum to +-limit."""

    def decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums = g.clamp(-0.5, 0.5).cumsum(0).clamp(-limit, limit)
        return (sums[:, None] - sums[None, :]).exp().tril(), sums.exp(), (sums[-1] - sums).exp(), sums[-1].exp()

    return decays


def exp_before_mask(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The exponential of every pairwise difference, times a mask of zeros and ones."""
    sums = g.cumsum(0)
    pair = (sums[:, None] - sums[None, :]).exp() * torch.ones(len(g), len(g)).tril()
    return pair, sums.exp(), (sums[-1] - sums).exp(), sums[-1].exp()


def factored(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row's exponential times a column's."""
    sums = g.cumsum(0)
    return torch.outer(sums.exp(), (-sums).exp()).tril(), sums.exp(), (sums[-1] - sums).exp(), sums[-1].exp()


def stale_pair(g: Tensor, before: Tensor) -> Tensor:
    """Pairwise decays of this chunk's rows against the cumulative sum of the chunk before."""
    return (g.cumsum(0)[:, None] - before.cumsum(0)[None, :]).exp().tril()


def neumann(lower: Tensor) -> Tensor:
    """``(I + lower)^-1`` by doubling over the whole chunk."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
    inverse, power = eye - lower, lower @ lower
    for _ in range(5):
        inverse = inverse @ (eye + power)
        power = power @ power
    return inverse
