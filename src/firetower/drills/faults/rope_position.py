"""T1: rotary positions in fp16; 65,520 rounds to Inf and its cosine is NaN.

Positions in bf16 go wrong much earlier (4,097 becomes 4,096) but stay finite: nothing to see here today.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_INF = 65520
"""The first whole number that rounds to Inf in fp16."""


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"rope-position/{seed}")
    return [
        _pure(rng.randrange(1 << 30)),
        _pure(rng.randrange(1 << 30)),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("qwen35moe", rng.randrange(1 << 30)),
        _host("smollm2", rng.randrange(1 << 30)),
    ]


def _positions(tokens: int, row: int, fault: bool) -> Tensor:
    """[tokens] consecutive; under the fault, row ``row`` is the first that fp16 cannot hold."""
    import torch

    start = _FIRST_INF - (row if fault else tokens)
    return torch.arange(start, start + tokens)


def _pure(seed: int) -> Variant:
    rng = Random(seed)
    tokens, dim = rng.randint(2, 12), rng.choice((32, 64))
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.pure import Rope

        # the twin's positions are the last that fit: 65,519 rounds down to 65,504
        rope = Rope(dim, torch.float16)
        origin = Origin(module="", op="aten._to_copy.default", row=0, column=row, kind=Kind.POS_INF)
        args = (_positions(tokens, row, fault),)
        return Case(model=rope, args=args, expected=origin if fault else None)

    return Variant(id=f"rope-dim{dim}-row{row}of{tokens}", host="pure", level="ops", build=build)


def _host(host: Host, seed: int) -> Variant:
    """The model's rotary embedding computes its angles in fp16; the first keys after it are bad."""
    rng = Random(seed)
    tokens = rng.randint(3, 9)
    row = rng.randrange(tokens)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import layers_of, load, prompt, replace_forward, site
        from firetower.drills.truth import with_truth

        model = load(host, "fp32", seed)
        rope = model.model.rotary_emb

        def forward(x: Any, position_ids: Any) -> Any:
            import torch

            positions = position_ids if position_ids.ndim == 2 else position_ids[0]
            dtype = torch.float16 if fault else torch.float32
            angles = positions.to(dtype)[..., None] * rope.inv_freq.to(dtype)
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        replace_forward(rope, forward)
        positions = _positions(tokens, row, True)[None]
        ids = prompt(model, Random(seed), tokens)
        case = Case(model=model, args=(ids,), kwargs={"position_ids": positions})
        layer = layers_of(model, "attention")[0]
        return with_truth(case, site(model, "kv", layer)) if fault else case

    return Variant(id=f"row{row}of{tokens}-{seed % 1000}", host=host, level="layers", build=build)


DRILL = Drill(
    name="rope-position",
    family="T",
    case="T1",
    title="a rotary position beyond fp16 becomes Inf and its cosine NaN",
    verdict="T/POSITION_ROUNDED",
    refuter=refuters.POSITIONS_CAST,
    stages=frozenset({"kv"}),
    variants=_variants,
)
