"""Block layouts of every GGML type, from ggml-common.h; sizes from the installed `gguf` package.

A gain is the largest |code| times the largest |sub-scale| of the type.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from firetower.scan.layouts import Field, Layout, opaque, plain

_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"I8", "I16", "I32", "I64"}


def _scale(gain: float, offset: int = 0) -> tuple[Field, ...]:
    return (Field(role="scale", offset=offset, gain=gain),)


def _scale_min(gain: float, min_gain: float, offset: int = 0) -> tuple[Field, ...]:
    return (*_scale(gain, offset), Field(role="min", offset=offset + 2, gain=min_gain))


def _float32_pair() -> tuple[Field, ...]:
    return (
        Field(role="scale", dtype="float32", gain=128),
        Field(role="min", offset=4, dtype="float32"),
    )


_BLOCKS: dict[tuple[str, int], tuple[Field, ...]] = {
    ("Q1_0", 18): _scale(1),
    ("Q4_0", 18): _scale(8),
    ("Q4_1", 20): _scale_min(15, 1),
    ("Q5_0", 22): _scale(16),
    ("Q5_1", 24): _scale_min(31, 1),
    ("Q8_0", 34): _scale(128),
    # 40 bytes as the package and old ggml have it (two fp32), 36 as today's ggml has it (two fp16); the
    # second field is scale * sum of codes, an activation-side type that llama.cpp never writes to a file
    ("Q8_1", 40): _float32_pair(),
    ("Q8_1", 36): _scale_min(128, 1),
    ("Q2_K", 84): _scale_min(15 * 3, 15, offset=80),
    ("Q3_K", 110): _scale(32 * 4, offset=108),
    ("Q4_K", 144): _scale_min(63 * 15, 63),
    ("Q5_K", 176): _scale_min(63 * 31, 63),
    ("Q6_K", 210): _scale(128 * 32, offset=208),
    ("Q8_K", 292): (Field(role="scale", dtype="float32", gain=128),),
    ("IQ2_XXS", 66): _scale(15.5 * 0.25 * 43),
    ("IQ2_XS", 74): _scale(15.5 * 0.25 * 43),
    ("IQ2_S", 82): _scale(15.5 * 0.25 * 43),
    ("IQ3_XXS", 98): _scale(15.5 * 0.5 * 62),
    ("IQ3_S", 110): _scale(31 * 15),
    ("IQ1_S", 50): _scale(15 * 1.125),
    ("IQ1_M", 56): (Field(role="scale", offset=48, gain=15 * 1.125, is_packed=True),),
    ("IQ4_NL", 18): _scale(127),
    ("IQ4_XS", 136): _scale(32 * 127),
    ("TQ1_0", 54): _scale(1, offset=52),
    ("TQ2_0", 66): _scale(2, offset=64),
    ("MXFP4", 17): (Field(role="scale", dtype="float8_e8m0fnu", gain=6),),
    ("NVFP4", 36): tuple(
        Field(role="scale", offset=i, dtype="float8_e4m3fn", gain=6, columns=(16 * i, 16 * i + 16))
        for i in range(4)
    ),
}
"""Fields by type name and block size, so that a package with another layout is refused, not misread."""


@lru_cache
def ggml_layout(type_id: int) -> Layout | None:
    """Layout of a GGML type number, or None where the installed package or this table does not know it."""
    try:
        quant = GGMLQuantizationType(type_id)
        elements, num_bytes = GGML_QUANT_SIZES[quant]
    except (ValueError, KeyError):
        return None
    if quant.name in _PLAIN:
        return plain(quant.name, _PLAIN[quant.name])
    if quant.name in _INTEGERS:
        return opaque(quant.name, elements, num_bytes)
    fields = _BLOCKS.get((quant.name, num_bytes))
    if fields is None:
        return None
    layout = Layout(name=quant.name, block_elements=elements, block_bytes=num_bytes, fields=fields)
    # E8M0 has no zero, so an all-zero block shows in its 4-bit codes (sign bit ignored)
    return (
        dataclasses.replace(layout, code_bytes=(1, 17), code_mask=0x77) if quant.name == "MXFP4" else layout
    )
