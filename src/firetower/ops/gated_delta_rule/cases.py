"""Shapes, inputs and tolerances of the tests and benchmarks of the gated delta rule."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

ODD_LENGTHS = (1, 2, 63, 64, 65, 1000, 4097)
"""Around a chunk's edges, and two that nothing divides."""

RTOL = {
    # 2e-7 measured over the gates of the tables; sums of a chunk's 64 products in another order
    torch.float32: 2e-6,
    # half an ulp of the stored output is 2.8e-4 as a root mean square; operands in TF32 on CUDA lose as much
    torch.float16: 1e-3,
    # q, k, the state, the residual and the output rounded to 8 bits: 3.8e-3 to 5.8e-3 for gates of both families, and
    # FLA 3.9e-3 to 5.8e-3
    torch.bfloat16: 8e-3,
}
"""Frobenius error of outputs relative to the float64 recurrence, of inputs as stored."""

REFLECTION_RTOL = 2e-5
"""For beta 2, identical unit keys and no decay: each token reflects the state, and errors add up."""

NORM_RTOL = 6e-5
"""The same for keys that are normalised first: a norm that float32 rounds by 6e-8 stretches each of 200 reflections by
twice that; the float32 recurrence is off by up to 3e-5 too."""

SPLIT_RTOL = 1e-6
"""Between two float32 ways through the same tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call; ``initial_state`` is float32, gates are float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g, self.beta


def make_inputs(
    seed: int,
    *,
    batch: int = 1,
    length: int = 200,
    num_k_heads: int = 2,
    num_v_heads: int = 2,
    head_k_dim: int = 64,
    head_v_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    num_states: int | None = None,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random inputs with gates of both families of initialisation, half of the heads each.

    Args:
        num_states: sequences of ``initial_state``; None for ``batch``.
        device: made on the CPU, so that every device gets the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = (batch, length, num_k_heads, head_k_dim), (batch, length, num_v_heads, head_v_dim)
    states = (batch if num_states is None else num_states, num_v_heads, head_k_dim, head_v_dim)
    return Inputs(
        q=normal(*keys).to(device, dtype),
        k=normal(*keys).to(device, dtype),
        v=normal(*values).to(device, dtype),
        g=_gates(generator, batch, length, num_v_heads).to(device),
        beta=normal(*values[:3]).sigmoid().to(device),
        initial_state=normal(*states).to(device),
    )


def _gates(generator: torch.Generator, batch: int, length: int, num_heads: int) -> Tensor:
    """``-A softplus(a + dt_bias)``: A from U(.01, 16), dt_bias 1 in even heads, of a step of 1e-3 to .1 in odd ones."""
    decay = torch.empty(num_heads).uniform_(0.01, 16.0, generator=generator)
    step = torch.empty(num_heads).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
    inverse_softplus = step + torch.log(-torch.expm1(-step))
    bias = torch.where(torch.arange(num_heads) % 2 == 0, 1.0, inverse_softplus)
    raw = torch.randn(batch, length, num_heads, generator=generator)
    return -decay * torch.nn.functional.softplus(raw + bias)


def with_gates(inputs: Inputs, g: float | Tensor) -> Inputs:
    """The same inputs under one gate everywhere, or under gates that broadcast to them."""
    gates = torch.as_tensor(g, dtype=torch.float32, device=inputs.g.device).expand_as(inputs.g).contiguous()
    return dataclasses.replace(inputs, g=gates)
