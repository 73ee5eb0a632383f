"""C3: a projection adds to its output buffer, which was allocated and never cleared."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"accumulates-on-dirt/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import fills, generator, load, prompt, replace_forward, site
        from firetower.drills.pure import linear
        from firetower.drills.truth import with_truth
        from firetower.lab.subject import Rows

        if host == "pure":
            model: Any = nn.Sequential(linear(48, 32, seed), linear(24, 48, seed + 1))
            case = Case(model=model, args=(torch.randn(num_tokens, 32, generator=generator(seed)),))
            projection = model[1]
        else:
            model = load(host, "fp32", seed)
            case = Case(model=model, args=(prompt(model, Random(seed), num_tokens),))
            projection = model.get_submodule(site(model, "down", layer).module)
        kernel = _Accumulating(projection, clears=not fault)
        replace_forward(projection, kernel)
        buffer = Rows(
            name="the projection's output buffer",
            step=1,
            is_valid=(True,) * num_tokens,
            written_at=(None if fault else 1,) * num_tokens,
        )
        case = dataclasses.replace(
            case,
            switches=fills(kernel.filled, case.call),
            parts={"valid_rows": (buffer,)},
        )
        if not fault:
            return case
        if host == "pure":
            origin = Origin(module="1", op="aten.addmm_.default", row=0, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return with_truth(case, site(model, "down", layer))

    return Variant(id=f"layer{layer}-{num_tokens}tokens", host=host, level=level_in(host), build=build)


class _Accumulating:
    """A product that adds to freshly allocated memory; the twin clears it first.

    PyTorch's own deterministic fill puts NaN into the memory, so that every run finds the same in it.
    """

    def __init__(self, projection: Any, *, clears: bool) -> None:
        self.projection, self.clears = projection, clears
        self.fill: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.flatten(0, -2)
        out = _allocate(len(rows), self.projection.out_features, rows)
        if self.fill is not None:
            out.fill_(self.fill)
        if self.clears:
            out.zero_()
        out.addmm_(rows, self.projection.weight.T)
        return out.reshape(*x.shape[:-1], -1)

    def filled(self, number: float, run: Any) -> Any:
        """Run with a number in the memory."""
        self.fill = number
        try:
            return run()
        finally:
            self.fill = None


def _allocate(rows: int, columns: int, like: Tensor) -> Tensor:
    import torch

    memory: Any = torch.utils.deterministic
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True
    try:
        return torch.empty(rows, columns, dtype=like.dtype)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        memory.fill_uninitialized_memory = was_filling


DRILL = Drill(
    name="accumulates-on-dirt",
    family="C",
    case="C3",
    title="a projection adds to an output buffer that nobody cleared",
    verdict="C/UNINIT_READ",
    refuter=refuters.FILLS_ALIKE,
    stages=frozenset({"down"}),
    variants=_variants,
)
