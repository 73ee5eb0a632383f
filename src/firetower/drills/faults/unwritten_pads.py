"""C2b: pad rows of a workspace were never written; a scale over all rows spreads their NaN to the others."""

from __future__ import annotations

from random import Random

from firetower.core.records import Kind
from firetower.drills.spec import Case, Drill, Host, Origin, Variant


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"unwritten-pads/{seed}")
    pure = [_pure(rng.randrange(1 << 30), dtype) for dtype in rng.sample(("fp32", "fp16", "bf16"), 2)]
    return [
        *pure,
        _host("qwen35moe", rng.randrange(1 << 30), "down"),
        _host("qwen35moe", rng.randrange(1 << 30), "gate"),
        _host("smollm2", rng.randrange(1 << 30), "up"),
    ]


def _pure(seed: int, dtype: str) -> Variant:
    rng = Random(seed)
    tokens, pads, width = rng.randint(1, 8), rng.randint(1, 8), rng.choice((48, 63))

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import DTYPES, generator
        from firetower.drills.pure import Bucket

        x = torch.randn(tokens, width, generator=generator(seed)).to(DTYPES[dtype])
        scratch = torch.full((tokens + pads, width), float("nan"), dtype=DTYPES[dtype])
        # the twin's workspace is as dirty; it only does not read what it did not write
        module = Bucket(scratch, read_pads=fault)
        # the workspace is read as it stands; the scale is the first value made from it, a scalar
        origin = Origin(module="", kind=Kind.NAN, bad_weight=True)
        return Case(model=module, args=(x,), expected=origin if fault else None)

    id = f"bucket-{tokens}of{tokens + pads}x{width}-{dtype}"
    return Variant(id=id, host="pure", level="ops", build=build)


def _host(host: Host, seed: int, stage: str) -> Variant:
    """A left-padded batch; in the last layer one projection is quantised with one scale for all rows."""
    rng = Random(seed)
    lengths = [rng.randint(3, 6), rng.randint(7, 9)]
    rng.shuffle(lengths)

    def build(fault: bool) -> Case:
        import torch
        import torch.nn.functional as F

        from firetower.drills.placing import load, prompt, replace_forward, site
        from firetower.drills.truth import with_truth

        model = load(host, "fp32", seed)
        layer = len(model.model.layers) - 1  # after the last attention a pad row cannot reach a real one
        ids = prompt(model, Random(seed), max(lengths), batch=2)
        mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths]).long()
        where = site(model, stage, layer)
        projection = model.get_submodule(where.module)

        def quantised(x: torch.Tensor) -> torch.Tensor:
            real = mask.bool().reshape(*x.shape[:-1], 1)
            rows = torch.where(real, x, float("nan"))  # only real rows are copied to the dirty workspace
            scale = (rows if fault else rows[real.expand_as(rows)]).abs().amax() / 127
            return F.linear(torch.round(rows / scale) * scale, projection.weight)

        replace_forward(projection, quantised)
        case = Case(model=model, args=(ids.masked_fill(mask == 0, 0),), kwargs={"attention_mask": mask})
        return with_truth(case, where, row_mask=mask.bool(), pad_before_real=True) if fault else case

    name = f"{host}-lengths{'-'.join(map(str, lengths))}-{stage}"
    return Variant(id=name, host=host, level="layers", build=build)


DRILL = Drill(
    name="unwritten-pads",
    family="C",
    title="a scale over unwritten pad rows turns every real row into NaN",
    stages=frozenset({"gate", "up", "down"}),
    variants=_variants,
)
