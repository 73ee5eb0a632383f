"""P1: a kernel answers zeros for one number of rows; a norm without epsilon then shows the first bad value.

What a black box that looks for non-finite values can say today is the norm's reciprocal root, and that its
input is all zeros; that the kernel before it is to blame is a verdict, not an origin.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Literal

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Origin, Variant

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROWS = 3


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"zero-output/{seed}")
    return [
        _pure(rng.randrange(1 << 30)),
        _pure(rng.randrange(1 << 30)),
        _host(rng.randrange(1 << 30), "k", "ops"),
        _host(rng.randrange(1 << 30), "q", "ops"),
        _host(rng.randrange(1 << 30), "k", "layers"),
    ]


def _broken(layer: nn.Module, fault: bool) -> Callable[[Tensor], Tensor]:
    """The layer's own product, but zeros for `_ROWS` rows of input; whole when ``fault`` is False."""
    native = layer.forward

    def forward(x: Tensor) -> Tensor:
        y: Tensor = native(x)
        return y.new_zeros(y.shape) if fault and x.shape[:-1].numel() == _ROWS else y

    return forward


def _pure(seed: int) -> Variant:
    width = Random(seed).choice((16, 33, 64))

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, replace_forward
        from firetower.drills.pure import RmsNorm, linear

        model = nn.Sequential(linear(width, 32, seed), RmsNorm(width, eps=0.0))
        replace_forward(model[0], _broken(model[0], fault))
        x = torch.randn(_ROWS, 32, generator=generator(seed))
        origin = Origin(module="1", op="aten.rsqrt.default", row=0, column=0, kind=Kind.POS_INF, zero_input=True)
        return Case(model=model, args=(x,), expected=origin if fault else None, kernels={"0": "mm"})

    return Variant(id=f"linear-32to{width}-m{_ROWS}", host="pure", level="ops", build=build)


def _host(seed: int, name: str, level: Literal["layers", "ops"]) -> Variant:
    """The attention layer's query or key projection breaks, before a per-head norm without epsilon."""

    def build(fault: bool) -> Case:
        import dataclasses

        from firetower.drills.placing import layers_of, load, prompt, replace_forward, site
        from firetower.drills.truth import with_truth

        model = load("qwen35moe", "fp32", seed)
        layer = layers_of(model, "attention")[0]
        attention = model.model.layers[layer].self_attn
        projection, norm = getattr(attention, f"{name}_proj"), getattr(attention, f"{name}_norm")
        norm.eps = 0.0
        replace_forward(projection, _broken(projection, fault))
        kernels = {f"model.layers.{layer}.self_attn.{name}_proj": "mm"}
        case = Case(model=model, args=(prompt(model, Random(seed), _ROWS),), kernels=kernels)
        if not fault:
            return case
        if level == "layers":
            return with_truth(case, site(model, "query" if name == "q" else "kv", layer))
        module = f"model.layers.{layer}.self_attn.{name}_norm"
        kind = Kind.POS_INF
        origin = Origin(module=module, op="aten.rsqrt.default", row=0, column=0, kind=kind, zero_input=True)
        return dataclasses.replace(case, expected=origin)

    return Variant(id=f"{name}proj-m{_ROWS}-{level}", host="qwen35moe", level=level, build=build)


DRILL = Drill(
    name="zero-output",
    family="P",
    case="P1",
    title=f"a kernel answers zeros for {_ROWS} rows and a norm divides by them",
    verdict="P/ZERO_OUTPUT",
    refuter=refuters.STORED_NOT_ZERO,
    stages=frozenset({"kv"}),
    variants=_variants,
)
