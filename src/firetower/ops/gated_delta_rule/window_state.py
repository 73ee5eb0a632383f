"""What a window step reads and leaves behind: two halves of everything, so that the half last read stays as it was."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.core.errors import ConfigError

MAX_WINDOW = 8
"""Most tokens of one window."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """Recurrent state of every slot, with the last window's tokens beside it, in two halves.

    Half ``side[slot]`` is clean: ``state`` up to and without the pending window, then the window's tokens. A step with
    ``num_accepted`` reads that half alone. It writes the other half alone: ``state`` with the accepted tokens applied,
    and its own window as pending. `commit_window` then flips ``side`` of the rows that were clean. Nobody flips the
    side of a burned row, so the same call can be made again and finds every bit as it was.

    Attributes:
        state: fp32 [2, num_slots, Hv, Dk, Dv].
        pending_k: fp32 [2, num_slots, max_window, Hk, Dk], after the L2 norm, so that a token applied later gives the
            bits that it gave inside its window.
        pending_v: [2, num_slots, max_window, Hv, Dv], in the type of ``v``.
        pending_g: fp32 [2, num_slots, max_window, Hv]. pending_beta: likewise.
        num_pending: int32 [2, num_slots]: tokens of the pending window; `num_accepted` beyond it counts as it.
        side: int32 [num_slots], 0 or 1.
    """

    state: Tensor
    pending_k: Tensor
    pending_v: Tensor
    pending_g: Tensor
    pending_beta: Tensor
    num_pending: Tensor
    side: Tensor

    def __post_init__(self) -> None:
        if self.state.ndim != 5 or self.state.shape[0] != 2:
            raise ConfigError(f"state: {tuple(self.state.shape)}: must be [2, num_slots, Hv, Dk, Dv]")
        _, num_slots, num_v_heads, head_k_dim, head_v_dim = self.state.shape
        max_window, num_k_heads = self.pending_k.shape[2:4]
        gates = (2, num_slots, max_window, num_v_heads)
        shapes = {
            "pending_k": (2, num_slots, max_window, num_k_heads, head_k_dim),
            "pending_v": (*gates, head_v_dim),
            "pending_g": gates,
            "pending_beta": gates,
            "num_pending": (2, num_slots),
            "side": (num_slots,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ConfigError(f"{name}: {tuple(tensor.shape)}: must be contiguous {shape}; use new_window_state()")

    @property
    def num_slots(self) -> int:
        """Slots of the state."""
        return self.state.shape[1]

    @property
    def max_window(self) -> int:
        """Most tokens of a window."""
        return self.pending_k.shape[2]


def new_window_state(
    num_slots: int,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    *,
    max_window: int = MAX_WINDOW,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> WindowState:
    """Empty slots: zero states, nothing pending.

    Args:
        max_window: most tokens of a window, up to `MAX_WINDOW`.
        dtype: type of ``v``, in which pending values are kept.
        state_dtype: float32; float64 for the reference. Lower types stop decaying.

    Raises:
        ConfigError: sizes that are not positive, a window too long, or value heads that key heads do not divide.
    """
    if min(num_slots, num_k_heads, num_v_heads, head_k_dim, head_v_dim) < 1 or num_v_heads % num_k_heads:
        raise ConfigError(
            f"num_slots={num_slots}, num_k_heads={num_k_heads}, num_v_heads={num_v_heads}, head_k_dim={head_k_dim}, "
            f"head_v_dim={head_v_dim}: must be positive, value heads a multiple of key heads"
        )
    if not 1 <= max_window <= MAX_WINDOW:
        raise ConfigError(f"max_window={max_window}: must be from 1 to {MAX_WINDOW}")
    if state_dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"state_dtype={state_dtype}: must be float32; lower types round slow decay away")

    def zeros(*shape: int, dtype: torch.dtype = state_dtype) -> Tensor:
        return torch.zeros((2, num_slots, *shape), dtype=dtype, device=device)

    return WindowState(
        state=zeros(num_v_heads, head_k_dim, head_v_dim),
        pending_k=zeros(max_window, num_k_heads, head_k_dim),
        pending_v=zeros(max_window, num_v_heads, head_v_dim, dtype=dtype),
        pending_g=zeros(max_window, num_v_heads),
        pending_beta=zeros(max_window, num_v_heads),
        num_pending=zeros(dtype=torch.int32),
        side=torch.zeros(num_slots, dtype=torch.int32, device=device),
    )


def load_state(window: WindowState, state_slots: Tensor, state: Tensor | None = None) -> None:
    """Start slots from a state, with nothing pending; assigned, so that whatever was there is gone.

    Args:
        window: written in place, the clean half alone.
        state_slots: int32 or int64 [N], different, none negative.
        state: [N, Hv, Dk, Dv], as `gated_delta_rule` returns it; None for zeros.
    """
    slots = state_slots.long()
    side = window.side[slots].long()
    window.num_pending[side, slots] = torch.zeros_like(side, dtype=torch.int32)
    if state is None:
        state = window.state.new_zeros((slots.numel(), *window.state.shape[2:]))
    window.state[side, slots] = state.to(window.state.dtype)


def commit_window(window: WindowState, state_slots: Tensor, burned: Tensor | None = None) -> None:
    """Make what the last step wrote the clean half, for the rows that it did not burn; no host sync.

    Args:
        window: its ``side`` is written in place.
        state_slots: int32 or int64 [N], as the step had it; negative for pads.
        burned: bool [N]: rows that keep their clean half, to be run again or rolled back. None: no row.
    """
    slots = state_slots.long()
    flips = slots >= 0
    if burned is not None:
        flips = flips & ~burned
    slots = slots.clamp_min(0)
    # a pad adds nothing to slot 0; a plain assignment from it would race with the row that owns the slot
    step = torch.where(flips, 1 - 2 * window.side[slots], 0)
    window.side.index_add_(0, slots, step.to(torch.int32))
