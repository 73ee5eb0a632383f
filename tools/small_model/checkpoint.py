"""What names a checkpoint: the hash of its weights, in training.json and evaluation.json."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = "model.safetensors"


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the file of weights in a folder, in hex."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
