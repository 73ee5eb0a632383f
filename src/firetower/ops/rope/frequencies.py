"""Inverse frequencies of every kind of RoPE that ``rope_parameters`` of transformers can name, in float64.

Each is finite and above zero, or refused. Source: transformers 5.24, ``modeling_rope_utils.py``, where the formulas
run in float32; papers: Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN, with dynamic NTK in its appendix).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from firetower.core.errors import ConfigError

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip
_MAX_NUMBER, _MAX_LENGTH = 1e30, 1 << 40
"""Larger numbers in a configuration are a mistake, and their products could leave float64."""


def rope_frequencies(
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """Radians a position of each pair of dimensions, and the factor of cosine and sine.

    Args:
        parameters: as ``config.rope_parameters`` of transformers holds them: ``rope_theta``, ``rope_type`` (default,
            linear, dynamic, yarn, llama3) and what the type needs; ``partial_rotary_factor``. Sections of multimodal
            RoPE are allowed and not used: the three positions of a text token are equal, so that text needs none.
        head_dim: size of a head; ``rotary_dim = int(head_dim * partial_rotary_factor)`` of it are rotated.
        max_position_embeddings: the model's; needed by dynamic, and where a type has no
            ``original_max_position_embeddings``.
        seq_len: longest sequence that the frequencies are for; only dynamic looks at it.

    Returns:
        (float64 [rotary_dim / 2] on the CPU, finite and above zero; attention factor).

    Raises:
        ConfigError: an unknown type or key, a number that is missing, not finite or not above zero, an odd
            ``rotary_dim``, frequencies that leave float32.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KEYS:
        raise ConfigError(f"rope_type={kind!r}: must be one of {', '.join(_KEYS)}")
    if unknown := sorted(set(parameters) - _COMMON - _KEYS[kind]):
        raise ConfigError(f"rope_parameters: {', '.join(unknown)}: not known for rope_type={kind}; remove or rename")
    base = _number(parameters, "rope_theta")
    if base <= 1:
        raise ConfigError(f"rope_theta={base}: must be above 1, so that frequencies fall")
    dim = _rotary_dim(parameters, head_dim)
    original = parameters.get("original_max_position_embeddings")
    original = max_position_embeddings if original is None else original
    frequencies, attention_factor = _MAKERS[kind](parameters, base, dim, original, max_position_embeddings, seq_len)
    single = frequencies.float()
    if not bool(((single > 0) & single.isfinite()).all()):
        raise ConfigError(f"rope_parameters={dict(parameters)}: frequencies leave float32; check rope_theta and factor")
    return frequencies, attention_factor


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_NUMBER:
        raise ConfigError(f"{name}={value!r}: must be a finite number above 0; see the model's rope_parameters")
    return float(value)


def _rotary_dim(parameters: Mapping[str, Any], head_dim: int) -> int:
    fraction = _number(parameters, "partial_rotary_factor", 1.0)
    dim = int(head_dim * fraction)
    if not 2 <= dim <= head_dim or dim % 2:
        raise ConfigError(
            f"partial_rotary_factor={fraction}: rotates {dim} of head_dim={head_dim}: must be an even number of "
            "dimensions from 2 to head_dim"
        )
    return dim


def _length(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_LENGTH:
        raise ConfigError(f"{name}={value!r}: must be a whole number from 1 to {_MAX_LENGTH - 1} for this rope_type")
    return value


def _plain(base: float, dim: int) -> Tensor:
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(parameters: Mapping[str, Any], base: float, dim: int, *_: int | None) -> tuple[Tensor, float]:
    return _plain(base, dim), 1.0


def _linear(parameters: Mapping[str, Any], base: float, dim: int, *_: int | None) -> tuple[Tensor, float]:
    return _plain(base, dim) / _number(parameters, "factor"), 1.0


def _dynamic(
    parameters: Mapping[str, Any], base: float, dim: int, _: int | None, longest: int | None, seq_len: int | None
) -> tuple[Tensor, float]:
    factor, longest = _number(parameters, "factor"), _length("max_position_embeddings", longest)
    if dim < 4:
        raise ConfigError(f"head_dim: {dim} rotated dimensions: dynamic needs 4, its exponent is dim / (dim - 2)")
    seq_len = max(_length("seq_len", seq_len), longest) if seq_len is not None else longest
    stretch = factor * seq_len / longest - (factor - 1)
    return _plain(base * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(
    parameters: Mapping[str, Any], base: float, dim: int, original: int | None, longest: int | None, _: int | None
) -> tuple[Tensor, float]:
    original = _length("original_max_position_embeddings", original)
    ratio = None if longest is None else longest / original
    factor = _number(parameters, "factor", ratio)
    fast, slow = _number(parameters, "beta_fast", 32), _number(parameters, "beta_slow", 1)
    if fast < slow:
        raise ConfigError(f"beta_fast={fast}: must not be below beta_slow={slow}; exchange them")
    ends = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
    if parameters.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    plain = _plain(base, dim)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)


def _llama3(
    parameters: Mapping[str, Any], base: float, dim: int, original: int | None, *_: int | None
) -> tuple[Tensor, float]:
    original = _length("original_max_position_embeddings", original)
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"high_freq_factor={high}: must be above low_freq_factor={low}; exchange them")
    plain = _plain(base, dim)
    turns = original * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - smooth) + plain * smooth, 1.0


_MAKERS: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
