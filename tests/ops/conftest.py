"""Tests of ops run on the CPU, kernels by Triton's interpreter, and once more on a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the test's tensors live."""
    return str(request.param)


@pytest.fixture
def kernel_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Types that kernels can be tested in: the interpreter's bf16 ``tl.dot`` is silently wrong."""
    both = (torch.float32, torch.float16)
    return (*both, torch.bfloat16) if device == "cuda" else both


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """``assert_close(name, reference, actual, rtol)``: Frobenius error relative to a float64 reference, printed."""

    def check(name: str, reference: torch.Tensor, actual: torch.Tensor, rtol: float) -> None:
        truth = reference.double().cpu()
        error = (actual.double().cpu() - truth).norm() / truth.norm().clamp_min(1e-300)
        print(f"{name}: relative error {error:.3g}, allowed {rtol:.3g}")
        assert actual.shape == reference.shape
        assert error <= rtol, f"{name}: relative error {error:.3g}, allowed {rtol:.3g}"

    return check
