"""What the tests of the convolution share: one backend at a time, into outputs filled beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firetower.ops.causal_conv1d import torch_path

_OPTIONAL = ("conv_state", "state_ids", "state_ids_out", "has_initial_state", "num_accepted", "num_pads")


class Backend:
    """Prefill and window of one backend, arguments by the names of the public functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def prefill(
        self, x: Tensor, weight: Tensor, cu_seqlens: Tensor, *, bias: Tensor | None = None, fill: float = math.nan,
        **given: Any,
    ) -> Tensor:  # fmt: skip
        given.setdefault("state_ids_out", given.get("state_ids"))
        tensors = [given.pop(name, None) for name in _OPTIONAL]
        rest = {"activation": "silu", "mark": None, "mark_state": None, **given}
        out = torch.full_like(x, fill, memory_format=torch.contiguous_format)
        self._module.prefill(x, weight, bias, cu_seqlens, *tensors, out, **rest)
        return out

    def window(
        self, x: Tensor, weight: Tensor, conv_state: Tensor, state_ids: Tensor, num_accepted: Tensor, *,
        bias: Tensor | None = None, state_ids_out: Tensor | None = None, fill: float = math.nan, **given: Any,
    ) -> Tensor:  # fmt: skip
        rest = {"activation": "silu", "mark": None, "mark_state": None, **given}
        out = torch.full_like(x, fill, memory_format=torch.contiguous_format)
        ids_out = state_ids if state_ids_out is None else state_ids_out
        self._module.window(x, weight, bias, conv_state, state_ids, ids_out, num_accepted, out, **rest)
        return out


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend, on the test's device."""
    if request.param == "torch":
        return Backend(torch_path)
    return Backend(pytest.importorskip("firetower.ops.causal_conv1d.kernels"))


@pytest.fixture
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """Whether two tensors hold the same bits, NaN included."""

    def check(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

    return check
