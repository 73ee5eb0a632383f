"""`HybridConfig`: what the runtime needs to know of a model, read from the ``config.json`` of Transformers.

Every key of the file is either read, known to change nothing here, or refused: a key that nobody looked at could change
the maths in silence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firetower.core.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layer: Gated DeltaNet, and attention over all earlier tokens."""

FAMILIES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""``model_type`` of a file -> family."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "moe_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Field -> key; whole numbers above zero, all of them needed."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32", None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "is_encoder_decoder": (False,),
}
"""Keys with the only values that are served."""

_HARMLESS = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache",
    "attention_dropout", "output_router_logits", "router_aux_loss_coef", "pad_token_id", "bos_token_id",
    "intermediate_size", "full_attention_interval", "return_dict", "output_hidden_states", "output_attentions",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "_name_or_path", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "torchscript", "pruned_heads", "tokenizer_class", "max_window_layers",
    "language_model_only", "auto_map", "experts_implementation", "_experts_implementation", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
"""Keys that training, other heads, or the loader of Transformers read; none changes what a served token is."""

_WRAPPER = {
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id", "tie_word_embeddings", "eos_token_id",
}  # fmt: skip
"""Keys beside ``text_config`` in a file of a model that also sees; images are not served here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Sizes and rules of one model of Gated DeltaNet, attention and sparse experts.

    Attributes:
        family: ``qwen3_next`` or ``qwen3_5_moe``: how the checkpoint lays out the DeltaNet projections.
        vocab_size, hidden_size, num_layers: V, H, and decoder layers.
        layer_types: `LINEAR` or `FULL` for each layer.
        num_heads, num_kv_heads, head_dim: of attention; queries carry an output gate of the same size.
        rope_parameters: as Transformers has them, ``partial_rotary_factor`` included.
        rms_norm_eps: of every norm.
        is_zero_centred: whether norms multiply by ``1 + weight``; the gated norm of DeltaNet never does.
        num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel_size: of Gated DeltaNet.
        num_experts, top_k, moe_width, shared_width: of the sparse block and its shared expert.
        scoring: ``softmax`` or ``sigmoid`` of the router's logits.
        norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
        tie_word_embeddings: whether logits use the embedding.
        max_position_embeddings: longest sequence that the model was made for.
        eos_token_ids: tokens that end an answer.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any]
    rms_norm_eps: float = 1e-6
    is_zero_centred: bool = True
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int = 4
    num_experts: int
    top_k: int
    moe_width: int
    shared_width: int
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in _SIZES:
            _whole(field, getattr(self, field))
        if self.family not in FAMILIES.values():
            raise ConfigError(f"family={self.family!r}: must be one of {', '.join(sorted(set(FAMILIES.values())))}")
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {LINEAR, FULL}:
            raise ConfigError(
                f"layer_types={list(self.layer_types)}: must be {self.num_layers} of {LINEAR!r} and {FULL!r}, "
                "one for each layer"
            )
        for heads, groups in (("num_heads", "num_kv_heads"), ("num_v_heads", "num_k_heads")):
            if getattr(self, heads) % getattr(self, groups):
                raise ConfigError(
                    f"{heads}={getattr(self, heads)}: must be a multiple of {groups}={getattr(self, groups)}"
                )
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k}: must be at most num_experts={self.num_experts}")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"scoring={self.scoring!r}: must be 'softmax' or 'sigmoid'")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def key_dim(self) -> int:
        """Elements of all DeltaNet keys of a token."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Elements of all DeltaNet values of a token."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


def read_config(source: Path | str | Mapping[str, Any]) -> HybridConfig:
    """Read a model's configuration.

    Args:
        source: the folder of a model, its ``config.json``, or the file's content. A text model, or one that nests its
            text part under ``text_config`` (its vision part is not read).

    Returns:
        The configuration.

    Raises:
        ConfigError: no such file, no JSON object, a model of another family, a key that is missing, has a value that is
            not served, or is not known: it could change the maths.
    """
    content = source if isinstance(source, Mapping) else _load(Path(source))
    kind = content.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"model_type={kind!r}: must be one of {', '.join(FAMILIES)}; other models are not served")
    if "text_config" not in content:
        return _read_text(content, FAMILIES[kind])
    text = content["text_config"]
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config={text!r}: must be an object")
    _refuse_unknown(content, _WRAPPER | _HARMLESS)
    outer = {key: content[key] for key in ("tie_word_embeddings", "eos_token_id") if key in content}
    return _read_text({**outer, **text}, FAMILIES[kind])


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model={path}: has no config.json; give the folder of a Transformers model")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ConfigError(f"config={file}: is not JSON: {e}") from e
    if not isinstance(content, Mapping):
        raise ConfigError(f"config={file}: must be a JSON object, is {type(content).__name__}")
    return content


def _read_text(content: Mapping[str, Any], family: str) -> HybridConfig:
    read = {
        *_SIZES.values(), "rms_norm_eps", "layer_types", "rope_parameters", "rope_theta", "partial_rotary_factor",
        "norm_topk_prob", "tie_word_embeddings", "eos_token_id",
    }  # fmt: skip
    _refuse_unknown(content, read | _HARMLESS | _FIXED.keys())
    for key, allowed in _FIXED.items():
        if key in content and content[key] not in allowed:
            raise ConfigError(f"{key}={content[key]!r}: is not served; must be {allowed[0]!r}")
    norm_topk_prob = content.get("norm_topk_prob", True)
    if norm_topk_prob is not True and (family != "qwen3_next" or norm_topk_prob is not False):
        raise ConfigError(f"norm_topk_prob={norm_topk_prob!r}: must be true; the class of this family divides always")
    sizes: dict[str, Any] = {field: _whole(key, content.get(key)) for field, key in _SIZES.items()}
    return HybridConfig(
        family=family,
        layer_types=_layer_types(content, sizes["num_layers"]),
        rope_parameters=_rope_parameters(content),
        rms_norm_eps=_number("rms_norm_eps", content.get("rms_norm_eps", 1e-6)),
        norm_topk_prob=norm_topk_prob,
        tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(content.get("eos_token_id")),
        **sizes,
    )


def _refuse_unknown(content: Mapping[str, Any], known: set[str]) -> None:
    for key, value in content.items():
        if key not in known:
            raise ConfigError(
                f"{key}={value!r}: is not a known key, and may change what the model computes; remove it if it does not"
            )


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ConfigError(f"{name}={value!r}: must be a whole number above 0")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"{name}={value!r}: must be a number between 0 and 1")
    return float(value)


def _layer_types(content: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    given = content.get("layer_types")
    if given is not None:
        return tuple(given)
    interval = _whole("full_attention_interval", content.get("full_attention_interval", 4))
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))


def _rope_parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters``, or the older keys beside it; the rotated part is a quarter of a head where nothing says."""
    parameters = dict(content.get("rope_parameters") or {})
    if "rope_theta" in content:
        parameters.setdefault("rope_theta", content["rope_theta"])
    parameters.setdefault("partial_rotary_factor", content.get("partial_rotary_factor", 0.25))
    if "rope_theta" not in parameters:
        raise ConfigError("rope_theta: is missing; give it in rope_parameters")
    return parameters


def _eos(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(f"eos_token_id={value!r}: must be a token id, a list of them, or null")
    return ids
