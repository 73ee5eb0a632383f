"""O: compiled code fuses a division that eager guards; only the compiled result is NaN."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"compiled-differs/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    stage, column = rng.choice(("gate", "up", "down")), rng.randrange(24)

    def build(fault: bool) -> Case:
        from firetower.drills.kernels import kernel_case
        from firetower.lab.subject import Switch

        return kernel_case(
            host,
            seed,
            stage=stage,
            layer=layer,
            num_tokens=num_tokens,
            kernel=lambda y, _: _reassociated(y, column),
            cures=(Switch.EAGER,),
            useless=(Switch.EXACT_BUCKET, Switch.FILL_A, Switch.FILL_B, Switch.OTHER_BACKEND),
            fault=fault,
        )

    name = f"{num_tokens}tokens-column{column}"
    return Variant(
        id=name if host == "pure" else f"layer{layer}-{stage}-{name}", host=host, level="layers", build=build
    )


def _reassociated(y: Tensor, column: int) -> Tensor:
    """A scale that cancels on paper, 1e30 and back, is squared on the way: Inf times 0 in one column."""
    y = y.clone()
    y[..., column] = (y[..., column] * 1e30 * 1e30) * (1e-30 * 1e-30)
    return y


DRILL = Drill(
    name="compiled-differs",
    family="O",
    title="compiled code is NaN where eager is not",
    verdict="O/COMPILED_DIFFERS",
    refuter=refuters.EAGER,
    stages=frozenset({"gate", "up", "down"}),
    variants=_variants,
)
