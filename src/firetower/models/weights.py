"""`HybridWeights`: a model's tensors in the layout that the ops read, random ones, and checksums for the audit.

Projections that read the same rows are fused: queries with gate, keys and values of attention; queries, keys, values,
gate z and the two gate inputs b and a of DeltaNet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.models.config import LINEAR, HybridConfig
from firetower.ops.moe import MoeWeights, SharedExpert

INIT_STD = 0.02
"""Standard deviation of random projections, as in training."""

_WORDS_AT_ONCE = 1 << 25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaNetWeights:
    """A Gated DeltaNet mixer; P = 2 key_dim + 2 value_dim + 2 Hv, C = 2 key_dim + value_dim.

    Attributes:
        in_proj: [P, H]: queries, keys, values, gate z, then b of every value head, then a.
        conv: [C, K], channels contiguous in memory.
        decay_rate: float32 [Hv], ``-exp(A_log)``: what softplus is multiplied with.
        dt_bias: float32 [Hv].
        norm: float32 [Dv], not zero-centred.
        out_proj: [H, value_dim].
    """

    in_proj: Tensor
    conv: Tensor
    decay_rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWeights:
    """An attention mixer; Q = num_heads * head_dim, KV = num_kv_heads * head_dim.

    Attributes:
        qkv_proj: [2 Q + 2 KV, H]: for each head its query, then its gate; then keys; then values.
        q_norm, k_norm: float32 [head_dim].
        o_proj: [H, Q].
    """

    qkv_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer.

    Attributes:
        input_norm, post_norm: float32 [H].
        mixer: by the layer's kind.
        moe: router, experts, shared expert.
    """

    input_norm: Tensor
    post_norm: Tensor
    mixer: DeltaNetWeights | AttentionWeights
    moe: MoeWeights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HybridWeights:
    """A whole model.

    Attributes:
        embedding: [V, H].
        layers: in order.
        norm: float32 [H], after the last layer.
        lm_head: [V, H]; the embedding itself where they are tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of projections and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, tied ones once."""
        return sum(x.nbytes for _, x in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its path, as ``layers.3.mixer.in_proj``; a tied ``lm_head`` is left out."""
        yield from _named("embedding", self.embedding)
        for i, layer in enumerate(self.layers):
            yield from _named(f"layers.{i}", layer)
        yield from _named("norm", self.norm)
        if self.lm_head is not self.embedding:
            yield from _named("lm_head", self.lm_head)


def _named(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _named(f"{path}.{field.name}", getattr(value, field.name))


def shapes_of(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of `HybridWeights` by its path."""
    hidden, heads = config.hidden_size, config.num_v_heads
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}"
        shapes |= {f"{at}.input_norm": (hidden,), f"{at}.post_norm": (hidden,)}
        if kind == LINEAR:
            mixer: dict[str, tuple[int, ...]] = {
                "in_proj": (config.conv_dim + config.value_dim + 2 * heads, hidden),
                "conv": (config.conv_dim, config.conv_kernel_size),
                "decay_rate": (heads,),
                "dt_bias": (heads,),
                "norm": (config.head_v_dim,),
                "out_proj": (hidden, config.value_dim),
            }
        else:
            mixer = {
                "qkv_proj": (2 * query + 2 * key, hidden),
                "q_norm": (config.head_dim,),
                "k_norm": (config.head_dim,),
                "o_proj": (hidden, query),
            }
        shapes |= {f"{at}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes |= {
            f"{at}.moe.router": (config.num_experts, hidden),
            f"{at}.moe.gate_up_proj": (config.num_experts, 2 * config.moe_width, hidden),
            f"{at}.moe.down_proj": (config.num_experts, hidden, config.moe_width),
            f"{at}.moe.shared.gate_up_proj": (2 * config.shared_width, hidden),
            f"{at}.moe.shared.down_proj": (hidden, config.shared_width),
            f"{at}.moe.shared.gate": (1, hidden),
        }
    shapes["norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


SINGLE = ("norm", "decay_rate", "dt_bias")
"""Last parts of paths whose tensors are float32 whatever the model's type: small, and read in float32 anyway."""


def type_of(path: str, dtype: torch.dtype) -> torch.dtype:
    """Type of the tensor at a path in a model of ``dtype``."""
    return torch.float32 if path.endswith(SINGLE) else dtype


def empty_weights(config: HybridConfig, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Unwritten tensors by path; `assemble` makes them a model.

    Raises:
        ConfigError: a type that is not served.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={dtype}: must be torch.float32, torch.float16 or torch.bfloat16")
    tensors = {}
    for path, shape in shapes_of(config).items():
        if path.endswith(".conv"):
            # channels contiguous: the kernels of the convolution read it in wide loads
            tensors[path] = torch.empty(shape[::-1], dtype=dtype, device=device).t()
        else:
            tensors[path] = torch.empty(shape, dtype=type_of(path, dtype), device=device)
    return tensors


def assemble(config: HybridConfig, tensors: dict[str, Tensor]) -> HybridWeights:
    """The model that tensors by path make.

    Raises:
        ConfigError: a tensor that is missing, or has another shape.
    """
    for path, shape in shapes_of(config).items():
        if path not in tensors or tuple(tensors[path].shape) != shape:
            have = list(tensors[path].shape) if path in tensors else "missing"
            raise ConfigError(f"{path}: {have}: must be {list(shape)}")
    embedding = tensors["embedding"]
    return HybridWeights(
        embedding=embedding,
        layers=tuple(_layer(f"layers.{i}", kind, tensors) for i, kind in enumerate(config.layer_types)),
        norm=tensors["norm"],
        lm_head=embedding if config.tie_word_embeddings else tensors["lm_head"],
    )


def _layer(at: str, kind: str, tensors: dict[str, Tensor]) -> LayerWeights:
    def part(prefix: str, *names: str) -> dict[str, Tensor]:
        return {name: tensors[f"{at}.{prefix}.{name}"] for name in names}

    mixer: DeltaNetWeights | AttentionWeights
    if kind == LINEAR:
        mixer = DeltaNetWeights(**part("mixer", "in_proj", "conv", "decay_rate", "dt_bias", "norm", "out_proj"))
    else:
        mixer = AttentionWeights(**part("mixer", "qkv_proj", "q_norm", "k_norm", "o_proj"))
    shared = SharedExpert(**part("moe.shared", "gate_up_proj", "down_proj", "gate"))
    moe = MoeWeights(**part("moe", "router", "gate_up_proj", "down_proj"), shared=shared)
    return LayerWeights(
        input_norm=tensors[f"{at}.input_norm"], post_norm=tensors[f"{at}.post_norm"], mixer=mixer, moe=moe
    )


def random_weights(
    config: HybridConfig, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", seed: int = 0
) -> HybridWeights:
    """A model with random weights, made where it will run: projections from a normal distribution of `INIT_STD`.

    Norms are neutral, decays as a new model of Transformers has them. Same seed and device: same bits.

    Raises:
        ConfigError: a type that is not served.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = empty_weights(config, dtype, device)
    for path, x in tensors.items():
        last = path.rpartition(".")[2]
        if last == "decay_rate":
            x.uniform_(0.01, 16.0, generator=generator).neg_()
        elif last == "dt_bias" or path.endswith("mixer.norm"):
            x.fill_(1.0)
        elif last.endswith("norm"):
            x.fill_(0.0 if config.is_zero_centred else 1.0)
        elif last == "conv":
            # in the order of memory, whatever the strides
            x.t().uniform_(-(x.shape[1] ** -0.5), x.shape[1] ** -0.5, generator=generator)
        else:
            x.normal_(0.0, INIT_STD, generator=generator)
    return assemble(config, tensors)


def content_hashes(weights: HybridWeights) -> dict[str, int]:
    """One checksum a tensor, computed where the tensors are, with one host sync at the end.

    The sum of all 64-bit words, each times an odd number that its place gives, modulo 2^64. An odd factor has an
    inverse: any change within one word changes the sum, so that no single flipped bit can hide. Several changes cancel
    each other with a chance of 2^-64. Not proof against intent.

    Returns:
        Path -> signed 64-bit number; equal for equal bits, whatever the device.
    """
    names, sums = [], []
    for name, x in weights.named_tensors():
        names.append(name)
        sums.append(_hash(x))
    return dict(zip(names, torch.stack(sums).tolist(), strict=True))


def _hash(x: Tensor) -> Tensor:
    raw = (x if x.is_contiguous() else x.t()).reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        piece = words[start : start + _WORDS_AT_ONCE]
        total = total + (piece * _odd(start, piece.numel(), x.device)).sum()
    rest = raw[whole:].long()
    return total + (rest * _odd(words.numel(), rest.numel(), x.device)).sum()


def _odd(start: int, count: int, device: torch.device) -> Tensor:
    return 2 * torch.arange(start, start + count, device=device) + 1
