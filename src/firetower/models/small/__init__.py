"""The model that comes with the package: a hybrid of the Qwen3.5-MoE kind with 5.36 million parameters."""

from __future__ import annotations

from pathlib import Path

SMALL_MODEL = Path(__file__).parent
"""Its folder, as Transformers and `firetower.models.checkpoint.read_weights` read it; needs no torch to be named."""
