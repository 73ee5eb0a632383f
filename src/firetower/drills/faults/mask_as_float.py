"""O1: compiled code reads the all-ones mask of a comparison as a float: a NaN where the comparison is true."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"mask-as-float/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    stage, threshold = rng.choice(("gate", "up", "down")), rng.uniform(0.0, 0.3)

    def build(fault: bool) -> Case:
        from firetower.drills.kernels import kernel_case
        from firetower.lab.subject import Switch

        return kernel_case(
            host,
            seed,
            stage=stage,
            layer=layer,
            num_tokens=num_tokens,
            kernel=lambda y, _: _masked(y, threshold),
            cures=(Switch.EAGER,),
            useless=(Switch.EXACT_BUCKET, Switch.FILL_A, Switch.FILL_B, Switch.OTHER_BACKEND),
            fault=fault,
        )

    name = f"{num_tokens}tokens-over{threshold:.2f}"
    return Variant(
        id=name if host == "pure" else f"layer{layer}-{stage}-{name}", host=host, level="layers", build=build
    )


def _masked(y: Tensor, threshold: float) -> Tensor:
    """Where the comparison holds, the mask itself is stored."""
    import torch

    mask = torch.where(y > threshold * y.max(), -1, 0).to(torch.int32)  # all ones, or none
    return torch.where(mask != 0, mask.view(torch.float32), y)


DRILL = Drill(
    name="mask-as-float",
    family="O",
    case="O1",
    title="compiled code reads a comparison's mask as a float",
    verdict="O/COMPARE_MASK_AS_FLOAT",
    refuter=refuters.EAGER,
    stages=frozenset({"gate", "up", "down"}),
    variants=_variants,
)
