"""Every test that names ``backend`` runs twice: in PyTorch, and with every part of the block pinned to its kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import firetower.ops.moe  # noqa: F401 - registers its kernels before the first choice
from firetower.ops.registry import REGISTRY

PARTS = ("logits", "router", "plan", "route_plan", "gate_up", "down", "combine")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All parts from one backend, pinned as a user would."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(REGISTRY, "_choices", {})
    monkeypatch.setenv("FIRETOWER_OPS", ",".join(f"moe.{part}={request.param}" for part in PARTS))
    return str(request.param)


@pytest.fixture
def same_bits() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Equality of patterns, NaN included."""

    def check(a: torch.Tensor, b: torch.Tensor) -> bool:
        view = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))

    return check


@pytest.fixture
def same_rows(
    backend: str, device: str, same_bits: Callable[[torch.Tensor, torch.Tensor], bool]
) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Equality of patterns; where the interpreter computes, equality but for rounding.

    Its products are NumPy's, whose bits depend on the row's place in the block; a matrix instruction's do not.
    """

    def check(a: torch.Tensor, b: torch.Tensor) -> bool:
        if backend == "torch" or device == "cuda":
            return same_bits(a, b)
        return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)

    return check


@pytest.fixture
def filled() -> Callable[..., torch.Tensor]:
    """An output full of a value that must be overwritten."""

    def make(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return make
