"""The real model: SmolLM2-135M-Instruct in Q4_1."""

from __future__ import annotations

import shutil

import pytest

from firetower.scan import Problem, scan
from firetower.scan.gguf import block_location

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_model():
    from firetower.drills.hosts import smollm2_path

    return smollm2_path()


def test_the_real_model_is_silent(real_model):
    (report,) = scan(real_model).files
    assert (report.num_tensors, report.num_checked, report.findings) == (272, 272, ())


@pytest.mark.parametrize(("row", "block"), [(0, 0), (100, 7), (575, 47)])
def test_one_nan_block_scale_in_it_is_named(real_model, tmp_path, row, block):
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(real_model, copy)
    offset, num_bytes = block_location(copy, "blk.12.ffn_down.weight", row, block)
    with copy.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\x7e")
    (finding,) = scan(copy).findings
    assert finding.problem is Problem.NONFINITE
    assert (finding.tensor, finding.row, finding.block) == ("blk.12.ffn_down.weight", row, block)
    assert (finding.offset_bytes, finding.bits, finding.field) == (offset, "7e00", "scale")
    assert num_bytes == 20


def test_every_tensor_dequantises_finite_where_the_scan_is_silent(real_model):
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for tensor in GGUFReader(real_model).tensors:
        assert np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all(), tensor.name


@pytest.mark.parametrize("name", ["small_qwen35_moe", "small_qwen3_next", "small_llama"])
def test_models_saved_by_transformers_are_clean(name, tmp_path):
    from firetower.drills import hosts

    getattr(hosts, name)().save_pretrained(tmp_path)
    report = scan(tmp_path)
    assert report.is_clean
    assert report.files[0].num_checked == report.files[0].num_tensors > 30
