"""U: one bit of a stored weight differs on one device; everything stays finite."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"flipped-bit/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 7)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import alike, generator, load, prompt, site
        from firetower.drills.pure import linear
        from firetower.lab.subject import Switch

        if host == "pure":
            model: Any = nn.Sequential(linear(40, 32, seed), linear(24, 40, seed + 1))
            args: Any = (torch.randn(num_tokens, 32, generator=generator(seed)),)
            path = "1"
        else:
            model = load(host, "fp32", seed)
            args = (prompt(model, Random(seed), num_tokens),)
            path = site(model, "down", layer).module
        weight = model.get_submodule(path).weight.data
        loaded = weight.clone()
        place = _small_place(weight, Random(seed))
        if fault:
            _flip(weight, place)

        def elsewhere(_: int = 0) -> Any:
            """With the weight as it is in the file, and on every other device."""
            here = weight.clone()
            weight.copy_(loaded)
            try:
                return model(*args)
            finally:
                weight.copy_(here)

        return Case(
            model=model,
            args=args,
            right=elsewhere,
            places=(f"{path}.weight: 1 elements differ, {place} to {place} (flat); one bit",) if fault else (),
            switches={
                Switch.OTHER_DEVICE: elsewhere,
                Switch.RELOADED_WEIGHTS: elsewhere,
                **alike(lambda _: model(*args), Switch.EAGER, Switch.OTHER_BACKEND),
            },
            parts={"weights": lambda: _weights(f"{path}.weight", weight, loaded)},
        )

    return Variant(id=f"layer{layer}-{num_tokens}tokens", host=host, level="finite", build=build)


def _small_place(weight: Tensor, rng: Random) -> int:
    """The flat place of one of the smaller elements: 2^128 times it is large, yet finite."""
    small = (weight.abs() < 1e-3).reshape(-1).nonzero().reshape(-1)
    return int(small[rng.randrange(len(small))])


def _flip(weight: Tensor, place: int) -> None:
    """Flip the highest bit of the exponent."""
    import torch

    bits = weight.view(-1).view(torch.int32)
    bits[place] = int(bits[place]) ^ (1 << 30)


def _weights(name: str, now: Tensor, loaded: Tensor) -> Any:
    from firetower.drills.arrays import to_array
    from firetower.lab.subject import Weight

    return (Weight(name=name, now=to_array(name, now.clone()), at_load=to_array(name, loaded)),)


DRILL = Drill(
    name="flipped-bit",
    family="U",
    title="one bit of a weight differs on one device",
    verdict="U/SINGLE_BIT",
    refuter=refuters.OTHER_DEVICE,
    variants=_variants,
)
