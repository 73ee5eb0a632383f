"""Weights from a Transformers folder: safetensors in one file or in shards, checked tensor by tensor.

Nothing of the checkpoint is trusted: every tensor that the model needs must be there once, with its shape and a float
type, and finite; a tensor that nobody asked for could change the maths and is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firetower.core.errors import ConfigError, MissingExtraError
from firetower.models.config import LINEAR, HybridConfig
from firetower.models.weights import HybridWeights, assemble, empty_weights
from firetower.sensors.check import raw_bits

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"

PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")
"""Where the text part of a checkpoint may lie."""

_OTHER_PARTS = ("mtp.", "model.mtp.", "model.visual.", "visual.", "vision_tower.")
_BUFFERS = ("rotary_emb.inv_freq",)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far loading is.

    Attributes:
        done_bytes, total_bytes: of the checkpoint's tensors that are read.
        tensor: the last one.
    """

    done_bytes: int
    total_bytes: int
    tensor: str


def read_weights(
    folder: Path | str,
    config: HybridConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[Progress], None] | None = None,
) -> HybridWeights:
    """Read a checkpoint, one tensor at a time, into the layout that the ops read.

    Experts may be fused (``experts.gate_up_proj``) or apart (``experts.7.gate_proj.weight``). Vision towers and heads
    for multi-token prediction are left out.

    Args:
        folder: of the model.
        config: from `read_config` of the same folder.
        dtype: of projections; the type of the embedding in the checkpoint where None. On the CPU float32 is fastest.
            Norms and decays are float32 always.
        device: where the weights go.
        progress: called after each tensor of the checkpoint.

    Raises:
        ConfigError: a shard or tensor that is missing, of another shape or no float type, unknown, not finite, or not
            finite after the conversion to ``dtype``.
        MissingExtraError: safetensors is not installed.
    """
    with _Files(Path(folder), progress) as files:
        if dtype is None:
            dtype = files.dtype_of("embed_tokens.weight")
        tensors = empty_weights(config, dtype, device)
        _fill(config, files, tensors)
        files.refuse_unread(config)
    return assemble(config, tensors)


