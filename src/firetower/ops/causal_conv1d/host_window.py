"""The window step of the convolution where the host may look at slots and counts: few operations, one pass a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firetower.sensors.marks import Mark, mark_rows


def take_past(conv_state: Tensor, slots: list[int], accepted: list[int], num_past: int) -> Tensor:
    """The columns after the accepted tokens: [N, P, C]; slots and counts within the state."""
    columns = conv_state.transpose(1, 2).index_select(0, torch.tensor(slots))
    if len(set(accepted)) == 1:
        return columns[:, accepted[0] : accepted[0] + num_past]
    return torch.stack([row[count : count + num_past] for row, count in zip(columns, accepted, strict=True)])


def put_columns(conv_state: Tensor, slots: list[int], rows: list[int], past: Tensor, x: Tensor) -> None:
    """Commit ``past`` [N, P, C] and leave ``x`` [N, W, C] pending, NaN after it, for the rows that have a slot."""
    num_past, num_tokens = past.shape[1], x.shape[1]
    columns = past.new_full((len(rows), conv_state.shape[2], past.shape[2]), math.nan)
    if len(rows) < len(past):
        index = torch.tensor(rows)
        past, x = past.index_select(0, index), x.index_select(0, index)
    columns[:, :num_past] = past
    columns[:, num_past : num_past + num_tokens] = x
    conv_state.transpose(1, 2).index_copy_(0, torch.tensor(slots), columns)


def mark_committed(past: Tensor, rows: list[int], mark: Mark | None) -> None:
    """Check the committed columns of the rows that were written."""
    if mark is None:
        return
    if len(rows) < len(past):
        is_kept = torch.zeros(len(past), dtype=torch.bool)
        is_kept[rows] = True
        past = torch.where(is_kept[:, None, None], past, 0.0)
    mark_rows(past.flatten(1), mark)
