"""`ModelState`: what sequences leave behind: pages of keys and values, recurrent and convolution states by slot.

Every kind is one tensor with the layers in front, so that clearing, checking or copying a slot is one operation; each
layer works on its own view. Recurrent state and convolution have two halves a slot (`WindowState`): a step reads the
clean half and writes the other, and `commit` makes that one clean. All layers share one ``side``, so that they flip
together.

Legend: A attention layers, L DeltaNet layers, P pages, S slots, K taps, C channels, R pending columns.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.models.config import HybridConfig
from firetower.ops.attention import PagedKV
from firetower.ops.causal_conv1d import new_conv_state
from firetower.ops.gated_delta_rule import MAX_WINDOW, WindowState, commit_window, new_window_state, read_state

_SCALED = (torch.int8, torch.float8_e4m3fn)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PARTS = ("state", "pending_k", "pending_v", "pending_g", "pending_beta", "num_pending")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelState:
    """All state of a runtime. Made by `new_state`; forward passes write it in place.

    Attributes:
        kv: one `PagedKV` an attention layer, in the order of the layers; page numbers mean the same in each.
        recurrent: one `WindowState` a DeltaNet layer; ``side`` is one tensor for all of them.
        conv: one convolution state a DeltaNet layer, [2 * S, C, K - 1 + R]: row ``2 * slot + side`` is clean.
        side: int32 [S].
        pages: [A, 2, P, page_size, num_kv_heads, head_dim], keys then values: the storage of ``kv``.
        page_scales: float32 [A, 2, P, page_size, num_kv_heads] of 8-bit pages, else None.
        slots: the storage of ``recurrent``: for each of its fields a tensor with L in front.
        conv_storage: [L, 2 * S, K - 1 + R, C]: the storage of ``conv``.
        page_size: tokens a page. num_pages: P. num_slots: S.
    """

    kv: tuple[PagedKV, ...]
    recurrent: tuple[WindowState, ...]
    conv: tuple[Tensor, ...]
    side: Tensor
    pages: Tensor
    page_scales: Tensor | None
    slots: dict[str, Tensor]
    conv_storage: Tensor
    page_size: int
    num_pages: int
    num_slots: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotSnapshot:
    """The recurrent and convolution state of one sequence at one position, away from its slot.

    Attributes:
        recurrent: float32 [L, Hv, Dk, Dv].
        conv: [L, K - 1, C], the last inputs, oldest first.
    """

    recurrent: Tensor
    conv: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.recurrent.nbytes + self.conv.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Memory of a `ModelState`, before it is made."""

    pages: int
    recurrent: int
    conv: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.pages + self.recurrent + self.conv


