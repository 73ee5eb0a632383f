"""J2: now and then a buffer is read before it was written; it still holds what another step left there."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


_NUM_RUNS = 40
"""Schedules that there are: some of them let the reader go first, the others do not."""

_OPEN = ("J/RACE_SUSPECTED", "C/UNINIT_READ")


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"early-reader/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    told = [_variant(host, rng.randrange(1 << 30)) for host in hosts]
    # whoever cannot fill what nobody wrote cannot tell a race from memory that differs from run to run
    return distinct([*told, _variant("qwen35moe", rng.randrange(1 << 30), can_fill=False)])


def _variant(host: Host, seed: int, *, can_fill: bool = True) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 7)
    early = frozenset(rng.sample(range(_NUM_RUNS), rng.randint(2, 5)))

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import alike, generator, load, prompt, replace_forward, site
        from firetower.drills.pure import linear
        from firetower.lab.subject import Switch

        if host == "pure":
            model: Any = nn.Sequential(linear(48, 32, seed), linear(24, 48, seed + 1))
            args = (torch.randn(num_tokens, 32, generator=generator(seed)),)
            projection = model[1]
        else:
            model = load(host, "fp32", seed)
            args = (prompt(model, Random(seed), num_tokens),)
            projection = model.get_submodule(site(model, "down", layer).module)
        reader = _Reader(projection, early if fault else frozenset())
        replace_forward(projection, reader)

        def scheduled(number: int = 0) -> Any:
            reader.number = number
            return model(*args)

        def serial(_: int = 0) -> Any:
            reader.number = None
            return model(*args)

        # nothing is unwritten: filling changes nothing, the schedule stays what it is
        fills = alike(scheduled, Switch.FILL_A, Switch.FILL_B) if can_fill else {}
        told = ("of 40 replays are wrong", "serialised, 0 of")
        seen = told if can_fill else (_OPEN[0],)
        return Case(
            model=model,
            serve=scheduled,
            right=serial,
            places=seen if fault else (),
            switches={Switch.SERIAL: serial, **fills},
            parts={} if can_fill else {"valid_rows": None},
        )

    return Variant(
        id=f"layer{layer}-{len(early)}of{_NUM_RUNS}{'' if can_fill else '-nofill'}",
        host=host,
        level="finite",
        build=build,
        undecided_between=() if can_fill else _OPEN,
    )


class _Reader:
    """A projection whose result goes through a buffer that is now and then read too early.

    ``number`` is that of the run, which decides the schedule; None awaits the writer. ``early``: the numbers of the
    runs, modulo `_NUM_RUNS`, whose schedule lets the reader go first.
    """

    def __init__(self, projection: Any, early: frozenset[int]) -> None:
        self.native, self.early = projection.forward, early
        self.number: int | None = 0

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = self.native(x)
        is_early = self.number is not None and self.number % _NUM_RUNS in self.early
        # what another step left: the same rows, each one place on
        return y.roll(1, dims=-2) * 1.5 if is_early else y


DRILL = Drill(
    name="early-reader",
    family="J",
    case="J2",
    title="a buffer is read before it is written, with a small chance",
    verdict="J/RACE_SUSPECTED",
    refuter=refuters.SERIAL,
    variants=_variants,
)
