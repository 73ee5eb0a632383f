"""Which tensors of a model are worth watching, found from its module tree.

Knows the shape that Llama-, Qwen3-, Qwen3-Next-, Qwen3.5-MoE- and Qwen4-Exp-like models share: a list of decoder
layers, each with a token mixer and an MLP or a block of experts. Any other model gets every leaf module.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from enum import Enum

from torch import nn

from firetower.core.records import Legal, Signal
from firetower.sensors.check import Layout

STAGES: dict[str, str] = {
    "input": "hidden states as a decoder layer receives them",
    "attention": "output of the token mixer: attention or gated delta net",
    "query": "queries of attention, after their norm where there is one",
    "kv": "keys and values written to the cache in this step",
    "conv_state": "convolution window that a gated delta net leaves behind",
    "recurrent_state": "recurrent state that a gated delta net leaves behind",
    "ple": "output of the per-layer n-gram embedding, added to the hidden states",
    "gate": "gate projection of the MLP or shared expert",
    "up": "up projection of the MLP or shared expert",
    "swiglu": "activation product, as the down projection receives it",
    "down": "down projection of the MLP or shared expert",
    "shared": "output of the shared expert",
    "router": "router logits and the weights of the chosen experts",
    "routed": "weighted sum of the routed experts",
    "output": "hidden states as a decoder layer leaves them",
    "logits": "logits of the model",
}
"""Every stage that `attach` declares at level ``layers``, in the order in which a layer runs them."""

_MIXERS = ("mamba", "self_attn", "linear_attn", "attention", "attn", "self_attention", "mixer", "temporal_block")
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
_ROUTERS = ("gate", "router")
_HEADS = ("lm_head", "embed_out", "output_projection")


class Side(Enum):
    """Where on a module the tensor is taken."""

    INPUT = "first tensor argument"
    OUTPUT = "first tensor of the output"
    OUTPUTS = "every float tensor of the output"
    CACHE = "what the module left in the cache"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """One place to read a signal: a module, a side and the layout of what is found there.

    ``cache_layer`` is the index in the model's cache, for `Side.CACHE`.
    """

    signal: Signal
    module: nn.Module
    side: Side
    layout: Layout = Layout.TOKENS
    cache_layer: int | None = None


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The dotted path and the list of decoder layers of the language model, or None where there is none.

    Vision and audio towers are passed over: what they make is seen at the language model's input. Of several stacks
    the longest is taken, but towers side by side without a language model's head (CLIP) are none.
    """
    stacks = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(_is_decoder_layer(m) for m in module)
    ]
    if len(stacks) > 1 and not any(path.rpartition(".")[2] in _HEADS for path, _ in model.named_modules()):
        return None
    language = [s for s in stacks if not any(w in s[0].lower() for w in ("vis", "audio", "image", "speech"))]
    return max(language, key=lambda s: len(s[1]), default=None)


def discover(model: nn.Module, level: str) -> list[Tap]:
    """The taps of ``model`` at level ``logits`` or ``layers``, in execution order as far as it is known."""
    root = Tap(signal=Signal(stage="logits", legal=Legal.NEG_INF), module=model, side=Side.OUTPUT)
    if level == "logits":
        return [root]
    stack = decoder_layers(model)
    if stack is None:
        return _leaves(model)
    path, layers = stack
    # a layer that is used again (shared weights) is watched under its first number
    first = {id(layer): i for i, layer in reversed(list(enumerate(layers)))}
    taps = [tap for i in sorted(first.values()) for tap in _layer_taps(f"{path}.{i}", i, layers[i])]
    return [*taps, *_head(model), root]


