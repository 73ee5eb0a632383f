"""T1: rotary positions in bfloat16: 4,097 becomes 4,096; everything stays finite."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"rounded-positions/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    dtype = rng.choice(("bf16", "fp16"))
    # the first position that the type cannot hold, and some before it, which it can
    num_tokens = rng.randint(4, 9)
    before = rng.randrange(num_tokens - 1)
    start = (256 if dtype == "bf16" else 2048) - before

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.arrays import to_array
        from firetower.drills.placing import DTYPES, load, prompt, replace_forward
        from firetower.drills.pure import Rope
        from firetower.lab.subject import Positions

        # the twin's positions are the last ones that fit: all of them are exact in the narrow type
        exact = torch.arange(start, start + num_tokens) - (0 if fault else num_tokens - before)
        narrow = DTYPES[dtype]
        pair = Positions(exact=to_array("positions", exact), used=to_array("positions", exact.to(narrow)))
        if host == "pure":
            rope = Rope(64, narrow)
            case = Case(model=rope, args=(exact,))
        else:
            model = load(host, "fp32", seed)
            replace_forward(model.model.rotary_emb, _rope(model.model.rotary_emb.inv_freq, narrow))
            args = (prompt(model, Random(seed), num_tokens),)
            case = Case(model=model, args=args, kwargs={"position_ids": exact[None]})
        off = int((exact != exact.to(narrow).long()).nonzero()[0]) if fault else 0
        at = int(exact[off])
        places = (f"position {at} is used as {int(exact[off].to(narrow))} in",) if fault else ()
        import dataclasses

        return dataclasses.replace(case, places=places, parts={"positions": pair})

    return Variant(id=f"{dtype}-{start}plus{num_tokens}", host=host, level="finite", build=build)


def _rope(inv_freq: Tensor, narrow: Any) -> Any:
    """Angles from positions that went through a narrow type."""
    import torch

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = position_ids if position_ids.ndim == 2 else position_ids[0]
        angles = positions.to(narrow).float()[..., None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    return forward


DRILL = Drill(
    name="rounded-positions",
    family="T",
    case="T1",
    title="rotary positions are rounded by a narrow type and stay finite",
    verdict="T/POSITION_ROUNDED",
    refuter=refuters.POSITIONS_EXACT,
    variants=_variants,
)
