"""Small model files made on the spot, GGUF through the gguf package's writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

WriteGguf = Callable[..., Path]


def finite_blocks(quant: GGMLQuantizationType, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Random codes with scales and mins of 0.01, uint8 of shape (num_blocks, block bytes)."""
    from firetower.scan.ggml import ggml_layout

    layout = ggml_layout(quant)
    assert layout is not None
    blocks = rng.integers(0, 256, (num_blocks, layout.block_bytes), dtype=np.uint8)
    small = {
        "float16": b"\x1f\x21",
        "float32": b"\x0a\xd7\x23\x3c",
        "float8_e8m0fnu": b"\x78",
        "float8_e4m3fn": b"\x10",
    }
    for field in layout.fields:
        if field.is_packed:  # 0x211f, a nibble atop each of four words
            for i, nibble in enumerate((0xF, 0x1, 0x1, 0x2)):
                at = field.offset + 2 * i + 1
                blocks[:, at] = (blocks[:, at] & 0x0F) | (nibble << 4)
            continue
        raw = np.frombuffer(small[field.dtype], dtype=np.uint8)
        blocks[:, field.offset : field.offset + len(raw)] = raw
    return blocks


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Write a GGUF file; a tensor is a float32 array (stored as ``quant``) or (raw uint8 rows, type)."""

    def write(
        tensors: Mapping[str, Any], name: str = "model.gguf", quant: str = "F32", vocabulary: int = 50
    ) -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, "llama")
        writer.add_context_length(128)
        writer.add_token_list([f"token{i}" for i in range(vocabulary)])
        writer.add_token_scores([0.5] * vocabulary)
        for tensor, value in tensors.items():
            if isinstance(value, tuple):
                writer.add_tensor(tensor, value[0], raw_dtype=value[1])
            else:
                kind = GGMLQuantizationType[quant]
                writer.add_tensor(tensor, quantize(value.astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def weights() -> Callable[..., np.ndarray]:
    """Random float32 weights of a shape, as those of a model: normal, standard deviation 0.02."""
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(0, 0.02, shape).astype(np.float32)


@pytest.fixture
def random_blocks() -> Callable[..., np.ndarray]:
    """`finite_blocks`, seeded."""
    rng = np.random.default_rng(1)
    return lambda quant, num_blocks: finite_blocks(quant, num_blocks, rng)