def _head(model: nn.Module) -> Iterator[Tap]:
    """What a plain projection stores is finite; a head made of more than one module, and the model, may write -Inf."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in _HEADS:
            is_plain = not any(True for _ in module.children())
            legal = Legal.FINITE if is_plain else Legal.NEG_INF
            yield Tap(signal=Signal(stage="logits", module=path, legal=legal), module=module, side=Side.OUTPUT)


def _is_decoder_layer(module: nn.Module) -> bool:
    return _child(module, _MIXERS) is not None and _child(module, _MLPS) is not None


def _child(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((n for n in names if isinstance(getattr(module, n, None), nn.Module)), None)


def _leaves(model: nn.Module) -> list[Tap]:
    """What computes something: modules without children or with parameters of their own; last, the model's output.

    A leaf with parameters must be finite. Any other may give a mask or a log of probabilities: -Inf is legal.
    """
    paths = {id(m): path for path, m in model.named_modules()}
    taps = [_leaf(paths[id(m)], m) for m in _inside_out(model, set()) if m is model or _computes(m)]
    # parts that a fused module never calls (the projection of `nn.MultiheadAttention`) would never be covered
    fused = [t.signal.module + "." for t in taps if isinstance(t.module, nn.MultiheadAttention)]
    return [t for t in taps if not any(t.signal.module.startswith(f) for f in fused)]


def _leaf(path: str, module: nn.Module) -> Tap:
    is_plain = _is_leaf(module) and any(True for _ in module.parameters())
    signal = Signal(
        stage=type(module).__name__, module=path, legal=Legal.FINITE if is_plain else Legal.NEG_INF
    )
    return Tap(signal=signal, module=module, side=Side.OUTPUTS)


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _computes(module: nn.Module) -> bool:
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return not is_container and (_is_leaf(module) or any(True for _ in module.parameters(recurse=False)))


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Every module once, children before their parent: in the order in which their outputs appear."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inside_out(child, seen)
    yield module


def _layer_taps(path: str, index: int, layer: nn.Module) -> Iterator[Tap]:
    def tap(stage: str, name: str, side: Side = Side.OUTPUT, layout: Layout = Layout.TOKENS) -> Tap:
        dotted = f"{path}.{name}" if name else path
        signal = Signal(stage=stage, layer=index, module=dotted)
        cache_layer = index if side is Side.CACHE else None
        return Tap(
            signal=signal, module=layer.get_submodule(name), side=side, layout=layout, cache_layer=cache_layer
        )

    mlp = _child(layer, _MLPS)
    assert mlp is not None
    yield tap("input", "", Side.INPUT)
    if _child(layer, ("ple",)):
        yield tap("ple", "ple")
    # a layer may run two mixers side by side (Falcon-H1)
    for name in _MIXERS:
        if isinstance(getattr(layer, name, None), nn.Module):
            yield from _mixer_taps(tap, name, layer.get_submodule(name))
    yield from _mlp_taps(tap, mlp, layer.get_submodule(mlp))
    yield tap("output", "")


def _mixer_taps(tap: object, name: str, mixer: nn.Module) -> Iterator[Tap]:
    assert callable(tap)
    # a state is written inside the mixer, before its output leaves it
    if isinstance(getattr(mixer, "conv1d", None), nn.Module):
        yield tap("conv_state", name, Side.CACHE, Layout.STATE)
        yield tap("recurrent_state", name, Side.CACHE, Layout.STATE)
    else:
        # a fused kernel may answer a NaN query with zeros: it would be gone at the mixer's output
        query = _child(mixer, ("q_norm", "q_proj"))
        if query is not None:
            yield tap("query", f"{name}.{query}")
        if _takes_cache(mixer):
            yield tap("kv", name, Side.CACHE, Layout.HEADS)
    yield tap("attention", name)


def _takes_cache(mixer: nn.Module) -> bool:
    """Whether a mixer may write keys and values; that of an encoder never does."""
    parameters = inspect.signature(type(mixer).forward).parameters
    return any("cache" in name or "past" in name for name in parameters)


def _mlp_taps(tap: object, name: str, mlp: nn.Module) -> Iterator[Tap]:
    assert callable(tap)
    experts = _child(mlp, ("experts",))
    if experts is None:
        dense = list(_dense_taps(tap, name, mlp))
        # projections of other names (``c_proj``, ``dense_4h_to_h``): what leaves the MLP
        yield from dense or [tap("down", name)]
        return
    shared = _child(mlp, ("shared_expert", "shared_experts"))
    if shared is not None:
        yield from _dense_taps(tap, f"{name}.{shared}", mlp.get_submodule(shared))
        yield tap("shared", f"{name}.{shared}")
    router = _child(mlp, _ROUTERS)
    if router is not None:
        yield tap("router", f"{name}.{router}", Side.OUTPUTS)
    if isinstance(mlp.get_submodule(experts), nn.ModuleList):
        for i in range(len(mlp.get_submodule(experts))):  # type: ignore[arg-type]
            yield tap("routed", f"{name}.{experts}.{i}")
    else:
        yield tap("routed", f"{name}.{experts}")


def _dense_taps(tap: object, name: str, mlp: nn.Module) -> Iterator[Tap]:
    assert callable(tap)
    for stage, child in (("gate", "gate_proj"), ("up", "up_proj")):
        if isinstance(getattr(mlp, child, None), nn.Module):
            yield tap(stage, f"{name}.{child}")
    if isinstance(getattr(mlp, "down_proj", None), nn.Module):
        yield tap("swiglu", f"{name}.down_proj", Side.INPUT)
        yield tap("down", f"{name}.down_proj")
