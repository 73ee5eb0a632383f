"""A projection split over ranks, whose parts are summed; torch-free until a variant is built."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills.spec import Case, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Collective

_HOSTS: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")


def reduced(name: str, seed: int, *, times: int, says: str) -> list[Variant]:
    """Variants of a sum over ranks that takes one rank's part ``times`` times; ``says``: what a verdict must say."""
    rng = Random(f"{name}/{seed}")
    return distinct([_variant(host, rng.randrange(1 << 30), times, says) for host in _HOSTS])


def _variant(host: Host, seed: int, times: int, says: str) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(2, 7)
    world = rng.choice((2, 4, 8))
    rank = rng.randrange(world)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, load, prompt, replace_forward, site
        from firetower.drills.pure import linear
        from firetower.lab.subject import Switch

        if host == "pure":
            model: Any = nn.Sequential(linear(64, 32, seed), linear(24, 64, seed + 1))
            args: Any = (torch.randn(num_tokens, 32, generator=generator(seed)),)
            path = "1"
        else:
            model = load(host, "fp32", seed)
            args = (prompt(model, Random(seed), num_tokens),)
            path = site(model, "down", layer).module
        projection = model.get_submodule(path)
        ranks = Ranks(path, projection, [times if fault and i == rank else 1 for i in range(world)])
        replace_forward(projection, ranks)

        def alone(_: int = 0) -> Any:
            taken, ranks.taken = ranks.taken, [1] * world
            try:
                return model(*args)
            finally:
                ranks.taken = taken

        with torch.no_grad():
            model(*args)
        return Case(
            model=model,
            args=args,
            right=alone,
            places=(path, says.format(rank=rank)) if fault else (),
            switches={Switch.WORLD_SIZE_ONE: alone},
            parts={"collectives": ranks.collectives},
        )

    return Variant(id=f"layer{layer}-rank{rank}of{world}", host=host, level="finite", build=build)


class Ranks:
    """A projection [out, in] whose input channels are split over ranks.

    ``taken``: how often the sum takes each rank's part; 1 for all of them is right.
    """

    def __init__(self, name: str, projection: Any, taken: Sequence[int]) -> None:
        self.name, self.weight, self.taken = name, projection.weight, list(taken)
        self._parts: list[Tensor] = []
        self._result: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        import torch.nn.functional as F

        world = len(self.taken)
        self._parts = [
            F.linear(part, weight) for part, weight in zip(x.chunk(world, -1), self.weight.chunk(world, 1), strict=True)
        ]
        y: Tensor = sum(part * n for part, n in zip(self._parts, self.taken, strict=True))  # type: ignore[assignment]
        self._result = y
        return y

    def collectives(self) -> tuple[Collective, ...]:
        """Parts and result of the last run."""
        from firetower.drills.arrays import to_array
        from firetower.lab.subject import Collective

        assert self._result is not None
        parts = tuple(to_array(f"rank {i}", p) for i, p in enumerate(self._parts))
        return (Collective(name=f"all-reduce of {self.name}", parts=parts, result=to_array("sum", self._result)),)
