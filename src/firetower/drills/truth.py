"""The truth of a planted fault, from whole tensors of a plain run: nothing of the watch is used here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firetower.core.records import Kind
from firetower.drills.spec import Case, Origin

Side = Literal["input", "output", "cache"]
_INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a stage's tensors are: a module and a side of it, or names of a cache layer's states."""

    stage: str
    module: str
    layer: int | None = None
    side: Side = "output"
    cache_names: tuple[str, ...] = ()

    @property
    def cache_layer(self) -> int:
        """Index in the model's cache."""
        assert self.layer is not None
        return self.layer

    def at_input(self) -> Site:
        """The same module's first tensor argument."""
        return dataclasses.replace(self, side="input")


def whole_tensors(case: Case, site: Site) -> list[Tensor]:
    """Run the case once, bare; copies of every float tensor found at ``site`` in its first call."""
    if site.side == "cache":
        return _cached(case.call(), site)
    found: list[Tensor] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.extend(_floats((args, kwargs)) if not found else ())

    def after(_: nn.Module, __: Any, output: Any) -> None:
        found.extend(_floats(output) if not found else ())

    module = case.model.get_submodule(site.module)
    if site.side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        case.call()
    finally:
        handle.remove()
    return found[:1] if site.side == "input" else found


def with_truth(case: Case, site: Site, row_mask: Tensor | None = None, **flags: Any) -> Case:
    """Fill in what must be seen: the site, and row, column, kind and bits of the first bad element there.

    Args:
        case: the case with its fault planted.
        site: the stage that the construction of the fault makes the origin.
        row_mask: bool [rows]; False rows (pads) are passed over.
        flags: further fields of `Origin` to assert.
    """
    for tensor in whole_tensors(case, site):
        if place := first_nonfinite(tensor, row_mask):
            origin = Origin(module=site.module, stage=site.stage, layer=site.layer, **place, **flags)
            return dataclasses.replace(case, expected=origin)
    raise AssertionError(f"the fault left no non-finite value at {site}")


def first_nonfinite(tensor: Tensor, row_mask: Tensor | None = None) -> dict[str, Any] | None:
    """Row, column, kind and bits of the first non-finite element in row-major order, or None."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    bad = ~torch.isfinite(flat)
    if row_mask is not None:
        bad &= row_mask.reshape(-1, 1)
    places = bad.nonzero()
    if not len(places):
        return None
    row, column = (int(i) for i in places[0])
    bits = int(flat[row, column].clone().reshape(1).view(_INTEGER[tensor.element_size()]).item())
    return {
        "row": row,
        "column": column,
        "kind": kind_of(float(flat[row, column])),
        "bits": bits & ((1 << 8 * tensor.element_size()) - 1),
    }


def kind_of(value: float) -> Kind:
    """NaN told from the infinities."""
    if value != value:
        return Kind.NAN
    return Kind.POS_INF if value > 0 else Kind.NEG_INF


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)


def _cached(output: Any, site: Site) -> list[Tensor]:
    layer = output.past_key_values.layers[site.cache_layer]
    states = (getattr(layer, name) for name in site.cache_names)
    return [s[0] if isinstance(s, dict) else s for s in states]