class _Files:
    """The tensors of a checkpoint by their names in the text model; shards are opened as they are needed."""

    def __init__(self, folder: Path, progress: Callable[[Progress], None] | None) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as e:
            raise MissingExtraError("reading a checkpoint", "transformers") from e
        self._open: Callable[..., Any] = safe_open
        self._damage: tuple[type[Exception], ...] = (OSError, SafetensorError)
        self._folder = folder
        self._file_of = _shards(folder)
        self._handles: dict[str, Any] = {}
        self._unread: set[str] = set()
        self._names: dict[str, tuple[str, str]] = {}
        self._progress = progress
        self._done = self._total = 0

    def __enter__(self) -> _Files:
        for file in sorted(set(self._file_of.values())) or [ONE_FILE]:
            self._list(file)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def _list(self, file: str) -> None:
        path = self._folder / file
        wanted = sorted(name for name, at in self._file_of.items() if at == file)
        if not path.is_file():
            first = f"; {wanted[0]} and {len(wanted) - 1} more tensors are in it" if wanted else ""
            raise ConfigError(f"shard={path}: is missing{first}; copy the whole model folder")
        try:
            handle = self._handles[file] = self._open(path, framework="pt", device="cpu")
            present = list(handle.keys())
        except self._damage as e:
            raise ConfigError(f"shard={path}: cannot be read: {e}; copy it again") from e
        if absent := sorted(set(wanted) - set(present)):
            raise ConfigError(f"tensor={absent[0]}: the index says it is in {file}, which has no such tensor")
        for name in present:
            if name.startswith(_OTHER_PARTS) or name.endswith(_BUFFERS):
                continue
            plain = _plain_name(name)
            if plain in self._names:
                raise ConfigError(f"tensor={name}: is there twice, in {self._names[plain][0]} and {file}")
            self._names[plain] = (file, name)
            self._unread.add(plain)
            self._total += _num_bytes(handle.get_slice(name))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def dtype_of(self, name: str) -> torch.dtype:
        """Type of a tensor as it is stored."""
        file, full = self._find(name)
        stored = self._handles[file].get_slice(full).get_dtype()
        if stored not in _FLOATS:
            raise ConfigError(
                f"tensor={full}: is stored as {stored}: must be one of {', '.join(_FLOATS)}; dequantise the checkpoint"
            )
        return _FLOATS[stored]

    def read_into(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Copy a tensor of a shape into ``into``, whose elements it has; finite before and after the conversion."""
        x = self.read(name, shape)
        into.copy_(x.view(into.shape))
        self.check_converted(name, x, into)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A finite tensor of a shape, in the type it is stored in, on the CPU."""
        file, full = self._find(name)
        self.dtype_of(name)
        x: Tensor = self._handles[file].get_tensor(full)
        if tuple(x.shape) != shape:
            raise ConfigError(
                f"tensor={full}: has the shape {list(x.shape)}: must be {list(shape)}, as config.json says"
            )
        if not _is_finite(x):
            raise ConfigError(f"tensor={full}: {describe_first_bad(x)}; the checkpoint is damaged, in {file}")
        self._unread.discard(name)
        self._done += x.nbytes
        if self._progress is not None:
            self._progress(Progress(done_bytes=self._done, total_bytes=self._total, tensor=full))
        return x

    def check_converted(self, name: str, before: Tensor, after: Tensor) -> None:
        """Refuse a conversion that made an Inf of a number."""
        if after.dtype is not before.dtype and after.dtype is not torch.float32 and not _is_finite(after):
            raise ConfigError(
                f"tensor={name}: {describe_first_bad(after)} as {after.dtype}: the number is too large for the type; "
                "load the model as torch.bfloat16 or torch.float32"
            )

    def refuse_unread(self, config: HybridConfig) -> None:
        """Refuse tensors that no part of the model asked for."""
        if config.tie_word_embeddings:
            self._unread.discard("lm_head.weight")
        if self._unread:
            first = sorted(self._unread)[0]
            raise ConfigError(
                f"tensor={self._names[first][1]}: and {len(self._unread) - 1} more are not known in a "
                f"{config.family} model of {config.num_layers} layers, and may change what it computes"
            )

    def _find(self, name: str) -> tuple[str, str]:
        if name not in self._names:
            raise ConfigError(f"tensor={name}: is missing in {self._folder}; the checkpoint is not complete")
        return self._names[name]


def _shards(folder: Path) -> Mapping[str, str]:
    """Tensor -> shard, as the index says; empty where there is one file."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): str(file) for name, file in found.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"index={index}: has no weight_map: {e!r}; copy it again") from e
    for file in shards.values():
        if Path(file).name != file:
            raise ConfigError(f"index={index}: names the shard {file!r}: must be a file in the same folder")
    return shards


def _plain_name(name: str) -> str:
    """A tensor's name without the prefix of the text model: ``layers.0.mlp.gate.weight``, ``lm_head.weight``."""
    prefix = next(p for p in PREFIXES if name.startswith(p))
    return name.removeprefix(prefix)


def _num_bytes(piece: Any) -> int:
    size = 1
    for n in piece.get_shape():
        size *= n
    return size * {"F32": 4, "F16": 2, "BF16": 2}.get(piece.get_dtype(), 1)


def _is_finite(x: Tensor) -> bool:
    # a finite sum proves it, without a mask the size of the tensor
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def describe_first_bad(x: Tensor) -> str:
    """Row, column and bits of the first element that is not finite.

    Args:
        x: with at least one; rows are all dimensions but the last.
    """
    place = int((~x.isfinite()).reshape(-1).int().argmax())
    row, column = divmod(place, x.shape[-1])
    value = x.reshape(-1)[place]
    width = 2 * x.element_size()
    return f"is {value.item()} at row {row}, column {column}, bits {raw_bits(x.contiguous(), place):0{width}x}"


def _fill(config: HybridConfig, files: _Files, tensors: dict[str, Tensor]) -> None:
    vocab = (config.vocab_size, config.hidden_size)
    files.read_into("embed_tokens.weight", vocab, tensors["embedding"])
    files.read_into("norm.weight", vocab[1:], tensors["norm"])
    if not config.tie_word_embeddings:
        files.read_into("lm_head.weight", vocab, tensors["lm_head"])
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}"
        files.read_into(f"{at}.input_layernorm.weight", vocab[1:], tensors[f"{at}.input_norm"])
        files.read_into(f"{at}.post_attention_layernorm.weight", vocab[1:], tensors[f"{at}.post_norm"])
        fill = _fill_delta if kind == LINEAR else _fill_attention
        fill(config, files, at, _below(tensors, f"{at}.mixer."))
        _fill_moe(config, files, at, _below(tensors, f"{at}.moe."))


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {path.removeprefix(prefix): x for path, x in tensors.items() if path.startswith(prefix)}


