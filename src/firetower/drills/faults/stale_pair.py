"""J1: a decay matrix takes its rows from one chunk and its columns from the chunk before.

No NaN anywhere: what is broken is a law, "a decay is at most 1".
"""

from __future__ import annotations

import dataclasses
import sys
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.drills.pure import ChunkDecays
    from firetower.lab.subject import Law


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"stale-pair/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "qwen35moe")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    chunk, layer, heads = rng.choice((8, 12, 17)), rng.randrange(3), rng.randint(1, 3)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import generator
        from firetower.drills.pure import ChunkDecays

        decays = ChunkDecays(chunk, stale=fault)
        if host == "pure":
            steps = -torch.rand(heads, 2 * chunk, generator=generator(seed))
            steps[:, :chunk] *= 2.0  # the first chunk forgets faster
            case = Case(model=decays, args=(steps,), right=lambda: decays.matrix(rows=1, columns=1))
        else:
            case = _inside(seed, layer, chunk, decays)
        # right totals are there from the first run on
        case.call()
        places = ("decay at most 1", "operands written in steps 1, 0") if fault else ()
        return dataclasses.replace(case, places=places, parts={"laws": lambda: (_law(decays),)})

    where = f"{heads}heads" if host == "pure" else f"layer{layer}"
    return Variant(id=f"{where}-chunk{chunk}", host=host, level="finite", build=build)


def _law(decays: ChunkDecays) -> Law:
    """The law on the operands as they were used, and on those of one step each."""
    from firetower.lab.subject import Law

    columns = 0 if decays.stale else 1
    worst = float(decays.matrix(rows=1, columns=columns).max())
    each = max(float(decays.matrix(rows=i, columns=i).max()) for i in (0, 1))
    return Law(
        name="decay at most 1",
        worst=worst,
        limit=1.0,
        holds=worst <= 1.0,
        holds_for_each_operand=each <= 1.0,
        versions=(1, columns),
    )


def _inside(seed: int, layer: int, chunk: int, decays: ChunkDecays) -> Case:
    """The layer's own gates over two chunks; each token of the second is scaled by what it still sees of it."""
    import torch

    from firetower.drills.placing import load, prompt, replace_chunk_rule

    model = load("qwen35moe", "fp32", seed)
    ids = prompt(model, Random(seed), 2 * chunk)
    mixer = model.model.layers[layer].linear_attn
    native = sys.modules[type(mixer).__module__].torch_chunk_gated_delta_rule

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        out, state = native(query, key, value, g=g, beta=beta, **kwargs)
        sees = decays(g[0].T.float()).sum(-1).T  # [chunk, heads]
        scale = torch.cat((torch.ones_like(sees), sees))[None, :, :, None]  # [1, 2 chunk, heads, 1]
        return out * scale.to(out.dtype), state

    replace_chunk_rule(mixer, rule)

    def right() -> Any:
        was, decays.stale = decays.stale, False
        try:
            return model(ids)
        finally:
            decays.stale = was

    return Case(model=model, args=(ids,), right=right)


DRILL = Drill(
    name="stale-pair",
    family="J",
    case="J1",
    title="a decay matrix of two chunks' totals exceeds 1",
    verdict="J/RACE_OR_STALE_PAIR",
    refuter=refuters.LAW_HOLDS,
    variants=_variants,
)
