"""Where an op leaves its answer: `Mark` names one signal's words in a panel; `mark_rows` is the check in plain PyTorch.

Panel layout for S signals and R rows as in `firetower.sensors.mark`. An op's output is ``[rows, width]`` to the panel;
``row_ids`` says which row word each of its rows owns, so that padded, sorted or gathered rows keep their names.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.core.words import CLEAN, MAX_ELEMENTS, NOT_RUN
from firetower.sensors.mark import BIT_TESTS, shape_word

_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One signal of one step, as an op marks it.

    Attributes:
        panel: int64 [2 S + R + S + 1], on the op's device.
        slot: the signal's index in execution order.
        num_signals: S. num_rows: R.
        row_ids: int32 or int64 [rows of the op's output]: the row word of each, negative for a pad, which marks only
            the pad word. None: no row words, no pads.
        neg_inf_legal: whether -Inf may stand in the signal.
    """

    panel: Tensor
    slot: int
    num_signals: int
    num_rows: int
    row_ids: Tensor | None = None
    neg_inf_legal: bool = False

    def __post_init__(self) -> None:
        if self.panel.numel() != 3 * self.num_signals + self.num_rows + 1 or self.panel.dtype is not torch.int64:
            raise ConfigError(
                f"panel: {self.panel.numel()} words of {self.panel.dtype}: must be int64 "
                f"[3 * {self.num_signals} + {self.num_rows} + 1]; make it with new_panel()"
            )
        if not 0 <= self.slot < self.num_signals:
            raise ConfigError(f"slot={self.slot}: must be from 0 to {self.num_signals - 1}; declare the signal first")


def new_panel(num_signals: int, num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """An empty panel: int64 [3 * num_signals + num_rows + 1], every word `NOT_RUN`."""
    return torch.full((3 * num_signals + num_rows + 1,), NOT_RUN, dtype=torch.int64, device=device)


def mark_arguments(
    mark: Mark | None, dtype: torch.dtype, rows: int, width: int
) -> tuple[Tensor | None, Tensor | None, int, int, int, int, int]:
    """What a Triton kernel is passed to mark an output ``[rows, width]``; all of it unused where ``mark`` is None.

    Returns:
        (panel, row_ids, slot, num_signals, num_rows, shape word, pattern of a legal -Inf or 0), in the order of
        `firetower.sensors.mark_tile.mark_tile`.

    Raises:
        ConfigError: more elements than a word's index has room for.
    """
    if mark is None:
        return None, None, 0, 0, 0, 0, 0
    if rows * width > MAX_ELEMENTS:
        raise ConfigError(f"rows * width={rows * width}: a word's index has 31 bits; split the tensor by rows")
    legal = BIT_TESTS[dtype][2] if mark.neg_inf_legal else 0
    shape = shape_word(dtype, (rows, width))
    return mark.panel, mark.row_ids, mark.slot, mark.num_signals, mark.num_rows, shape, legal


def mark_rows(x: Tensor, mark: Mark | None) -> None:
    """Check ``x`` ``[..., width]`` as ``[rows, width]`` and lower the panel's words; nothing where ``mark`` is None.

    Needs no host sync on a device. Reads raw bits; float64 keeps the high half of its pattern.
    """
    if mark is None or x.numel() == 0:
        return
    width = x.shape[-1] if x.ndim else 1
    panel, slot = mark.panel, mark.slot
    at, shape = panel.numel() - 1 - mark.num_signals + slot, _shape_of(x.dtype, x.numel() // width, width)
    if x.is_cpu:
        _declare_on_host(panel, slot, at, shape)
        if _is_clean(x, neg_inf_legal=mark.neg_inf_legal):
            return
    else:
        _lower(panel, slot, torch.full_like(panel[slot], CLEAN))
        _declare_shape(panel, at, shape)
    rows = x.detach().reshape(-1, width)
    bad, code = _bad_codes(rows, neg_inf_legal=mark.neg_inf_legal)
    index = torch.arange(rows.numel(), device=x.device).view(rows.shape)
    words = torch.where(bad, index << 32 | code, NOT_RUN)
    if mark.row_ids is None:
        _lower(panel, slot, words.min())
        return
    ids = mark.row_ids[: rows.shape[0]].long()
    is_pad = (ids < 0)[:, None]
    _lower(panel, slot, words.masked_fill(is_pad, NOT_RUN).min())
    _lower(panel, mark.num_signals + slot, words.masked_fill(~is_pad, NOT_RUN).min())
    column = torch.where(bad, torch.arange(width, device=x.device), width).amin(-1)
    row_words = torch.where((column < width) & (ids >= 0), column | slot << 32, NOT_RUN)
    first = 2 * mark.num_signals
    panel[first : first + mark.num_rows].scatter_reduce_(0, ids.clamp_min(0), row_words, "amin")


def _is_clean(x: Tensor, *, neg_inf_legal: bool) -> bool:
    """A finite sum proves every element finite, one of -Inf that none is a NaN or +Inf; else ask the exact pass."""
    if x.dtype.itemsize == 1:
        return False
    total = x.sum(dtype=torch.float64 if x.dtype is torch.float64 else torch.float32).item()
    return math.isfinite(total) or (neg_inf_legal and total == -math.inf)


@functools.lru_cache(maxsize=4096)
def _shape_of(dtype: torch.dtype, rows: int, width: int) -> int:
    return shape_word(dtype, (rows, width))


def _declare_on_host(panel: Tensor, slot: int, at: int, shape: int) -> None:
    """Says that the signal ran, and as which shape; through NumPy, as an operation on one word costs as much as one on
    thousands."""
    words = panel.numpy()
    words[slot] = min(int(words[slot]), CLEAN)
    before = int(words[at])
    words[at] = shape if before == NOT_RUN else before if before | 1 == shape else before & -2


def _bad_codes(rows: Tensor, *, neg_inf_legal: bool) -> tuple[Tensor, Tensor]:
    """(bool, int64 raw pattern in 32 bits) of every element."""
    pattern, value, neg_inf = BIT_TESTS[rows.dtype]
    raw = rows.contiguous().view(_INT_VIEW[rows.dtype.itemsize]).long()
    if rows.dtype is torch.float64:
        high = raw >> 32 & 0xFFFFFFFF
        code = torch.where((raw & 0xFFFFFFFF != 0) & (high & 0xFFFFF == 0), high | 1, high)
    else:
        code = raw & ((1 << 8 * rows.dtype.itemsize) - 1)
    bad = code & pattern == value
    return (bad & (code != neg_inf & 0xFFFFFFFF) if neg_inf_legal and neg_inf else bad), code


def _lower(panel: Tensor, at: int, word: Tensor) -> None:
    panel[at : at + 1] = torch.minimum(panel[at : at + 1], word)


def _declare_shape(panel: Tensor, at: int, shape: int) -> None:
    before = panel[at : at + 1]
    same = (before == NOT_RUN) | (before | 1 == shape)
    panel[at : at + 1] = torch.where(same, torch.where(before == NOT_RUN, shape, before), before & -2)