def bytes_of(
    config: HybridConfig,
    *,
    num_pages: int,
    num_slots: int,
    page_size: int = 64,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> StateBytes:
    """Memory that `new_state` takes with the same arguments; nothing is allocated.

    Raises:
        ConfigError: as `new_state`.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    _check(num_pages, num_slots, page_size, kv_dtype, dtype)
    rows = len(config.full_layers) * 2 * num_pages * page_size * config.num_kv_heads
    scales = 4 * rows if kv_dtype in _SCALED else 0
    pending = MAX_WINDOW * (4 * config.key_dim + dtype.itemsize * config.value_dim + 8 * config.num_v_heads)
    slot = 4 * config.value_dim * config.head_k_dim + pending + 4
    columns = config.conv_kernel_size - 1 + MAX_WINDOW
    halves = 2 * num_slots * len(config.linear_layers)
    return StateBytes(
        pages=rows * config.head_dim * kv_dtype.itemsize + scales,
        recurrent=halves * slot + 4 * num_slots,
        conv=halves * columns * config.conv_dim * dtype.itemsize,
    )


def new_state(
    config: HybridConfig,
    *,
    num_pages: int,
    num_slots: int,
    page_size: int = 64,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> ModelState:
    """Empty state: slots as after `clear_slots`, pages as after `clear_pages`.

    Args:
        config: of the model.
        num_pages, page_size: of the pool of keys and values of every attention layer.
        num_slots: sequences whose states there is room for.
        kv_dtype: of keys and values: that of ``dtype``, int8 or float8_e4m3fn; None for ``dtype``.
        dtype: of the model's activations.
        device: where.

    Raises:
        ConfigError: sizes below 1, or a type that is not served.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    _check(num_pages, num_slots, page_size, kv_dtype, dtype)
    side = torch.zeros(num_slots, dtype=torch.int32, device=device)
    pages, page_scales = _new_pages(config, num_pages, page_size, kv_dtype, device)
    storage = _new_slots(config, num_slots, dtype, device)
    conv_storage = _new_conv(config, num_slots, dtype, device)
    num_layers = len(config.linear_layers)
    return ModelState(
        kv=tuple(_paged(pages, page_scales, layer) for layer in range(len(config.full_layers))),
        recurrent=tuple(
            WindowState(**{part: storage[part][layer] for part in _PARTS}, side=side) for layer in range(num_layers)
        ),
        conv=tuple(conv_storage[layer].transpose(1, 2) for layer in range(num_layers)),
        side=side,
        pages=pages,
        page_scales=page_scales,
        slots=storage,
        conv_storage=conv_storage,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
    )


def _check(num_pages: int, num_slots: int, page_size: int, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for name, value in (("num_pages", num_pages), ("num_slots", num_slots), ("page_size", page_size)):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if kv_dtype != dtype and kv_dtype not in _SCALED:
        raise ConfigError(f"kv_dtype={kv_dtype}: must be {dtype} as dtype, torch.int8 or torch.float8_e4m3fn")


def _new_pages(
    config: HybridConfig, num_pages: int, page_size: int, kv_dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    shape = (len(config.full_layers), 2, num_pages, page_size, config.num_kv_heads)
    bits = torch.zeros((*shape, config.head_dim * kv_dtype.itemsize), dtype=torch.uint8, device=device)
    scales = torch.zeros(shape, dtype=torch.float32, device=device) if kv_dtype in _SCALED else None
    return bits.view(kv_dtype), scales


def _paged(pages: Tensor, scales: Tensor | None, layer: int) -> PagedKV:
    key_scale, value_scale = (None, None) if scales is None else (scales[layer, 0], scales[layer, 1])
    return PagedKV(key=pages[layer, 0], value=pages[layer, 1], key_scale=key_scale, value_scale=value_scale)


def _new_slots(
    config: HybridConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    # the op says what an empty slot is; "meta" makes its shapes and types without memory
    one = new_window_state(
        num_slots, config.num_k_heads, config.num_v_heads, config.head_k_dim, config.head_v_dim, dtype=dtype,
        device="meta",
    )  # fmt: skip
    layers = len(config.linear_layers)
    parts = {part: getattr(one, part) for part in _PARTS}
    return {part: torch.zeros((layers, *x.shape), dtype=x.dtype, device=device) for part, x in parts.items()}


def _new_conv(config: HybridConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    rows = len(config.linear_layers) * 2 * num_slots
    flat = new_conv_state(
        max(rows, 1), config.conv_dim, kernel_size=config.conv_kernel_size, max_window=MAX_WINDOW, dtype=dtype,
        device=device,
    )  # fmt: skip
    columns = flat.transpose(1, 2)[:rows]
    return columns.view(len(config.linear_layers), 2 * num_slots, *columns.shape[1:])


def commit(state: ModelState, state_slots: Tensor, burned: Tensor | None = None) -> None:
    """Make what the last window wrote the clean half of every layer, for the rows that it did not burn; no host sync.

    Call it once after each `HybridModel.window`, never after a prefill. A burned row keeps its clean half: the same
    window run again has the same bits.

    Args:
        state: its ``side`` is written.
        state_slots: int32 or int64 [N] as the window had them; negative for pads.
        burned: bool [N], or None for no row.
    """
    if state.recurrent:
        commit_window(state.recurrent[0], state_slots, burned)


def clear_slots(state: ModelState, slots: Tensor) -> None:
    """Empty slots by assignment, both halves: whatever was there, NaN included, is gone. No host sync.

    Args:
        state: written in place.
        slots: int32 or int64 [n], none negative.
    """
    index = slots.long()
    for storage in state.slots.values():
        storage[:, :, index] = 0
    num_past = state.conv_storage.shape[2] - MAX_WINDOW
    for half in (0, 1):
        rows = 2 * index + half
        state.conv_storage[:, rows, :num_past] = 0
        state.conv_storage[:, rows, num_past:] = math.nan
    state.side[index] = 0


def slots_clean(state: ModelState, slots: Tensor) -> Tensor:
    """Whether slots are as `clear_slots` leaves them, every bit of both halves; no host sync.

    Args:
        slots: int32 or int64 [n], none negative.

    Returns:
        bool [n] on the device.
    """
    index = slots.long()
    clean = state.side[index] == 0
    for storage in state.slots.values():
        rows = storage[:, :, index].movedim(2, 0).flatten(1)
        clean = clean & (_bits(rows) == 0).all(1)
    num_past = state.conv_storage.shape[2] - MAX_WINDOW
    for half in (0, 1):
        columns = state.conv_storage[:, 2 * index + half].movedim(1, 0)
        clean = clean & (_bits(columns[:, :, :num_past].flatten(1)) == 0).all(1)
        clean = clean & columns[:, :, num_past:].isnan().flatten(1).all(1)
    return clean


def clear_pages(state: ModelState, pages: Tensor) -> None:
    """Zero pages of every layer, and their scales, by assignment; no host sync.

    Args:
        state: written in place.
        pages: int32 or int64 [n], none negative.
    """
    index = pages.long()
    # 8-bit floats have no assignment of their own on every device
    state.pages.view(torch.uint8)[:, :, index] = 0
    if state.page_scales is not None:
        state.page_scales[:, :, index] = 0


def pages_clean(state: ModelState, pages: Tensor) -> Tensor:
    """Whether every bit of pages is zero; bool [n] on the device, no host sync."""
    index = pages.long()
    clean = (state.pages.view(torch.uint8)[:, :, index].movedim(2, 0).flatten(1) == 0).all(1)
    if state.page_scales is not None:
        clean = clean & (_bits(state.page_scales[:, :, index].movedim(2, 0).flatten(1)) == 0).all(1)
    return clean


def snapshot(state: ModelState, slot: int, num_accepted: int = 0) -> SlotSnapshot:
    """Copy the state of one sequence.

    Args:
        state: only read.
        slot: of the sequence.
        num_accepted: tokens of its pending window to count in: the snapshot is that many tokens later than the clean
            half.

    Raises:
        ConfigError: a slot that does not exist, or more tokens than a window has.
    """
    _check_slot(state, slot)
    if not 0 <= num_accepted <= MAX_WINDOW:
        raise ConfigError(f"num_accepted={num_accepted}: must be from 0 to {MAX_WINDOW}")
    side = state.side[slot : slot + 1].long()
    past = state.conv_storage.shape[2] - MAX_WINDOW
    row = state.conv_storage.index_select(1, 2 * slot + side)[:, 0]
    conv = row[:, num_accepted : num_accepted + past].clone()
    parts = {name: x[:, :, slot].index_select(1, side)[:, 0] for name, x in state.slots.items()}
    if num_accepted == 0:
        return SlotSnapshot(recurrent=parts["state"], conv=conv)
    # the layers as slots of one state, so that the op applies the pending tokens of all of them at once
    layers = torch.arange(parts["state"].shape[0], device=side.device)
    both = {name: torch.stack((x, x)) for name, x in parts.items()}
    as_slots = WindowState(**both, side=torch.zeros_like(layers, dtype=torch.int32))
    accepted = torch.full_like(layers, num_accepted, dtype=torch.int32)
    return SlotSnapshot(recurrent=read_state(as_slots, layers, accepted), conv=conv)


def restore(state: ModelState, slot: int, saved: SlotSnapshot) -> None:
    """Put a snapshot into a slot's clean half, with nothing pending; as after a prefill up to its position.

    Raises:
        ConfigError: a slot that does not exist, or a snapshot of another model.
    """
    _check_slot(state, slot)
    past = state.conv_storage.shape[2] - MAX_WINDOW
    want = ((state.slots["state"].shape[0], *state.slots["state"].shape[3:]), (state.conv_storage.shape[0], past))
    if (tuple(saved.recurrent.shape), tuple(saved.conv.shape[:2])) != want:
        raise ConfigError(f"saved: {tuple(saved.recurrent.shape)}: must be {want[0]}; the snapshot is of another model")
    side = state.side[slot : slot + 1].long()
    at = torch.full_like(side, slot)
    state.slots["state"][:, side, at] = saved.recurrent[:, None]
    state.slots["num_pending"][:, side, at] = 0
    row = 2 * slot + side
    pending = saved.conv.new_full((saved.conv.shape[0], MAX_WINDOW, saved.conv.shape[2]), math.nan)
    state.conv_storage[:, row] = torch.cat((saved.conv, pending), 1)[:, None]


def _check_slot(state: ModelState, slot: int) -> None:
    if not 0 <= slot < state.num_slots:
        raise ConfigError(f"slot={slot}: must be from 0 to {state.num_slots - 1}")


def _bits(x: Tensor) -> Tensor:
    """Raw patterns: -0.0 is not clean."""
    return x if not x.is_floating_point() else x.contiguous().view(torch.uint8)
