"""The absurd-magnitude rule: damage is seen, real outliers are not."""

from __future__ import annotations

import numpy as np
import pytest

from firetower.scan import Problem, scan
from firetower.scan.gguf import block_location


def absurd(path):
    return [f for f in scan(path).bad if f.problem is Problem.ABSURD]


def test_flipped_exponent_bit_of_a_block_scale_is_found(write_gguf, weights):
    path = write_gguf({"blk.0.ffn_up.weight": weights(64, 96)}, quant="Q4_1")
    offset, _ = block_location(path, "blk.0.ffn_up.weight", 9, 1)
    data = bytearray(path.read_bytes())
    data[offset + 1] ^= 0x40
    path.write_bytes(data)
    (finding,) = absurd(path)
    assert (finding.row, finding.block, finding.field, finding.offset_bytes) == (9, 1, "scale", offset)
    assert finding.kind is None


@pytest.mark.parametrize("quant", ["F32", "BF16", "F16"])
def test_flipped_exponent_bit_of_a_value_is_found(quant, write_gguf, weights):
    values = weights(64, 96)
    values[9, 41] = 0.013
    path = write_gguf({"blk.0.ffn_up.weight": values}, quant=quant)
    offset, size = block_location(path, "blk.0.ffn_up.weight", 9, 41)
    data = bytearray(path.read_bytes())
    data[offset + size - 1] ^= 0x40
    path.write_bytes(data)
    (finding,) = absurd(path)
    assert (finding.row, finding.column_start, finding.field) == (9, 41, "value")


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
def test_outliers_of_real_matrices_are_not_absurd(quant, write_gguf, weights):
    values = weights(64, 96)
    values[3, 7], values[50] = 60.0, 12.0  # 3,000 and 600 standard deviations
    assert absurd(write_gguf({"blk.0.ffn_up.weight": values}, quant=quant)) == []


def test_large_biases_and_norms_are_not_absurd(write_gguf, weights):
    bias = weights(128)
    bias[5] = 400.0  # as the key bias of Qwen2.5-7B
    norm = np.full(128, 0.01, dtype=np.float32)
    norm[3] = 900.0
    assert absurd(write_gguf({"blk.0.attn_k.bias": bias, "blk.0.attn_norm.weight": norm})) == []


def test_mostly_unused_embedding_is_not_absurd(write_gguf, weights):
    values = weights(256, 64) * 1e-6
    values[:8] = weights(8, 64)
    assert absurd(write_gguf({"token_embd.weight": values})) == []


def test_value_past_a_million_is_absurd_anywhere(write_gguf, weights):
    bias = weights(128)
    bias[5] = -1.5e6
    (finding,) = absurd(write_gguf({"blk.0.attn_k.bias": bias}))
    assert "value -1.5e+06" in finding.message


def test_float16_near_its_maximum_is_absurd_anywhere(write_gguf, weights):
    bias = weights(128)
    bias[5] = 40000.0
    assert len(absurd(write_gguf({"blk.0.attn_k.bias": bias}, quant="F16"))) == 1
    assert absurd(write_gguf({"blk.0.attn_k.bias": bias}, quant="BF16")) == []


def test_rope_factors_that_switch_a_frequency_off_are_legal(write_gguf, weights):
    factors = np.array([1.0] * 32 + [1e30] * 32, dtype=np.float32)
    assert scan(write_gguf({"rope_freqs.weight": factors, "a.weight": weights(4, 32)})).findings == ()


def test_masks_may_hold_neg_inf_and_the_least_value(write_gguf, weights):
    mask = np.zeros((8, 32), dtype=np.float32)
    mask[0, 1:], mask[1, 2:] = -np.inf, np.finfo(np.float32).min
    assert scan(write_gguf({"attn_mask": mask, "a.weight": weights(4, 32)})).findings == ()
    mask[3, 3] = np.inf
    (finding,) = scan(write_gguf({"attn_mask": mask})).bad
    assert (finding.row, finding.column_start, finding.bits) == (3, 3, "7f800000")