def _fill_attention(config: HybridConfig, files: _Files, at: str, into: dict[str, Tensor]) -> None:
    hidden, dim = config.hidden_size, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    rows = torch.split(into["qkv_proj"], [2 * query, key, key])
    for name, part in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True):
        files.read_into(f"{at}.self_attn.{name}.weight", (part.shape[0], hidden), part)
    for name in ("q_norm", "k_norm"):
        files.read_into(f"{at}.self_attn.{name}.weight", (dim,), into[name])
    files.read_into(f"{at}.self_attn.o_proj.weight", (hidden, query), into["o_proj"])


def _fill_delta(config: HybridConfig, files: _Files, at: str, into: dict[str, Tensor]) -> None:
    at, hidden, heads = f"{at}.linear_attn", config.hidden_size, config.num_v_heads
    for name, part in _delta_rows(config, into["in_proj"]):
        parts = part if isinstance(part, list) else [part]
        shape = (sum(p.shape[:-1].numel() for p in parts), hidden)
        x = files.read(f"{at}.{name}.weight", shape)
        for p, piece in zip(parts, _pieces(config, x, len(parts)), strict=True):
            p.copy_(piece.reshape(p.shape))
            files.check_converted(f"{at}.{name}.weight", x, p)
    conv = (config.conv_dim, 1, config.conv_kernel_size)
    files.read_into(f"{at}.conv1d.weight", conv, into["conv"])
    into["decay_rate"].copy_(-files.read(f"{at}.A_log", (heads,)).float().exp())
    if not _is_finite(into["decay_rate"]):
        raise ConfigError(f"tensor={at}.A_log: its exponential {describe_first_bad(into['decay_rate'])}")
    files.read_into(f"{at}.dt_bias", (heads,), into["dt_bias"])
    files.read_into(f"{at}.norm.weight", (config.head_v_dim,), into["norm"])
    files.read_into(f"{at}.out_proj.weight", (hidden, config.value_dim), into["out_proj"])


def _delta_rows(config: HybridConfig, in_proj: Tensor) -> Iterator[tuple[str, Tensor | list[Tensor]]]:
    """(tensor of the checkpoint, the rows of ``in_proj`` that it fills, several where it interleaves them)."""
    heads = config.num_v_heads
    sizes = [config.key_dim, config.key_dim, config.value_dim, config.value_dim, heads, heads]
    q, k, v, z, b, a = torch.split(in_proj, sizes)
    if config.family == "qwen3_next":
        yield "in_proj_qkvz", [q, k, v, z]
        yield "in_proj_ba", [b, a]
        return
    yield "in_proj_qkv", in_proj[: config.conv_dim]
    yield "in_proj_z", z
    yield "in_proj_b", b
    yield "in_proj_a", a


def _pieces(config: HybridConfig, x: Tensor, count: int) -> list[Tensor]:
    """A projection of Qwen3-Next cut up: each key head has its query, key, values and z there, or its b and a."""
    if count == 1:
        return [x]
    group = config.num_v_heads // config.num_k_heads
    keys, values = config.head_k_dim, group * config.head_v_dim
    sizes = [keys, keys, values, values] if count == 4 else [group, group]
    by_head = x.view(config.num_k_heads, sum(sizes), x.shape[1])
    return list(torch.split(by_head, sizes, dim=1))


def _fill_moe(config: HybridConfig, files: _Files, at: str, into: dict[str, Tensor]) -> None:
    at, hidden, width = f"{at}.mlp", config.hidden_size, config.moe_width
    files.read_into(f"{at}.gate.weight", (config.num_experts, hidden), into["router"])
    if f"{at}.experts.gate_up_proj" in files:
        shape = (config.num_experts, 2 * width, hidden)
        files.read_into(f"{at}.experts.gate_up_proj", shape, into["gate_up_proj"])
        files.read_into(f"{at}.experts.down_proj", (config.num_experts, hidden, width), into["down_proj"])
    else:
        for e in range(config.num_experts):
            _fill_expert(files, f"{at}.experts.{e}", width, into["gate_up_proj"][e], into["down_proj"][e])
    _fill_expert(
        files, f"{at}.shared_expert", config.shared_width, into["shared.gate_up_proj"], into["shared.down_proj"]
    )
    files.read_into(f"{at}.shared_expert_gate.weight", (1, hidden), into["shared.gate"])


def _fill_expert(files: _Files, at: str, width: int, gate_up: Tensor, down: Tensor) -> None:
    hidden = gate_up.shape[1]
    files.read_into(f"{at}.gate_proj.weight", (width, hidden), gate_up[:width])
    files.read_into(f"{at}.up_proj.weight", (width, hidden), gate_up[width:])
    files.read_into(f"{at}.down_proj.weight", (hidden, width), down)
