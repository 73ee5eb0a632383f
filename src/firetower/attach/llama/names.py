"""From llama.cpp's tensor names to (layer, stage).

llama.cpp names an intermediate ``<stem>-<layer>`` (``ffn_out-12``) and a weight
``blk.<layer>.<part>.weight``. The weight is the surer witness: a shared expert's products carry the names of
a dense MLP, its weights do not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_SUFFIX = re.compile(r"(?: \([^)]*\))+$")
_LAYERED = re.compile(r"^(?P<stem>.+?)-(?P<layer>\d+)$")
_NORM = re.compile(r"^norm(?:-(?P<layer>\d+))?$")
_CACHE = re.compile(r"^cache_(?P<part>\w+?)_l(?P<layer>\d+)$")
_WEIGHT = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<part>[\w.]+)\.(?:weight|bias|scale)$")

_STEMS: tuple[tuple[str, str], ...] = (
    (r"result_output", "logits"),
    (r"result_(norm|embd).*", "output"),
    (r"embd|inp_.*|.*embeddings?", "input"),
    (r"attn_norm.*", "input"),
    (r".*conv_(states?|input|output|x).*|conv_state.*|last_conv_states?", "conv_state"),
    (r".*(^|_)(ssm_|new_)?states?(_.*)?", "recurrent_state"),
    (r"ffn_moe_(logits|probs|topk|argsort|group|selection|weights?($|_)).*", "router"),
    (r"ffn_moe_(weighted|out).*", "routed"),
    (r".*sh(ared_)?exp.*", "shared"),
    (r"ffn_(moe_)?gate_par.*|ffn_(moe_)?(\w*glu|silu|relu|gelu|act)\w*", "swiglu"),
    (r"ffn_(moe_)?gate(_up)?(_exps)?(_b|_scaled)?", "gate"),
    (r"ffn_(moe_)?up.*", "up"),
    (r"ffn_(moe_)?(out|down).*", "down"),
    (r"l_out|ffn_post_norm.*|post_ffw.*", "output"),
    (r"(ffn|mlp)_(inp|norm)\w*", "attention"),
    (
        r"[QKV]cur.*|[qkvz]|[qkv]_.*|kq\w*|qkv\w*|kv\w*|\w*attn\w*|wo|wqkv\w*|alpha|beta|gate|g|a_softplus",
        "attention",
    ),
)
_WEIGHTS: tuple[tuple[str, str], ...] = (
    (r"output_norm.*", "output"),
    (r"token_embd.*|position_embd|token_types", "input"),
    (r"output", "logits"),
    (r"attn_norm.*", "input"),
    (r"ssm_conv1d", "conv_state"),
    (r"ffn_gate_inp_shexp|ffn_\w+_shexp", "shared"),
    (r"ffn_gate_inp.*|exp_probs_b", "router"),
    (r"ffn_gate(_up)?(_exps)?", "gate"),
    (r"ffn_up(_exps)?", "up"),
    (r"ffn_down(_exps)?", "down"),
    (r"(ffn_norm|attn_|ssm_|post_attention).*", "attention"),
    (r"post_ffw_norm", "output"),
)
_CACHES = {"k": "kv", "v": "kv", "r": "conv_state", "s": "recurrent_state"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor sits: layer (None outside the layers), stage of design.md, weight or tensor name."""

    layer: int | None
    stage: str
    module: str


def strip(name: str) -> str:
    """The name without what views append: ``Qcur-3 (view) (permuted)`` is ``Qcur-3``."""
    return _SUFFIX.sub("", name)


def is_weight(name: str) -> bool:
    """True for a name that a model file gives a tensor."""
    return _WEIGHT.match(strip(name)) is not None


def place(name: str, op: str, sources: Sequence[str] = ()) -> Place:
    """Place a tensor by, in order: a weight among its sources, its own name, its sources' names.

    Args:
        name: the tensor's name, view suffixes included.
        op: ggml's name of the op that computes it.
        sources: names of its source tensors, in order.

    Returns:
        The place; a tensor nobody can place has no layer and the op's name, lower-case, as its stage.
    """
    bare = strip(name)
    own = _place_norm(bare, sources) or _from_name(bare)
    if own is not None and own.stage == "logits":
        return own  # its weight may be the tied embedding, whose own place is the input
    candidates = [_from_weight(strip(s)) for s in sources]
    found = next((c for c in candidates if c is not None), own)
    if found is not None:
        return found
    named = (_from_name(strip(s)) for s in sources)
    near = next((n for n in named if n is not None), None)
    if near is not None:
        return dataclasses.replace(near, module=bare)
    return Place(layer=None, stage=op.lower(), module=bare)


def _from_weight(name: str) -> Place | None:
    match = _WEIGHT.match(name)
    if match is None:
        return None
    layer = None if match["layer"] is None else int(match["layer"])
    module = name.rpartition(".")[0]
    stage = next((s for pattern, s in _WEIGHTS if re.fullmatch(pattern, match["part"])), None)
    return None if stage is None else Place(layer=layer, stage=stage, module=module)


def _from_name(name: str) -> Place | None:
    if cache := _CACHE.match(name):
        return Place(layer=int(cache["layer"]), stage=_CACHES.get(cache["part"], "kv"), module=name)
    match = _LAYERED.match(name)
    stem, layer = (match["stem"], int(match["layer"])) if match else (name, None)
    stage = next((s for pattern, s in _STEMS if re.fullmatch(pattern, stem)), None)
    return None if stage is None else Place(layer=layer, stage=stage, module=name)


def _place_norm(name: str, sources: Sequence[str]) -> Place | None:
    # "norm-12" is the name of both norms of a layer: only what it reads tells them apart
    match = _NORM.match(name)
    if match is None:
        return None
    if match["layer"] is None:
        return Place(layer=None, stage="output", module=name)
    after_attention = any(strip(s).startswith(("ffn_inp", "attn_out", "attn_residual")) for s in sources)
    return Place(layer=int(match["layer"]), stage="attention" if after_attention else "input", module=name)
