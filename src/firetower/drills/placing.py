"""Helpers that place a fault inside a host model: sites of stages, prompts, other forwards, calibration."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firetower.core.records import Kind
from firetower.drills import hosts
from firetower.drills.spec import Case, Host
from firetower.drills.truth import Site, whole_tensors
from firetower.lab.subject import FILLS, Switch

FP16_MAX = 65504.0
"""Largest finite float16."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Types by the name that a variant's id carries."""

_INSIDE_MLP = {"gate": "gate_proj", "up": "up_proj", "swiglu": "down_proj", "down": "down_proj"}
_INSIDE_EXPERTS = {"shared": "shared_expert", "router": "gate", "routed": "experts"}
_CACHES = {
    "kv": ("keys", "values"),
    "conv_state": ("conv_states",),
    "recurrent_state": ("recurrent_states",),
}


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that building a drill never touches the global random state."""
    return torch.Generator().manual_seed(seed)


def alike(run: Callable[[int], Any], *switches: Switch) -> dict[Switch, Callable[[int], Any]]:
    """Ways to run that change nothing here: there is no graph, no unread place, no other rank to leave out."""
    return dict.fromkeys(switches, run)


def fixed(run: Callable[..., Any], *args: Any) -> Callable[[int], Any]:
    """A way to run that is the same whatever the number of the replay: ``run(*args)``."""
    return lambda number: run(*args)


def fills(
    filled: Callable[[float, Callable[[], Any]], Any], run: Callable[[], Any]
) -> dict[Switch, Callable[[int], Any]]:
    """The switches that fill unread places: ``filled(value, run)`` runs with a value in them."""
    return {switch: fixed(filled, value, run) for switch, value in FILLS.items()}


def load(host: Host, dtype: str = "fp32", seed: int = 0) -> Any:
    """A fresh host model of this type; ``seed`` is that of the random weights."""
    if host == "smollm2":
        return hosts.load_smollm2(dtype=DTYPES[dtype])[0]
    build = {"qwen35moe": hosts.small_qwen35_moe, "qwen4exp": hosts.small_qwen4_exp}[host]
    return build(DTYPES[dtype], seed)


def prompt(model: Any, rng: Random, num_tokens: int, batch: int = 1) -> Tensor:
    """Random token ids [batch, num_tokens], all different, none of them special."""
    ids = rng.sample(range(3, model.config.vocab_size), batch * num_tokens)
    return torch.tensor(ids).reshape(batch, num_tokens)


def layers_of(model: Any, kind: str) -> list[int]:
    """Indices of the decoder layers with a token mixer of this kind: ``attention`` or ``linear``."""
    name = {"attention": "self_attn", "linear": "linear_attn"}[kind]
    return [i for i, layer in enumerate(model.model.layers) if hasattr(layer, name)]


def site(model: Any, stage: str, layer: int | None = None) -> Site:
    """Where a stage's tensors are in a host model, read from the model's own structure."""
    if stage == "logits":
        return Site(stage=stage, module="lm_head")
    assert layer is not None
    decoder = model.model.layers[layer]
    path = f"model.layers.{layer}"
    mixer = f"{path}.linear_attn" if hasattr(decoder, "linear_attn") else f"{path}.self_attn"
    if stage in _CACHES:
        return Site(stage=stage, module=mixer, layer=layer, side="cache", cache_names=_CACHES[stage])
    if stage == "query":
        attention = model.get_submodule(mixer)
        name = "q_norm" if hasattr(attention, "q_norm") else "q_proj"
        return Site(stage=stage, module=f"{mixer}.{name}", layer=layer)
    if stage in ("input", "output"):
        return Site(stage=stage, module=path, layer=layer, side="input" if stage == "input" else "output")
    if stage in _INSIDE_EXPERTS:
        return Site(stage=stage, module=f"{path}.mlp.{_INSIDE_EXPERTS[stage]}", layer=layer)
    if stage in _INSIDE_MLP:
        mlp = f"{path}.mlp.shared_expert" if hasattr(decoder.mlp, "shared_expert") else f"{path}.mlp"
        side: Any = "input" if stage == "swiglu" else "output"
        return Site(stage=stage, module=f"{mlp}.{_INSIDE_MLP[stage]}", layer=layer, side=side)
    return Site(stage=stage, module=mixer if stage == "attention" else f"{path}.{stage}", layer=layer)


def tensor_at(case: Case, where: Site) -> Tensor:
    """The first tensor at a site in a bare run of the case: what a fault is calibrated on."""
    return whole_tensors(case, where)[0]


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module instance another forward; hooks keep running around it."""
    module.forward = forward


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """Where a product overflows first."""

    channel: int
    token: int
    kind: Kind


@torch.no_grad()
def scale_product(gate: Tensor, up: Tensor, x: Tensor, rng: Random, *, fault: bool) -> Overflow:
    """Scale one channel of a SwiGLU so that its fp16 product overflows while gate and up stay finite.

    Args:
        gate: weight [intermediate, hidden], scaled in place.
        up: weight [intermediate, hidden], scaled in place.
        x: input [tokens, hidden] that the layer will see.
        rng: picks the channel.
        fault: reach 1.6 times the type's maximum; else 0.4 times, large but finite.

    Returns:
        The overflow under the fault: its channel, and token and class of its first element.
    """
    g, u = x.float() @ gate.float().T, x.float() @ up.float().T
    for channel in rng.sample(range(len(gate)), len(gate)):
        gain = (g[:, channel].clamp(min=0) * u[:, channel].abs()).max().item()
        if gain <= 0:
            continue
        factor, mild = ((p * FP16_MAX / gain) ** 0.5 for p in (1.6, 0.4))
        if (token := _first_overflow(g[:, channel] * factor, u[:, channel] * factor)) is not None:
            for weight in (gate, up):
                weight[channel] *= factor if fault else mild
            kind = Kind.POS_INF if u[token, channel] > 0 else Kind.NEG_INF
            return Overflow(channel=channel, token=token, kind=kind)
    raise AssertionError("no channel of this layer can be made to overflow cleanly")


def _first_overflow(g: Tensor, u: Tensor) -> int | None:
    """First token whose product is beyond fp16; None when one is near the edge or an operand is too."""
    product = (F.silu(g) * u).abs() / FP16_MAX
    near = bool(((product > 0.8) & (product < 1.25)).any())
    if near or max(g.abs().max(), u.abs().max()) > 0.7 * FP16_MAX or product.max() < 1.25:
        return None
    return int((product > 1.0).nonzero()[0])


def replace_chunk_rule(mixer: nn.Module, rule: Callable[..., Any]) -> None:
    """Give one Gated DeltaNet layer another chunk rule, in force only while that layer's forward runs."""
    family = sys.modules[type(mixer).__module__]
    native: Callable[..., Any] = mixer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(family, "torch_chunk_gated_delta_rule", rule):
            return native(*args, **kwargs)

    replace_forward(mixer, forward)
