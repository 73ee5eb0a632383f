"""P: a kernel stores NaN in the last tile when the number of rows is odd; another backend is right."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"wrong-for-shape/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.choice((3, 5, 7))
    stage, tile = rng.choice(("gate", "up", "down")), rng.choice((8, 16))
    value = rng.choice(("nan", "inf", "-inf"))

    def build(fault: bool) -> Case:
        from firetower.drills.kernels import kernel_case
        from firetower.lab.subject import Switch

        def kernel(y: Tensor, _: Tensor) -> Tensor:
            y = y.clone()
            if y.flatten(0, -2).shape[0] % 2:
                y.view(-1, y.shape[-1])[-1, -tile:] = float(value)
            return y

        return kernel_case(
            host,
            seed,
            stage=stage,
            layer=layer,
            num_tokens=num_tokens,
            kernel=kernel,
            cures=(Switch.OTHER_BACKEND,),
            useless=(Switch.EAGER, Switch.EXACT_BUCKET, Switch.FILL_A, Switch.FILL_B),
            fault=fault,
        )

    name = f"m{num_tokens}-tile{tile}-{value}"
    return Variant(
        id=name if host == "pure" else f"layer{layer}-{stage}-{name}", host=host, level="layers", build=build
    )


DRILL = Drill(
    name="wrong-for-shape",
    family="P",
    title="a kernel is wrong for odd numbers of rows, another backend is right",
    verdict="P/KERNEL_WRONG",
    refuter=refuters.OTHER_BACKEND,
    stages=frozenset({"gate", "up", "down"}),
    variants=_variants,
)
