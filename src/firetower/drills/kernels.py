"""Kernels that stand in place of a module: one op to whoever watches, with the module's own forward beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from firetower.drills.placing import alike, generator, load, prompt, replace_forward, site
from firetower.drills.pure import linear
from firetower.drills.spec import Case, Host
from firetower.drills.truth import Site, with_truth
from firetower.lab.subject import Switch

Kernel = Callable[[Tensor, Tensor], Tensor]
"""(what the module's own forward answers, its input) -> what the kernel stores."""


def kernel_case(
    host: Host,
    seed: int,
    *,
    stage: str,
    layer: int,
    num_tokens: int,
    kernel: Kernel,
    cures: Sequence[Switch],
    useless: Sequence[Switch],
    fault: bool,
) -> Case:
    """A call with one module's result stored by a kernel, as a fused one would; the twin's kernel is right.

    ``cures``: switches under which the module's own forward runs. ``useless``: those that leave the kernel as it
    is. The origin is the module, from a plain run.
    """
    if host == "pure":
        model: Any = nn.Sequential(linear(40, 32, seed), nn.SiLU(), linear(24, 40, seed + 1))
        args: Any = (torch.randn(num_tokens, 32, generator=generator(seed)),)
        where = Site(stage="Linear", module="2")
    else:
        model = load(host, "fp32", seed)
        args = (prompt(model, Random(seed), num_tokens),)
        where = site(model, stage, layer)
    module = model.get_submodule(where.module)
    native = module.forward

    def forward(x: Tensor) -> Tensor:
        y: Tensor = native(x)
        return kernel(y, x) if fault else y

    replace_forward(module, forward)

    def with_native(_: int = 0) -> Any:
        replace_forward(module, native)
        try:
            return model(*args)
        finally:
            replace_forward(module, forward)

    case = Case(model=model, args=args, kernels={where.module: "linear"})
    switches = {**dict.fromkeys(cures, with_native), **alike(lambda _: model(*args), *useless)}
    case = dataclasses.replace(case, switches=switches)
    return with_truth(case, where) if fault else case
