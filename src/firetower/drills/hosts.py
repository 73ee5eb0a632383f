"""Models that drills live in: a real small one (SmolLM2-135M-Instruct) and tiny random ones of each family.

The random models come from Transformers' own classes with about 4 M parameters; their weights depend on
``seed`` only, and building one leaves the global random state as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firetower.core.config import cache_folder
from firetower.core.errors import FiretowerError, MissingExtraError

if TYPE_CHECKING:
    import torch

SMOLLM2_FILE = "smollm2-135m-instruct-q4_1.gguf"
"""File name of the real model's GGUF inside ``<cache folder>/models``."""

_INITIALIZER_RANGE = 0.08
_NUM_EXPERTS = 32


def smollm2_path() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF (Q4_1, 98 MB).

    Raises:
        FiretowerError: the file has not been fetched yet.
    """
    path = cache_folder() / "models" / SMOLLM2_FILE
    if not path.is_file():
        raise FiretowerError(f"path={path}: the real model is not there; run `make models` (93 MB)")
    return path


def load_smollm2(
    path: Path | str | None = None, dtype: torch.dtype | None = None, *, keep: bool = True
) -> tuple[Any, Any]:
    """Load SmolLM2 through Transformers with exactly the weights of the GGUF file.

    Transformers takes 20 s to dequantise the file, so the result is kept as fp32 safetensors (0.5 GB) in the
    cache folder under the file's SHA-256; loading that takes about a second.

    Args:
        path: a GGUF file of this model; the fetched one when None.
        dtype: type of the weights, ``torch.float32`` when None. Casts from the dequantised fp32.
        keep: write the dequantised weights to the cache; False for a file that is used once.

    Returns:
        (model in eval mode, tokenizer).

    Raises:
        FiretowerError: no such file.
    """
    torch, transformers = _libraries()
    file = Path(path) if path is not None else smollm2_path()
    if not file.is_file():
        raise FiretowerError(f"path={file}: no such file")
    folder = cache_folder() / "dequantised" / _sha256(file)
    if not folder.is_dir() and keep:
        _dequantise_into(folder, file)
    where = {"pretrained_model_name_or_path": str(folder)} if folder.is_dir() else _gguf_source(file)
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype or torch.float32)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def small_qwen35_moe(dtype: torch.dtype | None = None, seed: int = 0, num_layers: int = 4, **config: Any) -> Any:
    """Qwen3.5-MoE (``Qwen3_5MoeForCausalLM``): 3 Gated DeltaNet layers to 1 of attention, experts in each.

    Args:
        dtype: type of the weights, ``torch.float32`` when None. Casts from fp32, so that equal seeds agree.
        seed: of the random weights.
        num_layers: decoder layers.
        config: overrides of the text config (``num_experts=8``).

    Returns:
        The model in eval mode, vocabulary 512, hidden size 128.
    """
    transformers = _libraries()[1]
    settings = _hybrid(num_layers) | {"shared_expert_intermediate_size": 64} | config
    config_class = transformers.Qwen3_5MoeTextConfig
    return _build(transformers.Qwen3_5MoeForCausalLM, config_class(**settings), dtype, seed)


def small_qwen3_next(dtype: torch.dtype | None = None, seed: int = 0, num_layers: int = 4, **config: Any) -> Any:
    """Qwen3-Next (``Qwen3NextForCausalLM``), sized and seeded as `small_qwen35_moe`."""
    transformers = _libraries()[1]
    sizes = {"shared_expert_intermediate_size": 64, "intermediate_size": 256}
    settings = _hybrid(num_layers) | sizes | config
    return _build(transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig(**settings), dtype, seed)


def small_qwen4_exp(dtype: torch.dtype | None = None, seed: int = 0, num_layers: int = 4, **config: Any) -> Any:
    """Qwen4-Exp (``Qwen4ExpForCausalLM``) with indexer and per-layer embedding, as `small_qwen35_moe`."""
    transformers = _libraries()[1]
    settings = (
        _hybrid(num_layers)
        | {
            "shared_expert_intermediate_size": 64,
            "eos_token_id": 2,
            "hc_lowrank": 16,
            "ple_layer_ids": [1],
            "ple_embed_dim": 64,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 256,
            "split_ngram_parts": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
        | config
    )
    return _build(transformers.Qwen4ExpForCausalLM, transformers.Qwen4ExpTextConfig(**settings), dtype, seed)


def small_llama(dtype: torch.dtype | None = None, seed: int = 0, num_layers: int = 4, **config: Any) -> Any:
    """Llama (``LlamaForCausalLM``): dense, grouped-query attention, tied embeddings; 0.8 M parameters."""
    transformers = _libraries()[1]
    settings = _dense(num_layers) | {"intermediate_size": 352, "tie_word_embeddings": True} | config
    return _build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**settings), dtype, seed)


def _dense(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": _INITIALIZER_RANGE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hybrid(num_layers: int) -> dict[str, Any]:
    return _dense(num_layers) | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
    }


def _build(cls: Any, config: Any, dtype: torch.dtype | None, seed: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = cls(config)
    # without an end token generate() always runs to max_new_tokens, so that random weights give equal lengths
    model.generation_config.eos_token_id = None
    return model.to(dtype or torch.float32).eval()


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as e:
        raise MissingExtraError("a host model", "transformers") from e
    return torch, transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, no advice on faster kernels: the user did not ask for these models."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _gguf_source(file: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _dequantise_into(folder: Path, file: Path) -> None:
    """Fill ``folder`` in one rename, so that an interrupted or concurrent run never leaves half a model."""
    torch, transformers = _libraries()
    source = _gguf_source(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    try:
        with _quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # Transformers refuses to save what came from a GGUF, though the weights are plain fp32 by now
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        os.chmod(scratch, 0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its folder holds the same weights
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
