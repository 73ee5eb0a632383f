"""Every GGML type: what the scan reads off the scales agrees with dequantising every element."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize

from firetower.core.formats import decode
from firetower.scan import Problem, scan
from firetower.scan.ggml import ggml_layout
from firetower.scan.gguf import block_location
from firetower.scan.layouts import bit_test, field_bits, magnitude_keys

BLOCK_TYPES = [q for q in GGMLQuantizationType if GGML_QUANT_SIZES[q][0] > 1]
DEQUANTISED = [q for q in BLOCK_TYPES if q in _type_traits]
NAN = {
    "float16": b"\x01\x7e",
    "float32": b"\x01\x00\xc0\x7f",
    "float8_e8m0fnu": b"\xff",
    "float8_e4m3fn": b"\x7f",
}


def by_name(quant: GGMLQuantizationType) -> str:
    return quant.name


@pytest.mark.parametrize("quant", list(GGMLQuantizationType), ids=by_name)
def test_every_type_of_the_package_has_a_layout_of_its_size(quant):
    layout = ggml_layout(quant)
    assert layout is not None
    assert (layout.block_elements, layout.block_bytes) == GGML_QUANT_SIZES[quant]
    assert bool(layout.fields) is (quant.name not in {"I8", "I16", "I32", "I64"})


@pytest.mark.parametrize("quant", DEQUANTISED, ids=by_name)
def test_random_bytes_are_judged_as_dequantising_judges_them(quant):
    layout, rng = ggml_layout(quant), np.random.default_rng(2)
    blocks = rng.integers(0, 256, (20_000, layout.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(blocks, quant)
    truth = ~np.isfinite(values).all(axis=1)
    bad = np.zeros(len(blocks), dtype=bool)
    for field in layout.fields:
        keys = magnitude_keys(field_bits(blocks.reshape(-1), len(blocks), layout, field, "<"), field.dtype)
        bad |= keys >= bit_test(field.dtype).bad_from
    if (
        quant.name == "NVFP4"
    ):  # ggml reads the NaN of E4M3 as a number; the scan calls it what the format does
        assert not truth.any()
        assert bad.any()
        return
    if quant.name == "MXFP4":  # from 2^126 on the product overflows fp32: absurd by the scan's rule
        scales = blocks[:, 0]
        assert (bad == (scales == 255)).all()
        assert (scales[truth] >= 253).all()
        return
    # a NaN or Inf scale times a zero sub-scale or code is NaN as well: every element of the block is lost
    assert (bad == truth).all()
    assert bad.any()


@pytest.mark.parametrize("quant", DEQUANTISED, ids=by_name)
def test_gain_bounds_the_elements_and_is_not_lax(quant, random_blocks):
    layout = ggml_layout(quant)
    blocks = random_blocks(quant, 20_000)
    if quant.name == "Q6_K":
        blocks[::2, 192:208] = 0x80  # the largest sub-scale, which random bytes seldom have
    elif quant.name == "Q3_K":
        blocks[::2, 96:108] = 0
    values = np.abs(dequantize(blocks, quant))
    fields = layout.fields if quant.name != "NVFP4" else layout.fields[:1]
    scale = {"float16": 0x211F, "float8_e8m0fnu": 0x78, "float8_e4m3fn": 0x10}
    bound = sum(decode(scale[f.dtype], f.dtype) * f.gain for f in fields)
    assert values.max() <= bound * 1.0001
    assert values.max() >= bound / 4


@pytest.mark.parametrize("quant", BLOCK_TYPES, ids=by_name)
def test_nan_in_each_field_is_placed(quant, write_gguf, random_blocks):
    layout = ggml_layout(quant)
    num_rows, per_row = 4, 3
    clean = random_blocks(quant, num_rows * per_row)
    path = write_gguf({"blk.0.ffn_up.weight": (clean.reshape(num_rows, -1), quant)})
    assert scan(path).bad == ()
    for field in layout.fields:
        data = bytearray(path.read_bytes())
        offset, num_bytes = block_location(path, "blk.0.ffn_up.weight", 2, 1)
        assert num_bytes == layout.block_bytes
        _put_nan(data, offset, field)
        damaged = path.with_name("damaged.gguf")
        damaged.write_bytes(data)
        (finding,) = scan(damaged).bad
        start, stop = field.columns or (0, layout.block_elements)
        assert finding.problem is Problem.NONFINITE
        assert (finding.tensor, finding.row, finding.block) == ("blk.0.ffn_up.weight", 2, 1)
        assert finding.column_start == layout.block_elements + start
        assert finding.column_stop == layout.block_elements + stop
        assert finding.offset_bytes == offset + field.offset
        assert (finding.field, finding.dtype) == (field.role, field.dtype)
        assert finding.bits == NAN[field.dtype][::-1].hex()


def _put_nan(data, offset, field):
    if field.is_packed:  # 0x7e01, a nibble atop each of four words
        for i, nibble in enumerate((0x1, 0x0, 0xE, 0x7)):
            at = offset + field.offset + 2 * i + 1
            data[at] = (data[at] & 0x0F) | (nibble << 4)
        return
    raw = NAN[field.dtype]
    data[offset + field.offset : offset + field.offset + len(raw)] = raw


@pytest.mark.parametrize("quant", BLOCK_TYPES, ids=by_name)
def test_all_zero_bytes_are_an_all_zero_tensor(quant, write_gguf, random_blocks):
    layout = ggml_layout(quant)
    zero = np.zeros((4, 3 * layout.block_bytes), dtype=np.uint8)
    path = write_gguf(
        {"a.weight": (zero, quant), "b.weight": (random_blocks(quant, 12).reshape(4, -1), quant)}
    )
    (finding,) = scan(path).bad
    assert (finding.problem, finding.tensor) == (Problem.ALL_ZERO, "a.weight")


def test_mxfp4_with_the_least_scale_and_codes_is_not_zero(write_gguf):
    blocks = np.full((4, 17), 0x11, dtype=np.uint8)
    blocks[:, 0] = 0
    path = write_gguf({"a.weight": (blocks, GGMLQuantizationType.MXFP4)})
    assert scan(path).findings == ()
