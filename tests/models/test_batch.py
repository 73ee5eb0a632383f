"""Shapes and types of batches are checked on the host, before anything runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.models.batch import new_prefill_batch, new_window_batch

PROMPTS = {"prompts": [[1, 2, 3], [4]], "block_tables": [[2, 1], [3]], "state_slots": [1, 0], "page_size": 2}


def test_a_new_window_is_all_pads():
    batch = new_window_batch(3, 5, 7, max_seq_len=20)
    assert (batch.num_sequences, batch.window) == (3, 5)
    assert (batch.row_ids < 0).all()
    assert (batch.state_slots < 0).all()
    assert (batch.slot_mapping < 0).all()
    assert (batch.seq_lens == 0).all()


WINDOW = {
    "nine tokens": ({"token_ids": torch.zeros(3, 9, dtype=torch.int64)}, r"token_ids: \[3, 9\]"),
    "flat tokens": ({"token_ids": torch.zeros(15, dtype=torch.int64)}, r"token_ids: \[15\]"),
    "int32 tokens": ({"token_ids": torch.zeros(3, 5, dtype=torch.int32)}, r"token_ids: torch\.int32"),
    "rows": ({"row_ids": torch.zeros(3, dtype=torch.int32)}, r"row_ids: torch\.int32 \[3\]"),
    "slots": ({"state_slots": torch.zeros(3, dtype=torch.int64)}, r"state_slots: torch\.int64"),
    "strided": ({"positions": torch.zeros(5, 3, dtype=torch.int64).T}, "positions: .* must be contiguous"),
    "table": ({"block_table": torch.zeros(2, 7, dtype=torch.int32)}, "block_table"),
    "limit": ({"max_seq_len": 0}, "max_seq_len=0"),
}


@pytest.mark.parametrize(("change", "message"), WINDOW.values(), ids=WINDOW)
def test_windows_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(new_window_batch(3, 5, 7, max_seq_len=20), **change)


def test_prompts_lie_one_behind_the_other():
    batch = new_prefill_batch(**PROMPTS, first_row=10)
    assert batch.token_ids.tolist() == [1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.row_ids.tolist() == [10, 11, 12, 13]
    assert batch.cu_seqlens == tuple(batch.cu_seqlens_device.tolist()) == (0, 3, 4)
    assert batch.slot_mapping.tolist() == [4, 5, 2, 6]
    assert batch.block_table.tolist() == [[2, 1], [3, 0]]
    assert batch.prefix_lens == (0, 0)


def test_a_prefix_moves_positions_and_places():
    batch = new_prefill_batch([[7, 8]], block_tables=[[5, 9]], state_slots=[0], page_size=64, prefix_lens=[64])
    assert batch.positions.tolist() == [64, 65]
    assert batch.slot_mapping.tolist() == [9 * 64, 9 * 64 + 1]


PREFILL = {
    "empty prompt": ({"prompts": [[1, 2, 3], []]}, r"cu_seqlens=\(0, 3, 3\)"),
    "no prompts": ({"prompts": [], "block_tables": [], "state_slots": []}, "prompts=0"),
    "one slot short": ({"state_slots": [1]}, "state_slots=1"),
    "pages": ({"block_tables": [[2], [3]]}, "1 pages of 2: too few for 3 tokens"),
    "prefix": ({"prefix_lens": [0, 2], "block_tables": [[2, 1], [3, 4]]}, r"prefix_lens=\(0, 2\)"),
}


@pytest.mark.parametrize(("change", "message"), PREFILL.values(), ids=PREFILL)
def test_prompts_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        new_prefill_batch(**{**PROMPTS, **change})
